"""Host plans: what each operator and stage allocates, and what it launches on CuPy's current stream."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import numpy as np

from ...array_kinds import BFLOAT16
from ...contract import CHUNK, SUB_CHUNK
from ..cupy import peak_bandwidth
from . import kernels
from .routes import mode
from .runtime import launch


def run(problem):
    with device(problem):
        return PLANS[problem.op.name](problem)


def device(problem):
    """The device of the arrays, made current."""
    return nullcontext() if problem.home == "host" else sys.modules["cupy"].cuda.Device(ordinal(problem))


def ordinal(problem) -> int:
    return int(problem.home.split(":")[1])


def namespace(problem):
    """NumPy in the simulator, CuPy otherwise."""
    return np if problem.home == "host" else sys.modules["cupy"]


# -- operators -----------------------------------------------------------------------------------------------
def operator(problem):
    return recurrent(problem) if mode(problem) == "recurrent" else staged(problem)


def staged(problem):
    q, k, v, g, u = inputs(problem)
    chunks = chunk_table(problem)
    b, e = chunk_cumsum(problem, g, chunks)
    qg, kg = gated_qk(problem, q, k, b, e, chunks, problem.op.reads_before_write)
    h, state = inter_chunk(problem, kg, v, b, chunks)
    A = intra_chunk(problem, q, k, g, u, chunks)
    return combine(problem, qg, h, A, v, chunks, like=q), final(problem, state)


def recurrent(problem):
    q, k, v, g, u = inputs(problem)
    state = start_state(problem)
    rows = namespace(problem).arange(problem.sizes["N"], dtype=np.int64)
    bounds = namespace(problem).asarray(problem.spans.bounds)
    o = walk(problem, q, k, v, g, u, bounds, rows, state)
    return o, final(problem, state)


def step(problem):
    """One token is a sequence of length 1. Of a bfloat16 state, the rows in use go to float32 and back."""
    q, k, v, g, u = inputs(problem)
    xp, B = namespace(problem), problem.sizes["B"]
    state, slots = problem.options["state"], problem.options["slots"]
    rows = xp.arange(B, dtype=np.int64) if slots is None else xp.asarray(slots)
    bounds = xp.arange(2, dtype=np.int64)
    q, k, v, g = (x[:, :, None] for x in (q, k, v, g))
    if state.dtype != BFLOAT16:
        return walk(problem, q, k, v, g, u, bounds, rows, state)[:, :, 0]
    copy = state[rows].astype(np.float32)
    o = walk(problem, q, k, v, g, u, bounds, xp.arange(B, dtype=np.int64), copy)
    state[rows] = copy.astype(BFLOAT16)
    return o[:, :, 0]


def walk(problem, q, k, v, g, u, bounds, rows, state):
    """The recurrence over [B, H, T, ...]; `state` is updated in place."""
    out = problem.out if problem.out is None or problem.out.ndim == 4 else problem.out[:, :, None]
    o = output(problem, q, v.shape, out)
    N, H, V = problem.shape("N H V")
    launch(
        kernels.recurrent(key_channels(problem)),
        N * H * tiles_of(V, kernels.COLS),
        kernels.THREADS,
        q,
        k,
        v,
        g,
        u,
        bounds,
        rows,
        state,
        o,
        real(problem)(problem.scale),
        problem.op.reads_before_write,
    )
    return finished(problem, o, out)


# -- stages --------------------------------------------------------------------------------------------------
def chunk_cumsum(problem, g, chunks):
    b, e = (empty_like(problem, g, g.shape) for _ in range(2))
    launch(kernels.chunk_cumsum, channel_blocks(g, chunks), kernels.THREADS, g, chunks, b, e)
    return b, e


def gated_qk(problem, q, k, b, e, chunks, exclusive):
    qg, kg = (empty_like(problem, q, q.shape) for _ in range(2))
    launch(kernels.gated_qk, channel_blocks(q, chunks), kernels.THREADS, q, k, b, e, chunks, qg, kg, exclusive)
    return qg, kg


def inter_chunk(problem, kg, v, b, chunks):
    B, H, K, V, N = problem.shape("B H K V N")
    xp = namespace(problem)
    state = start_state(problem)
    h = xp.empty((B, H, len(chunks), K, V), real(problem))
    first_chunk = xp.asarray(problem.spans.chunk_bounds(chunk_size(problem)))
    blocks = N * H * tiles_of(K, kernels.ROWS) * tiles_of(V, kernels.COLS)
    launch(kernels.inter_chunk, blocks, kernels.THREADS, kg, v, b, chunks, first_chunk, h, state)
    return h, state


def intra_chunk(problem, q, k, g, u, chunks):
    B, H, T = problem.shape("B H T")
    A = empty_like(problem, q, (B, H, T, chunk_size(problem)))
    subs = sub_chunks(problem)
    launch(
        kernels.intra_chunk_below,
        B * H * len(chunks) * (subs * (subs - 1) // 2),
        kernels.THREADS,
        q,
        k,
        g,
        chunks,
        subs,
        A,
        problem.op.reads_before_write,
    )
    launch(
        kernels.intra_chunk_diagonal,
        B * H * len(chunks) * subs,
        kernels.THREADS,
        q,
        k,
        g,
        u,
        chunks,
        subs,
        A,
        problem.op.reads_before_write,
    )
    return A


def combine(problem, qg, h, A, v, chunks, like):
    B, H, V = problem.shape("B H V")
    subs = sub_chunks(problem)
    o = output(problem, like, v.shape, problem.out)
    blocks = B * H * len(chunks) * tiles_of(subs * SUB_CHUNK, kernels.ROWS) * tiles_of(V, kernels.COLS)
    launch(kernels.combine, blocks, kernels.THREADS, qg, h, A, v, chunks, subs, o, real(problem)(problem.scale))
    return finished(problem, o, problem.out)


def run_chunk_cumsum(problem):
    return chunk_cumsum(problem, readable(problem["g"]), chunk_table(problem))


def run_gated_qk(problem):
    q, k, b, e = map(readable, problem.arrays.values())
    return gated_qk(problem, q, k, b, e, chunk_table(problem), problem.options["exclusive"])


def run_inter_chunk(problem):
    kg, v, b = map(readable, problem.arrays.values())
    h, state = inter_chunk(problem, kg, v, b, chunk_table(problem))
    return h, final(problem, state)


def run_intra_chunk(problem):
    q, k, g, *u = map(readable, problem.arrays.values())
    return intra_chunk(problem, q, k, g, bonus(problem, *u), chunk_table(problem))


def run_combine(problem):
    qg, h, A, v = map(readable, problem.arrays.values())
    return combine(problem, qg, h, A, v, chunk_table(problem), like=qg)


PLANS = {
    "gla": operator,
    "rwkv6": operator,
    "gla_step": step,
    "rwkv6_step": step,
    "chunk_cumsum": run_chunk_cumsum,
    "gated_qk": run_gated_qk,
    "inter_chunk": run_inter_chunk,
    "intra_chunk": run_intra_chunk,
    "combine": run_combine,
}


# -- arrays in, arrays out -----------------------------------------------------------------------------------
def real(problem):
    """The scalar type of the arithmetic."""
    return problem.compute_dtype.type


def readable(x):
    """Numba has no name for ml_dtypes' bfloat16: such arrays are read as float32 copies."""
    return x.astype(np.float32) if x.dtype == BFLOAT16 else x


