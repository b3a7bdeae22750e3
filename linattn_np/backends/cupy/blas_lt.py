"""Large matrix products by cuBLASLt, each by the fastest of the algorithms that it proposes. Where sums have few terms,
cuBLAS itself chooses tiles so large that writing one does not overlap computing the next."""

import ctypes
from ctypes import byref, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import partial
from math import prod
from statistics import median

from .blas import COMPUTE_32F, Cublas, operand
from .kernel import HALF

LEAST = 1 << 32  # multiplications; cuBLAS makes products of fewer
ROWS = 1024  # `prepared` times products whose rows are a multiple of it
PROPOSALS, ROUNDS = 8, 9  # the most algorithms that are asked for; how often each is timed
CUDA_R_32F = 0  # of cudaDataType
TRANS_A, TRANS_B = 3, 4  # of cublasLtMatmulDescAttributes_t
BATCH_COUNT, BATCH_STRIDE = 5, 6  # of cublasLtMatrixLayoutAttribute_t
MOST_WORKSPACE, ALIGNMENTS = 1, (5, 6, 7, 8)  # of cublasLtMatmulPreferenceAttributes_t: bytes; alignments of A to D
SPLIT_K = 2  # of cublasLtMatmulAlgoConfigAttributes_t
SUCCESS, NOT_SUPPORTED = 0, 15  # of cublasStatus_t
ALIGNED = 16  # bytes to which a product's arrays are aligned
CHOSEN: dict = {}  # (device, shapes, strides, dtypes) -> what `CublasLt.choose` returns


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int32),
        ("waves", c_float),
        ("reserved", c_int32 * 4),
    ]


