"""Padding in a batch: its keys become 0 and its gates 0 (no decay), so that it leaves the state as it is."""

import numpy as np


def fill(x, padding, value=0.0):
    """Writes `value` to x [B, H, T, ...] where `padding` [B, T] is True, also in place of NaN; returns x."""
    bits = x.view(f"u{x.dtype.itemsize}")  # NumPy has no casts from Python's numbers to bfloat16
    B, T = padding.shape
    where = np.broadcast_to(padding.reshape(B, 1, T, *(1,) * (x.ndim - 3)), x.shape)  # a CuPy array if `padding` is one
    np.copyto(bits, int(np.array(value, x.dtype).view(bits.dtype)), where=where)
    return x


def value_of_padding(problem, name: str) -> float:
    """The value of an array at padding: for a key one that every feature map (none, elu + 1, relu, exp) makes 0."""
    return -np.inf if name == "k" and problem.options.get("feature_map") else 0.0
