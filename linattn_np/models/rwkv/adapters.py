"""Low-rank adapters in files, and models that they are merged into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from ...errors import ContractError
from ..number_checks import real, shown
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
    places = by_place(adapter_weights)
    own = places.pop(ALPHA, {}).get(ALPHA)
    if not places:
        refuse(f"is empty, expected blocks.N.att.key.{A} and the like")
    for place, parts in places.items():
        name = f"{place}.weight"
        if name not in found or parts.keys() != {A, B}:
            odd = next((part for part in parts if part not in (A, B)), next(iter(parts)))
            refuse(f"has {shown(f'{place}.{odd}')}, expected {A} and {B} of matrices of the model")
        down, up, matrix = parts[A], parts[B], found[name]
        if isinstance(matrix, Stored):
            refuse(f"cannot be merged into {name}, which is {matrix.format}: merge first, then quantise")
        rank = down.shape[0] if down.ndim == 2 else 0
        if not rank or (*up.shape, *down.shape) != (len(matrix), rank, rank, *matrix.shape[1:]):
            refuse(f"has {up.shape} times {down.shape} for {name}, expected {matrix.shape} of two matrices")
        factor = alpha if alpha is not None else rank if own is None else own
        found[name] = changed(name, matrix, down, up, factor)
    return found


@np.errstate(all="ignore")
def changed(name, matrix, down, up, alpha):
    """`matrix` with the adapter's two, in its own dtype."""
    alpha = np.asarray(alpha).item() if np.size(alpha) == 1 else alpha
    alpha = real("the adapter", "alpha", alpha, "a number above 0", lambda x: x > 0)
    made = (matrix.astype(np.float32) + alpha / len(down) * (up @ down)).astype(matrix.dtype)
    if not np.isfinite(made).all():
        refuse(f"makes numbers of {name} that are not finite in {matrix.dtype}")
    return made


def by_place(adapter_weights: Mapping) -> dict[str, dict[str, np.ndarray]]:
    """The float32 parts of an adapter by the places of their matrices; `lora_alpha` has a place of its own."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, array in adapter_weights.items():
        place, _, part = plain(name).rpartition(".")
        parts = found.setdefault(place or part, {})
        if part in parts:
            refuse(f"has {shown(plain(name))} twice")
        parts[part] = np.asarray(array, np.float32)
    return found


def plain(name: str) -> str:
    """An adapter's name without what PEFT and trainers put around it."""
    name = name.removesuffix(".weight").removesuffix(".default")
    place = name.find("blocks.")
    return name if place < 0 else name[place:]


def refuse(complaint: str) -> NoReturn:
    raise ContractError(f"the adapter {complaint}")
