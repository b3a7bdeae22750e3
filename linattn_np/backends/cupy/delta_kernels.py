"""Kernel classes of the delta rules; `gated_kernels` has the words that these share with others.

A class stands for the CUDA file `file`. Its annotated fields are the template's arguments, in order; `arguments` are
the members of the kernel's argument struct (`arguments.members` explains the text), `shared` the C++ type whose size is
the shared memory of a block, and `constants` pairs of a C++ constant and the attribute that must equal it. The compiler
checks all of these. What the arrays in `arguments` hold stands in the head of the CUDA file.

The state of a head is [K, V]: K channels by V columns. The kernels compute a head of values at a time; `group` of these
share a head of queries and keys. A *walk* is a kernel whose blocks go from chunk to chunk, or from token to token, and
hold the state, or its gradient, in registers. Sequences are cut into *segments* if there are too few walks to fill the
card: `delta_segments`. K is at most 256; chunks take no float64.

Fields that classes share: `dtype` of q, k, v and o; `gate`, the dtype of g and of beta; BK and BV, the channels and
columns of the state that a block computes; BK >= K, but for blocks with a part of the channels. Arguments that kernels
share:

- prepared: one struct for every chunk, of `prepared_bytes`: what the chunk does to a state
- starts, P: the states from which segments start, and the number of segments of a sequence
- F: the matrix [K, K] by which a segment multiplies the state; null: not wanted
- chunk_states: the states before all chunks; state_gradients: the gradients of the states after them
- parts: terms of dq, dk and other gradients, which `DeltaSumParts` adds up
- normalized: whether the kernel divides the rows of q and k by their lengths
- bytes: the largest of 16, 8, 4 and 2 of which all rows' addresses and lengths are multiples
- w_scale: a factor of the prepared W: the call's scale if `gradient`; else 1, as the walk multiplies o by the scale
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from .arguments import members
from .arithmetic import ceil_div, padded
from .gated_kernels import CHANNELS, TILES, channels
from .kernel import DOUBLE, Kernel, StepKernel, TiledKernel
from .plan import FLOAT32

# What these words mean, beyond the docstring:
#     shared               the attribute `shared_memory`: C++ types, the sum of whose sizes is a block's shared memory
#     tiles                the sizes of an instance that `explain` shows; TILES are the possible BV of walks
#     W                    the prepared matrix by which outputs read the state: o = scale (W S + B v), prepared.cuh
#     F, G                 a segment changes the state S before it to F S + G (`delta_segments`). `starts` has G before
#                          the join of segments; after it the states before segments, and gradients after them
#     forgets              of each segment, whether its F is 0: join_segments.cu
#     normalized           a flag in `arguments`; in `sum_parts` it is the array q or k whose rows were divided
#     a part of channels   BK < K: the kernels with TILE channels per block

SHARING = 113 << 10  # bytes of shared memory of a block, of which Hopper's multiprocessors hold two
GATED_DELTA, KDA, DPLR = "GatedDelta", "Kda", "Dplr"  # the template argument `Rule`; Dplr is RWKV-7's


# -- in chunks ---------------------------------------------------------------------------------------------------------
class ChunkKernel(Kernel):
    """The base of kernels in chunks, whose first template argument is the dtype of data: `single` for float32."""

    @property
    def template(self):
        dtype, *others = super().template
        return ("single" if dtype == "float" else dtype, *others)


class DeltaPrepare(ChunkKernel):
    """Writes what each chunk does to a state, for a walk, if the channels of a token share a gate."""

    file = "delta/prepare"
    arguments = members(
        "strided q k g beta, pointers prepared, shape, int64s group, float64s w_scale, int64s normalized bytes"
    )
    shared_memory = ("Shared<{dtype}, {BK}>",)
    dtype: np.dtype
    gate: np.dtype
    BK: int
    gradient: bool  # whether for a walk in both directions

    @property
    def threads(self):
        return 2 * self.BK


class DeltaChannelPrepare(DeltaPrepare):
    """`DeltaPrepare` for a gate of every channel."""

    file = "delta/channel_prepare"
    shared_memory = ("Shared<{dtype}, {gate}, {BK}>",)


class DeltaDplrPrepare(DeltaPrepare):
    """`DeltaPrepare` for RWKV-7, which erases along the vectors a and b. With `logits`, in prompts of models, it makes
    these, keys, values v and gates of the time mix's products, in the place of which it stores keys and values."""

    file = "delta/dplr_prepare"
    arguments = members(
        "strided q k a b g, pointers prepared, shape, float64s w_scale, int64s bytes, "
        "strided? key v first_v bases removal replacement"
    )
    shared_memory = ("Shared<{dtype}, {gate}, {BK}>",)
    logits: bool = False


