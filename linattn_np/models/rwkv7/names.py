"""The parameters of RWKV-7 (x070), and the names and shapes that they have in files."""

from collections.abc import Mapping
from functools import partial

from ..rwkv.names import as_row, block_prefix, fla_naming, identity, official_names_first, transposed
from ..rwkv.version import FLA_SIZES, GROUP_NORM, NORMS, Version, name_in_block
from .weights import LAYER

# Every parameter of a block (att: time mix, ffn: channel mix) and its axes: the letters of `rwkv.version`; W, A, Q and
# G, the ranks of the low-rank matrices of decays, learning rates, values and gates; F, the width of the channel mix.
# Linear weights are (out, in).
BLOCK = {
    **NORMS,
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
    **{f"att.{name}.weight": "D D" for name in ("receptance", "key", "value", "output")},
    **GROUP_NORM,
    "ffn.x_k": "1 1 D",
    "ffn.key.weight": "F D",
    "ffn.value.weight": "D F",
}

# Parts of names that give another version away; RWKV-7b has those of RWKV-7a, too, and so comes first.
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
FLA_LOW_RANK = {"0": ("2.bias", as_row), "1": ("0.weight", transposed), "2": ("2.weight", transposed)}
FLA_MIXES = "rwkvag"  # the order of the six mixes in fla's older files, which have one array of all


def shape_conversion(name):
    """The conversion of an array that may lack axes of size 1 to the shape of the official one."""
    return as_row if BLOCK.get(name_in_block(name)) == "1 1 D" else identity


def official_naming(name):
    return name, shape_conversion(name)


def web_rwkv_naming(name):
    """web-rwkv's files have the official names, and matrices of low rank as (out, in)."""
    return name, transposed if name.split(".")[-1] in LOW_RANK else shape_conversion(name)


def fla_block_naming(weights, name):
    """(flash-linear-attention's name of a block's parameter, the conversion of its array to the official one)."""
    part, leaf, *rest = name.split(".")
    if part == "ffn":
        return name, shape_conversion(name)
    if leaf[1:] in FLA_LOW_RANK:
        ending, convert = FLA_LOW_RANK[leaf[1:]]
        return f"attn.{leaf[0]}_lora.lora.{ending}", convert
    if leaf.startswith("x_") and any(other.endswith(".attn.x_x") for other in weights):
        return "attn.x_x", lambda x: as_row(x.reshape(len(FLA_MIXES), -1)[FLA_MIXES.index(leaf[-1])])
    return ".".join(["attn", FLA_MODULES.get(leaf, leaf), *rest]), shape_conversion(name)


def naming(weights: Mapping):
    """`Version.naming`: (the prefix of blocks in a file, the naming of its parameters).

    Files have the official names, fla's (`model.layers.0.attn.*`), or web-rwkv's, which differ in layout alone.
    """
    prefix = block_prefix(weights)
    if prefix == "model.layers.":
        return prefix, official_names_first(weights, fla_naming(partial(fla_block_naming, weights)))
    down, up = (weights.get(f"blocks.0.att.{name}") for name in ("w1", "w2"))
    width = weights["emb.weight"].shape[-1:] if "emb.weight" in weights else None
    is_web_rwkv = down is not None and up is not None and down.shape[:1] != width == down.shape[-1:]
    return prefix, web_rwkv_naming if is_web_rwkv else official_naming


def head_size(weights) -> int:
    """The head size of weights with fla's names, for `Version.fla_group_eps_factor`."""
    return next((array.shape[-1] for name, array in weights.items() if name.endswith(".r_k") and array.shape), 64)


VERSION = Version(  # its fields are explained in `rwkv.version`
    number=7,
    owner="RWKV7",
    title="RWKV-7 x070",
    block=BLOCK,
    layer=LAYER,
    naming=naming,
    foreign_parts=lambda weights: OTHER_VERSIONS,
    fla_fields={"norm_first": True, "attn": None},
    fla_sizes=FLA_SIZES
    | {"head_dim": "N", "num_heads": "H", "value_dim": "D"}
    | {f"{name}_low_rank_dim": rank for name, rank in dict(decay="W", a="A", v="Q", gate="G").items()},
    fla_eps=1e-5,
    fla_group_eps_factor=head_size,
    first_layer_lacks=frozenset({"att.v0", "att.v1", "att.v2"}),
)
