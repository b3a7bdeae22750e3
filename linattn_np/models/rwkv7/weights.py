"""The arrays of RWKV-7's layers, and the parameters that each of them holds: {field: Weight}; a `Weight`
names the parameters of the files, and says how they are stacked.

The code's names say what the official ones, such as att.k_k, do not: `linear` is a matrix or a stack of several,
`low_rank` one of a pair (_down, then _up), `norm` a weight and a bias, `vector` a vector or a stack. icl is the
in-context learning rate; removal and replacement are factors of the keys by which a token removes and writes.
"""

from ..rwkv.version import linear, low_rank, norm, vector

# A training keeps all parameters in one vector, which its files hold: the matrices there have the order of this table.
# Another order makes these files unreadable. The order within a stack is that of the rows that layers and kernels take.
# The first layer of a model has no value_down, value_up and value.
LAYER = {
    "kvr": linear("att", "key", "value", "receptance"),
    "output": linear("att", "output"),
    "ffn_key": linear("ffn", "key"),
    "ffn_value": linear("ffn", "value"),
    "decay_down": low_rank("att.w1"),
    "decay_up": low_rank("att.w2"),
    "icl_down": low_rank("att.a1"),
    "icl_up": low_rank("att.a2"),
    "gate_down": low_rank("att.g1"),
    "gate_up": low_rank("att.g2"),
    "value_down": low_rank("att.v1"),
    "value_up": low_rank("att.v2"),
    "ln1": norm("ln1"),
    "ln2": norm("ln2"),
    "ln_x": norm("att.ln_x"),
    "mix": vector(*(f"att.x_{x}" for x in "wagkvr")),
    "decay": vector("att.w0"),
    "icl": vector("att.a0"),
    "value": vector("att.v0"),
    "removal": vector("att.k_k"),
    "replacement": vector("att.k_a"),
    "bonus": vector("att.r_k"),
    "ffn_mix": vector("ffn.x_k"),
}
