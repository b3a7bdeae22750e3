"""Instances of kernels: one class for each file of `kernels_cu`, whose fields are the template's arguments in their
order.

Each says how many threads a block has, what its argument is, and how much shared memory it takes. `source` has the
compiler check both against the kernel. Kernels that one planner alone asks for stand beside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from ...array_kinds import BFLOAT16
from .arguments import members
from .kernel import BARRIER, INTEGER, POINTER, REAL, CType, GatedKernel, Kernel, TiledKernel, padded, struct
from .plan import ceil_div

CHANNELS = (64, 128, 256)  # BK of kernels whose tile holds all of K: a tile below 64 would not be faster
SM90 = "sm_90a"


def channels(K: int) -> int:
    """BK, the smallest tile that holds K."""
    return next(size for size in CHANNELS if K <= size)


def read_order(op) -> str:
    """The template argument `ReadOrder`: whether o reads the state before or after the token is written."""
    return "BeforeWrite" if op.reads_before_write else "AfterWrite"


# -- gated: a gate for every channel -----------------------------------------------------------------------------------
# The schedules of forward kernels: a sequence in one pass of one block; only the state that a segment leaves; on every
# card a launch for some of the channels; on Hopper a cluster of two blocks, each with half of K or half of V.
SINGLE_PASS, SEGMENT_STATE, SPLIT_CHANNELS = "SinglePass", "SegmentState", "SplitChannels"
CLUSTER_SPLIT_K, CLUSTER_SPLIT_V = "ClusterSplitK", "ClusterSplitV"
TILES = (64, 128)  # BK and BV of forward kernels


class GatedForward(TiledKernel):
    """Forward, on every card: BK channels a launch."""

    file = "gated/forward"
    arguments = members(
        "rows q k v g o, pointers? u initial final, shape, reals scale, pointers? sums, integers channel bytes"
    )
    shared = ("Shared<{schedule}, {dtype}, {gate}, {BK}, {BV}>",)
    SUB_CHUNK = 8
    read_order: str
    schedule: str
    dtype: np.dtype
    gate: np.dtype
    products: int  # of tf32 numbers, whose sum is one product of float32 numbers
    BK: int
    BV: int

    @classmethod
    def fitting(cls, read_order, schedule, dtype, gate, products, K, V, shared):
        """For a device whose blocks may have `shared` bytes of shared memory: with as many columns as that allows, or,
        if one launch cannot take all channels, as many channels."""
        found = cls(read_order, schedule, dtype, gate, products, TILES[K > 64], TILES[V > 64])
        split = schedule == SPLIT_CHANNELS
        wide = replace(found, BV=2 * TILES[-1])
        if split and dtype == BFLOAT16 and V > TILES[-1] and wide.shared_bytes <= shared:
            return wide
        if found.shared_bytes <= shared:
            return found
        return replace(found, BK=TILES[0]) if split else replace(found, BV=TILES[0])

    def with_channels(self, left) -> GatedForward:
        """The instance for a launch to which `left` channels are left."""
        return replace(self, BK=TILES[0]) if self.schedule == SPLIT_CHANNELS and left <= TILES[0] else self

    @property
    def operand_bytes(self):
        return 2 if self.dtype == BFLOAT16 else 4

    @property
    def CHUNK(self):
        return 64 // self.operand_bytes

    @property
    def threads(self):
        return 2 * self.BV  # a warp for every 16 columns of V

    @property
    def resident(self):
        return 2 if self.schedule != SEGMENT_STATE and self.BK > self.BV else 256 // self.BV

    @property
    def shared_bytes(self):
        C, BK, X, size = self.CHUNK, self.BK, self.operand_bytes, self.dtype.itemsize
        stages, spans = 2 * C * (BK + self.BV) * size, 4 * BK * (C // 4 + 1) + C * BK * self.gate.itemsize
        border, numbers = 32 if C == 32 else 8, 2 if X == 2 else 1
        middle = 4 if self.schedule == SPLIT_CHANNELS else X
        scores = 2 * C * BK * (size + middle) + X * (2 * border * BK + numbers * C * (C + 8)) + 4 * (4 * C + BK)
        state = 0 if X == size else 2 * X * C * BK
        return stages + spans + state + scores * (self.schedule != SEGMENT_STATE)


class GatedSegmentStates(TiledKernel):
    """The state that each segment leaves by itself, and its decays, on every card: BK channels a launch."""

    file = "gated/segment_states"
    arguments = members("rows k v g, pointers left decays, shape, integers channel of needed parts bytes")
    shared = ("Shared<{dtype}, {gate}, {BK}, {BV}>",)
    dtype: np.dtype
    gate: np.dtype
    products: int  # as `GatedForward` has them
    BK: int
    BV: int

    @classmethod
    def fitting(cls, dtype, gate, products, K, V, shared):
        """For a device whose blocks may have `shared` bytes of shared memory: with as many channels as that allows.
        float16 data leave registers for 64 columns only."""
        found = cls(dtype, gate, products, TILES[K > TILES[0]], TILES[V > TILES[0] and dtype != np.float16])
        return found if found.shared_bytes <= shared else replace(found, BK=TILES[0])

    @property
    def CHUNK(self):
        """Tokens that are in shared memory together."""
        return 64 // self.dtype.itemsize

    @property
    def threads(self):
        return 2 * self.BK  # a warp for every 16 channels

    @property
    def resident(self):
        return 256 // self.BK

    @property
    def shared_bytes(self):
        sizes = (self.BK, self.dtype), (self.BV, self.dtype), (self.BK, self.gate)
        return 3 * sum(tile_bytes(self.CHUNK, columns, dtype) + 96 for columns, dtype in sizes) + self.BK // 4


class Recurrent(GatedKernel, TiledKernel):
    """Forward token by token, on every card."""

    file = "recurrent/forward"
    arguments = members("rows q k v g o, pointers? u initial final, shape, reals scale")
    shared = ("Shared<{BK}>",)
    threads = 128
    BV: ClassVar[int] = 32  # columns of V a block, one lane a column
    BK: int

    @property
    def shared_bytes(self):
        tokens, warps = 16, self.threads // 32
        return 4 * (tokens * (3 * self.BK + self.BV) + self.BK + warps * tokens * self.BV)  # q, k, g, v; u; parts of o


class GatedBackward(GatedKernel):
    """A backward kernel of chunks, on every card; one product is the sum of so many tf32 `products`."""

    CHUNK: ClassVar[int] = 64
    TILE: ClassVar[int] = 64  # channels and columns of a tile of the states that are kept
    threads = 128
    products: int

    @property
    def stored(self) -> np.dtype:
        """The dtype of kept states and of operands."""
        return BFLOAT16 if self.dtype == BFLOAT16 and self.products == 1 else np.dtype(np.float32)

    @property
    def tiles(self):
        return {"BK": self.TILE, "BV": self.TILE, "chunk": self.CHUNK, "sub_chunk": 8}


def tile_bytes(rows, columns, dtype) -> int:
    """Shared memory of a tile whose rows are padded so that one column's numbers lie in different banks."""
    return rows * (columns + (8 if dtype.itemsize == 2 else 4)) * dtype.itemsize


