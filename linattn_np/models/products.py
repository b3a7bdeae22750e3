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
    """cuBLAS's on the current device, of arrays in `dtype`; results are float32."""

    def __init__(self, dtype):
        import cupy

        from ..backends.cupy import blas

        self.dtype, self.empty = np.dtype(dtype), cupy.empty
        self.product = blas.handle(cupy.cuda.runtime.getDevice()).product

    def cast(self, x):
        return x.astype(self.dtype, copy=False)

    def matmul(self, a, b, out=None):
        """a b, for a [..., M, K] and b [..., K, N] that are contiguous, or so transposed; as may be `out`."""
        if out is None:
            out = self.empty((*a.shape[:-1], b.shape[-1]), np.float32)
        if out.strides[-1] != out.itemsize:
            self.matmul(b.swapaxes(-1, -2), a.swapaxes(-1, -2), out.swapaxes(-1, -2))
        elif out.ndim == 2:
            self.product(a[None], b[None], out[None])
        else:
            self.product(a, b, out)
        return out
