"""One checked call: what backends compute from."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from .argument_checks import Declaration
from .varlen import Spans

MAPPINGS = ("arrays", "sizes", "options")


@dataclass(frozen=True, eq=False)
class Problem:
    """One checked call. Arrays are [B, H, T, ...] views of the caller's memory, whatever layout they came in.

    A problem never changes, since calls with the same key share one without its arrays. `replace` makes another one.
    """

    op: Declaration
    arrays: MappingProxyType[str, Any]  # nobody can write to these
    sizes: MappingProxyType[str, int]  # B, H, T, K, V as declared, and N, the number of sequences
    options: MappingProxyType[str, Any]  # the checked arguments that only some operators have
    dtype: np.dtype  # of q, k, v and o
    spans: Spans  # token ranges; dense: the one range that all B rows share
    varlen: bool  # cu_seqlens were given
    layout: str
    reverse: bool  # arrays and spans run backwards in time, as the recurrence does
    state_v_first: bool  # the caller's states are [N, H, V, K]
    mode: str
    chunk_size: int | None
    materialize: bool | None
    precision: str  # of products of float32 arrays: one of `precisions.PRECISIONS`
    scale: float
    initial_state: tuple | None
    output_final_state: bool
    state_dtype: np.dtype
    out: Any
    home: str  # 'host' or 'cuda:<ordinal>'
    kind: str  # the library whose arrays came in
    example: Any = None  # one of the arrays as the caller gave it
    gradient: bool = False  # a vjp is asked for
    groups: int = 1  # the caller's value heads in each head, whose V counts the columns of all of them
    copied_arrays: tuple[str, ...] = ()  # the caller's arrays that are copied because of their grouped heads
    mask: Any = None  # [B, T], True for a token, False for padding
    warnings: tuple[str, ...] = ()  # of likely mistakes, as far as shapes tell
    memo: dict | None = None  # what backends keep for calls with this key; None without a key

    def replace(self, **fields) -> Problem:
        """This problem with other `fields`: `dataclasses.replace` in a tenth of its time."""
        for name in MAPPINGS:
            if name in fields:
                fields[name] = MappingProxyType(fields[name])
        problem = object.__new__(Problem)
        object.__setattr__(problem, "__dict__", vars(self) | fields)
        return problem

    def __getitem__(self, name: str):
        return self.arrays[name]

    @property
    def compute_dtype(self) -> np.dtype:
        return compute_dtype(self.dtype)

    def shape(self, axes: str) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in axes.split())


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of the arithmetic on arrays of `dtype`."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)
