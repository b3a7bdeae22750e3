"""The parameters of RWKV-7 (x070), and the names and shapes that they have in files."""

from __future__ import annotations

from collections.abc import Mapping

from ..checkpoint import refuse as refuse_file
from ..number_checks import shown
from ..rwkv.names import blocks_of, row, same, transposed
from ..rwkv.version import Version
from .weights import LAYER, MODEL

# Every parameter and its axes; an axis gets its size where it is first named. D n_embd, V vocabulary,
# H heads, N head size, F the channel mix's width; W, A, Q and G the ranks of the decay, the learning rate, the value
# and the gate. Linear weights are (out, in).
EMBEDDING = {"emb.weight": "V D", "blocks.0.ln0.weight": "D", "blocks.0.ln0.bias": "D"}
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
HEAD = {"ln_out.weight": "D", "ln_out.bias": "D", "head.weight": "V D"}
FIRST_LAYER_LACKS = frozenset({"att.v0", "att.v1", "att.v2"})

# A part of a name that gives another version away; the first that is found is told.
OTHER_VERSIONS = {
    "qkv": "RWKV-7b (DEA)",
    "s_emb": "RWKV-7a (DeepEmbed)",
    "enn": "RWKV-8 (x080)",
    "time_maa_x": "RWKV-6",
    "time_mix_w1": "RWKV-6",
    "time_mix_k": "RWKV-5 or an older version",
    "time_mix_key": "RWKV-5 or an older version",
}
LOW_RANK = ("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2")

# Official name -> fla's, and what makes the one's array of the other's.
FLA = {
    "emb.weight": "model.embeddings.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
FLA_PARTS = {"att": "attn", "ffn": "ffn", "ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm"}
FLA_MODULES = {
    "receptance": "r_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "ln_x": "g_norm",
}
FLA_LOW_RANK = {"0": ("2.bias", row), "1": ("0.weight", transposed), "2": ("2.weight", transposed)}
PACKED = "rwkvag"  # the order of the six mixes in fla's older files, which have them as one array


def shape_of(name):
    """What makes an official array of one that may lack axes of 1."""
    return row if name.startswith("blocks.") and "1 1 D" == BLOCK.get(name.split(".", 2)[2]) else same


def official(name):
    return name, shape_of(name)


def web_rwkv(name):
    """web-rwkv's files have the official names, and matrices of low rank as (out, in)."""
    return name, transposed if name.split(".")[-1] in LOW_RANK else shape_of(name)


def fla(weights):
    def origin(name):
        if not name.startswith("blocks."):
            return FLA[name], same
        _, i, part, *rest = name.split(".")
        its = f"model.layers.{i}.{FLA_PARTS[part]}."
        if part != "att":
            return its + ".".join(rest), shape_of(name)
        kind, number = rest[0][0], rest[0][1:]
        if number in FLA_LOW_RANK:
            ending, make = FLA_LOW_RANK[number]
            return f"{its}{kind}_lora.lora.{ending}", make
        if kind == "x" and f"{its}x_x" in weights:
            return f"{its}x_x", lambda x: row(x.reshape(len(PACKED), -1)[PACKED.index(rest[0][-1])])
        return its + ".".join([FLA_MODULES.get(rest[0], rest[0]), *rest[1:]]), shape_of(name)

    return origin


def naming(weights: Mapping):
    """The prefix of blocks, and where each parameter comes from.

    Files have the official names, or fla's (`model.layers.0.attn.*`, which transposes the matrices of low rank); files
    for web-rwkv have the official names and these matrices transposed.
    """
    blocks = blocks_of(weights)
    if blocks == "model.layers.":
        origin = fla(weights)
        return blocks, lambda name: (name, same) if name in weights else origin(name)
    down, up = (weights.get(f"blocks.0.att.{name}") for name in ("w1", "w2"))
    width = weights["emb.weight"].shape[-1] if "emb.weight" in weights else None
    turned = down is not None and up is not None and down.shape[0] != width == down.shape[-1]
    return blocks, web_rwkv if turned else official


def refuse_other_versions(weights):
    for part, version in OTHER_VERSIONS.items():
        for name in weights:
            if part in name.split("."):
                refuse_file(f"{shown(name)} belongs to {version}", f"the parameters of {TITLE}")


def check_sizes(sizes):
    H, N, D = (sizes[axis] for axis in "HND")
    if H * N != D:
        VERSION.refuse(f"att.r_k has H={H} heads of N={N}, expected H x N = D = {D}")


def head_size(weights) -> int:
    """Of weights with fla's names, whose group norm has the layer norms' eps times this."""
    return next((array.shape[-1] for name, array in weights.items() if name.endswith(".r_k")), 64)


TITLE = "RWKV-7 x070"
VERSION = Version(
    owner="RWKV7",
    title=TITLE,
    embedding=EMBEDDING,
    block=BLOCK,
    head=HEAD,
    layer=LAYER,
    model=MODEL,
    naming=naming,
    refuse_others=refuse_other_versions,
    check_sizes=check_sizes,
    fla_fields={"hidden_act": "sqrelu", "norm_first": True, "attn": None},
    fla_eps=1e-5,
    fla_group_eps_factor=head_size,
    first_layer_lacks=FIRST_LAYER_LACKS,
)
