"""What the config.json of a Hugging Face folder says of RWKV-6: what is computed is taken, all else refused by name."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..number_checks import real, shown
from ..rwkv.names import blocks_of
from ..rwkv.version import EPS
from .math import LAYER_NORM_EPS
from .names import refuse

# flash-linear-attention's fields that change what is computed, with the one value of each that is computed here.
FLA = {"hidden_act": "sqrelu", "expand_k": 1, "expand_v": 1, "norm_first": True, "attn": None}
FLA_NORMS = ("attn_norm", "ffn_norm", "pre_norm", "model.norm")  # that have no bias where `norm_bias` says so
FLA_EPS = 1e-6  # where its config says nothing


def completed(weights: Mapping, config: Mapping | None) -> Mapping:
    """`weights`, which have the names of Hugging Face or fla, with what their config says besides; official ones are
    left as they are.

    The eps of the layer norms and of the group norm become the array EPS. ContractError for a field that asks for what
    is not computed.
    """
    prefix = blocks_of(weights)
    if config is None or prefix == "blocks.":
        return weights
    found = dict(weights)
    if prefix == "model.layers.":
        for field, wanted in FLA.items():
            if (value := config.get(field, wanted)) != wanted:
                refuse(f"config.json has {field} {shown(value)}, expected {shown(wanted)}: no other is computed")
        found[EPS] = np.full(2, eps(config, "norm_eps", FLA_EPS))
        if not config.get("norm_bias", True):
            for name, array in weights.items():
                norm, _, part = name.rpartition(".")
                if part == "weight" and norm.endswith(FLA_NORMS):
                    found.setdefault(f"{norm}.bias", np.zeros(array.shape, array.dtype))
        table, head = "model.embeddings.weight", "lm_head.weight"
    else:
        layer, divisor = eps(config, "layer_norm_epsilon", LAYER_NORM_EPS), eps(config, "head_size_divisor", 8)
        found[EPS] = np.array([layer, LAYER_NORM_EPS * divisor**2])
        table, head = "rwkv.embeddings.weight", "head.weight"
    if config.get("tie_word_embeddings") and table in found:
        found[head] = found[table]
    return found


def eps(config, field, default) -> float:
    return real("RWKV6", f"config.json's {field}", config.get(field, default), "a number above 0", lambda x: x > 0)
