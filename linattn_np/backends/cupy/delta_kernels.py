"""Instances of the kernels of the delta rules."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .arguments import members
from .gated_kernels import TILES, channels
from .kernel import DOUBLE, Kernel, TiledKernel
from .plan import ceil_div

GATED_DELTA, KDA, DPLR = "GatedDelta", "Kda", "Dplr"  # the template argument `Rule`
READ = members(
    "rows q k v, rows? a b, rows g, rows? beta initial, shape, integers group, reals scale, integers normalized bytes, "
    "pointers? starts, integers P"
)


class DeltaKernel(Kernel):
    """A kernel for data of a dtype, whose gates, and what says how strongly tokens are written, have another."""

    threads = 128
    rule: str
    dtype: np.dtype
    gate: np.dtype

    @property
    def real(self) -> int:
        """Bytes of a number that is computed."""
        return 8 if self.dtype == DOUBLE else 4

    def tokens_bytes(self, tokens, BK, BV, columns=1) -> int:
        """Shared memory of so many tokens, with so many arrays that have a number for each column."""
        own, gated = self.rule == DPLR, self.rule != GATED_DELTA
        wide = (2 + 2 * own) * BK + columns * BV
        return tokens * (wide * self.dtype.itemsize + gated * BK * self.gate.itemsize) + 16 * (
            2 * (not own) + (not gated)
        )

    def looks_bytes(self, tokens, BK) -> int:
        """That of what is known of them."""
        return (tokens * BK * self.real if self.rule != GATED_DELTA else 16) + tokens * 6 * self.real


class Walk(TiledKernel):
    """A walk over states, from what another kernel has prepared for each chunk."""

    CHUNK: ClassVar[int] = 32
    dtype: np.dtype
    BK: int
    BV: int
    two: bool  # whether a token writes its value and what the state returns by keys of their own: Dplr
    stages: int  # chunks that are in shared memory at once
    outputs: bool = True  # whether outputs are computed, not what segments do to states

    @classmethod
    def fitting(cls, dtype, K, V, rule, heads, device):
        """With 128 columns where blocks of so many are enough for half of the card, and three stages where they fit."""
        BK, enough = TILES[K > TILES[0]], 2 * heads * ceil_div(V, TILES[1]) >= device.multiprocessors
        BV = TILES[V > TILES[0] and enough]
        tiles = (BV, 3), (BV, 2), (TILES[0], 2)
        kernels = [cls(dtype, BK, *tile, rule == DPLR, stages) for *tile, stages in tiles]
        return next((x for x in kernels if x.shared_bytes <= device.shared_per_block), kernels[-1])

    @property
    def threads(self):
        return 2 * self.BV

    @property
    def resident(self):
        return TILES[1] // self.BV

    @property
    def prepared_bytes(self) -> int:
        """Of a chunk as it is prepared."""
        return self.shared_bytes // self.stages - self.CHUNK * self.BV * self.dtype.itemsize


class DeltaScan(Walk):
    """Outputs and final states."""

    file = "delta/scan"
    arguments = members(
        "rows v, rows? o initial final, pointers? starts F, pointers prepared, shape, integers P, reals scale, "
        "integers bytes"
    )
    shared = ("Shared<{dtype}, {BK}, {BV}, {two}, {stages}>",)
    directions: ClassVar[int] = 1


class DeltaBackwardStates(Walk):
    """States before all chunks, gradients of those after them, residuals and their gradients, and dv."""

    file = "delta/backward_states"
    arguments = members(
        "rows v do_, rows? initial dht dh0 dv residual dresidual, pointers? kept starts F, pointers prepared, shape, "
        "integers P, reals scale, integers bytes"
    )
    shared = ("Shared<{dtype}, {BK}, {BV}, {two}, {stages}>",)
    directions: ClassVar[int] = 2
    KEPT: ClassVar[int] = 64  # states have multiples of so many channels and columns in memory

    def kept_size(self, size) -> int:
        """Channels or columns of what is kept, of so many."""
        return ceil_div(size, self.KEPT) * self.KEPT

    def kept_bytes(self, problem, group) -> int:
        """Of what is prepared and kept for `group` heads: images, states before and behind chunks, residuals in
        two numbers, and their gradients."""
        B, T, K, V = problem.shape("B T K V")
        states = 2 * ceil_div(T, self.CHUNK) * self.kept_size(K)
        kept = self.dtype.itemsize * self.kept_size(V) * (states + 3 * T)
        return B * group * (kept + ceil_div(T, self.CHUNK) * self.prepared_bytes)


class DeltaJoinSegments(Kernel):
    """The states from which segments start, in each direction, from what segments do to states."""

    file = "delta/join_segments"
    shared = ("Shared<{dtype}, {BK}>",)
    arguments = members("pointers F starts, integers N P H K V")
    dtype: np.dtype  # of states
    BK: int
    BV: ClassVar[int] = 16

    @property
    def threads(self):
        return 2 * self.BK


class DeltaPrepare(Kernel):
    """What a chunk does to states, under a gate for all channels of a token."""

    file = "delta/prepare"
    arguments = members(
        "rows q k g beta, pointers prepared, shape, integers group, reals w_scale, integers normalized bytes"
    )
    shared = ("Shared<{dtype}, {BK}>",)
    dtype: np.dtype
    gate: np.dtype
    BK: int
    gradient: bool  # whether for walks in both directions

    @property
    def threads(self):
        return 2 * self.BK


class DeltaChannelPrepare(DeltaPrepare):
    """The same under a gate for every channel."""

    file = "delta/channel_prepare"
    shared = ("Shared<{dtype}, {gate}, {BK}>",)


class DeltaDplrPrepare(DeltaPrepare):
    """The same of a rule that erases by keys of its own."""

    file = "delta/dplr_prepare"
    arguments = members("rows q k a b g, pointers prepared, shape, reals w_scale, integers bytes")
    shared = ("Shared<{dtype}, {gate}, {BK}>",)


class GradientKernel(Kernel):
    """The kernel of a way to compute gradients which does most of it."""

    def kept_bytes(self, problem, inputs) -> int:
        """Of what is kept between the way's kernels, for the heads that share a head of keys."""
        raise NotImplementedError


