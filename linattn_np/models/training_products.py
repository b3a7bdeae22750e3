"""How training multiplies matrices: NumPy in the arrays' dtype, cuBLAS in half precision with float32 sums."""

from __future__ import annotations

import numpy as np


class HostProducts:
    """NumPy's, in the arrays' own dtype: float32, but for tests."""

    dtype = np.dtype(np.float32)

    def cast(self, x):
        """`x` as products take it."""
        return x

    def matmul(self, a, b, out=None):
        return np.matmul(a, b, out=out)


class CudaProducts:
    """cuBLAS's on the current device, of arrays in `dtype`, with sums in float32."""

    def __init__(self, dtype):
        from ..backends.cupy.device import CupyDevice

        self.dtype, self.device = np.dtype(dtype), CupyDevice()
        self.product = self.device.cublas.product

    def cast(self, x):
        """`x` as products take it."""
        return x.astype(self.dtype, copy=False)

    def matmul(self, a, b, out=None):
        """a b, for a [..., M, K] and b [..., K, N] that have rows or columns of neighbours; as may `out`.

        `out` is in `dtype` or float32, which is what a new one is in.
        """
        if out is None:
            out = self.device.empty((*a.shape[:-1], b.shape[-1]), np.float32)
        if out.strides[-1] != out.itemsize:
            self.matmul(b.swapaxes(-1, -2), a.swapaxes(-1, -2), out.swapaxes(-1, -2))
        elif out.ndim == 2:
            self.product(a[None], b[None], out[None])
        else:
            self.product(a, b, out)
        return out
