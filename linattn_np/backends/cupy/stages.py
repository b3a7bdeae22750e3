"""The five public stages of the chunked form, each a launch; `gated` plans mode "staged" as all of them in a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...contract import SUB_CHUNK
from .arguments import pointers, reals, rows, shape
from .gated_kernels import CHANNELS, channels, read_order
from .kernel import DOUBLE, FLOATS, Kernel
from .plan import Array, Draft, ceil_div

STAGE_COLUMNS = 64  # columns a block of the tiled stages


@dataclass(frozen=True)
class ChunkCumsum(Kernel):
    file = "stages/chunk_cumsum"
    arguments = (*rows("g b e"), *shape)
    threads = 128
    gate: np.dtype


@dataclass(frozen=True)
class GatedQk(Kernel):
    file = "stages/gated_qk"
    arguments = (*rows("q k b e qg kg"), *shape)
    threads = 128
    read_order: str
    dtype: np.dtype


@dataclass(frozen=True)
class InterChunk(Kernel):
    file = "stages/inter_chunk"
    arguments = (*rows("kg b v"), *pointers("h initial final"), *shape)
    shared = ("Shared",)
    threads = 128
    shared_bytes = 4 * (2 * 16 * (64 + 8))
    dtype: np.dtype


@dataclass(frozen=True)
class IntraChunk(Kernel):
    file = "stages/intra_chunk"
    arguments = (*rows("q k g"), *pointers("u"), *rows("A"), *shape)
    shared = ("Shared<{BK}>",)
    threads = 128
    read_order: str
    dtype: np.dtype
    gate: np.dtype
    BK: int

    @property
    def shared_bytes(self):
        return 4 * (3 * 16 * (self.BK + 8) + 2 * self.BK + 4 * 16 * 16)


@dataclass(frozen=True)
class Combine(Kernel):
    file = "stages/combine"
    arguments = (*rows("qg h A v o"), *shape, *reals("scale"))
    shared = ("Shared",)
    threads = 128
    shared_bytes = 4 * (64 * (16 + 4) + 16 * (64 + 8))
    dtype: np.dtype


class Float64InterChunk(Kernel):
    file = "float64/inter_chunk"
    arguments = (*rows("kg b v"), *pointers("h initial final"), *shape)
    threads = 128


@dataclass(frozen=True)
class Float64IntraChunk(Kernel):
    file = "float64/intra_chunk"
    arguments = (*rows("q k g"), *pointers("u"), *rows("A"), *shape)
    threads = 128
    read_order: str


class Float64Combine(Kernel):
    file = "float64/combine"
    arguments = (*rows("qg h A v o"), *shape, *reals("scale"))
    threads = 128


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if problem.dtype not in FLOATS:
        return f"no {problem.dtype} kernels; it has {', '.join(map(str, FLOATS))}"
    if problem.op.name == "intra_chunk" and problem.dtype != DOUBLE and problem.sizes["K"] > CHANNELS[-1]:
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    return None


def plan(problem, device):
    draft = Draft()
    shape = draft.shape(problem)
    results = STAGES[problem.op.name](draft, problem, shape)
    tiled = problem.op.name == "intra_chunk" and problem.dtype != DOUBLE
    BK = {"BK": channels(problem.sizes["K"])} if tiled else {}
    return draft.plan(results, tiles=BK | {"chunk": problem.chunk_size})


def plan_vjp(problem, device, do, dht, saved):
    raise NotImplementedError("a stage has no gradients")


# -- each as its public function has it --------------------------------------------------------------------------------
def chunk_cumsum(draft, problem, shape):
    (g,) = draft.inputs(problem)
    b, e = (draft.like(g, problem.compute_dtype) for _ in range(2))
    launch_chunk_cumsum(draft, shape, g, b, e)
    return b, e


def gated_qk(draft, problem, shape):
    q, k, b, e = draft.inputs(problem)
    qg, kg = (draft.like(x, problem.compute_dtype) for x in (q, k))
    order = "BeforeWrite" if problem.options["exclusive"] else "AfterWrite"
    launch_gated_qk(draft, shape, order, q, k, b, e, qg, kg)
    return qg, kg


def inter_chunk(draft, problem, shape):
    kg, v, b = draft.inputs(problem)
    h = draft.empty(problem.shape("B H NC K V"), problem.compute_dtype)
    final = draft.final(problem)
    launch_inter_chunk(draft, shape, kg, v, b, h, draft.initial(problem), final)
    return h, draft.stored(problem, final)


def intra_chunk(draft, problem, shape):
    q, k, g = draft.inputs(problem)
    A = draft.like(q, problem.compute_dtype, problem.shape("B H T C"))
    launch_intra_chunk(draft, shape, read_order(problem.op), q, k, g, draft.bonus(problem), A)
    return A


def combine(draft, problem, shape):
    qg, A, v = (draft.in_rows(problem[name], name) for name in ("qg", "A", "v"))
    o = draft.output(problem)
    launch_combine(draft, shape, qg, problem["h"], A, v, o, problem.scale)
    return draft.give_back(problem, o)


STAGES = {
    "chunk_cumsum": chunk_cumsum,
    "gated_qk": gated_qk,
    "inter_chunk": inter_chunk,
    "intra_chunk": intra_chunk,
    "combine": combine,
}


# -- launches ----------------------------------------------------------------------------------------------------------
def launch_chunk_cumsum(draft, shape, g, b, e):
    draft.launch(ChunkCumsum(g.dtype), shape.all_chunks, g=g, b=b, e=e, shape=shape)


def launch_gated_qk(draft, shape, order, q, k, b, e, qg, kg):
    draft.launch(GatedQk(order, q.dtype), shape.all_chunks, q=q, k=k, b=b, e=e, qg=qg, kg=kg, shape=shape)


def launch_inter_chunk(draft, shape, kg, v, b, h, initial, final):
    given = {"kg": kg, "b": b, "v": v, "h": h, "initial": initial, "final": final, "shape": shape}
    heads = shape.B * shape.count * shape.H
    if v.dtype == DOUBLE:
        kernel = Float64InterChunk()
        return draft.launch(kernel, heads * ceil_div(shape.K * shape.V, kernel.threads), **given)
    tiles = ceil_div(kg.shape[-1], STAGE_COLUMNS) * ceil_div(v.shape[-1], STAGE_COLUMNS)
    return draft.launch(InterChunk(v.dtype), heads * tiles, **given)


def launch_intra_chunk(draft, shape, order, q, k, g, u, A):
    given = {"q": q, "k": k, "g": g, "u": u, "A": A, "shape": shape}
    if q.dtype == DOUBLE:
        return draft.launch(Float64IntraChunk(order), shape.all_chunks, **given)
    kernel = IntraChunk(order, q.dtype, g.dtype, channels(shape.K))
    return draft.launch(kernel, shape.all_chunks * (shape.chunk // SUB_CHUNK), **given)


def launch_combine(draft, shape, qg, h, A, v, o, scale):
    h = draft.in_rows(h, "h")
    B, H, NC, K, V = h.shape
    if h.strides[2] != K * h.strides[3]:  # rows of all chunks are to be one axis
        h = draft.contiguous(h, reason="h: its chunks are not side by side")
    states = Array(h.memory, (B, H, NC * K, V), (*h.strides[:2], *h.strides[3:]), h.dtype, h.offset)
    given = {"qg": qg, "h": states, "A": A, "v": v, "o": o, "shape": shape, "scale": scale}
    if v.dtype == DOUBLE:
        return draft.launch(Float64Combine(), shape.all_chunks, **given)
    blocks = shape.all_chunks * ceil_div(shape.chunk, STAGE_COLUMNS) * ceil_div(shape.V, STAGE_COLUMNS)
    return draft.launch(Combine(v.dtype), blocks, **given)