def inputs(problem):
    q, k, v, g, *u = map(readable, problem.arrays.values())
    return q, k, v, g, bonus(problem, *u)


def bonus(problem, u=None):
    """[H, K] in the dtype of the arithmetic, as kernels serve both forms; GLA's diagonal has weight 1."""
    if u is None:
        return namespace(problem).ones(problem.shape("H K"), real(problem))
    return u.astype(real(problem), copy=False)


def start_state(problem):
    """A fresh [N, H, K, V] for the kernels to work on."""
    if problem.initial_state is None:
        return namespace(problem).zeros(problem.shape("N H K V"), real(problem))
    return problem.initial_state[0].astype(real(problem))


def final(problem, state):
    return (state.astype(problem.state_dtype, copy=False),) if problem.output_final_state else None


def empty_like(problem, x, shape):
    """Uninitialised, in the memory order of `x` and the dtype of the arithmetic."""
    return namespace(problem).empty_like(x, dtype=real(problem), shape=shape)


def output(problem, like, shape, out):
    """What the kernel writes: `out` itself, or a new array in the memory order of `like`."""
    if problem.dtype == BFLOAT16:
        return empty_like(problem, like, shape)
    return out if out is not None else namespace(problem).empty_like(like, dtype=problem.dtype, shape=shape)


def finished(problem, o, out):
    """`o` in the dtype of the operator, and in `out` where one was given."""
    if problem.dtype != BFLOAT16:
        return o
    if out is None:
        return o.astype(BFLOAT16)
    out[...] = o.astype(BFLOAT16)
    return out


# -- sizes ---------------------------------------------------------------------------------------------------
def chunk_size(problem) -> int:
    return problem.chunk_size or CHUNK


def chunk_table(problem):
    """[NC, 2] int64 on the device."""
    return namespace(problem).asarray(problem.spans.chunks(chunk_size(problem)))


def sub_chunks(problem) -> int:
    """Sub-chunks of the longest chunk: fewer than a whole chunk's when every sequence is short."""
    return tiles_of(min(chunk_size(problem), int(problem.spans.lengths.max())), SUB_CHUNK)


def key_channels(problem) -> int:
    """K rounded up to a power of two from 16 on, so that few kernels serve every K."""
    return max(16, 1 << (problem.sizes["K"] - 1).bit_length())


def tiles_of(size, tile) -> int:
    return -(-size // tile)


def channel_blocks(x, chunks) -> int:
    B, H, _, K = x.shape
    return tiles_of(B * H * len(chunks) * K, kernels.THREADS)


# -- explain -------------------------------------------------------------------------------------------------
def tiles(problem, recurrent) -> dict:
    if recurrent:
        return {"K": key_channels(problem), "BV": kernels.COLS, "threads": kernels.THREADS}
    return {
        "chunk_size": chunk_size(problem),
        "BC": kernels.SUB,
        "BT": kernels.ROWS,
        "BK": kernels.INNER,
        "BV": kernels.COLS,
        "threads": kernels.THREADS,
    }


def copies(problem) -> tuple[str, ...]:
    arrays = {**problem.arrays, "out": problem.out, "state": problem.options.get("state")}
    return tuple(
        f"{name}: bfloat16, which Numba cannot take, through float32"
        for name, x in arrays.items()
        if x is not None and x.dtype == BFLOAT16
    )


def floor_ms(problem, bytes_moved):
    bandwidth = 0 if problem.home == "host" else peak_bandwidth(ordinal(problem))
    return bytes_moved / bandwidth * 1e3 if bandwidth else None
