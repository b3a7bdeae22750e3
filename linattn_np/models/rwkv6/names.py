"""The parameters of RWKV-6 (x060), and the names and shapes that they have in files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ..checkpoint import refuse as refuse_file
from ..number_checks import shown
from ..rwkv import names
from ..rwkv.names import blocks_of, hugging_face, row, same, transposed, unchanged
from ..rwkv.version import Version
from .weights import LAYER, MODEL

# Every parameter and its axes; an axis gets its size where it is first named. D n_embd, V vocabulary,
# H heads, N head size, A and W the ranks of the mix and decay LoRA, F the channel mix's width. Linear weights
# are (out, in).
EMBEDDING = {"emb.weight": "V D", "blocks.0.ln0.weight": "D", "blocks.0.ln0.bias": "D"}
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
HEAD = {"ln_out.weight": "D", "ln_out.bias": "D", "head.weight": "V D"}

# The last part of a name that gives another version away. x060b and x060c have the same names; RWKV-4 has
# those of RWKV-5 but no ln_x.
OTHER_VERSIONS = {
    "gate_w1": "RWKV-6 x060a",
    "time_maa_rkvw_w1": "RWKV-6 x060b or x060c",
    **dict.fromkeys(("x_r", "w0", "a0", "k_k", "k_a", "r_k"), "RWKV-7"),
    **dict.fromkeys(("time_mix_k", "time_mix_key", "time_first"), "RWKV-5"),
}


# fla orders the five mixes r w k v g, and keeps the LoRA's weights as those of Linear layers, (out, in).
FLA_ORDER = "rwkvg"
OFFICIAL_ORDER = [FLA_ORDER.index(mix) for mix in "wkvrg"]


def mix_of(mix):
    return lambda x: row(x.reshape(5, -1)[FLA_ORDER.index(mix)])  # [5, D] -> [1, 1, D]


def mix_down(x):
    return x.reshape(5, -1, x.shape[-1])[OFFICIAL_ORDER].reshape(x.shape).T  # [5A, D] -> [D, 5A]


def mix_up(x):
    return x.reshape(len(x), 5, -1)[:, OFFICIAL_ORDER].transpose(1, 2, 0)  # [D, 5A] -> [5, A, D]


# Official name -> fla's, and what makes the one's array of the other's.
FLA = {
    "emb.weight": ("model.embeddings.weight", same),
    "ln_out.weight": ("model.norm.weight", same),
    "ln_out.bias": ("model.norm.bias", same),
    "head.weight": ("lm_head.weight", same),
}
FLA_BLOCK = {
    **{
        f"{name}.{part}": (f"{its_name}.{part}", same)
        for part in ("weight", "bias")
        for name, its_name in (
            ("ln0", "pre_norm"),
            ("ln1", "attn_norm"),
            ("ln2", "ffn_norm"),
            ("att.ln_x", "attn.g_norm"),
        )
    },
    "att.time_maa_x": ("attn.x_proj.0.mu", row),
    **{f"att.time_maa_{mix}": ("attn.x_bias", mix_of(mix)) for mix in FLA_ORDER},
    "att.time_maa_w1": ("attn.x_proj.0.linear.weight", mix_down),
    "att.time_maa_w2": ("attn.x_proj.2.weight", mix_up),
    "att.time_decay": ("attn.w_proj.linear.lora.2.bias", row),
    "att.time_decay_w1": ("attn.w_proj.linear.lora.0.weight", transposed),
    "att.time_decay_w2": ("attn.w_proj.linear.lora.2.weight", transposed),
    "att.time_faaaa": ("attn.bonus", same),
    "att.receptance.weight": ("attn.r_proj.linear.weight", same),
    "att.key.weight": ("attn.k_proj.linear.weight", same),
    "att.value.weight": ("attn.v_proj.linear.weight", same),
    "att.gate.weight": ("attn.g_proj.linear.weight", same),
    "att.output.weight": ("attn.o_proj.weight", same),
    "ffn.time_maa_k": ("ffn.key.mu", row),
    "ffn.time_maa_r": ("ffn.receptance.mu", row),
    "ffn.key.weight": ("ffn.key.linear.weight", same),
    "ffn.receptance.weight": ("ffn.receptance.linear.weight", same),
    "ffn.value.weight": ("ffn.value.weight", same),
}


def fla(name):
    if not name.startswith("blocks."):
        return FLA[name]
    _, i, name_in_block = name.split(".", 2)
    if name_in_block not in FLA_BLOCK:
        return name, same
    its_name, make = FLA_BLOCK[name_in_block]
    return f"model.layers.{i}.{its_name}", make


def web_rwkv(name):
    part = name.split(".")[-1]
    make = transposed if part.endswith(("_w1", "_w2")) or part == "time_state" else row if "maa" in part else same
    make = row if part == "time_decay" else make
    return name.replace("time_maa", "time_mix").replace("time_faaaa", "time_first"), make


def of_web_rwkv(weights) -> bool:
    return any(name.endswith(".time_mix_w1") for name in weights)


def naming(weights: Mapping):
    """The prefix of blocks, and where each parameter comes from.

    Files have the official names, those of Hugging Face (`rwkv.blocks.0.attention.*`, which rename only), of fla
    (`model.layers.0.attn.*`, which also orders the mixes r w k v g and transposes the LoRAs) or of web-rwkv
    (`blocks.0.att.time_mix_w1`, which transposes them). A name that is official already stays.
    """
    if of_web_rwkv(weights):
        return "blocks.", web_rwkv
    blocks = blocks_of(weights)
    origin = {"rwkv.blocks.": hugging_face, "model.layers.": fla, "blocks.": unchanged}[blocks]
    return blocks, lambda name: (name, same) if name in weights else origin(name)


def refuse_other_versions(weights):
    if of_web_rwkv(weights):
        return
    for name in weights:
        version = OTHER_VERSIONS.get(name.split(".")[-1])
        if version == "RWKV-5" and not any("ln_x" in other for other in weights):
            version = "RWKV-4"
        if version:
            refuse_file(f"{shown(name)} belongs to {version}", f"the parameters of {TITLE}")


def check_sizes(sizes):
    H, N, D, A = (sizes[axis] for axis in "HNDA")
    if H * N != D:
        refuse(f"att.time_faaaa has H={H} heads of N={N}, expected H x N = D = {D}")
    if 5 * A != sizes["5A"]:
        refuse(f"att.time_maa_w1 has {sizes['5A']} columns, expected 5 x A = {5 * A} as att.time_maa_w2 has it")


TITLE = "RWKV-6 x060"
VERSION = Version(
    owner="RWKV6",
    title=TITLE,
    embedding=EMBEDDING,
    block=BLOCK,
    head=HEAD,
    layer=LAYER,
    model=MODEL,
    naming=naming,
    refuse_others=refuse_other_versions,
    check_sizes=check_sizes,
    fla_fields={"hidden_act": "sqrelu", "expand_k": 1, "expand_v": 1, "norm_first": True, "attn": None},
    fla_eps=1e-6,
    fla_group_eps_factor=lambda weights: 1,
)
refuse = VERSION.refuse
official, parameters = partial(names.official, VERSION), partial(names.parameters, VERSION)
