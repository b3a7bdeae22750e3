"""The arrays of RWKV-6's layers, and the parameters that each of them holds: {field: `version.Weight`}.

The code's names say what the official ones, such as att.time_faaaa, do not: `linear` is a matrix or a stack of several,
`low_rank` one of a pair (_down, then _up), `norm` a weight and a bias, `vector` a vector or a stack. maa are weights of
the mixes of a token with the previous one.
"""

from ..rwkv.version import linear, low_rank, norm, vector

# Matrices are in the order of a training's vector, which its files have.
LAYER = {
    "kvrg": linear("att", "key", "value", "receptance", "gate"),
    "output": linear("att", "output"),
    "ffn_key": linear("ffn", "key"),
    "ffn_receptance": linear("ffn", "receptance"),
    "ffn_value": linear("ffn", "value"),
    "maa_down": low_rank("att.time_maa_w1"),
    "maa_up": low_rank("att.time_maa_w2"),  # five, one for each of w k v r g
    "decay_down": low_rank("att.time_decay_w1"),
    "decay_up": low_rank("att.time_decay_w2"),
    "ln1": norm("ln1"),
    "ln2": norm("ln2"),
    "ln_x": norm("att.ln_x"),
    "maa_x": vector("att.time_maa_x"),
    "maa": vector(*(f"att.time_maa_{x}" for x in "wkvrg")),
    "decay": vector("att.time_decay"),
    "bonus": vector("att.time_faaaa"),
    "ffn_maa": vector("ffn.time_maa_k", "ffn.time_maa_r"),
}
