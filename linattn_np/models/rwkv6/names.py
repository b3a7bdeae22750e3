"""The parameters of RWKV-6 (x060), and the names and shapes that they have in files."""

from collections.abc import Mapping
from functools import partial

from ..rwkv import names
from ..rwkv.names import blocks_of, fla, hugging_face, official_first, row, same, transposed, unchanged
from ..rwkv.version import FLA_SIZES, Version
from .weights import LAYER

# Every parameter of a block and its axes; an axis gets its size where it is first named. D n_embd, H heads, N head
# size, A and W the ranks of the mix and decay LoRA, F the channel mix's width. Linear weights are (out, in).
BLOCK = {
    "ln1.weight": "D",
    "ln1.bias": "D",
    "ln2.weight": "D",
    "ln2.bias": "D",
    "att.time_maa_x": "1 1 D",
    "att.time_maa_w": "1 1 D",
    "att.time_maa_k": "1 1 D",
    "att.time_maa_v": "1 1 D",
    "att.time_maa_r": "1 1 D",
    "att.time_maa_g": "1 1 D",
    "att.time_maa_w1": "D 5A",
    "att.time_maa_w2": "5 A D",
    "att.time_decay": "1 1 D",
    "att.time_decay_w1": "D W",
    "att.time_decay_w2": "W D",
    "att.time_faaaa": "H N",
    "att.receptance.weight": "D D",
    "att.key.weight": "D D",
    "att.value.weight": "D D",
    "att.gate.weight": "D D",
    "att.output.weight": "D D",
    "att.ln_x.weight": "D",
    "att.ln_x.bias": "D",
    "ffn.time_maa_k": "1 1 D",
    "ffn.time_maa_r": "1 1 D",
    "ffn.key.weight": "F D",
    "ffn.receptance.weight": "D D",
    "ffn.value.weight": "D F",
}

# Parts of names that give another version away. x060b and x060c have the same names.
OTHER_VERSIONS = {
    "gate_w1": "RWKV-6 x060a",
    "time_maa_rkvw_w1": "RWKV-6 x060b or x060c",
    **dict.fromkeys(("x_r", "w0", "a0", "k_k", "k_a", "r_k"), "RWKV-7"),
    **dict.fromkeys(("time_mix_k", "time_mix_key", "time_first"), "RWKV-5"),
}


# fla orders the five mixes r w k v g, and keeps the LoRA's weights as those of Linear layers, (out, in).
FLA_ORDER, LINEAR = "rwkvg", ("receptance", "key", "value", "gate")
OFFICIAL_ORDER = [FLA_ORDER.index(mix) for mix in "wkvrg"]


def mix_of(mix):
    return lambda x: row(x.reshape(5, -1)[FLA_ORDER.index(mix)])  # [5, D] -> [1, 1, D]


def mix_down(x):
    return x.reshape(5, -1, x.shape[-1])[OFFICIAL_ORDER].reshape(x.shape).T  # [5A, D] -> [D, 5A]


def mix_up(x):
    return x.reshape(len(x), 5, -1)[:, OFFICIAL_ORDER].transpose(1, 2, 0)  # [D, 5A] -> [5, A, D]


# Official name in a block -> fla's, and what makes the one's array of the other's.
FLA = {
    "att.time_maa_x": ("attn.x_proj.0.mu", row),
    **{f"att.time_maa_{mix}": ("attn.x_bias", mix_of(mix)) for mix in FLA_ORDER},
    "att.time_maa_w1": ("attn.x_proj.0.linear.weight", mix_down),
    "att.time_maa_w2": ("attn.x_proj.2.weight", mix_up),
    "att.time_decay": ("attn.w_proj.linear.lora.2.bias", row),
    "att.time_decay_w1": ("attn.w_proj.linear.lora.0.weight", transposed),
    "att.time_decay_w2": ("attn.w_proj.linear.lora.2.weight", transposed),
    "att.time_faaaa": ("attn.bonus", same),
    **{f"att.{name}.weight": (f"attn.{name[0]}_proj.linear.weight", same) for name in LINEAR},
    "att.output.weight": ("attn.o_proj.weight", same),
    "ffn.time_maa_k": ("ffn.key.mu", row),
    "ffn.time_maa_r": ("ffn.receptance.mu", row),
    "ffn.key.weight": ("ffn.key.linear.weight", same),
    "ffn.receptance.weight": ("ffn.receptance.linear.weight", same),
    "ffn.value.weight": ("ffn.value.weight", same),
}


def web_rwkv(name):
    part = name.split(".")[-1]
    make = transposed if part.endswith(("_w1", "_w2")) or part == "time_state" else row if "maa" in part else same
    make = row if part == "time_decay" else make
    return name.replace("time_maa", "time_mix").replace("time_faaaa", "time_first"), make


def of_web_rwkv(weights) -> bool:
    return any(name.endswith(".time_mix_w1") for name in weights)


in_fla = fla(lambda name: FLA.get(name, (name, same)))


def naming(weights: Mapping):
    """The prefix of blocks, and where each parameter comes from.

    Files have the official names, those of Hugging Face (`rwkv.blocks.0.attention.*`, which rename only), of fla
    (`model.layers.0.attn.*`, which also orders the mixes r w k v g and transposes the LoRAs) or of web-rwkv
    (`blocks.0.att.time_mix_w1`, which transposes them). A name that is official already stays.
    """
    if of_web_rwkv(weights):
        return "blocks.", web_rwkv
    blocks = blocks_of(weights)
    origin = {"rwkv.blocks.": hugging_face, "model.layers.": in_fla, "blocks.": unchanged}[blocks]
    return blocks, official_first(weights, origin)


VERSION = Version(
    number=6,
    owner="RWKV6",
    title="RWKV-6 x060",
    block=BLOCK,
    layer=LAYER,
    naming=naming,
    others=lambda weights: {} if of_web_rwkv(weights) else OTHER_VERSIONS,
    fla_fields={"hidden_act": "sqrelu", "expand_k": 1, "expand_v": 1, "norm_first": True, "attn": None},
    fla_sizes=FLA_SIZES | {"num_heads": "H", "proj_low_rank_dim": "A", "gate_low_rank_dim": "W"},
    fla_eps=1e-6,
    fla_group_eps_factor=lambda weights: 1,
)
official, parameters = partial(names.official, VERSION), partial(names.parameters, VERSION)
