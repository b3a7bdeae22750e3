"""The parameters of RWKV-6 (x060), and the names and shapes that they have in files."""

from collections.abc import Mapping

import numpy as np

from ..number_checks import checked_number
from ..rwkv.names import (
    as_row,
    block_prefix,
    fla_naming,
    hugging_face_naming,
    identity,
    official_names_first,
    official_naming,
    transposed,
)
from ..rwkv.version import FLA_SIZES, GROUP_NORM, NORMS, Version
from .weights import LAYER

# Every parameter of a block (att: time mix, ffn: channel mix) and its axes: the letters of `rwkv.version`; A and W, the
# ranks of the low-rank matrices of mixes and of decays; F, the width of the channel mix. Linear weights are (out, in).
BLOCK = {
    **NORMS,
    **{f"att.time_maa_{mix}": "1 1 D" for mix in "xwkvrg"},
    "att.time_maa_w1": "D 5A",
    "att.time_maa_w2": "5 A D",
    "att.time_decay": "1 1 D",
    "att.time_decay_w1": "D W",
    "att.time_decay_w2": "W D",
    "att.time_faaaa": "H N",
    **{f"att.{name}.weight": "D D" for name in ("receptance", "key", "value", "gate", "output")},
    **GROUP_NORM,
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


# flash-linear-attention (fla) orders the five mixes r w k v g, and stores low-rank matrices as (out, in).
# LINEAR: the matrices that it has as `linear.weight` of a module.
FLA_ORDER, LINEAR = "rwkvg", ("receptance", "key", "value", "gate")
OFFICIAL_ORDER = [FLA_ORDER.index(mix) for mix in "wkvrg"]


def one_mix(mix):
    """The conversion of fla's array of all mixes to that of `mix`."""
    return lambda x: as_row(x.reshape(5, -1)[FLA_ORDER.index(mix)])  # [5, D] -> [1, 1, D]


def mix_down(x):
    """fla's array of the first matrices, in the official order and layout."""
    return x.reshape(5, -1, x.shape[-1])[OFFICIAL_ORDER].reshape(x.shape).T  # [5A, D] -> [D, 5A]


def mix_up(x):
    """The same of the second matrices."""
    return x.reshape(len(x), 5, -1)[:, OFFICIAL_ORDER].transpose(1, 2, 0)  # [D, 5A] -> [5, A, D]


# {official name in a block: (fla's name, the conversion of fla's array to the official one)}
FLA_NAMES = {
    "att.time_maa_x": ("attn.x_proj.0.mu", as_row),
    **{f"att.time_maa_{mix}": ("attn.x_bias", one_mix(mix)) for mix in FLA_ORDER},
    "att.time_maa_w1": ("attn.x_proj.0.linear.weight", mix_down),
    "att.time_maa_w2": ("attn.x_proj.2.weight", mix_up),
    "att.time_decay": ("attn.w_proj.linear.lora.2.bias", as_row),
    "att.time_decay_w1": ("attn.w_proj.linear.lora.0.weight", transposed),
    "att.time_decay_w2": ("attn.w_proj.linear.lora.2.weight", transposed),
    "att.time_faaaa": ("attn.bonus", identity),
    **{f"att.{name}.weight": (f"attn.{name[0]}_proj.linear.weight", identity) for name in LINEAR},
    "att.output.weight": ("attn.o_proj.weight", identity),
    "ffn.time_maa_k": ("ffn.key.mu", as_row),
    "ffn.time_maa_r": ("ffn.receptance.mu", as_row),
    "ffn.key.weight": ("ffn.key.linear.weight", identity),
    "ffn.receptance.weight": ("ffn.receptance.linear.weight", identity),
    "ffn.value.weight": ("ffn.value.weight", identity),
}


# Of an attention of fla: the arrays with rows for the channels of keys.
LOW_RANK_DECAY = "w_proj.linear.lora.2"
OF_KEYS = (
    "bonus",
    "r_proj.linear.weight",
    "k_proj.linear.weight",
    f"{LOW_RANK_DECAY}.weight",
    f"{LOW_RANK_DECAY}.bias",
)


def with_wide_keys(weights: Mapping, config: Mapping) -> Mapping:
    """`weights` with fla's names, with as many channels of keys as of values: fla has fewer if `expand_k` is below 1.

    Each head gets channels of 0 in r, k, the decay and the bonus. No logit changes: nothing is written to their rows of
    the state, and nothing is read from them. Their gradients are 0, so that no training changes them.
    """
    wide: dict = {}
    for name, bonus in weights.items():
        attention = name.removesuffix("bonus")
        values = weights.get(f"{attention}v_proj.linear.weight")
        if not name.endswith(".attn.bonus") or values is None or (bonus.ndim, values.ndim) != (2, 2):
            continue
        (H, K), (rows, D) = bonus.shape, values.shape
        check_expand_k(config, H * K, D)
        if H and rows % H == 0 and K < rows // H:
            arrays = {part: weights[attention + part] for part in OF_KEYS if attention + part in weights}
            wide |= {attention + part: widened(x, H, K, rows // H, D) for part, x in arrays.items()}
    return {**weights, **wide}


def widened(x, H, K, N, D):
    """x, whose rows are H heads of K channels, with heads of N; the others are 0. The bonus has the heads as an axis.
    Any other x is returned unchanged, as one with rows of more than D numbers, which no model has."""
    x = np.asarray(x)
    is_bonus = x.shape == (H, K)
    columns = () if is_bonus else x.shape[1:]
    if not is_bonus and (x.shape[:1] != (H * K,) or len(columns) > 1 or max(columns, default=0) > D):
        return x
    y = np.zeros((H, N, *columns), x.dtype)
    y[:, :K] = x.reshape(H, K, *columns)
    return y if is_bonus else y.reshape(H * N, *columns)


def check_expand_k(config, channels, D):
    """ContractError if the config's `expand_k` is not that of keys of so many channels, or above 1. Without it the
    shapes tell."""
    expand = config.get("expand_k", channels / max(1, D))
    expand = checked_number(VERSION.owner, "config.json's expand_k", expand, "a number above 0", lambda x: x > 0)
    if int(D * expand) != channels:
        VERSION.refuse(f"config.json has expand_k {expand:g}, but the weights have {channels} channels of keys for {D}")
    if channels > D:
        VERSION.refuse(f"config.json has expand_k {expand:g}, expected at most 1: keys have as many channels as values")


def web_rwkv_naming(name):
    """(web-rwkv's name of an official one, the conversion of its array): its low-rank matrices are (out, in), and its
    vectors [D]."""
    part = name.split(".")[-1]
    convert = identity
    if part.endswith(("_w1", "_w2")) or part == "time_state":
        convert = transposed
    elif "maa" in part or part == "time_decay":
        convert = as_row
    return name.replace("time_maa", "time_mix").replace("time_faaaa", "time_first"), convert


def is_web_rwkv(weights) -> bool:
    """Whether the names are web-rwkv's."""
    return any(name.endswith(".time_mix_w1") for name in weights)


NAMINGS = {
    "rwkv.blocks.": hugging_face_naming,
    "model.layers.": fla_naming(lambda name: FLA_NAMES.get(name, (name, identity))),
    "blocks.": official_naming,
}


def naming(weights: Mapping):
    """`Version.naming`: (the prefix of blocks in a file, the naming of its parameters).

    Files have the official names, those of Hugging Face (`rwkv.blocks.0.attention.*`), of fla (`model.layers.0.attn.*`)
    or of web-rwkv (`blocks.0.att.time_mix_w1`). In the first three, any parameter may have its official name.
    """
    if is_web_rwkv(weights):
        return "blocks.", web_rwkv_naming
    prefix = block_prefix(weights)
    return prefix, official_names_first(weights, NAMINGS[prefix])


VERSION = Version(  # its fields are explained in `rwkv.version`
    number=6,
    owner="RWKV6",  # the class of models
    title="RWKV-6 x060",
    block=BLOCK,
    layer=LAYER,  # the arrays of a layer, each made of parameters of a block
    naming=naming,
    foreign_parts=lambda weights: {} if is_web_rwkv(weights) else OTHER_VERSIONS,
    fla_complete=with_wide_keys,
    fla_fields={"expand_v": 1, "norm_first": True, "attn": None},
    fla_sizes=FLA_SIZES | {"num_heads": "H", "proj_low_rank_dim": "A", "gate_low_rank_dim": "W"},
    fla_eps=1e-5,
    fla_group_eps_factor=lambda weights: 1,  # the group norm has the eps of the layer norms
)
