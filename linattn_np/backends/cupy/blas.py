"""Matrix products by cuBLAS with float32 sums, called through ctypes: CuPy refuses to call cuBLAS while a CUDA graph is
captured."""

import ctypes
from collections import defaultdict
from functools import partial
from threading import Lock
from weakref import finalize

import numpy as np

from ...array_kinds import BFLOAT16

NORMAL, TRANSPOSED = 0, 1  # of cublasOperation_t
CUDA_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 2, BFLOAT16: 14}  # of cudaDataType
COMPUTE_32F = 68  # of cublasComputeType_t
DEFAULT_ALGORITHM = -1  # of cublasGemmAlgo_t
# Bytes of a workspace: what NVIDIA recommends for sm_90, and more than for older cards (4 MiB). It is allocated before
# products are captured, since cuBLAS would otherwise allocate memory in the graph.
WORKSPACE = 32 << 20
# Numbers of a tile of Hopper's. Of a product with more tiles than multiprocessors cuBLAS counts tiles in the workspace,
# which it clears before: this takes 4 us in a CUDA graph. Without a workspace it has no such count. With fewer tiles it
# may divide K, for which it takes the workspace.
TILE = 128 * 256
UNUSED_HANDLES: defaultdict[int, list] = defaultdict(list)  # device -> cuBLAS handles of deleted `Cublas` objects


class Cublas:
    """A cuBLAS handle on the current CUDA device. Each product runs on the stream that is current when it is called.

    All products of an object use its workspace. So they must not run at the same time on different streams, and the
    object must outlive the CUDA graphs that have captured them.
    """

    def __init__(self):
        import cupy
        from cupy.cuda import cublas  # noqa: F401  finds the library and loads it

        self.current_stream, self.lock = cupy.cuda.get_current_stream, Lock()
        self.multiprocessors = cupy.cuda.Device().attributes["MultiProcessorCount"]
        self.of_handle = None  # (the address of the stream on which the handle works, the bytes of its workspace)
        self.cublas = ctypes.CDLL(f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}")
        self.workspace = cupy.empty(WORKSPACE, np.uint8)
        unused = UNUSED_HANDLES[cupy.cuda.runtime.getDevice()]
        try:
            self.handle = unused.pop()
        except IndexError:
            self.handle = ctypes.c_void_p()
            self.call("cublasCreate_v2", ctypes.byref(self.handle))
        finalize(self, unused.append, self.handle)  # the handle is used again: to destroy it would wait for the device

    def product(self, a, b, y, add: bool = False):
        """y = a b, or y += a b if `add`, for C matrices: a [C, M, K], b [C, K, N], y [C, M, N].

        a and b have one of the dtypes of `CUDA_TYPES`; y has the same, or float32. The rows or the columns of each
        matrix of a and b must be contiguous; of y, the rows.
        """
        self.prepared(a, b, y, add)()

    def prepared(self, a, b, y, add: bool = False):
        """A function that enqueues `product` of these arrays, whenever it is called, with what they then hold.

        The function has their addresses alone, so the caller keeps their memory allocated. It refers to this object.
        """
        (C, M, K), N = a.shape, b.shape[2]
        (op_a, operand_a), (op_b, operand_b), (_, operand_y) = map(operand, (a, b, y))
        one, beta = (ctypes.byref(ctypes.c_float(factor)) for factor in (1, add))
        # cuBLAS expects matrices by columns. It reads ours by rows as their transposes: y^T = b^T a^T.
        operands = (one, *operand_b, *operand_a, beta, *operand_y)
        arguments = self.handle, op_b, op_a, N, M, K, *operands, C, COMPUTE_32F, DEFAULT_ALGORITHM
        return partial(self.multiply, self.workspace_for(C * M * N), *arguments)

    def workspace_for(self, numbers) -> int:
        """The bytes of the workspace for a product of so many numbers."""
        return 0 if numbers > self.multiprocessors * TILE else WORKSPACE

    def multiply(self, workspace, *arguments):
        """Calls cublasGemmStridedBatchedEx on the current stream, with so many bytes of the workspace."""
        stream = self.current_stream().ptr
        with self.lock:  # threads may have streams of their own
            if self.of_handle != (stream, workspace):
                self.call("cublasSetStream_v2", self.handle, ctypes.c_void_p(stream))  # also resets the workspace
                address = ctypes.c_void_p(self.workspace.data.ptr)
                self.call("cublasSetWorkspace_v2", self.handle, address, ctypes.c_size_t(workspace))
                self.of_handle = stream, workspace
            self.call("cublasGemmStridedBatchedEx", *arguments)

    def call(self, name, *arguments):
        """Calls a function of cuBLAS by its name; RuntimeError if it fails."""
        status = getattr(self.cublas, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with cublasStatus_t {status}")


def operand(x):
    """How cuBLAS is to read x [C, rows, columns]: (the operation, (address, type, leading dimension, stride between
    matrices)). The leading dimension is the stride of the rows, or of the columns if these are contiguous."""
    matrix_stride, row_stride, column_stride = (stride // x.itemsize for stride in x.strides)
    operation, leading = (NORMAL, row_stride) if column_stride == 1 else (TRANSPOSED, column_stride)
    return operation, (ctypes.c_void_p(x.data.ptr), CUDA_TYPES[x.dtype], leading, ctypes.c_longlong(matrix_stride))
