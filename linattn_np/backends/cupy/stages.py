"""Plans of the five public stages of the chunked form, one launch each, and of all five for one call (mode "staged").

`linattn_np.stages` has their equations. The arrays between stages are

    b, e    [B, H, T, K]      sums of a chunk's log gates: b up to and with this token, e of the tokens after it
    qg, kg  [B, H, T, K]      q exp(b) and k exp(e): queries decayed from the chunk's start, keys to its end
    h       [B, H, NC, K, V]  the state before every chunk
    A       [B, H, T, chunk]  the weight of each token of the chunk in this token's output

with B batch, H heads, T tokens, K channels, V columns and NC chunks. Stages 3 to 5 have other kernels for float64.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ...contract import SUB_CHUNK
from . import aligned_copies, segments
from .arguments import members
from .arithmetic import ceil_div
from .elementwise_kernels import sum_arrays
from .gated_forward import PortableForward
from .gated_kernels import CHANNELS, channels
from .kernel import DOUBLE, FLOATS, GatedKernel, Kernel, no_kernels
from .plan import Array, Draft, common_bytes, is_contiguous

# A class describes a kernel: its annotated fields are the template's arguments, in order; `arguments` the members of
# struct Args, which the compiler checks, with `?` if they may be null.
#
# Arguments: u: RWKV-6's bonus, or null; initial, final: states; bytes: of a copy, the largest of 16, 8, 4 and 2 of
# which all rows' addresses and lengths are multiples

STAGE_COLUMNS = 64  # channels or columns per block of the stages `inter_chunk` and `combine`, and rows of `combine`


class ChunkCumsum(Kernel):
    """Stage 1: b and e from g."""

    file = "stages/chunk_cumsum"
    arguments = members("strided g b e, shape")
    threads = 128
    gate: np.dtype


class GatedQk(Kernel):
    """Stage 2: qg and kg."""

    file = "stages/gated_qk"
    arguments = members("strided q k b e qg kg, shape")
    threads = 128
    read_order: str
    dtype: np.dtype


class InterChunk(Kernel):
    """Stage 3: h and the final state."""

    file = "stages/inter_chunk"
    arguments = members("strided kg b v, pointers h initial final, shape, int64s bytes")
    shared_memory = ("Shared<{dtype}>",)
    threads = 128
    TILE = STAGE_COLUMNS
    constants = (("TILE", "TILE"),)
    dtype: np.dtype


class IntraChunk(GatedKernel):
    """Stage 4: A."""

    file = "stages/intra_chunk"
    arguments = members("strided q k g, pointers u, strided A, shape, int64s bytes part_stride")
    shared_memory = ("Shared<{BK}>",)
    WARP_ROWS: ClassVar[int] = 16
    constants = (("ROWS<{BK}>", "rows"), ("WARP_ROWS", "WARP_ROWS"))
    BK: int

    @property
    def rows(self):
        """Rows of scores per block: a warp has WARP_ROWS of them."""
        return 32 if self.BK > 128 else 64

    @property
    def threads(self):
        return 32 * self.rows // self.WARP_ROWS


class Combine(Kernel):
    """Stage 5: o = scale (qg h + A v)."""

    file = "stages/combine"
    arguments = members("strided qg h A v o, shape, float64s scale, int64s bytes")
    shared_memory = ("Shared<{dtype}>",)
    threads = 128
    TILE = STAGE_COLUMNS
    constants = (("TILE", "TILE"),)
    dtype: np.dtype


class Float64InterChunk(Kernel):
    """Stage 3 in float64."""

    file = "float64/inter_chunk"
    arguments = members("strided kg b v, pointers h initial final, shape")
    threads = 128


class Float64IntraChunk(Kernel):
    """Stage 4 in float64."""

    file = "float64/intra_chunk"
    arguments = members("strided q k g, pointers u, strided A, shape")
    threads = 128
    read_order: str


class Float64Combine(Kernel):
    """Stage 5 in float64."""

    file = "float64/combine"
    arguments = members("strided qg h A v o, shape, float64s scale")
    threads = 128


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    return no_kernels(problem.dtype, FLOATS)


def plan(problem, device):
    """The plan of one stage, which `problem.op` names."""
    draft, name = Draft(), problem.op.name
    stages = Stages(draft, problem, draft.like)
    results = getattr(stages, name)(*draft.inputs(problem))
    if name == "inter_chunk":
        results = results[0], draft.in_state_dtype(problem, results[1])
    if name == "combine":
        results = draft.give_back(problem, results)
    tiled = name == "intra_chunk" and problem.dtype != DOUBLE
    BK = {"BK": channels_of_block(problem)} if tiled else {}
    return draft.plan(results, tiles=BK | {"chunk": problem.chunk_size})


def plan_all_stages(problem, device, summaries):
    """The plan of mode "staged" of an operator of the gated family: all five stages. Stage 3 goes from chunk to chunk:
    few heads are cut into segments, which are summarised before. Rows that stages would load slowly are copied to
    padded ones first. `summaries` is always empty."""
    if problem.dtype != DOUBLE and segments.load_slowly(problem.token_arrays, segments.LEAST_PIECE):
        return aligned_copies.plan_on_copies(problem, lambda copies: plan_all_stages(copies, device, ()))
    draft = Draft()
    stages = Stages(draft, problem, lambda x, dtype, shape=None: draft.empty(shape or x.shape, dtype))
    q, k, v, g = draft.inputs(problem)
    b, e = stages.chunk_cumsum(g)
    qg, kg = stages.gated_qk(q, k, b, e)
    shape, initial, final = stages.shape, draft.initial(problem), draft.final(problem)
    cut = segments.stage_cut(problem, device, shape.chunk, state_tiles(shape))
    if cut.segments == 1:
        h = stages.states(kg, v, b, initial, final)
    else:
        summarised = PortableForward(draft, problem, cut, (q, k, v, g), o=None)
        summaries = summarised.segment_summaries(with_last=final is not None)
        h = stages.states(kg, v, b, summarised.states_at_starts(summaries, initial, final), None, cut.spans)
    o = stages.combine(qg, h, stages.intra_chunk(q, k, g), v)
    tiles = {"chunk": shape.chunk} | ({"segments": cut.segments} if cut.segments > 1 else {})
    if problem.dtype != DOUBLE:
        tiles = {"BK": channels_of_block(problem), "BV": STAGE_COLUMNS} | tiles | {"sub_chunk": SUB_CHUNK}
    return draft.plan(draft.results(problem, o, final), mode="staged", tiles=tiles)


def state_tiles(shape) -> int:
    """The tiles of a state, of which the kernel of stage 3 has a block for each."""
    return ceil_div(shape.K, STAGE_COLUMNS) * ceil_div(shape.V, STAGE_COLUMNS)


def channels_of_block(problem) -> int:
    """The channels of a block of scores."""
    return channels(min(problem.sizes["K"], CHANNELS[-1]))


class Stages:
    """Adds the launches of stages to a draft. A stage's method has the name and the arrays of its public function, and
    returns the arrays of its results.

    new_array : a function of (a prototype, a dtype, a shape or None for the prototype's) that makes arrays of results
    """

    def __init__(self, draft, problem, new_array):
        self.draft, self.problem, self.new_array = draft, problem, new_array
        self.shape, self.real = draft.shape(problem), problem.compute_dtype
        exclusive = problem.options.get("exclusive", problem.op.reads_before_write)
        self.read_order = "BeforeWrite" if exclusive else "AfterWrite"

    @property
    def channel_blocks(self) -> int:
        """Blocks of the kernels of stages 1 and 2, a thread of which has a channel of a chunk."""
        return self.shape.all_chunks * ceil_div(self.shape.K, ChunkCumsum.threads)

    def launch(self, kernel, blocks, **arrays):
        """Launches a kernel; `arrays`: its arguments but `shape`."""
        self.draft.launch(kernel, blocks, **arrays, shape=self.shape)

    def chunk_cumsum(self, g):
        b, e = self.new_array(g, self.real), self.new_array(g, self.real)
        self.launch(ChunkCumsum(g.dtype), self.channel_blocks, g=g, b=b, e=e)
        return b, e

    def gated_qk(self, q, k, b, e):
        qg, kg = self.new_array(q, self.real), self.new_array(k, self.real)
        kernel = GatedQk(self.read_order, q.dtype)
        self.launch(kernel, self.channel_blocks, q=q, k=k, b=b, e=e, qg=qg, kg=kg)
        return qg, kg

    def inter_chunk(self, kg, v, b):
        """(h, the final state or None)."""
        final = self.draft.final(self.problem)
        return self.states(kg, v, b, self.draft.initial(self.problem), final), final

    def states(self, kg, v, b, initial, final, spans=None):
        """h. The kernel carries states through each of `spans`, by default through whole sequences, from the states
        `initial`, and stores the last ones in `final` unless it is None."""
        shape = self.shape if spans is None else self.draft.shape(self.problem, spans)
        h = self.draft.empty((shape.B, shape.H, shape.NC, shape.K, shape.V), self.real)
        access, kernel, blocks = {"bytes": common_bytes(kg, v)}, InterChunk(v.dtype), state_tiles(shape)
        if v.dtype == DOUBLE:
            access, kernel = {}, Float64InterChunk()
            blocks = ceil_div(shape.K * shape.V, kernel.threads)
        arrays = {"kg": kg, "v": v, "b": b, "h": h, "initial": initial, "final": final}
        self.draft.launch(kernel, shape.B * shape.row_sequences * shape.H * blocks, **arrays, shape=shape, **access)
        return h

    def intra_chunk(self, q, k, g):
        """A. Of more channels than a block has each part has scores of its own, which are then added."""
        shape, draft, u = self.shape, self.draft, self.draft.bonus(self.problem)
        A = self.new_array(q, self.real, (shape.B, shape.H, shape.T, shape.chunk))
        if q.dtype == DOUBLE:
            self.launch(Float64IntraChunk(self.read_order), shape.all_chunks, q=q, k=k, g=g, u=u, A=A)
            return A
        kernel = IntraChunk(self.read_order, q.dtype, g.dtype, channels_of_block(self.problem))
        parts = max(1, ceil_div(shape.K, kernel.BK))
        scores = A if parts == 1 else draft.empty((parts, *A.shape), self.real)
        first = A if parts == 1 else scores[0]
        blocks = shape.all_chunks * ceil_div(shape.chunk, kernel.rows) * parts
        self.launch(kernel, blocks, q=q, k=k, g=g, u=u, A=first, bytes=common_bytes(q, k, g), part_stride=A.size)
        if parts == 1:
            return A
        total = A if is_contiguous(A) else draft.empty(A.shape, A.dtype)
        sum_arrays(draft, scores, total)
        if total is not A:
            draft.copy(total, A)
        return A

    def combine(self, qg, h, A, v):
        """o in an array that the kernel can write, which may be the caller's `out`."""
        o, shape = self.draft.output(self.problem), self.shape
        B, H, NC, K, V = h.shape
        if h.strides[2] != K * h.strides[3]:  # the kernel reads chunks and channels as one axis
            h = self.draft.contiguous_copy(h, reason="h: its chunks are not side by side")
        states = Array(h.memory, (B, H, NC * K, V), (*h.strides[:2], *h.strides[3:]), h.dtype, h.offset)
        access = {}
        if v.dtype == DOUBLE:
            kernel, blocks = Float64Combine(), shape.all_chunks
        else:
            access = {"bytes": common_bytes(qg, states, A, v, o)}
            kernel = Combine(v.dtype)
            blocks = shape.all_chunks * ceil_div(shape.chunk, STAGE_COLUMNS) * ceil_div(shape.V, STAGE_COLUMNS)
        self.launch(kernel, blocks, qg=qg, h=states, A=A, v=v, o=o, scale=self.problem.scale, **access)
        return o
