"""Instances of kernels: one class for each file of `kernels_cu`, whose fields are the template's arguments in their
order.

Each says how many threads a block has, what its argument is, and which types a block has in shared memory. `source` has
the compiler check the argument and the types' sizes. Kernels that one planner alone asks for stand beside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from ...array_kinds import BFLOAT16
from .arguments import members
from .kernel import GatedKernel, Kernel, TiledKernel
from .plan import FLOAT32, ceil_div

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
    def CHUNK(self):
        return 32 if self.dtype == BFLOAT16 else 16

    @property
    def threads(self):
        return 2 * self.BV  # a warp for every 16 columns of V

    @property
    def resident(self):
        return 2 if self.schedule != SEGMENT_STATE and self.BK > self.BV else 256 // self.BV


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


class Recurrent(GatedKernel, TiledKernel):
    """Forward token by token, on every card. `gates_columns`: columns of V have gates, too."""

    file = "recurrent/forward"
    arguments = members("rows q k v g o, pointers? u initial final, shape, reals scale, rows? gv")
    shared = ("Shared<{BK}>",)
    threads = 128
    BV: ClassVar[int] = 32  # columns of V a block, one lane a column
    BK: int
    gates_columns: bool = False


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
    def producer_groups(self):
        """Warpgroups that make operands: two, or one for CLUSTER_SPLIT_K, whose other block makes half of them, or one
        if shared memory is short: it holds two groups with at most one of float32 gates, float16 data and
        CLUSTER_SPLIT_V."""
        if self.schedule == CLUSTER_SPLIT_K:
            return 1
        more = (self.gate == FLOAT32) + (self.dtype != BFLOAT16) + (self.schedule == CLUSTER_SPLIT_V)
        return 1 if self.reads and self.BK == 128 and more > 1 else 2

    @property
    def threads(self):
        return 2 * self.BV + self.producer_groups * self.BK

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
    schedule: str

    @classmethod
    def fitting(cls, read_order, dtype, gate, K, V, schedule):
        return cls(read_order, dtype, gate, TILES[K > 64], TILES[V > 64], schedule)

    @property
    def resident(self):
        return 2 if self.BK + self.BV == 128 else 1


class GatedBackwardQueriesSm90(GatedBackwardMainSm90):
    file = "gated/sm90/backward_queries"
    arguments = members(
        "maps+rows q k v do_ g dq weight, pointers u initial dht ends sums du kept, shape, reals scale, "
        "integers P joined adds"
    )


class GatedBackwardKeysSm90(GatedBackwardMainSm90):
    file = "gated/sm90/backward_keys"
    arguments = members(
        "maps+rows q k v do_ g weight dk dv dg, pointers u dht ends sums kept dh0, shape, reals scale, "
        "integers P joined adds adds_dv"
    )

    @property
    def threads(self):
        return 2 * self.BK + (256 if self.BK == 128 else 128)


class GatedBackwardSegmentsSm90(GatedBackwardSm90):
    file = "gated/sm90/backward_segments"
    arguments = members(
        "maps+rows q k v do_ g, pointers initial dht states decays, shape, reals scale, integers P first ends"
    )

    @property
    def threads(self):
        return 2 * self.BK + 32
