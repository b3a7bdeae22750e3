"""Reads what the config.json of a Hugging Face folder says about a model; refuses fields that are not supported."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..number_checks import real, shown
from .names import blocks_of
from .version import LAYER_NORM_EPS, NORM_EPS_NAME, Version

FLA_NORMS = ("attn_norm", "ffn_norm", "pre_norm", "model.norm")  # norms without bias if `norm_bias` is false


def completed(version: Version, weights: Mapping, config: Mapping | None) -> Mapping:
    """`weights` with Hugging Face's or fla's names, completed by what their config says; others are returned unchanged.

    The array NORM_EPS_NAME is added: the eps of the layer norms and of the group norm; so are biases of 0 for norms
    without bias, and tied matrices. ContractError for a value that is not supported.
    """
    prefix = blocks_of(weights)
    if config is None or prefix == "blocks.":
        return weights
    completed_weights = dict(weights)
    if prefix == "model.layers.":
        for field, wanted in version.fla_fields.items():
            if (value := config.get(field, wanted)) != wanted:
                version.refuse(
                    f"config.json has {field} {shown(value)}, expected {shown(wanted)}: no other is computed"
                )
        layer = eps(version, config, "norm_eps", version.fla_eps)
        completed_weights[NORM_EPS_NAME] = np.array([layer, layer * version.fla_group_eps_factor(weights)])
        if not config.get("norm_bias", True):
            for name, array in weights.items():
                norm, _, part = name.rpartition(".")
                if part == "weight" and norm.endswith(FLA_NORMS):
                    completed_weights.setdefault(f"{norm}.bias", np.zeros(array.shape, array.dtype))
        table, head = "model.embeddings.weight", "lm_head.weight"
    else:
        layer = eps(version, config, "layer_norm_epsilon", LAYER_NORM_EPS)
        divisor = eps(version, config, "head_size_divisor", 8)
        completed_weights[NORM_EPS_NAME] = np.array([layer, LAYER_NORM_EPS * divisor**2])
        table, head = "rwkv.embeddings.weight", "head.weight"
    if config.get("tie_word_embeddings") and table in completed_weights:
        completed_weights[head] = completed_weights[table]
    return completed_weights


def eps(version, config, field, default) -> float:
    """A field of the config that is a number above 0."""
    return real(
        version.owner, f"config.json's {field}", config.get(field, default), "a number above 0", lambda x: x > 0
    )
