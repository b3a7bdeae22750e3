"""Kernel classes of the gated family: a class for each CUDA file; its fields are the template's arguments, in order.

A class says how many threads a block has, the members of the kernel's argument struct, and the C++ types of its shared
memory; the module `source` makes the compiler check both. `fitting` chooses the tile sizes of an instance.

Words: a head's state has K channels and V columns; BK and BV are the channels and columns of a block's tile. A launch
takes BK channels; more channels need more launches, whose outputs are added up. A segment is a run of chunks that a
block computes by itself. The kernels' files describe the arguments; `arguments.members` says what a text such as
"tensor_maps+strided q k, pointers? u" declares: `?` marks arguments that may be null.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from ...array_kinds import BFLOAT16
from .arguments import members
from .arithmetic import ceil_div
from .kernel import GatedKernel, HopperKernel, Kernel, ReadOrderKernel, TiledKernel
from .plan import FLOAT32

# Arguments besides those of the call (q, k, v, o, ...). An array is [N, ...] of N sequences, or segments:
#     bytes                how many bytes a copy may move at once
#     first, heads         the first head of a launch, and how many it has
#     u, scale             RWKV-6's bonus; the factor of o
#     initial, final       states; dht, dh0: gradients of the final and of the initial state. None: zero, or not wanted
#     states, decays       summaries of segments, or of their parts
#     starts, ends         states before segments, and gradients of the states after segments
#     channel              the first channel of a launch; sums: o of the channels of earlier launches
#     segments or P        how many each sequence has; computed: a launch computes so many of them, from the first on
#     marks                written: the states before every mark_every-th chunk, marks_per_sequence of each sequence
#     segment_states       final states of segments, from which the next ones start; if null, `initial` has all starts
#     chunk_states         states before chunks, and gradients of states after them; step_states: states before chunks
#     partial_du           du of each chunk or segment
#     adds, adds_dv        whether gradients, and dv, are added to what their arrays hold
#     column_decays        products of the decays of columns of V, if these have gates; scores, diagonal, row_growth,
#                          column_growth, given_v, given_do, gv are for such columns, too

CHANNELS = (64, 128, 256)  # BK of kernels whose tile holds all of K; smaller tiles would not be faster


def channels(K: int) -> int:
    """The smallest BK that is at least K."""
    return next(size for size in CHANNELS if K <= size)


def read_order(op) -> str:
    """The template argument `ReadOrder`: whether o reads the state before or after the token is written."""
    return "BeforeWrite" if op.reads_before_write else "AfterWrite"


# -- kernels for a gate per channel, on every card ---------------------------------------------------------------------
# The schedules of forward kernels. SINGLE_PASS: one launch computes all channels and o. SEGMENT_STATE: only the final
# state of each segment. SPLIT_CHANNELS (not on Hopper): a launch for each BK channels. CLUSTER_SPLIT_K and _V (Hopper):
# clusters of two blocks, each with half of K or half of V.
SINGLE_PASS, SEGMENT_STATE, SPLIT_CHANNELS = "SinglePass", "SegmentState", "SplitChannels"
CLUSTER_SPLIT_K, CLUSTER_SPLIT_V = "ClusterSplitK", "ClusterSplitV"
TILES = (64, 128)  # BK and BV of forward kernels


def tile_for(size) -> int:
    """The smallest of TILES that holds `size` channels or columns; the largest if none does."""
    return TILES[size > TILES[0]]


class ForwardInChunks(TiledKernel):
    """The base of kernels of the forward pass in chunks."""

    SUB_CHUNK = 8
    constants = (("CHUNK<{dtype}>", "CHUNK"), ("RESIDENT<{schedule}, {BK}, {BV}>", "blocks_per_multiprocessor"))
    schedule: str
    dtype: np.dtype
    gate: np.dtype
    products: int  # tf32 products whose sum approximates one float32 product: 1 or 3
    BK: int
    BV: int

    def with_channels(self, channels_left):
        """The instance for the next launch if `channels_left` channels remain."""
        return self

    @property
    def CHUNK(self):
        return 32 if self.dtype == BFLOAT16 else 16

    @property
    def threads(self):
        return 2 * self.BV  # a warp for every 16 columns of V

    @property
    def blocks_per_multiprocessor(self):
        return 2 if self.schedule != SEGMENT_STATE and self.BK > self.BV else 256 // self.BV


class GatedForward(ForwardInChunks, ReadOrderKernel):
    """The forward pass in chunks, if columns of V have no gates."""

    file = "gated/forward"
    arguments = members(
        "strided q k v g o, pointers? u initial final, shape, float64s scale, pointers? sums, int64s channel bytes"
    )
    shared_memory = ("Shared<{schedule}, {dtype}, {gate}, {BK}, {BV}>",)

    @classmethod
    def fitting(cls, read_order, schedule, dtype, gate, products, K, V, shared):
        """The instance with the largest tile whose shared memory is at most `shared` bytes.

        If the first choice is too large, SPLIT_CHANNELS halves BK; the other schedules halve BV.
        """
        instance = cls(read_order, schedule, dtype, gate, products, tile_for(K), tile_for(V))
        if instance.shared_bytes <= shared:
            return instance
        return replace(instance, BK=TILES[0]) if schedule == SPLIT_CHANNELS else replace(instance, BV=TILES[0])

    def with_channels(self, channels_left):
        narrow = self.schedule == SPLIT_CHANNELS and channels_left <= TILES[0]
        return replace(self, BK=TILES[0]) if narrow else self


class GatedSegmentStates(TiledKernel):
    """The summaries of segments, each divided into so many `parts`: each part's final state if its initial state is 0
    (`states`), and the product of its `decays`; for the first `computed` of the `segments` of each sequence."""

    file = "gated/segment_states"
    arguments = members("strided k v g, pointers states decays, shape, int64s segments computed parts bytes")
    shared_memory = ("Shared<{dtype}, {gate}, {BK}, {BV}>",)
    constants = (("STEP<{dtype}>", "CHUNK"),)
    dtype: np.dtype
    gate: np.dtype
    products: int  # as in `ForwardInChunks`
    BK: int
    BV: int

    @classmethod
    def fitting(cls, dtype, gate, products, K, V, shared):
        """The instance with the most channels whose shared memory is at most `shared` bytes.

        With float16 data a block's registers hold 64 columns only.
        """
        instance = cls(dtype, gate, products, tile_for(K), TILES[0] if dtype == np.float16 else tile_for(V))
        return instance if instance.shared_bytes <= shared else replace(instance, BK=TILES[0])

    @property
    def CHUNK(self):
        """Tokens that are in shared memory at a time."""
        return 64 // self.dtype.itemsize

    @property
    def threads(self):
        return 2 * self.BK  # a warp for every 16 channels

    @property
    def blocks_per_multiprocessor(self):
        return 256 // self.BK


class Recurrent(GatedKernel, TiledKernel):
    """The forward pass token by token. `gates_columns`: columns of V have gates, too."""

    file = "recurrent/forward"
    arguments = members("strided q k v g o, pointers? u initial final, shape, float64s scale, strided? gv")
    shared_memory = ("Shared<{BK}>",)
    threads = 128
    BV: ClassVar[int] = 32  # columns of V in a block, one per lane of a warp
    constants = (("BV", "BV"),)
    BK: int
    gates_columns: bool = False


class GatedBackward(GatedKernel):
    """A kernel of the backward pass in chunks; `products` as in `ForwardInChunks`."""

    CHUNK: ClassVar[int] = 64
    TILE: ClassVar[int] = 64  # channels and columns of a tile of the states that one kernel stores for the others
    constants: ClassVar[tuple] = (("CHUNK", "CHUNK"), ("TILE", "TILE"))
    threads = 128
    products: int

    @property
    def stored(self) -> np.dtype:
        """The dtype of stored states and of the operands of matrix products."""
        return BFLOAT16 if self.dtype == BFLOAT16 and self.products == 1 else np.dtype(np.float32)

    @property
    def tiles(self):
        return {"BK": self.TILE, "BV": self.TILE, "chunk": self.CHUNK, "sub_chunk": 8}


class GatedBackwardStates(GatedBackward):
    """`chunk_states`: the states before all chunks and the gradients of the states after them. If this is null: the
    summaries of segments, `states` and `decays`, forwards and backwards in time (see `gated_backward`)."""

    file = "gated/backward_states"
    arguments = members(
        "strided q k v do_ g, pointers? initial dht chunk_states dh0 states decays, shape, int64s first heads, "
        "float64s scale, int64s P"
    )
    shared_memory = ("Shared<{dtype}, {gate}, {BV}>",)
    constants = (
        *GatedBackward.constants,
        ("blocks<Math<{dtype}, {products}>, {dtype}, {BV}>()", "blocks_per_multiprocessor"),
    )
    BV: int

    @classmethod
    def widths(cls, dtype, products, V=TILES[-1]):
        """The possible BV. For half-precision data with three products the registers hold 64 columns only."""
        return TILES if V > cls.TILE and (products == 1 or dtype.itemsize == 4) else TILES[:1]

    def blocks(self, K, V) -> int:
        """Blocks per sequence and head: one for every tile of the state and each of the two directions in time."""
        return 2 * ceil_div(K, self.TILE) * ceil_div(V, self.BV)

    @property
    def blocks_per_multiprocessor(self):
        if self.products == 3 or self.stored != self.dtype:
            return 2
        return 3 if self.BV > self.TILE else 4 if self.stored == BFLOAT16 else 2


class GatedBackwardChannels(GatedBackward):
    """The gradients dq, dk, dg, and du of each chunk.

    `columns`: "Ungated"; "Gated" if columns of V have gates, too; "GatedTurned" for the transposed state of that case,
    with values in the place of keys (see `value_gate`).
    """

    file = "gated/backward_channels"
    arguments = members(
        "strided q k v do_ g dq dk dg, pointers? u chunk_states partial_du, shape, int64s first heads, float64s scale, "
        "pointers? scores diagonal decays row_growth column_growth, strided? given_v given_do gv"
    )
    shared_memory = ("Shared<{dtype}, {gate}, {products}, {columns}>",)
    columns: str = "Ungated"


class GatedBackwardValues(GatedBackward):
    """The gradient dv."""

    file = "gated/backward_values"
    arguments = members(
        "strided q k do_ g dv, pointers? u, pointers chunk_states, shape, int64s first heads, float64s scale"
    )
    shared_memory = ("Shared<{dtype}, {gate}, {products}, {BV}>",)
    BV: int

    @classmethod
    def fitting(cls, read_order, dtype, gate, products, V, shared):
        """The instance with BV = 128, which computes the scores once for more columns, if `shared` bytes of shared
        memory suffice; else with BV = 64."""
        wide = cls(read_order, dtype, gate, products, 128)
        return wide if V > 64 and wide.shared_bytes <= shared else cls(read_order, dtype, gate, products, 64)


class ScanSegments(Kernel):
    """The scan of the summaries of segments: `starts`, the state at the start of each of P segments, and the `final`
    state. `states` and `decays` are the summaries of the R parts of each segment; BV: as `columns_of_decays` says."""

    file = "gated/scan_segments"
    arguments = members(
        "pointers states decays, pointers? column_decays initial, pointers starts, pointers? final, int64s P R H K V BV"
    )
    shared_memory = ("Shared<{width}>",)
    threads = 256
    MANY: ClassVar[int] = 16  # parts, up to which one thread loads them in two rounds
    width: int  # neighbouring columns per thread
    grouped: bool  # whether a block's threads share the parts

    @classmethod
    def fitting(cls, K, V, parts):
        width = 1 if V % 4 else 4
        return cls(width, parts > cls.MANY and ceil_div(K * V, width) <= cls.threads // 2)


class ScanBothWays(Kernel):
    """`ScanSegments` for the backward pass: in place of the summaries `states` it writes the states at the segments'
    starts and the states' gradients at their ends; the latter alone if `only_backwards`. A thread joins COLUMNS
    neighbouring columns, of which V must be a multiple."""

    file = "gated/scan_both_ways"
    shared_memory = ("Shared",)
    arguments = members("pointers states decays, pointers? column_decays, int64s N P H K V BV only_backwards")
    threads = 256
    COLUMNS: ClassVar[int] = 4
    constants = (("COLUMNS", "COLUMNS"),)
    grouped: bool

    @classmethod
    def fitting(cls, K, V, P):
        return cls(P > ScanSegments.MANY and K * V // cls.COLUMNS <= cls.threads // 2)


def columns_of_decays(summary, V):
    """How many neighbouring columns share the decays of a segment that the kernel `summary` writes: all, or a block's
    where a block forgets only what its own columns hide."""
    return summary.BV if isinstance(summary, GatedSegmentStates | GatedBackwardStates) else V


# -- kernels for a gate per channel, on Hopper -------------------------------------------------------------------------
PANEL = 64  # columns of V that a warpgroup computes
SCALAR = "ScalarDecay"  # `gate` of GatedForwardSm90 for one float32 decay per token and head


class GatedForwardSm90(HopperKernel):
    """The forward pass in chunks: producer warpgroups prepare gated operands, the other warpgroups multiply them."""

    file = "gated/sm90/forward"
    arguments = members(
        "tensor_maps+strided q k g v, tensor_maps o_boxes, strided o, strided? scalar_gate, pointers? u initial "
        "final, shape, float64s scale, pointers? decays, int64s channel segments computed, pointers? marks, int64s "
        "mark_every marks_per_sequence parts, pointers? segment_states, int64s backwards"
    )
    shared_memory = ("Shared<{schedule}, {dtype}, {gate}, {BK}, {BV}>",)
    CHUNK, SUB_CHUNK = 32, 8
    constants = ("CHUNK", "CHUNK"), ("SUB_CHUNK", "SUB_CHUNK"), ("{schedule}::CLUSTER_SIZE", "blocks_per_cluster")
    read_order: str
    schedule: str
    dtype: np.dtype
    gate: np.dtype | str
    BK: int
    BV: int

    @classmethod
    def fitting(cls, read_order, schedule, dtype, gate, K, V):
        columns = {CLUSTER_SPLIT_K: TILES[V > 128], CLUSTER_SPLIT_V: PANEL}
        return cls(read_order, schedule, dtype, gate, tile_for(K), columns.get(schedule, tile_for(V)))

    @property
    def channels(self):
        """Channels per launch."""
        return self.BK * (2 if self.schedule == CLUSTER_SPLIT_K else 1)

    @property
    def blocks_per_cluster(self):
        return 2 if self.schedule in (CLUSTER_SPLIT_K, CLUSTER_SPLIT_V) else 1

    @property
    def reads(self):
        """Whether the kernel computes o, that is, whether queries read the states."""
        return self.schedule != SEGMENT_STATE

    @property
    def producer_groups(self):
        """Warpgroups that prepare operands, 1 or 2.

        With CLUSTER_SPLIT_K one suffices, because each block of the cluster prepares half of the channels. With
        BK = 128, shared memory holds the buffers of two groups only if at most one of these three is the case, as each
        needs more memory: float32 gates, float16 data, CLUSTER_SPLIT_V.
        """
        if self.schedule == CLUSTER_SPLIT_K:
            return 1
        demands = (self.gate == FLOAT32) + (self.dtype != BFLOAT16) + (self.schedule == CLUSTER_SPLIT_V)
        return 1 if self.reads and self.BK == 128 and demands > 1 else 2

    @property
    def threads(self):
        return 2 * self.BV + self.producer_groups * self.BK


class GatedBackwardSm90(GatedKernel, HopperKernel):
    """A kernel of the backward pass on Hopper."""

    shared_memory = ("Shared<{dtype}, {gate}, {BK}, {BV}>",)
    CHUNK: ClassVar[int] = 32
    # Tokens between stored states. The gates' gradient is a running sum. It starts anew at each stored state, which
    # bounds its error.
    CHECKPOINT_EVERY: ClassVar[int] = 1024
    FLAGS: ClassVar[int] = 2  # float32 numbers after a chunk's `query_sums`; their 8 bytes are a flag for each warp
    constants = ("CHUNK", "CHUNK"), ("CHECKPOINT_EVERY", "CHECKPOINT_EVERY"), ("FLAGS", "FLAGS")
    BK: int
    BV: int

    @classmethod
    def fitting(cls, read_order, dtype, gate, K, V, *schedule):
        return cls(read_order, dtype, gate, tile_for(K), tile_for(V), *schedule)

    @property
    def threads(self):
        return 2 * self.BK + 128

    @property
    def tiles(self):
        return super().tiles | {"checkpoint every": self.CHECKPOINT_EVERY}


# ONE_EACH: a block computes one segment. IN_TURN: there are as many blocks as the card can run at a time, and each
# computes whole sequences one after the other.
ONE_EACH, IN_TURN = "OneEach", "InTurn"


class GatedBackwardMainSm90(GatedBackwardSm90):
    """The base of the two kernels that compute gradients, chunk by chunk. `schedule`: ONE_EACH or IN_TURN."""

    shared_memory = ("Shared<{dtype}, {gate}, {BK}, {BV}, {schedule}>",)
    schedule: str


class GatedBackwardQueriesSm90(GatedBackwardMainSm90):
    """dq, du and the queries' terms of dg (`query_share`), forwards in time. It stores states in `checkpoints`, and
    what `GatedBackwardKeysSm90` needs of each chunk in `query_sums`. With `joined`, sequences have three segments, of
    which a block computes the last two as one. With `adds`, it adds to what dq holds."""

    file = "gated/sm90/backward_queries"
    arguments = members(
        "tensor_maps+strided q k v do_ g dq query_share, pointers u initial dht ends query_sums du checkpoints, "
        "shape, float64s scale, int64s P joined adds"
    )


class GatedBackwardKeysSm90(GatedBackwardMainSm90):
    """dk, dv, dg and dh0, backwards in time, from what `GatedBackwardQueriesSm90` stored. With `joined`, a block
    computes the first two of three segments as one."""

    file = "gated/sm90/backward_keys"
    arguments = members(
        "tensor_maps+strided q k v do_ g query_share dk dv dg, pointers u dht ends query_sums checkpoints dh0, "
        "shape, float64s scale, int64s P joined adds adds_dv"
    )

    @property
    def threads(self):
        return 2 * self.BK + (256 if self.BK == 128 else 128)


class GatedBackwardSegmentsSm90(GatedBackwardSm90):
    """The summaries of segments, `states` and `decays`, forwards and backwards in time (see `gated_backward`);
    `ScanBothWays` joins them. only_backwards: it computes those backwards in time alone; only_first: of a sequence,
    only those of the first segment forwards, and of the last one backwards."""

    file = "gated/sm90/backward_segments"
    arguments = members(
        "tensor_maps+strided q k v do_ g, pointers initial dht states decays, shape, float64s scale, "
        "int64s P only_backwards only_first"
    )
    blocks_per_multiprocessor = 1

    @property
    def threads(self):
        return 2 * self.BK + 32


# -- kernels for heads of more than 128 channels, on every card --------------------------------------------------------
class GatedWideOperands(GatedKernel):
    """The first kernel of the forward pass: the operands (queries and keys with their decays) and the scores of all
    chunks, computed once for all columns."""

    file = "gated/wide_operands"
    arguments = members("strided q k g, pointers u operands scores decays, shape, int64s bytes")
    shared_memory = ("Shared<SplitChannels, {dtype}, {gate}, 128, 16>",)
    threads = 256


class GatedWideForward(TiledKernel):
    """The second kernel: o and the final state, from what `GatedWideOperands` has written."""

    file = "gated/wide_forward"
    arguments = members(
        "strided v o, pointers operands scores decays initial final, shape, float64s scale, int64s bytes"
    )
    shared_memory = ("WideShared<{dtype}, {channel_tiles}>",)
    CHUNK: ClassVar[int] = 32
    TILE: ClassVar[int] = 128  # channels of a tile
    SCORES: ClassVar[int] = 2 * 32 * 40  # numbers per chunk in `scores`: two matrices [32, 32], rows padded to 40
    BV: ClassVar[int] = 64
    MOST_TILES: ClassVar[int] = 4  # tiles of channels that a block's registers can hold
    constants = (("CHUNK<bf16>", "CHUNK"), ("WIDE", "TILE"), ("SCORES", "SCORES"), ("BV", "BV"))
    dtype: np.dtype
    channel_tiles: int

    @classmethod
    def fitting(cls, dtype, K):
        return cls(dtype, ceil_div(K, cls.TILE))

    @property
    def channels(self):
        """The channels of all tiles; one launch computes all of them."""
        return self.channel_tiles * self.TILE

    @property
    def threads(self):
        return 2 * self.BV * self.channel_tiles

    @property
    def blocks_per_multiprocessor(self):
        return 1 if self.channel_tiles > 2 else 2

    @property
    def tiles(self):
        return {"BK": self.channels, "BV": self.BV, "chunk": self.CHUNK, "sub_chunk": 8}


SHORT_SEQUENCES = (8, 16)  # the possible TOKENS of kernels for short sequences: the most tokens of one


class GatedShortForward(GatedKernel):
    """o and the final states of sequences of at most TOKENS tokens without initial states: a block computes one head
    of a sequence."""

    file = "gated/short_forward"
    arguments = members("strided q k v g o, pointers? u final, shape, float64s scale")
    shared_memory = ("Shared<{TOKENS}>",)
    constants = (("RESIDENT<{TOKENS}>", "blocks_per_multiprocessor"),)
    threads = 128
    TOKENS: int

    @property
    def blocks_per_multiprocessor(self):
        return 3 if self.TOKENS > 8 else 6

    @property
    def tiles(self):
        return {"chunk": self.TOKENS}


class GatedShortBackward(GatedKernel):
    """All gradients of sequences of at most TOKENS tokens, and du of each sequence: a block computes one head of a
    sequence. `gates_columns`: columns of V have gates, too."""

    file = "gated/short_backward"
    arguments = members(
        "strided q k v do_ g dq dk dv dg, pointers? u initial dht dh0 partial_du, shape, float64s scale, "
        "strided? gv dgv"
    )
    shared_memory = ("Shared<{TOKENS}>",)
    threads = 128
    MOST_GATED: ClassVar[int] = 2560  # channels and columns, if columns have gates
    constants = (("MOST_GATED", "MOST_GATED"), ("RESIDENT<{gates_columns}, {TOKENS}>", "blocks_per_multiprocessor"))
    gates_columns: bool = False
    TOKENS: int = SHORT_SEQUENCES[-1]

    @property
    def blocks_per_multiprocessor(self):
        return 2 if self.gates_columns else 3 if self.TOKENS > 8 else 5

    @property
    def tiles(self):
        return {"chunk": self.TOKENS}


# -- kernels for heads of at most 16 channels and columns, on every card -----------------------------------------------
SMALL_SIZES = (8, 16)  # the possible D of `GatedSmall`: the most channels and columns of a head


class GatedSmall(GatedKernel):
    """The base of these kernels: a warp computes several heads, and a block has WARPS warps. `gates_columns`: columns
    of V have gates, too."""

    CHUNK: ClassVar[int] = 8  # tokens that are in shared memory at a time
    WARPS: ClassVar[int] = 4
    SEGMENT: ClassVar[int] = 64  # tokens of the shortest segment
    shared_memory = ("Shared<{dtype}, {gate}, {D}, {gates_columns}>",)
    constants: ClassVar[tuple] = (("STEP", "CHUNK"), ("WARPS", "WARPS"))
    D: int
    gates_columns: bool = False

    @classmethod
    def fitting(cls, problem, gate):
        D = SMALL_SIZES[max(problem.shape("K V")) > SMALL_SIZES[0]]
        return cls(read_order(problem.op), problem.dtype, gate, D, "gv" in problem.arrays)

    @property
    def threads(self):
        return 32 * self.WARPS

    @property
    def blocks_per_multiprocessor(self):
        if self.D > SMALL_SIZES[0]:
            return 3
        return 5 if self.gate.itemsize == 2 else 4

    @property
    def heads(self) -> int:
        """Heads per block."""
        return 64 // self.D * self.WARPS

    def blocks(self, heads) -> int:
        """Blocks for the given number of heads, counted over all sequences or segments."""
        return ceil_div(heads, self.heads)

    @property
    def channels(self):
        """The most channels per launch."""
        return self.D

    @property
    def tiles(self):
        return {"BK": self.D, "BV": self.D, "heads": self.heads, "chunk": self.CHUNK}


class GatedSmallForward(GatedSmall):
    """o and the final state. Without `outputs`: the summaries of the first `computed` of the `segments` of each
    sequence: each segment's final state if its initial state is 0 (`states`), and the product of its `decays`; with
    `both` also the same backwards in time, for the state's gradient."""

    file = "gated/small_forward"
    arguments = members(
        "strided q k v g, strided? o, pointers? u initial final, shape, float64s scale, int64s bytes, strided? gv do_, "
        "pointers? dht states decays column_decays, int64s segments computed both"
    )
    shared_memory = ("Shared<{dtype}, {gate}, {D}, {gates_columns}, {outputs}>",)
    outputs: bool = True


class GatedSmallBackward(GatedSmall):
    """dq, dk, dv, dg, dh0, and du of each segment. `starts` and `ends`: the states at the segments' starts and the
    states' gradients at their ends."""

    file = "gated/small_backward"
    arguments = members(
        "strided q k v do_ g dq dk dv dg, pointers u starts ends dh0 step_states partial_du, shape, float64s scale, "
        "int64s P bytes, strided? gv dgv"
    )
    WARPS: ClassVar[int] = 2
    SEGMENT: ClassVar[int] = 32
    blocks_per_multiprocessor = 5
    NUMBERS: ClassVar[int] = 16  # numbers of a state that each lane holds in registers
    constants = (*GatedSmall.constants, ("NUMBERS", "NUMBERS"))

    @property
    def heads(self):
        return 32 * self.NUMBERS // self.D**2 * self.WARPS