class Walk(ChunkKernel, TiledKernel):
    """The base of walks from chunk to chunk, which read what `DeltaPrepare` or a kernel like it has prepared."""

    CHUNK: ClassVar[int] = 32
    PREPARED: ClassVar[str]  # the C++ type of a prepared chunk
    dtype: np.dtype
    BK: int
    BV: int
    two_writes: bool  # whether a token writes v along k, and what it read from the state along b, as in RWKV-7
    stages: int  # chunks that are in shared memory at a time
    outputs: bool = True  # False: the kernel computes instead what each segment does to a state, F and G
    only_backwards: ClassVar[bool] = False  # whether the walk has no direction but that backwards in time

    @classmethod
    def fitting(cls, dtype, K, V, rule, walks, device, **fields):
        """The instance for so many walks at the same time, or the smallest if none fits. It has 128 columns per block
        if so wide blocks fill half of the card, else 64, and three stages; if these do not fit in shared memory, two
        stages, then 64 columns, and then, in float32 or with 256 channels, one stage. In float32 it has two stages at
        most: two blocks of 64 columns and channels then share a multiprocessor. If blocks would wait for others, those
        of 64 columns that all exist have one stage where two then share a multiprocessor; blocks of 32 columns wait for
        memory, 13.7 -> 14.7 ms. `fields`: those of the derived class."""
        BK, wide_blocks = channels(K), walks * ceil_div(V, TILES[1])
        BV = TILES[V > TILES[0] and 2 * wide_blocks >= device.multiprocessors]
        one_stage = ((BV, 1),) if dtype == FLOAT32 or BK > TILES[1] else ()
        sizes = ((BV, 3), (BV, 2), (TILES[0], 2), *one_stage)[dtype == FLOAT32 :]
        kernels = [cls(dtype, BK, width, rule == DPLR, stages, **fields) for width, stages in sizes]
        kernel = next((kernel for kernel in kernels if kernel.shared_bytes <= device.shared_per_block), kernels[-1])
        waits = one_stage and kernel.BV == TILES[0] <= V and walks * kernel.grid(V) > device.multiprocessors
        smallest = replace(kernel, stages=1)
        return smallest if waits and smallest.shared_bytes <= SHARING < kernel.shared_bytes else kernel

    @property
    def threads(self):
        """A warp has 16 columns; or 32 without outputs, if registers hold two states of 16 columns."""
        has_two = not self.outputs and self.dtype != FLOAT32 and self.BK <= TILES[1]
        return self.BV if has_two else 2 * self.BV

    @property
    def summary(self) -> Walk:
        """The instance without outputs, with as many stages if blocks of 256 columns then share a multiprocessor,
        else with two at most."""
        kernel = replace(self, outputs=False, BV=max(self.BV, TILES[0]))
        fits = kernel.shared_bytes * TILES[1] <= SHARING * kernel.BV
        return kernel if fits else replace(kernel, stages=min(2, self.stages))

    @property
    def shared_types(self):
        """That of one stage, as often as there are stages."""
        return super().shared_types * self.stages

    @property
    def prepared_bytes(self) -> int:
        """Bytes of one prepared chunk."""
        return self.bytes_of(self.filled_in(self.PREPARED))

    @property
    def constants(self):
        return (f"sizeof({self.PREPARED})", "prepared_bytes"), ("BT", "CHUNK")


class DeltaScan(Walk):
    """The forward walk: o and the final states."""

    file = "delta/scan"
    PREPARED = "Prepared<{dtype}, {BK}, {two_writes}>"
    shared_memory = ("Shared<{dtype}, {BK}, {BV}, {two_writes}, 1, {outputs}>",)
    arguments = members(
        "strided v, strided? o initial final, pointers? starts F, pointers prepared, shape, int64s P, float64s scale, "
        "int64s bytes"
    )
    directions: ClassVar[int] = 1  # in time, of the walks of a launch