class GatedBackwardStates(GatedBackward):
    file = "gated/backward_states"
    arguments = members(
        "rows q k v do_ g, pointers? initial dht kept dh0 states decays, shape, integers first heads, reals scale, "
        "integers vectors P"
    )
    shared = ("Shared<{dtype}, {gate}, {BV}>",)
    BV: int

    @classmethod
    def widths(cls, dtype, products, V=TILES[-1]):
        """The possible BV: half-precision data in three products leave registers for one tile only."""
        return TILES if V > cls.TILE and (products == 1 or dtype.itemsize == 4) else TILES[:1]

    def blocks(self, K, V) -> int:
        """Blocks of a sequence and head: one for every tile of the state and direction in time."""
        return 2 * ceil_div(K, self.TILE) * ceil_div(V, self.BV)

    @property
    def resident(self):
        if self.products == 3 or self.stored != self.dtype:
            return 2
        return 3 if self.BV > self.TILE else 4 if self.stored == BFLOAT16 else 2

    @property
    def shared_bytes(self):
        stages = 2 if self.dtype.itemsize == 4 and self.BV > self.TILE else 3
        columns = (self.TILE, self.dtype), (self.BV, self.dtype), (self.TILE, self.gate)
        return stages * sum(tile_bytes(32, *of) for of in columns)


