"""The launches of a call: arrays in, arrays out, on NumPy's arrays in the simulator and on CuPy's on a device.

bfloat16, which Numba does not know, is read as float32 copies, and results are rounded to it in the end.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cached_property

import numpy as np

from ...array_kinds import BFLOAT16
from ...contract import CHUNK, SUB_CHUNK
from ...declarations import DELTA_RULE_STEPS, DELTA_RULES, RWKV7, RWKV7_STEP, STAGES, STEPS
from ..cupy import peak_bandwidth
from . import kernels
from .modes import mode
from .runtime import launch


def run(problem):
    call = NumbaLaunches(problem)
    with nullcontext() if problem.home == "host" else sys.modules["cupy"].cuda.Device(ordinal(problem)):
        if problem.op in STAGES:
            return getattr(call, problem.op.name)(*call.arrays)
        if problem.op in STEPS:
            return call.step(*call.arrays)
        return (call.recurrent if mode(problem) == "recurrent" else call.staged)(*call.arrays)


def ordinal(problem) -> int:
    """The device that the arrays live on."""
    return int(problem.home.removeprefix("cuda:"))


def tiles_of(size, tile) -> int:
    return -(-size // tile)


class NumbaLaunches:
    """The launches of one problem. Methods take the arrays of the operator, step or stage in its order."""

    def __init__(self, problem):
        self.problem, self.xp = problem, np if problem.home == "host" else sys.modules["cupy"]
        self.real = problem.compute_dtype.type  # of the arithmetic
        self.chunk_size = problem.chunk_size or CHUNK
        self.exclusive = problem.options.get("exclusive", problem.op.reads_before_write)

    @property
    def sub_chunks(self) -> int:
        """Sub-chunks of the longest chunk."""
        return tiles_of(min(self.chunk_size, int(self.problem.spans.lengths.max())), SUB_CHUNK)

    @property
    def arrays(self):
        return [x.astype(np.float32) if x.dtype == BFLOAT16 else x for x in self.problem.arrays.values()]

    @cached_property
    def chunks(self):
        """[NC, 2] where the arrays are: the token range of every chunk."""
        return self.xp.asarray(self.problem.spans.chunks(self.chunk_size))

    # -- operators --
    def staged(self, q, k, v, g, *u):
        b, e = self.chunk_cumsum(g)
        qg, kg = self.gated_qk(q, k, b, e)
        h, final = self.inter_chunk(kg, v, b)
        return self.combine(qg, h, self.intra_chunk(q, k, g, *u), v), final

    def recurrent(self, *arrays):
        state, bounds = self.initial_state(), self.xp.asarray(self.problem.spans.bounds)
        rows = self.xp.arange(self.problem.sizes["N"], dtype=np.int64)
        return self.walk(*arrays, bounds=bounds, rows=rows, state=state), self.final(state)

    def step(self, *arrays):
        """One token is a sequence of length 1. Of a bfloat16 state, the rows in use go to float32 and back."""
        state, slots = self.problem.options["state"], self.problem.options["slots"]
        own = self.xp.arange(self.problem.sizes["B"], dtype=np.int64)
        rows, bounds = own if slots is None else self.xp.asarray(slots), self.xp.arange(2, dtype=np.int64)
        axes = self.problem.op.arrays.values()
        arrays = [x[:, :, None] if of.startswith("B") else x for of, x in zip(axes, arrays)]
        if state.dtype != BFLOAT16:
            return self.walk(*arrays, bounds=bounds, rows=rows, state=state)[:, :, 0]
        copy = state[rows].astype(np.float32)
        o = self.walk(*arrays, bounds=bounds, rows=own, state=copy)
        state[rows] = copy.astype(BFLOAT16)
        return o[:, :, 0]

    def walk(self, *arrays, bounds, rows, state):
        """The recurrence over [B, H, T, ...]; `state` is updated in place."""
        out, op = self.problem.out, self.problem.op
        out = out if out is None or out.ndim == 4 else out[:, :, None]
        delta = op in (*DELTA_RULES, *DELTA_RULE_STEPS)
        q, k, v, g, u, a, b = self.general_form(*arrays) if delta else self.gated_form(*arrays)
        o, (N, H, V) = self.output(q, v.shape, out), self.problem.shape("N H V")
        kernel, blocks = kernels.recurrent(key_channels(self.problem), delta), N * H * tiles_of(V, kernels.COLS)
        scale = self.real(self.problem.scale)
        exclusive = op in (RWKV7, RWKV7_STEP) if delta else self.exclusive
        launch(kernel, blocks, kernels.THREADS, q, k, v, g, u, a, b, bounds, rows, state, o, scale, exclusive)
        return self.finished(o, out)

    def gated_form(self, q, k, v, g, *u):
        """The kernel's arrays; it reads neither a nor b."""
        return q, k, v, g, self.bonus(*u), k, k

    def general_form(self, *arrays):
        """The kernel's arrays, but u, which it does not read: of the delta rule a = -k, and beta k is b and the key."""
        if self.problem.op in (RWKV7, RWKV7_STEP):
            r, w, k, v, a, b = arrays
            return r, k, v, w, self.bonus(), a, b
        q, k, v, *g, beta = arrays
        q, k = self.of_every_head(q), self.of_every_head(k)
        written = beta.astype(self.real)[..., None] * k
        g = g[0] if g else self.xp.zeros((), self.real)
        g = self.xp.broadcast_to(g if g.ndim in (0, 4) else g[..., None], k.shape)
        return q, written, v, g, self.bonus(), -k, written

    def of_every_head(self, x):
        """The query or key of every head, divided by its length where the call asks for it."""
        x, (H, HK) = x.astype(self.real, copy=False), self.problem.shape("H HK")
        if self.problem.options["qk_l2norm"]:
            x = x / self.xp.sqrt((x * x).sum(-1, keepdims=True) + self.real(1e-6))
        return x if H == HK else x.repeat(H // HK, axis=1)

    # -- stages --
    def chunk_cumsum(self, g):
        b, e, chunks = self.empty_like(g, g.shape), self.empty_like(g, g.shape), self.chunks
        launch(kernels.chunk_cumsum, self.channel_blocks(g), kernels.THREADS, g, chunks, b, e)
        return b, e

    def gated_qk(self, q, k, b, e):
        qg, kg, chunks = self.empty_like(q, q.shape), self.empty_like(q, q.shape), self.chunks
        blocks = self.channel_blocks(q)
        launch(kernels.gated_qk, blocks, kernels.THREADS, q, k, b, e, chunks, qg, kg, self.exclusive)
        return qg, kg

    def inter_chunk(self, kg, v, b):
        (B, H, K, V, N), state, chunks = self.problem.shape("B H K V N"), self.initial_state(), self.chunks
        h = self.xp.empty((B, H, len(chunks), K, V), self.real)
        first_chunk = self.xp.asarray(self.problem.spans.chunk_bounds(self.chunk_size))
        blocks = N * H * tiles_of(K, kernels.ROWS) * tiles_of(V, kernels.COLS)
        launch(kernels.inter_chunk, blocks, kernels.THREADS, kg, v, b, chunks, first_chunk, h, state)
        return h, self.final(state)

    def intra_chunk(self, q, k, g, *u):
        (B, H, T), subs, chunks = self.problem.shape("B H T"), self.sub_chunks, self.chunks
        A = self.empty_like(q, (B, H, T, self.chunk_size))
        blocks, more = B * H * len(chunks), (chunks, subs, A, self.exclusive)
        launch(kernels.intra_chunk_below, blocks * (subs * (subs - 1) // 2), kernels.THREADS, q, k, g, *more)
        launch(kernels.intra_chunk_diagonal, blocks * subs, kernels.THREADS, q, k, g, self.bonus(*u), *more)
        return A

    def combine(self, qg, h, A, v):
        (B, H, V), subs, chunks = self.problem.shape("B H V"), self.sub_chunks, self.chunks
        o, scale = self.output(qg, v.shape, self.problem.out), self.real(self.problem.scale)
        blocks = B * H * len(chunks) * tiles_of(subs * SUB_CHUNK, kernels.ROWS) * tiles_of(V, kernels.COLS)
        launch(kernels.combine, blocks, kernels.THREADS, qg, h, A, v, chunks, subs, o, scale)
        return self.finished(o, self.problem.out)

    def channel_blocks(self, x) -> int:
        """Blocks of the kernels of which a thread has a channel of a chunk."""
        B, H, _, K = x.shape
        return tiles_of(B * H * len(self.chunks) * K, kernels.THREADS)

    # -- arrays --
    def bonus(self, u=None):
        """[H, K] in the dtype of the arithmetic, as kernels serve both forms; GLA's diagonal has weight 1."""
        return self.xp.ones(self.problem.shape("H K"), self.real) if u is None else u.astype(self.real, copy=False)

    def initial_state(self):
        """A fresh [N, H, K, V] for the kernels to work on."""
        if self.problem.initial_state is None:
            return self.xp.zeros(self.problem.shape("N H K V"), self.real)
        return self.problem.initial_state[0].astype(self.real)

    def final(self, state):
        problem = self.problem
        return (state.astype(problem.state_dtype, copy=False),) if problem.output_final_state else None

    def empty_like(self, x, shape, dtype=None):
        """Uninitialised, in the memory order of `x`; in the dtype of the arithmetic if none is given."""
        return self.xp.empty_like(x, dtype=dtype or self.real, shape=shape)

    def output(self, like, shape, out):
        """What the kernel writes: `out` itself, or a new array in the memory order of `like`."""
        if self.problem.dtype == BFLOAT16:
            return self.empty_like(like, shape)
        return self.empty_like(like, shape, self.problem.dtype) if out is None else out

    def finished(self, o, out):
        """`o` in the dtype of the operator, and in `out` where one was given."""
        if self.problem.dtype != BFLOAT16:
            return o
        if out is None:
            return o.astype(BFLOAT16)
        out[...] = o.astype(BFLOAT16)
        return out


def key_channels(problem) -> int:
    """K rounded up to a power of two from 16 on, so that few kernels serve every K."""
    return max(16, 1 << (problem.sizes["K"] - 1).bit_length())


# -- explain -----------------------------------------------------------------------------------------------------------
def tiles(problem) -> dict:
    threads = {"BV": kernels.COLS, "threads": kernels.THREADS}
    if mode(problem) == "recurrent":
        return {"K": key_channels(problem)} | threads
    chunk_size = problem.chunk_size or CHUNK
    return {"chunk_size": chunk_size, "BC": kernels.SUB, "BT": kernels.ROWS, "BK": kernels.INNER} | threads


def copies(problem) -> tuple[str, ...]:
    arrays = {**problem.arrays, "out": problem.out, "state": problem.options.get("state")}
    halves = [name for name, x in arrays.items() if x is not None and x.dtype == BFLOAT16]
    made = [] if "beta" not in problem.arrays else ["k: -k and beta k, of every head"]
    return (*(f"{name}: bfloat16, which Numba cannot take, through float32" for name in halves), *made)


def floor_ms(problem, bytes_moved):
    bandwidth = 0 if problem.home == "host" else peak_bandwidth(ordinal(problem))
    return bytes_moved / bandwidth * 1e3 if bandwidth else None
