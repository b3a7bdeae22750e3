"""The matrix products of training: by NumPy in the arrays' dtype, or by cuBLAS in a given dtype with float32 sums."""

from __future__ import annotations

import numpy as np


class HostProducts:
    """Products by NumPy, in the arrays' own dtype; that is float32, except in tests."""

    dtype = np.dtype(np.float32)

    def cast(self, x):
        """`x` in the dtype of products."""
        return x

    def matmul(self, a, b, out=None):
        return np.matmul(a, b, out=out)


class CudaProducts:
    """Products by cuBLAS on the current device, of arrays in `dtype`, with float32 sums."""

    def __init__(self, dtype):
        from ..backends.cupy.device import CupyDevice

        self.dtype, self.device = np.dtype(dtype), CupyDevice()
        self.product = self.device.cublas.product

    def cast(self, x):
        """`x` in the dtype of products."""
        return x.astype(self.dtype, copy=False)

    def matmul(self, a, b, out=None, add=False):
        """a b for a [..., M, K] and b [..., K, N]; of each of a, b and `out`, rows or columns must be contiguous.

        `out` has `dtype` or float32; without it, the result is a new float32 array. `add`: out + a b, in `out`.
        """
        if out is None:
            out = self.device.empty((*a.shape[:-1], b.shape[-1]), np.float32)
        if out.strides[-1] != out.itemsize:
            self.matmul(b.swapaxes(-1, -2), a.swapaxes(-1, -2), out.swapaxes(-1, -2), add)
        elif out.ndim == 2:
            self.product(a[None], b[None], out[None], add)
        else:
            self.product(a, b, out, add)
        return out
