"""Merges low-rank adapters (LoRA) from files into a model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from ...errors import ContractError
from .. import checkpoint
from ..number_checks import checked_number, shown
from ..quantised import Stored
from .version import VERSION_NAME, number_in

LORA_A, LORA_B, LORA_ALPHA = "lora_A", "lora_B", "lora_alpha"


def adapter_name(name: str, part: str) -> str:
    """The name in files of `part`, LORA_A or LORA_B, of the adapter of the matrix `name`."""
    return f"{name.removesuffix('.weight')}.{part}"


def read(path) -> dict:
    """The arrays of an adapter, from its file or from the folder of `linattn-np train --lora`."""
    return checkpoint.read(checkpoint.located(path, "adapter"))


def merged(model_class, weights: Mapping, adapter_weights: Mapping, alpha: float | None = None, config=None) -> dict:
    """`weights` under official names, with W + (alpha / rank) B A for every matrix W for which there is an adapter.
    Matrices in int8 or int4 become float32.

    weights, config : the model's weights under any names that `model_class` accepts, and its config.json
    adapter_weights : `blocks.N.att.key.lora_A` [rank, in], `blocks.N.att.key.lora_B` [out, rank], and so on, as
        `fine_tuning.LowRank` and RWKV-PEFT name them; names may end in `.weight` and have a trainer's prefix.
        `lora_alpha` [1] and `rwkv_version` [1] are optional
    alpha : by default the adapter's `lora_alpha`, or its rank

    ContractError if the adapter does not fit the model's matrices.
    """
    model_weights, _ = model_class.parameters(weights, config)
    model_weights = {name: np.asarray(x) if isinstance(x, Stored) else x for name, x in model_weights.items()}
    adapters = by_matrix(adapter_weights)
    model_class.version.check_number(number_in(adapters.pop(VERSION_NAME, {})), "the adapter")
    own_alpha = adapters.pop(LORA_ALPHA, {}).get(LORA_ALPHA)
    if not adapters:
        refuse(f"is empty, expected blocks.N.att.key.{LORA_A} and the like")
    for matrix_name, parts in adapters.items():
        name = f"{matrix_name}.weight"
        if name not in model_weights or parts.keys() != {LORA_A, LORA_B}:
            unexpected = next((part for part in parts if part not in (LORA_A, LORA_B)), next(iter(parts)))
            found = shown(f"{matrix_name}.{unexpected}")
            refuse(f"has {found}, expected {LORA_A} and {LORA_B} of matrices of the model")
        down, up, matrix = parts[LORA_A], parts[LORA_B], model_weights[name]
        rank = down.shape[0] if down.ndim == 2 else 0
        if not rank or (*up.shape, *down.shape) != (len(matrix), rank, rank, *matrix.shape[1:]):
            refuse(f"has {up.shape} times {down.shape} for {name}, expected {matrix.shape} of two matrices")
        chosen_alpha = alpha if alpha is not None else rank if own_alpha is None else own_alpha
        model_weights[name] = with_adapter(name, matrix, down, up, chosen_alpha)
    return model_weights


@np.errstate(all="ignore")
def with_adapter(name, matrix, down, up, alpha):
    """`matrix` + (alpha / rank) `up` `down`, in the dtype of `matrix`; `name` is for errors. The shapes fit."""
    alpha = np.asarray(alpha).item() if np.size(alpha) == 1 else alpha
    alpha = checked_number("the adapter", "alpha", alpha, "a number above 0", lambda x: x > 0)
    result = (matrix.astype(np.float32) + alpha / len(down) * (up @ down)).astype(matrix.dtype)
    if not np.isfinite(result).all():
        refuse(f"makes numbers of {name} that are not finite in {matrix.dtype}")
    return result


def by_matrix(adapter_weights: Mapping) -> dict[str, dict[str, np.ndarray]]:
    """{matrix name without ".weight": {LORA_A or LORA_B: float32 array}}. An array that belongs to no matrix, such as
    LORA_ALPHA, is {name: {name: array}}."""
    parts_by_matrix: dict[str, dict[str, np.ndarray]] = {}
    for name, array in adapter_weights.items():
        matrix_name, _, part = without_affixes(name).rpartition(".")
        parts = parts_by_matrix.setdefault(part if part == VERSION_NAME else matrix_name or part, {})
        if part in parts:
            refuse(f"has {shown(without_affixes(name))} twice")
        parts[part] = np.asarray(array, np.float32)
    return parts_by_matrix


def without_affixes(name: str) -> str:
    """An adapter's name without the prefixes and endings that PEFT and trainers add."""
    name = name.removesuffix(".weight").removesuffix(".default")
    start = name.find("blocks.")
    return name if start < 0 else name[start:]


def refuse(complaint: str) -> NoReturn:
    raise ContractError(f"the adapter {complaint}")
