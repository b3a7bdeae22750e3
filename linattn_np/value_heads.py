"""Grouped value heads: G heads of v for each head of q, k and the gate, to a backend one head of G * V columns.

Columns of V never meet in these recurrences, so a state [K, G * V] is the G states [K, V] of the group side by side.
"""

from __future__ import annotations

import numpy as np


def callers(axes: str, groups: int) -> str:
    """The axes of a caller's array: "B H T V" -> "B HV T V" where heads are grouped."""
    return axes.replace("H", "HV") if groups > 1 and has_columns(axes) else axes


def has_columns(axes: str) -> bool:
    return axes.split()[-1] == "V"


def folds_in_place(x) -> bool:
    """Whether the heads of a group lie side by side in memory, as they do in [B, T, HV, V]."""
    return x.strides[1] == x.shape[3] * x.strides[3]


def fold(x, groups: int):
    """[B, H * G, T, V] -> [B, H, T, G * V], a view where the memory allows it; states alike, with K for T."""
    B, heads, T, V = x.shape
    parted = x.reshape(B, heads // groups, groups, T, V).swapaxes(2, 3)
    return parted.reshape(B, heads // groups, T, groups * V)


def unfold(x, groups: int):
    """[B, H, T, G * V] -> [B, H * G, T, V], the inverse."""
    B, heads, T, columns = x.shape
    parted = x.reshape(B, heads, T, groups, columns // groups).swapaxes(2, 3)
    return parted.reshape(B, heads * groups, T, columns // groups)


def columns(x, axes: str, start: int, count: int):
    """`count` columns of an array that has any."""
    return x[..., start : start + count] if has_columns(axes) else x


def cotangents(x, axes: str, start: int, count: int):
    """A share's part of a result's gradient; of what has no columns, and so is in every share's result, the first's."""
    return columns(x, axes, start, count) if has_columns(axes) or start == 0 else np.zeros_like(x)


def beside(parts):
    """Arrays joined along their last axis, in the memory order of the first."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    joined = np.empty_like(first, shape=(*first.shape[:-1], sum(part.shape[-1] for part in parts)))  # CuPy's for CuPy's
    start = 0
    for part in parts:
        joined[..., start : start + part.shape[-1]] = part
        start += part.shape[-1]
    return joined


def added(parts, dtype):
    """The sum of arrays, taken in `dtype`, in the dtype of the first."""
    return parts[0] if len(parts) == 1 else sum(part.astype(dtype) for part in parts).astype(parts[0].dtype)
