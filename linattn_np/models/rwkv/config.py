"""Reads what the config.json of a Hugging Face folder says about a model; refuses fields that are not supported.

The names of a block's weights begin with "model.layers." in fla's files (flash-linear-attention), with "blocks." in the
official ones, which have no config, and with "rwkv.blocks." in Hugging Face's.
"""

from collections.abc import Mapping

import numpy as np

from ..array_math import ACTIVATIONS
from ..number_checks import checked_number, shown
from .names import block_prefix, unwrapped
from .version import HIDDEN_ACT_NAME, LAYER_NORM_EPS, NORM_EPS_NAME, SQRELU, Version

HUGGING_FACE_SIZES = {  # its num_attention_heads is 64 in files of 32 heads, and no model reads it
    "vocab_size": "V",
    "hidden_size": "D",
    "attention_hidden_size": "D",
    "intermediate_size": "F",
    "num_hidden_layers": "L",
    "head_size": "N",
}
FLA_NORMS = ("attn_norm", "ffn_norm", "pre_norm", "model.norm")  # norms without bias if `norm_bias` is false


def completed(version: Version, weights: Mapping, config: Mapping | None) -> Mapping:
    """`weights` with Hugging Face's or fla's names, completed by what their config says; others are returned unchanged.

    The array NORM_EPS_NAME is added: the eps of the layer norms and of the group norm; so are biases of 0 for norms
    without bias, tied matrices, and HIDDEN_ACT_NAME. ContractError for a value that is not supported, or fla's names
    without a config.
    """
    weights = unwrapped(weights)
    prefix = block_prefix(weights)
    if config is None and prefix == "model.layers." and NORM_EPS_NAME not in weights:
        version.refuse("the weights have fla's names, expected its config.json beside them, which has the norms' eps")
    if config is None or prefix == "blocks.":
        return weights
    if prefix == "model.layers.":
        weights, table, head = with_fla_config(version, weights, config), "model.embeddings.weight", "lm_head.weight"
    else:
        table, head = "rwkv.embeddings.weight", "head.weight"
        weights = {**weights, NORM_EPS_NAME: hugging_face_eps(version, config)}
    if config.get("tie_word_embeddings") and table in weights:
        weights[head] = weights[table]
    return weights


def with_fla_config(version, weights, config) -> dict:
    """Weights with fla's names, their eps, and biases of 0 where fla has none; ContractError for unsupported fields."""
    for field, wanted in version.fla_fields.items():
        if (value := config.get(field, wanted)) != wanted:
            version.refuse(f"config.json has {field} {shown(value)}, expected {shown(wanted)}: no other is computed")
    act = config.get("hidden_act", SQRELU)
    if not isinstance(act, str) or act not in ACTIVATIONS:
        version.refuse(f"config.json has hidden_act {shown(act)}, expected one of {', '.join(ACTIVATIONS)}")
    weights = version.fla_complete(weights, config)
    if act != SQRELU:
        weights = {**weights, HIDDEN_ACT_NAME: np.frombuffer(act.encode(), np.uint8)}
    layer_eps = positive(version, config, "norm_eps", version.fla_eps)
    eps = np.array([layer_eps, layer_eps * version.fla_group_eps_factor(weights)])
    biases = {}
    if not config.get("norm_bias", True):
        for name, array in weights.items():
            norm, _, part = name.rpartition(".")
            if part == "weight" and norm.endswith(FLA_NORMS):
                biases[f"{norm}.bias"] = np.zeros(array.shape, array.dtype)
    return {**weights, **biases, NORM_EPS_NAME: eps}  # also in place of a bias in the file, which fla does not read


def hugging_face_eps(version, config):
    """The array NORM_EPS_NAME by a config of Hugging Face."""
    layer_eps = positive(version, config, "layer_norm_epsilon", LAYER_NORM_EPS)
    divisor = positive(version, config, "head_size_divisor", 8)
    return np.array([layer_eps, LAYER_NORM_EPS * divisor**2])  # the group norm's, whatever layer_norm_epsilon is


def check_sizes(version: Version, weights: Mapping, config: Mapping | None, sizes: Mapping):
    """ContractError if the config of `weights` with Hugging Face's or fla's names says other sizes than theirs."""
    prefix = block_prefix(unwrapped(weights))
    if config is None or prefix == "blocks.":
        return
    axes = version.fla_sizes if prefix == "model.layers." else HUGGING_FACE_SIZES
    for field, axis in axes.items():
        # RWKV-7's first block has no LoRA for the value residual: `sizes` of a model of one block lacks its rank.
        value, size = config.get(field), sizes.get(axis)
        if field == "num_heads" and config.get("head_dim") is not None:
            continue  # fla does not read it then
        if None not in (value, size) and value not in (size, [size] * sizes["L"]):  # a list: a number for each layer
            version.refuse(f"config.json has {field} {shown(value)}, but the weights have {size}")


def positive(version, config, field, default) -> float:
    """A field of the config that is a number above 0."""
    return checked_number(
        version.owner, f"config.json's {field}", config.get(field, default), "a number above 0", lambda x: x > 0
    )
