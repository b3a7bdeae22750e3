"""cuBLAS for products with a float32 result, also while a graph is captured: CuPy refuses to call it then."""

import ctypes
from functools import cache

import numpy as np

from ...arrays import BFLOAT16

N, T = 0, 1                         # of cublasOperation_t
DATA = {np.dtype(np.float32): 0, np.dtype(np.float16): 2, BFLOAT16: 14}     # of cudaDataType
COMPUTE_32F = 68                    # of cublasComputeType_t
DEFAULT_ALGORITHM = -1              # of cublasGemmAlgo_t
WORKSPACE = 32 << 20                # bytes, as cuBLAS takes on sm_90; our own, so that a graph allocates none


class Cublas:
    """A handle on the current CUDA device, for the current stream of each call."""

    def __init__(self):
        import cupy
        from cupy.cuda import cublas        # noqa: F401  finds the library and loads it

        self.stream = cupy.cuda.get_current_stream
        self.library = ctypes.CDLL(f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}")
        self.workspace = cupy.empty(WORKSPACE, np.uint8)
        self.handle = ctypes.c_void_p()
        self.call("cublasCreate_v2", ctypes.byref(self.handle))

    def matmul(self, w, x, y, add: bool):
        """y = x w^T, or y += x w^T; w [C, M, K] and contiguous x [C, B, K] of one dtype, y [C, B, M] float32."""
        C, M, K = w.shape
        B = x.shape[1]
        pointer, one, beta = ctypes.c_void_p, ctypes.c_float(1), ctypes.c_float(add)
        stride, data = ctypes.c_longlong, DATA[w.dtype]
        self.call("cublasSetStream_v2", self.handle, pointer(self.stream().ptr))
        workspace = pointer(self.workspace.data.ptr)
        self.call("cublasSetWorkspace_v2", self.handle, workspace, ctypes.c_size_t(WORKSPACE))
        self.call("cublasGemmStridedBatchedEx", self.handle, T, N, M, B, K, ctypes.byref(one),
                  pointer(w.data.ptr), data, K, stride(w.strides[0] // w.itemsize), pointer(x.data.ptr), data, K, stride(B * K),
                  ctypes.byref(beta), pointer(y.data.ptr), DATA[y.dtype], M, stride(B * M), C,
                  COMPUTE_32F, DEFAULT_ALGORITHM)

    def call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with cublasStatus_t {status}")


@cache
def handle(device: int) -> Cublas:
    """The handle of CUDA device `device`, which must be the current one."""
    return Cublas()