class DeltaBackwardStates(Walk):
    """The walks in both directions: the states before all chunks, the gradients of the states after them, each token's
    `residual` (v minus what its key reads) and its gradient, and dv. Or those of one direction: "ONLY_FORWARDS" in the
    call itself, which it gives o and the final states, and "ONLY_BACKWARDS" in its pullback."""

    file = "delta/backward_states"
    arguments = members(
        "strided? v do_ initial dht final dh0 o dv residual dresidual, "
        "pointers? chunk_states state_gradients starts F, pointers prepared, shape, int64s P, float64s scale, "
        "int64s bytes"
    )
    PREPARED = "PreparedForGradients<{dtype}, {BK}, {two_writes}>"
    shared_memory = ("Shared<{dtype}, {BK}, {BV}, {two_writes}, 1, {of}, {outputs}>",)
    TILE: ClassVar[int] = 64  # to a multiple of this are columns padded in what the walks write
    NARROW: ClassVar[int] = 32  # columns of a block, a possible BV
    DIRECTIONS: ClassVar[tuple[str, ...]] = ("BOTH", "ONLY_FORWARDS", "ONLY_BACKWARDS")  # the possible `of`
    # "ONLY_FORWARDS": in a call that keeps what its pullback will read; it then writes o and the final states, too.
    of: str = DIRECTIONS[0]

    @classmethod
    def fitting(cls, dtype, K, V, rule, walks, device, **fields):
        """The base's, or that of NARROW columns where three of its blocks share a multiprocessor, and two of 64 columns
        would leave many with one."""
        kernel = super().fitting(dtype, K, V, rule, walks, device, **fields)
        narrow = replace(kernel, BV=cls.NARROW, stages=2)
        if dtype == FLOAT32 or max(K, V) > TILES[0] or ceil_div(walks * narrow.grid(V), device.multiprocessors) != 3:
            return kernel
        return narrow if 3 * narrow.shared_bytes < device.shared_per_multiprocessor else kernel

    @property
    def directions(self) -> int:
        """In time, of the walks of a launch."""
        return 2 if self.of == self.DIRECTIONS[0] else 1

    @property
    def only_backwards(self):
        return self.of == self.DIRECTIONS[2]

    @property
    def constants(self):
        return *super().constants, ("TILE", "TILE"), ("stored_channels({BK})", "BK")

    def padded_columns(self, V) -> int:
        """Of V columns: chunk_states and state_gradients have BK channels by so many, rows of residuals so many."""
        return padded(V, self.TILE)

    @property
    def residual_numbers(self) -> int:
        """Of a token's residual in each column: 2 are the rounded number, and what its rounding has lost."""
        return 1 if self.two_writes or self.dtype == FLOAT32 else 2

    def bytes_between_kernels(self, problem, heads) -> int:
        """Bytes of what the kernel reads and writes of `heads` heads besides inputs and results: prepared chunks,
        states and their gradients, residuals as sums of two numbers, and the residuals' gradients."""
        B, T, K, V = problem.shape("B T K V")
        chunks = ceil_div(T, self.CHUNK)
        rows = 2 * chunks * self.BK + 3 * T  # of residuals 2 T, which is too many if `residual_numbers` is 1: at most
        return B * heads * (self.dtype.itemsize * self.padded_columns(V) * rows + chunks * self.prepared_bytes)


class DeltaBackwardChunks(ChunkKernel):
    """dq, dk, dbeta and dg of each chunk, from what `DeltaBackwardStates` wrote, if the channels of a token share a
    gate. If heads of values share a head of keys, the kernel writes the term of each head of values to `parts` in place
    of dq and dk."""

    file = "delta/backward_chunks"
    arguments = members(
        "strided q k do_ residual dresidual g beta, pointers chunk_states state_gradients, strided dq dk, "
        "pointers? parts, strided dbeta, strided? dg, shape, int64s group, float64s scale, int64s normalized bytes"
    )
    shared_memory = ("Shared<{dtype}, {BK}>",)
    constants: ClassVar[tuple] = (("BT", "CHUNK"),)
    CHUNK: ClassVar[int] = 32
    dtype: np.dtype
    gate: np.dtype
    BK: int

    @property
    def threads(self):
        return 2 * self.BK

    def blocks(self, chunks, K) -> int:
        """Blocks for so many chunks, counted over all heads."""
        return chunks

    @property
    def tiles(self):
        return {"BK": self.BK, "chunk": self.CHUNK}