class CublasLt(Cublas):
    """`Cublas`, with large products in half precision by cuBLASLt. The first product of a key of CHOSEN times the
    algorithms. A handle of cuBLAS is one of cuBLASLt, too."""

    def __init__(self):
        super().__init__()
        import cupy

        self.cupy, self.device = cupy, cupy.cuda.runtime.getDevice()
        self.lt = ctypes.CDLL(f"libcublasLt.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}")

    def product(self, a, b, y, add: bool = False):
        """As `Cublas.product`, for callers whose shapes recur: each large one is timed, whatever its rows."""
        self.fastest(a, b, y, add)()

    def prepared(self, a, b, y, add: bool = False):
        """As `Cublas.prepared`. Unless `add`, this call may write to y, on which algorithms are timed. A prompt has any
        number of tokens, which are the rows of y, and to time its products takes longer than the prompt: they are timed
        for multiples of ROWS only.
        """
        return super().prepared(a, b, y, add) if y.shape[1] % ROWS else self.fastest(a, b, y, add)

    def fastest(self, a, b, y, add):
        """As `Cublas.prepared`: by the fastest algorithm, or by cuBLAS where `chosen` is None."""
        if not (chosen := self.chosen(a, b, y, add)):
            return super().prepared(a, b, y, add)
        return partial(self.run, *chosen, *(x.data.ptr for x in (a, b, y)), add)

    def chosen(self, a, b, y, add):
        """What `choose` returns for a product of these shapes, or None if it is left to cuBLAS."""
        large = a.dtype in HALF and prod(a.shape) * b.shape[2] >= LEAST
        if not large or any(x.data.ptr % ALIGNED for x in (a, b, y)):
            return None
        key = self.device, *((x.shape, x.strides, x.dtype) for x in (a, b, y))
        if key not in CHOSEN:
            if self.current_stream().is_capturing() or add and not y.flags.c_contiguous:
                return None
            CHOSEN[key] = self.choose(a, b, self.cupy.empty_like(y) if add else y)
        return CHOSEN[key]

    def choose(self, a, b, y):
        """(the product's description, the matrices' layouts, the fastest algorithm), or None if cuBLASLt proposes none.
        Each is timed on y, which then is a b. Only those are compared that divide the sums into as many parts as
        cuBLASLt's first choice does: these have the same bits."""
        (op_a, a_layout), (op_b, b_layout), (_, y_layout) = map(self.layout, (a, b, y))
        description = self.made("cublasLtMatmulDescCreate", COMPUTE_32F, CUDA_R_32F)
        # y^T = b^T a^T, see `Cublas.prepared`
        for name, operation in ((TRANS_A, op_b), (TRANS_B, op_a)):
            self.set("cublasLtMatmulDescSetAttribute", description, name, c_int32(operation))
        layouts = b_layout, a_layout, y_layout
        # No workspace, and so no parts of sums, from half of the numbers on from which cuBLAS has none.
        proposals = self.proposals(description, layouts, self.workspace_for(2 * prod(y.shape)))
        if not proposals:
            return None
        splits = [self.split(one) for one in proposals]
        proposals = [one for one, split in zip(proposals, splits) if split == splits[0]]
        times: list[list] = [[] for _ in proposals]
        for _ in range(ROUNDS):
            for one, own in zip(proposals, times):
                events = [self.cupy.cuda.Event() for _ in range(2)]
                events[0].record()
                self.run(description, layouts, one, *(x.data.ptr for x in (a, b, y)), False)
                events[1].record()
                own.append(events)
        events[1].synchronize()
        taken = [median(self.cupy.cuda.get_elapsed_time(*pair) for pair in own) for own in times]
        return description, layouts, proposals[taken.index(min(taken))]

    def layout(self, x):
        """(how cuBLASLt is to read x [C, rows, columns], its layout), as `operand`."""
        operation, (_, dtype, leading, stride) = operand(x)
        count, *sizes = x.shape
        rows, columns = sizes if operation else sizes[::-1]  # of the matrix by columns
        layout = self.made("cublasLtMatrixLayoutCreate", dtype, c_uint64(rows), c_uint64(columns), c_int64(leading))
        for name, value in ((BATCH_COUNT, c_int32(count)), (BATCH_STRIDE, c_int64(stride.value))):
            self.set("cublasLtMatrixLayoutSetAttribute", layout, name, value)
        return operation, layout

    def proposals(self, description, layouts, workspace):
        """The algorithms that cuBLASLt proposes with such a workspace, in its order; none where it has none."""
        preference = self.made("cublasLtMatmulPreferenceCreate")
        wanted = [(MOST_WORKSPACE, c_uint64(workspace)), *((name, c_uint32(ALIGNED)) for name in ALIGNMENTS)]
        for name, value in wanted:
            self.set("cublasLtMatmulPreferenceSetAttribute", preference, name, value)
        found, count = (Proposal * PROPOSALS)(), c_int32()
        matrices = *layouts, layouts[-1]
        arguments = self.handle, description, *matrices, preference, PROPOSALS, found, byref(count)
        self.call_lt("cublasLtMatmulAlgoGetHeuristic", *arguments, accepted=(SUCCESS, NOT_SUPPORTED))
        return [proposal for proposal in found[: count.value] if proposal.status == SUCCESS]

    def split(self, proposal):
        """Into how many parts an algorithm divides the sums."""
        split, written = c_int32(), c_size_t()
        arguments = byref(proposal), SPLIT_K, byref(split), c_size_t(4), byref(written)
        self.call_lt("cublasLtMatmulAlgoConfigGetAttribute", *arguments)
        return split.value

    def run(self, description, layouts, proposal, a, b, y, add):
        """Enqueues a product of the matrices at these addresses on the current stream."""
        (b_layout, a_layout, y_layout), to = layouts, c_void_p(y)
        matrices = c_void_p(b), b_layout, c_void_p(a), a_layout
        workspace = c_void_p(self.workspace.data.ptr), c_size_t(proposal.workspace)
        stream = c_void_p(self.current_stream().ptr)
        factors = [byref(c_float(factor)) for factor in (1, add)]
        result = factors[1], to, y_layout, to, y_layout
        arguments = self.handle, description, factors[0], *matrices, *result, byref(proposal), *workspace, stream
        self.call_lt("cublasLtMatmul", *arguments)

    def made(self, name, *arguments):
        """What a function of cuBLASLt makes. It is kept as long as the process runs."""
        result = c_void_p()
        self.call_lt(name, byref(result), *arguments)
        return result

    def set(self, name, of, attribute, value):
        """Sets an attribute."""
        self.call_lt(name, of, attribute, byref(value), c_size_t(ctypes.sizeof(value)))

    def call_lt(self, name, *arguments, accepted=(SUCCESS,)):
        """Calls a function of cuBLASLt by its name; RuntimeError if its status is not an `accepted` one."""
        if (status := getattr(self.lt, name)(*arguments)) not in accepted:
            raise RuntimeError(f"{name} failed with cublasStatus_t {status}")