class DeltaBackwardChunks(GradientKernel):
    """What stays within a chunk of them."""

    file = "delta/backward_chunks"
    arguments = members(
        "rows q k do_ e w g beta, pointers kept, rows dq dk, pointers? parts, rows dbeta, rows? dg, shape, "
        "integers group, reals scale, integers normalized bytes"
    )
    shared = ("Shared<{dtype}, {BK}>",)
    constants: ClassVar[tuple] = (("COLUMNS", "KEPT"),)
    KEPT: ClassVar[int] = 64  # columns of states that are there at once
    CHUNK: ClassVar[int] = 32
    dtype: np.dtype
    gate: np.dtype
    BK: int

    @property
    def threads(self):
        return 2 * self.BK

    @property
    def resident(self):
        return 2

    @property
    def tiles(self):
        return {"BK": self.BK, "chunk": self.CHUNK}

    def parts_bytes(self, problem, inputs) -> int:
        """Of parts of gradients, for the heads of values that share a head of keys."""
        B, T, K = problem.shape("B T K")
        return B * inputs.group * T * 8 * K if inputs.group > 1 else 0


class DplrBackwardChunks(GradientKernel):
    """What stays within a chunk of them, a block for every KEPT channels."""

    file = "delta/dplr_backward_chunks"
    arguments = members(
        "rows q a k b do_ du v u g, pointers kept, rows dq dk da db dg, shape, reals scale, integers bytes"
    )
    shared = ("Shared<{dtype}, {gate}>",)
    constants: ClassVar[tuple] = (("KEPT", "KEPT"),)
    KEPT: ClassVar[int] = 64  # channels, and columns, of states that are there at once
    CHUNK: ClassVar[int] = 32
    threads = 128
    dtype: np.dtype
    gate: np.dtype

    @property
    def tiles(self):
        return {"BK": self.KEPT, "chunk": self.CHUNK}

    def parts_bytes(self, problem, inputs) -> int:
        return 0


class KdaBackwardChunks(DplrBackwardChunks):
    """What stays within a chunk of them."""

    file = "delta/kda_backward_chunks"
    arguments = members(
        "rows q k do_ w e g beta, pointers kept, pointers? parts, rows? dq dk, rows dg dbeta, shape, integers group, "
        "reals scale, integers normalized bytes"
    )

    def parts_bytes(self, problem, inputs) -> int:
        B, T, K = problem.shape("B T K")
        return B * inputs.group * T * 8 * K if inputs.group > 1 or inputs.normalized else 0