class GatedBackwardChannels(GatedBackward):
    """dq, dk, dg and the parts of du. `columns`: "Ungated"; "Gated" if columns have gates too; "GatedTurned" for the
    transposed state, with values for keys."""

    file = "gated/backward_channels"
    arguments = members(
        "rows q k v do_ g dq dk dg, pointers? u kept partial_du, shape, integers first heads, reals scale, "
        "integers vectors, pointers? pairs own decays row_growth column_growth, rows? given_v given_do gv"
    )
    shared = ("Shared<{dtype}, {gate}, {products}, {columns}>",)
    columns: str = "Ungated"

    @property
    def shared_bytes(self):
        values = 4 * 64 * (32 + 8) * (self.dtype if self.columns == "Ungated" else self.stored).itemsize
        pairs = (64 * (64 + 8) + 64 * 64) * self.stored.itemsize + 4 * (64 + 8 * 64 + 2 * 128)
        return 2 * tile_bytes(64, 64, self.dtype) + tile_bytes(64, 64, self.gate) + max(values, pairs)


class GatedBackwardValues(GatedBackward):
    """dv."""

    file = "gated/backward_values"
    arguments = members(
        "rows q k do_ g dv, pointers? u, pointers kept, shape, integers first heads, reals scale, integers vectors"
    )
    shared = ("Shared<{dtype}, {gate}, {products}, {BV}>",)
    BV: int

    @classmethod
    def fitting(cls, read_order, dtype, gate, products, V, shared):
        """With 128 columns, which share the scores, if a block may have the shared memory, or else with 64."""
        wide = cls(read_order, dtype, gate, products, 128)
        return wide if V > 64 and wide.shared_bytes <= shared else cls(read_order, dtype, gate, products, 64)

    @property
    def shared_bytes(self):
        tokens = 2 * tile_bytes(64, 32, self.dtype) + tile_bytes(64, 32, self.gate)
        columns, states = tile_bytes(64, self.BV, self.dtype), 32 * self.BV * self.stored.itemsize
        return max(tokens, columns) + 6 * tile_bytes(32, 64, self.stored) + states + 4 * 4 * 64 + 16


class ScanSegments(Kernel):
    file = "gated/scan_segments"
    arguments = members(
        "pointers left decays, pointers? column_decays initial, pointers starts, pointers? final, integers P R H K V"
    )
    threads = 256
    width: int  # columns of one channel that a thread takes

    @classmethod
    def fitting(cls, V):
        return cls(1 if V % 4 else 4)


class ScanBothWays(Kernel):
    file = "gated/scan_both_ways"
    arguments = members("pointers states decays, integers N P H K V first")
    threads = 256


# -- gated, on Hopper --------------------------------------------------------------------------------------------------
PANEL = 64  # columns of V of a warpgroup
SCALAR = "ScalarDecay"  # to GatedForwardSm90, the type of a scalar decay, which all channels share: float32


