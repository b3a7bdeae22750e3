"""cuBLAS for products with a float32 result, also while a graph is captured: CuPy refuses to call it then."""

import ctypes
from collections import defaultdict
from functools import partial
from threading import Lock
from weakref import finalize

import numpy as np

from ...array_kinds import BFLOAT16

NORMAL, TRANSPOSED = 0, 1  # of cublasOperation_t
DATA = {np.dtype(np.float32): 0, np.dtype(np.float16): 2, BFLOAT16: 14}  # of cudaDataType
COMPUTE_32F = 68  # of cublasComputeType_t
DEFAULT_ALGORITHM = -1  # of cublasGemmAlgo_t
WORKSPACE = 32 << 20  # bytes, as cuBLAS takes on sm_90; our own, so that a graph allocates none
UNUSED: defaultdict[int, list] = defaultdict(list)  # cuBLAS's handles by device, whose owners are gone


class Cublas:
    """A handle on the current CUDA device, for the current stream of each call. Products share a workspace, so that
    those on different streams must not run at the same time."""

    def __init__(self):
        import cupy
        from cupy.cuda import cublas  # noqa: F401  finds the library and loads it

        self.stream, self.follows, self.lock = cupy.cuda.get_current_stream, None, Lock()
        self.cublas = ctypes.CDLL(f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}")
        self.workspace = cupy.empty(WORKSPACE, np.uint8)
        unused = UNUSED[cupy.cuda.runtime.getDevice()]
        try:
            self.handle = unused.pop()
        except IndexError:
            self.handle = ctypes.c_void_p()
            self.call("cublasCreate_v2", ctypes.byref(self.handle))
        finalize(self, unused.append, self.handle)  # to destroy it would wait for the device

    def product(self, a, b, y, add: bool = False):
        """y = a b, or y += a b; a [C, M, K], b [C, K, N] of one dtype, each by rows or a transposed view of such."""
        self.prepared(a, b, y, add)()

    def prepared(self, a, b, y, add: bool = False):
        """A function that enqueues such a product of whatever is at these addresses then."""
        (C, M, K), N = a.shape, b.shape[2]
        (of_a, lda, stride_a), (of_b, ldb, stride_b), (_, ldy, stride_y) = map(reading, (a, b, y))
        pointer, one, beta = ctypes.c_void_p, ctypes.c_float(1), ctypes.c_float(add)
        # cuBLAS goes by columns: what it sees is y^T = b^T a^T.
        return partial(
            self.multiply,
            self.handle,
            of_b,
            of_a,
            N,
            M,
            K,
            ctypes.byref(one),
            pointer(b.data.ptr),
            DATA[b.dtype],
            ldb,
            stride_b,
            pointer(a.data.ptr),
            DATA[a.dtype],
            lda,
            stride_a,
            ctypes.byref(beta),
            pointer(y.data.ptr),
            DATA[y.dtype],
            ldy,
            stride_y,
            C,
            COMPUTE_32F,
            DEFAULT_ALGORITHM,
        )

    def multiply(self, *arguments):
        stream = self.stream().ptr
        with self.lock:  # of threads with streams of their own
            if stream != self.follows:
                self.call("cublasSetStream_v2", self.handle, ctypes.c_void_p(stream))
                workspace = ctypes.c_void_p(self.workspace.data.ptr)  # a new stream takes the old one's away
                self.call("cublasSetWorkspace_v2", self.handle, workspace, ctypes.c_size_t(WORKSPACE))
                self.follows = stream
            self.call("cublasGemmStridedBatchedEx", *arguments)

    def call(self, name, *arguments):
        status = getattr(self.cublas, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with cublasStatus_t {status}")


def reading(x):
    """How cuBLAS reads x [C, rows, columns]: as it is or transposed, and how far apart rows (or columns), matrices
    are."""
    matrices, rows, columns = (step // x.itemsize for step in x.strides)
    how, leading = (NORMAL, rows) if columns == 1 else (TRANSPOSED, columns)
    return how, leading, ctypes.c_longlong(matrices)