class DplrBackwardChunks(ChunkKernel):
    """`DeltaBackwardChunks` for RWKV-7: dq, dk, da, db and dg of each chunk, TILE channels per block."""

    file = "delta/dplr_backward_chunks"
    arguments = members(
        "strided q a k b do_ dresidual v residual g, pointers chunk_states state_gradients, strided dq dk da db dg, "
        "shape, float64s scale, int64s bytes"
    )
    shared_memory = ("Shared<{dtype}, {gate}>",)
    constants: ClassVar[tuple] = (("TILE", "TILE"), ("BT", "CHUNK"))
    TILE: ClassVar[int] = 64  # channels of a block
    CHUNK: ClassVar[int] = 32
    threads = 128
    dtype: np.dtype
    gate: np.dtype

    def blocks(self, chunks, K) -> int:
        return chunks * ceil_div(K, self.TILE)

    @property
    def tiles(self):
        return {"BK": self.TILE, "chunk": self.CHUNK}


class KdaBackwardChunks(DplrBackwardChunks):
    """`DeltaBackwardChunks` for a gate of every channel, TILE channels per block. It writes `parts` also if queries and
    keys are divided by their lengths."""

    file = "delta/kda_backward_chunks"
    arguments = members(
        "strided q k do_ dresidual residual g beta, pointers chunk_states state_gradients, pointers? parts, "
        "strided? dq dk, strided dg dbeta, shape, int64s group, float64s scale, int64s normalized bytes"
    )


# -- token by token ----------------------------------------------------------------------------------------------------
COMMON_ARGUMENTS = members(
    "strided q k v, strided? a b, strided g, strided? beta initial, shape, int64s group, float64s scale, int64s "
    "normalized bytes, pointers? starts, int64s P"
)


class DeltaKernel(Kernel):
    """The base of kernels that go token by token."""

    threads = 128
    rule: str
    dtype: np.dtype
    gate: np.dtype


class DeltaRecurrentForward(DeltaKernel):
    """The forward walk. A launch computes o and final states; or `kept`, the states before every `shape.chunk`-th
    token, for `DeltaRecurrentBackward`; or what segments do to a state: `F`, and G in `starts`."""

    file = "delta/recurrent_forward"
    arguments = COMMON_ARGUMENTS + members("strided? o final, pointers? kept F")
    shared_memory = ("Shared<{rule}, {dtype}, {gate}, {BK}, {columns}>",)
    constants: ClassVar[tuple] = (("CHANNELS", "CHANNELS"), (f"{shared_memory[0]}::BV", "BV"))
    CHANNELS: ClassVar[int] = 16  # of a lane: BK / CHANNELS lanes share a column
    BK: int
    columns: int  # of a lane

    @classmethod
    def fitting(cls, rule, dtype, gate, K, V, walks, multiprocessors):
        """The instance for so many walks at the same time: that with the most columns per lane whose blocks still fill
        half of the card, and have columns for more than half of their lanes; else that with the fewest."""
        kernels = [cls(rule, dtype, gate, channels(K), columns) for columns in cls.widths(dtype)]
        filling = (x for x in kernels if x.BV < 2 * V and 2 * walks * ceil_div(V, x.BV) >= multiprocessors)
        return next(filling, kernels[-1])

    @staticmethod
    def widths(dtype):
        """The possible `columns`. In float64, registers hold one column only."""
        return (1,) if dtype == DOUBLE else (4, 2, 1)

    @property
    def BV(self):
        return self.threads * self.CHANNELS // self.BK * self.columns

    @property
    def tiles(self):
        return {"BK": self.BK, "BV": self.BV}


