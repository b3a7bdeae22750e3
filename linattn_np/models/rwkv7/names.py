"""The parameters of RWKV-7 (x070), and the names and shapes that they have in files."""

from collections.abc import Mapping
from functools import partial

from ..rwkv.names import blocks_of, fla, official_first, row, same, transposed
from ..rwkv.version import FLA_SIZES, Version, name_in_block
from .weights import LAYER

# Every parameter of a block and its axes; an axis gets its size where it is first named. D n_embd, H heads, N head
# size, F the channel mix's width; W, A, Q and G the ranks of the decay, the learning rate, the value and the gate.
# Linear weights are (out, in).
BLOCK = {
    "ln1.weight": "D",
    "ln1.bias": "D",
    "ln2.weight": "D",
    "ln2.bias": "D",
    **{f"att.x_{x}": "1 1 D" for x in "wagkvr"},  # in the order of the layers' stack
    "att.w0": "1 1 D",
    "att.w1": "D W",
    "att.w2": "W D",
    "att.a0": "1 1 D",
    "att.a1": "D A",
    "att.a2": "A D",
    "att.v0": "1 1 D",
    "att.v1": "D Q",
    "att.v2": "Q D",
    "att.g1": "D G",
    "att.g2": "G D",
    "att.k_k": "1 1 D",
    "att.k_a": "1 1 D",
    "att.r_k": "H N",
    "att.receptance.weight": "D D",
    "att.key.weight": "D D",
    "att.value.weight": "D D",
    "att.output.weight": "D D",
    "att.ln_x.weight": "D",
    "att.ln_x.bias": "D",
    "ffn.x_k": "1 1 D",
    "ffn.key.weight": "F D",
    "ffn.value.weight": "D F",
}

# Parts of names that give another version away.
OTHER_VERSIONS = {
    "qkv": "RWKV-7b (DEA)",
    "s_emb": "RWKV-7a (DeepEmbed)",
    "enn": "RWKV-8 (x080)",
    "time_maa_x": "RWKV-6",
    "time_mix_w1": "RWKV-6",
    "time_mix_k": "RWKV-5",
    "time_mix_key": "RWKV-5",
}
LOW_RANK = ("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2")

FLA_MODULES = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
FLA_LOW_RANK = {"0": ("2.bias", row), "1": ("0.weight", transposed), "2": ("2.weight", transposed)}
PACKED = "rwkvag"  # the order of the six mixes in fla's older files, which have them as one array


def shape_of(name):
    """What makes an official array of one that may lack axes of 1."""
    return row if BLOCK.get(name_in_block(name)) == "1 1 D" else same


def official(name):
    return name, shape_of(name)


def web_rwkv(name):
    """web-rwkv's files have the official names, and matrices of low rank as (out, in)."""
    return name, transposed if name.split(".")[-1] in LOW_RANK else shape_of(name)


def in_fla(weights, name):
    """fla's name of a parameter in a block, and what makes the official array of the one there."""
    part, leaf, *rest = name.split(".")
    if part == "ffn":
        return name, shape_of(name)
    if leaf[1:] in FLA_LOW_RANK:
        ending, make = FLA_LOW_RANK[leaf[1:]]
        return f"attn.{leaf[0]}_lora.lora.{ending}", make
    if leaf.startswith("x_") and any(other.endswith(".attn.x_x") for other in weights):
        return "attn.x_x", lambda x: row(x.reshape(len(PACKED), -1)[PACKED.index(leaf[-1])])
    return ".".join(["attn", FLA_MODULES.get(leaf, leaf), *rest]), shape_of(name)


def naming(weights: Mapping):
    """The prefix of blocks, and where each parameter comes from.

    Files have the official names, or fla's (`model.layers.0.attn.*`, which transposes the matrices of low rank); files
    for web-rwkv have the official names and these matrices transposed.
    """
    blocks = blocks_of(weights)
    if blocks == "model.layers.":
        return blocks, official_first(weights, fla(partial(in_fla, weights)))
    down, up = (weights.get(f"blocks.0.att.{name}") for name in ("w1", "w2"))
    width = weights["emb.weight"].shape[-1] if "emb.weight" in weights else None
    turned = down is not None and up is not None and down.shape[0] != width == down.shape[-1]
    return blocks, web_rwkv if turned else official


def head_size(weights) -> int:
    """Of weights with fla's names, whose group norm has the layer norms' eps times this."""
    return next((array.shape[-1] for name, array in weights.items() if name.endswith(".r_k")), 64)


VERSION = Version(
    number=7,
    owner="RWKV7",
    title="RWKV-7 x070",
    block=BLOCK,
    layer=LAYER,
    naming=naming,
    others=lambda weights: OTHER_VERSIONS,
    fla_fields={"hidden_act": "sqrelu", "norm_first": True, "attn": None},
    fla_sizes=FLA_SIZES
    | {"head_dim": "N", "num_heads": "H", "value_dim": "D"}
    | {f"{name}_low_rank_dim": rank for name, rank in dict(decay="W", a="A", v="Q", gate="G").items()},
    fla_eps=1e-5,
    fla_group_eps_factor=head_size,
    first_layer_lacks=frozenset({"att.v0", "att.v1", "att.v2"}),
)
