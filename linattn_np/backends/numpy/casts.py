"""Casts between float32 and float16 by Numba's loops: NumPy's bits, where NumPy's casts take as long as 20 copies."""

import numpy as np

from .loop_choice import loaded_loops

FLOAT32, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)
LEAST = 1 << 12  # with fewer numbers NumPy is faster


def cast(x, dtype):
    """x in `dtype`: x itself if it has this dtype, else a copy."""
    if x.dtype == dtype:
        return x
    copy = np.empty(x.shape, dtype)
    assign(copy, x)
    return copy


def assign(to, x):
    """to[...] = x, for arrays of the same shape."""
    loops = loaded_loops(x.size) if x.size >= LEAST and {x.dtype, to.dtype} == {FLOAT16, FLOAT32} else None
    if loops is None or not loops.HAS_CASTS:
        to[...] = x
        return
    x, target = np.ascontiguousarray(x).reshape(-1), to if to.flags.c_contiguous else np.empty(to.shape, to.dtype)
    if x.dtype == FLOAT16:
        loops.float16_to_float32(x.view(np.uint16), target.reshape(-1))
    else:
        loops.float32_to_float16(x, target.reshape(-1).view(np.uint16))
    if target is not to:
        to[...] = target