class DeltaSmallForward(DeltaKernel):
    """The forward walk of heads with at most D channels and columns. A block, of one warp, has `heads` of them."""

    file = "delta/small_forward"
    arguments = COMMON_ARGUMENTS + members("strided? o final, pointers? F")
    shared_memory = ("Shared<{rule}, {dtype}, {gate}, {D}>",)
    threads = 32
    D: int
    outputs: bool = True  # False: the kernel computes instead what segments do to a state: `F`, and G in `starts`

    @property
    def heads(self):
        return self.threads // self.D

    @property
    def tiles(self):
        return {"BK": self.D, "BV": self.D, "heads": self.heads}


class DeltaSmallBackward(DeltaKernel):
    """All gradients of heads with at most D channels and columns. A block, of one warp, has `heads` of them. If heads
    of values share a head of keys, the kernel writes the term of each head of values to `parts`, not to dq and dk."""

    file = "delta/small_backward"
    arguments = COMMON_ARGUMENTS + members(
        "strided do_, strided? dht dh0 dq dk da db dv dg dbeta, pointers? step_states parts"
    )
    shared_memory = ("Shared<{rule}, {dtype}, {gate}, {D}>",)
    constants: ClassVar[tuple] = (
        ("STEP", "STEP"),
        ("BLOCK", "BLOCK"),
        ("StepTile<{dtype}, {D}>::HEADS", "heads"),
    )
    STEP: ClassVar[int] = 8  # tokens between stored states
    BLOCK: ClassVar[int] = 4  # channels, and columns, of a lane
    threads = 32
    D: int
    outputs: bool = True  # False: the kernel computes instead what each segment does to a state's gradient

    @property
    def heads(self):
        return self.threads * self.BLOCK**2 // self.D**2

    tiles = DeltaSmallForward.tiles


