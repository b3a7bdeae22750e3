"""The matrix products of training: by NumPy in the arrays' dtype, or by cuBLAS in a given dtype with float32 sums."""

from __future__ import annotations

import numpy as np


class HostProducts:
    """Products by NumPy, in the arrays' own dtype; that is float32, except in tests. The modules `grad` take it; they
    add no product to `out`, so `matmul` has no `add`."""

    dtype = np.dtype(np.float32)

    def cast(self, x):
        """`x` in the dtype of products."""
        return x

    def matmul(self, a, b, out=None):
        """a b, in `out` if that is given."""
        return np.matmul(a, b, out=out)


class CudaProducts:
    """Products by cuBLAS on the current device, of arrays in `dtype`, with float32 sums. The modules `cuda_grad` take
    it."""

    def __init__(self, dtype):
        from ..backends.cupy.blas_lt import CublasLt
        from ..backends.cupy.device import CupyDevice

        self.dtype, self.device = np.dtype(dtype), CupyDevice()
        self.product = CublasLt().product

    def cast(self, x):
        """`x` in the dtype of products."""
        return x.astype(self.dtype, copy=False)

    def matmul(self, a, b, out=None, add=False):
        """a b for matrices a [M, K] and b [K, N], or C of each: [C, M, K] and [C, K, N]. In each of a, b and `out` the
        numbers of a row or those of a column must be neighbours in memory.

        `out` has `dtype` or float32; without it, the result is a new float32 array. `add`: out + a b, in `out`, which
        must be given.
        """
        if out is None:
            out = self.device.empty((*a.shape[:-1], b.shape[-1]), np.float32)
        y = out
        if y.strides[-1] != y.itemsize:  # cuBLAS's `product` takes an `out` with contiguous rows: y^T = b^T a^T
            a, b, y = (x.swapaxes(-1, -2) for x in (b, a, y))
        self.product(*(x[None] if x.ndim == 2 else x for x in (a, b, y)), add)
        return out
