"""The launches of a call by Numba: on CuPy's arrays on a device, or on NumPy's in Numba's simulator.

Numba does not know bfloat16: kernels read float32 copies of such arrays, and their results are rounded afterwards.

Sizes: B batch, N sequences, H heads, T tokens, K channels, V columns, NC chunks.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cached_property

import numpy as np

from ...array_kinds import BFLOAT16
from ...contract import CHUNK, SUB_CHUNK
from ...declarations import DELTA_RULE_STEPS, DELTA_RULES, LEAST_SQUARE, RWKV7, RWKV7_STEP, STAGES, STEPS
from ..cupy import ordinal, peak_bandwidth
from ..cupy.arithmetic import ceil_div
from . import kernels
from .runtime import launch


def run(problem, mode):
    """(o, (the final state,) or None) of an operator, the o of a step, or the results of a stage."""
    call = NumbaLaunches(problem)
    with nullcontext() if problem.home == "host" else sys.modules["cupy"].cuda.Device(ordinal(problem)):
        if problem.op in STAGES:
            return getattr(call, problem.op.name)(*call.arrays)
        if problem.op in STEPS:
            return call.step(*call.arrays)
        return (call.recurrent if mode == "recurrent" else call.staged)(*call.arrays)


class NumbaLaunches:
    """The launches of one problem. The methods named like stages, and `staged`, `recurrent` and `step`, take the arrays
    of the stage, operator or step in its order.

    xp : the library of the arrays, the module numpy or cupy
    real : the class of scalars in the dtype of the arithmetic
    exclusive : whether outputs read the state before the write
    """

    def __init__(self, problem):
        self.problem, self.xp = problem, np if problem.home == "host" else sys.modules["cupy"]
        self.real = problem.compute_dtype.type
        self.chunk_size = problem.chunk_size or CHUNK
        self.exclusive = problem.options.get("exclusive", problem.op.reads_before_write)

    @property
    def sub_chunks(self) -> int:
        """The sub-chunks of the longest chunk."""
        return ceil_div(min(self.chunk_size, self.problem.spans.longest), SUB_CHUNK)

    @property
    def arrays(self):
        """The arrays of the call, those in bfloat16 as float32 copies."""
        return [x.astype(np.float32) if x.dtype == BFLOAT16 else x for x in self.problem.arrays.values()]

    @cached_property
    def chunks(self):
        """The first token and the last token + 1 of every chunk, [NC, 2], on the device of the arrays."""
        return self.xp.asarray(self.problem.spans.chunks(self.chunk_size))

    # -- operators --
    def staged(self, q, k, v, g, *u):
        """(o, final state) by the five stages."""
        b, e = self.chunk_cumsum(g)
        qg, kg = self.gated_qk(q, k, b, e)
        h, final = self.inter_chunk(kg, v, b)
        return self.combine(qg, h, self.intra_chunk(q, k, g, *u), v), final

    def recurrent(self, *arrays):
        """(o, final state), token by token."""
        state, bounds = self.initial_state(), self.xp.asarray(self.problem.spans.bounds)
        rows = self.xp.arange(self.problem.sizes["N"], dtype=np.int64)
        return self.launch_recurrence(*arrays, bounds=bounds, rows=rows, state=state), self.final(state)

    def step(self, *arrays):
        """The o of one token per sequence, computed as sequences of length 1. The used rows of a bfloat16 state are
        copied to float32 and back."""
        state, slots = self.problem.options["state"], self.problem.options["slots"]
        all_rows = self.xp.arange(self.problem.sizes["B"], dtype=np.int64)
        rows, bounds = all_rows if slots is None else self.xp.asarray(slots), self.xp.arange(2, dtype=np.int64)
        arrays = [
            x[:, :, None] if axes.startswith("B") else x for axes, x in zip(self.problem.op.arrays.values(), arrays)
        ]
        if state.dtype != BFLOAT16:
            return self.launch_recurrence(*arrays, bounds=bounds, rows=rows, state=state)[:, :, 0]
        copy = state[rows].astype(np.float32)
        o = self.launch_recurrence(*arrays, bounds=bounds, rows=all_rows, state=copy)
        state[rows] = copy.astype(BFLOAT16)
        return o[:, :, 0]

    def launch_recurrence(self, *arrays, bounds, rows, state):
        """o [B, H, T, V], token by token. `bounds`: the sequences' first tokens, and T; `rows`: the row of `state` that
        each sequence uses and updates."""
        out, op = self.problem.out, self.problem.op
        out = out if out is None or out.ndim == 4 else out[:, :, None]
        delta = op in (*DELTA_RULES, *DELTA_RULE_STEPS)
        q, k, v, g, u, a, b = self.delta_arguments(*arrays) if delta else self.gated_arguments(*arrays)
        o, (N, H, V) = self.output(q, v.shape, out), self.problem.shape("N H V")
        kernel, blocks = kernels.recurrent(key_channels(self.problem), delta), N * H * ceil_div(V, kernels.COLS)
        scale = self.real(self.problem.scale)
        exclusive = op in (RWKV7, RWKV7_STEP) if delta else self.exclusive
        launch(kernel, blocks, q, k, v, g, u, a, b, bounds, rows, state, o, scale, exclusive)
        return self.finished(o, out)

    def gated_arguments(self, q, k, v, g, *u):
        """The kernel's arrays q, k, v, g, u, a and b; without a delta rule it reads neither a nor b, which are k
        here."""
        return q, k, v, g, self.bonus(*u), k, k

    def delta_arguments(self, *arrays):
        """The kernel's arrays q, k, v, g, u, a and b for S_t = (diag(exp g_t) + b_t a_t^T) S_{t-1} + k_t v_t^T; it does
        not read u. RWKV-7 has a and b; for the other delta rules a = -k, and b and the kernel's key are beta k."""
        if self.problem.op in (RWKV7, RWKV7_STEP):
            r, w, k, v, a, b = arrays
            return r, k, v, w, self.bonus(), a, b
        q, k, v, *g, beta = arrays
        q, k = self.for_every_head(q), self.for_every_head(k)
        beta_k = beta.astype(self.real)[..., None] * k
        g = g[0] if g else self.xp.zeros((), self.real)
        g = self.xp.broadcast_to(g if g.ndim in (0, 4) else g[..., None], k.shape)
        return q, beta_k, v, g, self.bonus(), -k, beta_k

    def for_every_head(self, x):
        """q or k, repeated for all heads of v that share one, and normalised if the call asks for it."""
        x, (H, HK) = x.astype(self.real, copy=False), self.problem.shape("H HK")
        if self.problem.options["qk_l2norm"]:
            x = x / self.xp.sqrt((x * x).sum(-1, keepdims=True) + self.real(LEAST_SQUARE))
        return x if H == HK else x.repeat(H // HK, axis=1)

    # -- stages --
    def chunk_cumsum(self, g):
        b, e, chunks = self.empty_like(g, g.shape), self.empty_like(g, g.shape), self.chunks
        launch(kernels.chunk_cumsum, self.channel_blocks(g), g, chunks, b, e)
        return b, e

    def gated_qk(self, q, k, b, e):
        qg, kg, chunks = self.empty_like(q, q.shape), self.empty_like(q, q.shape), self.chunks
        launch(kernels.gated_qk, self.channel_blocks(q), q, k, b, e, chunks, qg, kg, self.exclusive)
        return qg, kg

    def inter_chunk(self, kg, v, b):
        (B, H, K, V, N), state, chunks = self.problem.shape("B H K V N"), self.initial_state(), self.chunks
        h = self.xp.empty((B, H, len(chunks), K, V), self.real)
        first_chunk = self.xp.asarray(self.problem.spans.chunk_bounds(self.chunk_size))
        blocks = N * H * ceil_div(K, kernels.ROWS) * ceil_div(V, kernels.COLS)
        launch(kernels.inter_chunk, blocks, kg, v, b, chunks, first_chunk, h, state)
        return h, self.final(state)

    def intra_chunk(self, q, k, g, *u):
        (B, H, T), subs, chunks = self.problem.shape("B H T"), self.sub_chunks, self.chunks
        A = self.empty_like(q, (B, H, T, self.chunk_size))
        blocks, more = B * H * len(chunks), (chunks, subs, A, self.exclusive)
        launch(kernels.intra_chunk_below, blocks * (subs * (subs - 1) // 2), q, k, g, *more)
        launch(kernels.intra_chunk_diagonal, blocks * subs, q, k, g, self.bonus(*u), *more)
        return A

    def combine(self, qg, h, A, v):
        (B, H, V), subs, chunks = self.problem.shape("B H V"), self.sub_chunks, self.chunks
        o, scale = self.output(qg, v.shape, self.problem.out), self.real(self.problem.scale)
        blocks = B * H * len(chunks) * ceil_div(subs * SUB_CHUNK, kernels.ROWS) * ceil_div(V, kernels.COLS)
        launch(kernels.combine, blocks, qg, h, A, v, chunks, subs, o, scale)
        return self.finished(o, self.problem.out)

    def channel_blocks(self, x) -> int:
        """The blocks of a kernel of which a thread computes one channel of a chunk."""
        B, H, _, K = x.shape
        return ceil_div(B * H * len(self.chunks) * K, kernels.THREADS)

    # -- arrays --
    def bonus(self, u=None):
        """u [H, K] in the dtype of the arithmetic; ones if there is no bonus, which is the weight of a token's own key
        in GLA."""
        return self.xp.ones(self.problem.shape("H K"), self.real) if u is None else u.astype(self.real, copy=False)

    def initial_state(self):
        """A new array [N, H, K, V] with the initial state, which kernels update."""
        if self.problem.initial_state is None:
            return self.xp.zeros(self.problem.shape("N H K V"), self.real)
        return self.problem.initial_state[0].astype(self.real)

    def final(self, state):
        """(`state` in the caller's dtype,), or None if the caller does not ask for it."""
        problem = self.problem
        return (state.astype(problem.state_dtype, copy=False),) if problem.output_final_state else None

    def empty_like(self, x, shape, dtype=None):
        """A new array with the memory order of `x`, by default in the dtype of the arithmetic."""
        return self.xp.empty_like(x, dtype=dtype or self.real, shape=shape)

    def output(self, like, shape, out):
        """The array to which a kernel writes o: `out` itself, or a new one with the memory order of `like`."""
        if self.problem.dtype == BFLOAT16:
            return self.empty_like(like, shape)
        return self.empty_like(like, shape, self.problem.dtype) if out is None else out

    def finished(self, o, out):
        """`o` as the call returns it: in the dtype of the operator, and in `out` unless that is None."""
        if self.problem.dtype != BFLOAT16:
            return o
        if out is None:
            return o.astype(BFLOAT16)
        out[...] = o.astype(BFLOAT16)
        return out


def key_channels(problem) -> int:
    """The channels that the recurrence is compiled for: K rounded up to a power of two, at least 16."""
    return max(16, 1 << (problem.sizes["K"] - 1).bit_length())


# -- explain -----------------------------------------------------------------------------------------------------------
def tiles(problem, mode) -> dict:
    """The sizes that `explain` shows."""
    threads = {"BV": kernels.COLS, "threads": kernels.THREADS}
    if mode == "recurrent":
        return {"K": key_channels(problem)} | threads
    chunk_size = problem.chunk_size or CHUNK
    return {"chunk_size": chunk_size, "BC": kernels.SUB, "BT": kernels.ROWS, "BK": kernels.INNER} | threads


def copies(problem) -> tuple[str, ...]:
    """Which arrays are copied, and why, for `explain`."""
    arrays = {**problem.arrays, "out": problem.out, "state": problem.options.get("state")}
    halves = [name for name, x in arrays.items() if x is not None and x.dtype == BFLOAT16]
    made = [] if "beta" not in problem.arrays else ["k: -k and beta k, of every head"]
    return (*(f"{name}: bfloat16, which Numba cannot take, through float32" for name in halves), *made)


def floor_ms(problem, bytes_moved):
    """The time of moving so many bytes at the card's peak bandwidth; None if that is not known."""
    bandwidth = 0 if problem.home == "host" else peak_bandwidth(ordinal(problem))
    return bytes_moved / bandwidth * 1e3 if bandwidth else None