class DeltaRecurrentBackward(DeltaKernel):
    """The backward walk: all gradients, from the states that `DeltaRecurrentForward` stored every TOKENS tokens, or, if
    it `holds` all tokens of a sequence at a time, from the initial states. A block has `tiles` times BV columns, one
    after the other. Of gradients that are sums over all columns it writes its terms: to `parts` of those with a
    number for each channel, to `token_parts` of those with one for each token."""

    file = "delta/recurrent_backward"
    arguments = COMMON_ARGUMENTS + members(
        "strided do_, strided? dv dht dh0, pointers? kept parts token_parts, int64s tiles"
    )
    shared_memory = ("Shared<{rule}, {dtype}, {gate}, {BK}, {TOKENS}>",)
    constants: ClassVar[tuple] = ((f"{shared_memory[0]}::BV", "BV"), (f"{shared_memory[0]}::KINDS", "kinds"))
    BK: int
    TOKENS: int
    outputs: bool = True  # False: the kernel computes instead what each segment does to a state's gradient

    @classmethod
    def fitting(cls, rule, dtype, gate, K, shared_per_block):
        """The instance with the most tokens whose shared memory is at most `shared_per_block` bytes; that of one token
        always is on cards that are served."""
        kernels = (cls(rule, dtype, gate, channels(K), tokens) for tokens in (8, 4, 2, 1))
        # There is one: that of one token fits on every supported card.
        return next(kernel for kernel in kernels if kernel.shared_bytes <= shared_per_block)

    @property
    def number_bytes(self) -> int:
        """Bytes of a number of the arithmetic: float64 for float64 data, else float32."""
        return 8 if self.dtype == DOUBLE else 4

    @property
    def BV(self):
        warp_columns = 32 * 64 // self.number_bytes // self.BK  # each lane has 64 bytes of the warp's part of a state
        return warp_columns * self.threads // 32

    @property
    def channel_gradients(self) -> tuple[str, ...]:
        """The arrays whose gradients go to `parts`, in its order. A gate that channels share has one number a token."""
        return ("q", "k", "a", "b", "g") if self.rule == DPLR else ("q", "k", "g")[: 2 + (self.rule == KDA)]

    @property
    def kinds(self):
        return len(self.channel_gradients)

    BLOCKS: ClassVar[int] = 48  # of a multiprocessor, three of which run at a time: more blocks have more columns

    def tiles_of_block(self, problem, multiprocessors) -> int:
        """`tiles`, if all heads are computed at a time."""
        (N, H), tiles = problem.shape("N H"), ceil_div(problem.sizes["V"], self.BV)
        most = max(1, N * H * tiles // (self.BLOCKS * multiprocessors))
        return ceil_div(tiles, ceil_div(tiles, most))

    def bytes_between_kernels(self, problem, heads, multiprocessors) -> int:
        """About how many bytes the stored states and `parts` take, for `heads` heads."""
        B, T, K, V = problem.shape("B T K V")
        states = 0 if self.holds(problem) else padded(K, 4) * V / self.TOKENS
        columns = self.BV * self.tiles_of_block(problem, multiprocessors)
        parts = ceil_div(V, columns) * len(self.channel_gradients) * K
        return int(B * heads * T * (states + parts) * self.number_bytes)

    def holds(self, problem) -> bool:
        """Whether no sequence has more than TOKENS tokens: states are then computed again from the initial ones."""
        return problem.spans.longest <= self.TOKENS

    @property
    def tiles(self):
        return {"BK": self.BK, "BV": self.BV, "chunk": self.TOKENS}


class DeltaStep(StepKernel):
    """One token of each sequence: o and the new state, in the layouts that the module `step` describes. `slots`: which
    state a sequence has; null: its own number. `aligned16`: whether rows of the state allow accesses of 16 bytes."""

    file = "delta/step"
    arguments = members(
        "strided q k v, strided? a b, strided g, strided? beta, strided o state, pointers? slots, int64s HV K V "
        "group, float64s scale, int64s normalized aligned16"
    )
    shared_memory = ("Shared<{rule}, {real}, {BK}, {BV}>",)
    threads = 256
    WIDTHS: ClassVar[tuple[int, ...]] = (16, 64)  # the possible BV
    FEW: ClassVar[tuple[int, int]] = (16, 128)  # or BK and BV of few channels, whose numbers have 4 bytes at most
    rule: str
    dtype: np.dtype
    gate: np.dtype
    state: np.dtype
    BK: int
    BV: int

    @classmethod
    def fitting(cls, *instance, K, V):
        """The instance for states of K channels and V columns. `instance`: its other template arguments."""
        if K <= cls.FEW[0] and V > cls.WIDTHS[-1] and instance[-1] != DOUBLE:
            return cls(*instance, *cls.FEW)
        return cls(*instance, channels(K), cls.WIDTHS[V > cls.WIDTHS[0]])


# -- both --------------------------------------------------------------------------------------------------------------
class DeltaJoinSegments(Kernel):
    """The states at segments' starts, and the gradients at their ends, from what each segment does: `delta_segments`.
    `starts` has G before the launch, and the states and gradients after it."""

    file = "delta/join_segments"
    shared_memory = ("Shared<{dtype}, {BK}>",)
    arguments = members("pointers F starts, pointers? forgets, int64s N P H K V backwards")  # N sequences of P segments
    dtype: np.dtype  # of states
    BK: int
    BV: ClassVar[int] = 16
    constants = (("BV", "BV"),)

    @property
    def threads(self):
        return 2 * self.BK


class DeltaSumParts(Kernel):
    """dx, the sum of `parts` over tiles of columns and over the heads of values of a group. `x`: q or k if the forward
    pass divided its rows by their lengths, and dx is then the gradient of the undivided rows; else null."""

    file = "delta/sum_parts"
    arguments = members("pointers parts, strided? x, strided dx, int64s B H T_ K group tiles")
    constants: ClassVar[tuple] = (("32 * LANE_CHANNELS", "MOST_CHANNELS"),)
    MOST_CHANNELS: ClassVar[int] = CHANNELS[-1]
    threads = 128
    dtype: np.dtype


def sum_parts(draft, parts, total, normalized):
    """Launches total [B, H, T, K] = the sum of parts [tiles, B, heads, T, K] over tiles and heads of a group.

    `normalized`: q or k, if the forward pass divided its rows by their lengths; the kernel then applies the pullback of
    this division to the sum. None otherwise.
    """
    kernel, (tiles, _, heads, T, K), (B, H) = DeltaSumParts(total.dtype), parts.shape, total.shape[:2]
    sizes = {"B": B, "H": H, "T_": T, "K": K, "group": heads // max(H, 1), "tiles": tiles}
    blocks = ceil_div(B * H * T, kernel.threads // 32)
    draft.launch(kernel, blocks, parts=parts, x=normalized, dx=total, **sizes)