class DeltaRecurrentForward(DeltaKernel):
    file = "delta/recurrent_forward"
    arguments = READ + members("rows? o final, pointers? kept F")
    shared = ("Shared<{rule}, {dtype}, {gate}, {BK}, {columns}>",)
    constants: ClassVar[tuple] = (("CHANNELS", "CHANNELS"),)
    CHANNELS: ClassVar[int] = 16  # of a lane
    BK: int
    columns: int  # of a lane

    @classmethod
    def fitting(cls, rule, dtype, gate, K, V, heads, multiprocessors):
        """With as many columns a lane as leave blocks for half of the card, or else with one."""
        kernels = [cls(rule, dtype, gate, channels(K), columns) for columns in cls.widths(dtype)]
        return next((x for x in kernels if 2 * heads * ceil_div(V, x.BV) >= multiprocessors), kernels[-1])

    @staticmethod
    def widths(dtype):
        """The possible `columns`: numbers of float64 leave registers for one."""
        return (1,) if dtype == DOUBLE else (4, 1)

    @property
    def BV(self):
        return self.threads * self.CHANNELS // self.BK * self.columns

    @property
    def shared_bytes(self):
        tokens = (16 if self.BK > 128 else 32) // self.dtype.itemsize
        return 2 * self.tokens_bytes(tokens, self.BK, self.BV) + self.looks_bytes(tokens, self.BK)

    @property
    def tiles(self):
        return {"BK": self.BK, "BV": self.BV}


class DeltaRecurrentBackward(DeltaKernel, GradientKernel):
    """Gradients token by token, from states that the forward kernel keeps every TOKENS tokens."""

    file = "delta/recurrent_backward"
    arguments = READ + members("rows do_, rows? dv dht dh0, pointers? kept parts token_parts")
    shared = ("Shared<{rule}, {dtype}, {gate}, {BK}, {TOKENS}>",)
    BK: int
    TOKENS: int
    outputs: bool = True  # whether gradients are computed, not what segments do to gradients of states

    @classmethod
    def fitting(cls, rule, dtype, gate, K, shared):
        """With as many tokens as a block's `shared` bytes of shared memory have room for."""
        kernels = [cls(rule, dtype, gate, channels(K), tokens) for tokens in (8, 4, 2, 1)]
        return next(x for x in kernels if x.shared_bytes <= shared)

    @property
    def columns(self):
        """Of a warp, whose lanes have all channels."""
        return 2048 // self.real // self.BK

    @property
    def BV(self):
        return self.columns * self.threads // 32

    @property
    def kinds(self) -> tuple[str, ...]:
        """The gradients with a number for each channel, which are sums over columns."""
        return ("q", "k", "a", "b", "g") if self.rule == DPLR else ("q", "k", "g")[: 2 + (self.rule == KDA)]

    def kept_bytes(self, problem, inputs) -> int:
        """Of states before chunks, and of parts of gradients."""
        T, K, V = problem.shape("T K V")
        states = K * V / self.TOKENS
        parts = ceil_div(V, self.BV) * len(self.kinds) * K
        return int(problem.sizes["B"] * inputs.group * T * (states + parts) * self.real)

    @property
    def shared_bytes(self):
        each = self.BK // 32
        kept = max(each * self.columns, len(self.kinds) * each) * self.threads * self.real
        numbers = self.BV + 2 * self.threads // 32
        tokens = self.tokens_bytes(self.TOKENS, self.BK, self.BV, columns=2)
        return tokens + self.TOKENS * (kept + numbers * self.real) + self.looks_bytes(self.TOKENS, self.BK)

    @property
    def tiles(self):
        return {"BK": self.BK, "BV": self.BV, "chunk": self.TOKENS}


class DeltaSumParts(Kernel):
    """The gradient of rows of queries, keys or gates: the sum of what tiles of columns, and heads of values, have."""

    file = "delta/sum_parts"
    arguments = members("pointers parts, rows? x, rows dx, integers B H T_ K group tiles")
    threads = 128
    dtype: np.dtype


class DeltaStep(Kernel):
    file = "delta/step"
    arguments = members(
        "rows q k v, rows? a b, rows g, rows? beta, rows o state, pointers? slots, integers H K V group, reals scale, "
        "integers normalized pieces"
    )
    shared = ("Shared<{rule}, Widest<{dtype}, {state}>, {BK}>",)
    threads = 256
    BV: ClassVar[int] = 64  # columns of V a block
    rule: str
    dtype: np.dtype
    gate: np.dtype
    state: np.dtype
    BK: int

    @property
    def shared_bytes(self):
        real, own, gated = 8 if DOUBLE in (self.dtype, self.state) else 4, self.rule == DPLR, self.rule != GATED_DELTA
        rows = (2 + 2 * own + gated) * self.BK * real + 16 * (2 * (not own) + (not gated))
        return rows + (2 * self.BV * self.threads // 32 + 6) * real