class GatedForwardSm90(TiledKernel):
    file = "gated/sm90/forward"
    arguments = members(
        "maps+rows q k g v, maps o_boxes, rows o, rows? scalar_gate, pointers? u initial final, shape, reals scale, "
        "pointers? decays, integers channel segments computed, pointers? marks, "
        "integers mark_every marks_per_sequence parts, pointers? segment_states, integers backwards"
    )
    shared = ("Shared<{schedule}, {dtype}, {gate}, {BK}, {BV}>",)
    arch = SM90
    CHUNK, SUB_CHUNK = 32, 8
    read_order: str
    schedule: str
    dtype: np.dtype
    gate: np.dtype | str
    BK: int
    BV: int

    @classmethod
    def fitting(cls, read_order, schedule, dtype, gate, K, V):
        columns = {CLUSTER_SPLIT_K: TILES[V > 128], CLUSTER_SPLIT_V: PANEL}
        return cls(read_order, schedule, dtype, gate, TILES[K > 64], columns.get(schedule, TILES[V > 64]))

    @property
    def channels(self):
        """Channels of a launch."""
        return self.BK * (2 if self.schedule == CLUSTER_SPLIT_K else 1)

    @property
    def cluster(self):
        return 2 if self.schedule in (CLUSTER_SPLIT_K, CLUSTER_SPLIT_V) else 1

    @property
    def reads(self):
        return self.schedule != SEGMENT_STATE

    @property
    def gate_bytes(self):
        return 0 if self.gate == SCALAR else self.gate.itemsize

    @property
    def producer_groups(self):
        """Warpgroups that make operands: two, or one for CLUSTER_SPLIT_K, whose other block makes half of them, or one
        if shared memory is short: it holds two groups with at most one of float32 gates, float16 data and
        CLUSTER_SPLIT_V."""
        if self.schedule == CLUSTER_SPLIT_K:
            return 1
        more = (self.gate_bytes == 4) + (self.dtype != BFLOAT16) + (self.schedule == CLUSTER_SPLIT_V)
        return 1 if self.reads and self.BK == 128 and more > 1 else 2

    @property
    def threads(self):
        return 2 * self.BV + self.producer_groups * self.BK

    @property
    def shared_bytes(self):
        """The size of the struct `Shared` in forward_storage.cuh, from its members in their order."""
        C, BK, reads, groups, coarse = self.CHUNK, self.BK, self.reads, self.producer_groups, self.dtype == BFLOAT16
        K_ranks, chunk_ranks = 1 + (self.schedule == CLUSTER_SPLIT_K), 1 + (self.schedule == CLUSTER_SPLIT_V)
        stages = max(2, groups * chunk_ranks)
        score_tiles = stages if coarse or self.cluster > 1 else 1
        warpgroups, slots = self.BV // PANEL, 2 if reads and not coarse else 4 if self.gate_bytes <= 2 else 3
        half, gate = CType(2, 2), CType(self.gate_bytes, max(self.gate_bytes, 1))
        wide = half if coarse else REAL
        middle = wide if K_ranks == 1 else REAL

        tokens, made = C * BK, stages * K_ranks * C * BK
        queries, keys, scores = wide.array(made), half.array(made), half.array(score_tiles * K_ranks * C * PANEL)
        operands = struct(*([queries, keys, scores] if reads else [keys]), alignment=1024)
        values = half.array(warpgroups * slots * C * PANEL)
        row = struct(middle.array(2 * BK), half.array(2 * BK), REAL.array(4), alignment=16)
        score_operands = struct(row.array(C), INTEGER, alignment=128) if reads else struct()
        inputs = struct(half.array((1 + reads) * tokens), gate.array(tokens), alignment=128)
        decays, bonus = REAL.array(groups * C // self.SUB_CHUNK * BK), REAL.array(BK)
        numbers = struct(REAL.array(K_ranks * BK), INTEGER.array(4), alignment=16)
        votes = struct(INTEGER.array(K_ranks * 2 * 4), BARRIER.array(2), alignment=16) if K_ranks > 1 else struct()
        scan = struct() if reads else struct(BARRIER, REAL)
        work = struct(INTEGER.array(6), POINTER.array(2))
        barriers = BARRIER.array(2 * groups + warpgroups * slots + 2 * stages)
        tiles = operands, values, score_operands.array(groups), inputs.array(groups)
        return struct(*tiles, decays, bonus, numbers.array(stages), votes, scan, work, barriers).size

    @property
    def resident(self):
        return 2 if self.BK + self.BV == 128 else 1


class GatedBackwardSm90(GatedKernel, TiledKernel):
    """A backward kernel of Hopper's, for gates of every channel."""

    arch = SM90
    shared = ("Shared<{dtype}, {gate}, {BK}, {BV}>",)
    CHUNK: ClassVar[int] = 32
    CHECKPOINT_EVERY: ClassVar[int] = 1024  # tokens between kept states, at which the gates' gradient starts anew: its
    # rounding errors add up in between
    FLAGS: ClassVar[int] = 2  # float32 numbers behind a chunk's sums: one byte for each of 8 warps
    constants = (("CHECKPOINT_EVERY", "CHECKPOINT_EVERY"), ("FLAGS", "FLAGS"))
    BK: int
    BV: int

    @classmethod
    def fitting(cls, read_order, dtype, gate, K, V):
        return cls(read_order, dtype, gate, TILES[K > 64], TILES[V > 64])

    @property
    def threads(self):
        return 2 * self.BK + 128

    @property
    def tiles(self):
        return super().tiles | {"checkpoint every": self.CHECKPOINT_EVERY}


ONE_EACH, IN_TURN = "OneEach", "InTurn"


class GatedBackwardMainSm90(GatedBackwardSm90):
    """The two kernels that compute gradients, chunk by chunk. `schedule` ONE_EACH: one block a segment; IN_TURN: as
    many blocks as the card holds take whole sequences one after the other."""

    shared = ("Shared<{dtype}, {gate}, {BK}, {BV}, {schedule}>",)
    PLACE_BYTES: ClassVar[int] = 40  # the struct `WorkTile`
    schedule: str

    @classmethod
    def fitting(cls, read_order, dtype, gate, K, V, schedule):
        return cls(read_order, dtype, gate, TILES[K > 64], TILES[V > 64], schedule)

    @property
    def resident(self):
        return 2 if self.BK + self.BV == 128 else 1

    def places(self, count):
        """Bytes that say where `count` chunks in flight lie, and which chunk comes next."""
        return self.PLACE_BYTES * count + 48 if self.schedule == IN_TURN else 0


class GatedBackwardQueriesSm90(GatedBackwardMainSm90):
    file = "gated/sm90/backward_queries"
    arguments = members(
        "maps+rows q k v do_ g dq weight, pointers u initial dht ends sums du kept, shape, reals scale, "
        "integers P joined adds"
    )

    @property
    def shared_bytes(self):
        C, BK, BV, stages = self.CHUNK, self.BK, self.BV, 3
        stage = C * BK * (2 * 2 + self.gate.itemsize) + C * BV * 2 * 2  # q, k, g; v, do
        stage += 4 * C * C + 4 * C * BV  # scores; operands of columns in tf32
        barriers = 8 * 4 * stages
        return padded(stages * stage + self.places(stages + 1) + self.PLACE_BYTES + barriers, 1024)


class GatedBackwardKeysSm90(GatedBackwardMainSm90):
    file = "gated/sm90/backward_keys"
    arguments = members(
        "maps+rows q k v do_ g weight dk dv dg, pointers u dht ends sums kept dh0, shape, reals scale, "
        "integers P joined adds adds_dv"
    )

    @property
    def threads(self):
        return 2 * self.BK + (256 if self.BK == 128 else 128)

    @property
    def shared_bytes(self):
        """The size of the kernel's struct `Shared`, summed over its members in their order."""
        C, BK, BV, warps, half_gate = self.CHUNK, self.BK, self.BV, self.BK // 16, self.gate.itemsize == 2
        stages, value_stages = 2, 3 if half_gate else 2
        channels = stages * C * BK * (2 * 2 + 2 * self.gate.itemsize)  # q, k; g, weight
        values = value_stages * (2 * 2 * C * BV + 4 * C * C)  # v, do; scores
        state, next_values = 2 * BK * BV, 4 * C * BV
        keys, scores = C * BK * (4 + 2 + 2), 4 * C * C  # in float32, and decayed to two lengths of sub-chunks
        own_scores = 1024 * warps if half_gate else 8  # an empty struct takes its alignment
        of_warps = 4 * 2 * warps + 2 * warps + 4 * (warps if self.schedule == IN_TURN else 1)  # largest, growth, keep
        sums = 4 * 2 * BK
        lookups = 2048 * (0 if BK == 64 else 4 if half_gate else 2)
        places = self.PLACE_BYTES + 4 * self.places(value_stages)
        barriers = 8 * (2 * stages + 2 * value_stages + 3)
        used = channels + values + state + next_values + keys + scores + own_scores + of_warps + sums + lookups
        return padded(used + places + barriers, 1024)


class GatedBackwardSegmentsSm90(GatedBackwardSm90):
    file = "gated/sm90/backward_segments"
    arguments = members(
        "maps+rows q k v do_ g, pointers initial dht states decays, shape, reals scale, integers P first ends"
    )

    @property
    def threads(self):
        return 2 * self.BK + 32

    @property
    def shared_bytes(self):
        stages = 4 if self.gate.itemsize == 2 else 3
        stage = self.CHUNK * (self.BK * (2 + self.gate.itemsize) + self.BV * 2)
        return padded(stages * (stage + 2 * 8 + 4), 1024)  # with two barriers and a vote each
