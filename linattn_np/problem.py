"""`Problem`: a checked call, from which backends compute and plan."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from .argument_checks import Declaration
from .varlen import Spans

MAPPINGS = ("arrays", "sizes", "options")


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """A checked call. Arrays are [B, H, T, ...] views of the caller's memory, whatever layout they came in.

    A problem never changes: `checked_calls` keeps one without arrays for all calls that its checks cannot tell apart.
    `replace` makes another problem, as from that one with a call's own arrays.
    """

    op: Declaration
    arrays: MappingProxyType[str, Any]  # by name, in the order of the declaration; a read-only mapping
    sizes: MappingProxyType[str, int]  # B, H, T, K, V as declared, and N, the number of sequences
    options: MappingProxyType[str, Any]  # the checked arguments that only some operators have
    dtype: np.dtype  # of q, k, v and o
    spans: Spans  # the token range of each sequence; without cu_seqlens the one range that all B rows have
    varlen: bool  # whether cu_seqlens were given
    layout: str  # of the caller's arrays: "bhtd" or "bthd"
    reverse: bool = False  # whether the recurrence runs from the last token to the first
    state_v_first: bool = False  # whether the caller's states are [N, H, V, K]
    mode: str  # "auto", "recurrent", "chunk", ...
    chunk_size: int | None = None  # tokens; None if the backend may choose
    materialize: bool | None = None  # whether to keep the state of every chunk; None if the backend may choose
    precision: str = "float32"  # of products of float32 arrays: one of `precisions.PRECISIONS`
    scale: float
    initial_state: tuple | None  # an array for each part that the operator's state has
    output_final_state: bool
    state_dtype: np.dtype  # of the final state
    out: Any  # the caller's array for o as [B, H, T, V], or None
    home: str  # where the arrays are: "host" or "cuda:<device number>"
    kind: str  # the library of the caller's arrays, as `array_kinds.kind` names it
    example: Any = None  # one of the arrays as the caller gave it: results are of its library
    gradient: bool = False  # whether the gradient of the call is wanted
    groups: int = 1  # value heads that share a head of q and k; they are one head here, and V counts the columns of all
    copied_arrays: tuple[str, ...] = ()  # names of arrays that are copied to lie so
    mask: Any = None  # [B, T]: True for a token, False for padding
    warnings: tuple[str, ...] = ()  # texts about likely mistakes, as far as shapes show them
    memo: dict | None = None  # what backends store for calls with this key; None if the call has no key

    def replace(self, **fields) -> Problem:
        """This problem with other `fields`: `dataclasses.replace` in a tenth of its time."""
        for name in MAPPINGS:
            if name in fields:
                fields[name] = MappingProxyType(fields[name])
        problem = object.__new__(Problem)
        object.__setattr__(problem, "__dict__", vars(self) | fields)
        return problem

    def __getitem__(self, name: str):
        """The array `name`."""
        return self.arrays[name]

    @property
    def compute_dtype(self) -> np.dtype:
        """The dtype of the arithmetic, and of states."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    @property
    def is_transformed(self) -> bool:
        """Whether a backend's arrays differ from the caller's: `conversions` makes them."""
        return self.reverse or self.state_v_first or self.groups > 1 or self.mask is not None

    @property
    def token_arrays(self) -> list:
        """The arrays with an axis of tokens; u, for example, has none."""
        return [x for name, x in self.arrays.items() if "T" in self.op.arrays[name].split()]

    def shape(self, axes: str) -> tuple[int, ...]:
        """The sizes of axes such as "B H T"."""
        return tuple(self.sizes[axis] for axis in axes.split())
