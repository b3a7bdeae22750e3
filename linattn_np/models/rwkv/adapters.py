"""Low-rank adapters in files, and models that they are merged into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from ...errors import ContractError
from ..number_checks import shown
from ..quantised import Stored

A, B, ALPHA = "lora_A", "lora_B", "lora_alpha"


def adapter(name: str, part: str) -> str:
    """What a file calls `part`, A or B, of the adapter of the matrix `name`."""
    return f"{name.removesuffix('.weight')}.{part}"


def merged(kind, weights: Mapping, adapter_weights: Mapping, alpha: float | None = None, config=None) -> dict:
    """`weights` under official names, with W + (alpha / rank) B A for every matrix W that an adapter is for.

    kind : the class of the model
    weights : of the model, under any names, with what its `config` says
    adapter_weights : `blocks.N.att.key.lora_A` [rank, in], `blocks.N.att.key.lora_B` [out, rank], and so on, as
        `fine_tuning.LowRank` and RWKV-PEFT name them; names may end in `.weight`, and may begin with what trainers put
        there. `lora_alpha` [1] may be there
    alpha : the adapter's, where it does not say; by default its rank

    ContractError where the adapter fits no matrix of the model.
    """
    found, _ = kind.parameters(weights, config)
    own = {plain(name): np.asarray(array, np.float32) for name, array in adapter_weights.items()}
    stored = own.pop(ALPHA, None)
    if not own:
        refuse(f"is empty, expected blocks.N.att.key.{A} and the like")
    for place in sorted({name.rpartition(".")[0] for name in own}):
        name = f"{place}.weight"
        if name not in found or not own.keys() >= {adapter(name, A), adapter(name, B)}:
            odd = next(other for other in own if other.rpartition(".")[0] == place)
            refuse(f"has {shown(odd)}, expected {A} and {B} of matrices of the model")
        down, up, matrix = own[adapter(name, A)], own[adapter(name, B)], found[name]
        if isinstance(matrix, Stored):
            refuse(f"cannot be merged into {name}, which is {matrix.format}: merge first, then quantise")
        if down.ndim != 2 or up.ndim != 2 or (*up.shape, down.shape[1]) != (len(matrix), len(down), matrix.shape[1]):
            refuse(f"has {up.shape} times {down.shape} for {name}, expected {matrix.shape} of two matrices")
        factor = alpha if alpha is not None else float(stored[0]) if stored is not None else len(down)
        change = factor / len(down) * (up @ down)
        found[name] = (matrix.astype(np.float32) + change).astype(matrix.dtype)
    return found


def plain(name: str) -> str:
    """An adapter's name without what PEFT and trainers put around it."""
    name = name.removesuffix(".weight").removesuffix(".default")
    place = name.find("blocks.")
    return name if place < 0 else name[place:]


def refuse(complaint: str) -> NoReturn:
    raise ContractError(f"the adapter {complaint}")
