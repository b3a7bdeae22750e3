"""How the walks of a delta rule (see `delta_kernels`) are cut into segments, and which kernels they take.

Few heads leave multiprocessors idle, as one block computes all tokens of its columns of a head. Then sequences are cut
into segments. A segment changes the state S before it to F S + G, and the gradient dS of the state after it to
F^T dS + G': F [K, K] is the result of a walk from the identity with values of zeros; G and G' are the results of walks
from zeros, or from the sequence's initial state and dht. A first launch computes F, G and G' of all segments, a second
one joins them to the states and gradients from which segments start, and a third one computes the outputs of all
segments at the same time. F of a sequence's first and last segment is not needed, nor is G of its last one, nor G'
of its first one. Two segments are no faster than one by these kernels; by Hopper's own, which `delta_hopper` cuts, they
may be.

Sizes: N sequences, H heads of values, K channels, V columns, P segments of a sequence.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any, ClassVar

from .arithmetic import ceil_div, padded
from .delta_kernels import (
    DPLR,
    GATED_DELTA,
    KDA,
    DeltaBackwardStates,
    DeltaChannelPrepare,
    DeltaDplrPrepare,
    DeltaJoinSegments,
    DeltaPrepare,
    DeltaRecurrentBackward,
    DeltaRecurrentForward,
    DeltaScan,
    DeltaSmallBackward,
    DeltaSmallForward,
)
from .gated_kernels import CHANNELS, SMALL_SIZES, TILES, channels
from .plan import FLOAT32, common_bytes


def chunk_kernels(problem, device, gradient, segments=1):
    """(the kernel that prepares chunks, the walk): those for every GPU, not Hopper's own. `gradient`: whether the walk
    has both directions; `segments`: of a sequence. The first kernel is the same for any number of them."""
    walk_class, (K, V), rule = DeltaBackwardStates if gradient else DeltaScan, problem.shape("K V"), rule_of(problem.op)
    walks = (1 + gradient) * long_heads(problem) * segments  # that run at the same time
    walk = walk_class.fitting(problem.dtype, K, V, rule, walks, device)
    prepare = {GATED_DELTA: DeltaPrepare, KDA: DeltaChannelPrepare, DPLR: DeltaDplrPrepare}[rule]
    fields = {"logits": True} if "logits" in problem.options else {}
    return prepare(problem.dtype, gate_dtype(problem), walk.BK, gradient, **fields), walk


def makes_keys(dtype, K) -> bool:
    """Whether the kernel that prepares RWKV-7's chunks can make keys of a model's logits: the option `logits`."""
    return dtype.itemsize == 2 and K == CHANNELS[0]


def long_heads(problem) -> float:
    """How many heads of the longest sequence have as many tokens as all heads of all sequences."""
    B, H, T = problem.shape("B H T")
    return B * H * T / max(1, problem.spans.longest)


# Times of a head {whether gradients are computed: the time}. 1 is the time of one token of one column token by token.
# Fitted to an H200.
TOKEN_BY_TOKEN_START = {False: 8, True: 2}  # of a column, besides its tokens
CHUNK_OF_COLUMN = {False: 8.6, True: 4.5}  # of a column in a chunk of half precision; float32 takes twice as long
CHUNK_COLUMNS = 64  # a chunk takes as long as if it had so many columns more


def are_few_tokens(problem, gradient) -> bool:
    """Whether no sequence is longer than a chunk, and all take less time token by token, with or without `gradient`."""
    columns, tokens = padded(problem.sizes["V"], 32), problem.spans.longest
    by_token = columns * (TOKEN_BY_TOKEN_START[gradient] + tokens)
    in_chunks = (columns + CHUNK_COLUMNS) * CHUNK_OF_COLUMN[gradient] * problem.dtype.itemsize / 2
    return tokens <= DeltaScan.CHUNK and by_token < in_chunks


def rule_of(op):
    """The template argument `Rule` of an operator, or of an operator's step."""
    if "a" in op.arrays:
        return DPLR
    return KDA if any("K" in op.arrays[name].split() for name in op.decays) else GATED_DELTA


def gate_dtype(problem):
    """The dtype in which kernels read gates and beta: that of the caller's arrays if they share one, else float32."""
    dtypes = {problem[name].dtype for name in (*problem.op.decays, *problem.op.strengths)}
    return dtypes.pop() if len(dtypes) == 1 else FLOAT32


def instance_of(problem) -> tuple:
    """The first template arguments of the kernels token by token: rule, dtype of data, dtype of gates."""
    return rule_of(problem.op), problem.dtype, gate_dtype(problem)


def rows_of(problem) -> list:
    """The arrays of a call with a row of channels or columns for each token."""
    return [x for name, x in problem.arrays.items() if problem.op.arrays[name].split()[-1] in "KV"]


class SegmentCut:
    """The base of cuts. Subclasses set `problem`, `device`, `gradient`: whether gradients are computed, `steps`: chunks
    or tokens of the longest sequence, and `segments`: how many a sequence is cut into."""

    problem: Any
    device: Any
    gradient = False
    steps: int
    segments: int
    START: ClassVar[int]  # a walk's first loads and last stores take as long as so many steps

    def waves(self, segments, tiles) -> float:
        """How many blocks a multiprocessor has one after the other, of sequences that are cut into so many segments and
        of which each head has `tiles` blocks. A block has the tokens of one of the longest sequence's segments.

        Packed sequences may be shorter: they have fewer segments, the last of which ends early, and leave the card to
        others. Then it is the mean of all multiprocessors, and one for the block that ends last; the block of a last
        segment counts as its START, that of an empty one as half of it."""
        (N, H), as_long = self.problem.shape("N H"), long_heads(self.problem)
        started = (N * H - as_long) * self.START / (self.START + ceil_div(self.steps, segments))
        mean = (as_long + started * (segments + 1) / (2 * segments)) * tiles / self.device.multiprocessors
        return min(ceil(N * H * tiles / self.device.multiprocessors), mean + 1)

    @property
    def tiles(self):
        """The number of segments, if sequences are cut: `explain` shows it beside the tiles of kernels."""
        return {"segments": self.segments} if self.segments > 1 else {}

    def spans(self, tokens):
        """The token ranges of all segments, as long as a multiple of `tokens`; None if sequences are not cut."""
        return self.problem.spans.segments(self.segments, tokens) if self.segments > 1 else None


class CutInChunks(SegmentCut):
    """How a walk in chunks is cut, and its kernels. `kept`: whether a call keeps for its pullback what it computes, so
    that each of these walks in one direction. Times are in microseconds, fitted to an H200."""

    PREPARE_TIME = 4.3  # to prepare a chunk, on one multiprocessor, if the channels of a token share a gate
    # Of a chunk of 64 columns, and of two at the same time on one multiprocessor: of walks with outputs, by whether
    # they compute gradients; and of walks without outputs.
    CHUNK_TIMES, SUMMARY_TIMES = {False: (1.0, 1.5), True: (1.4, 2.5)}, (0.7, 1.1)
    SINGLE = 2.5  # chunks of float32 take so many times as long
    START = 3
    LAUNCHES_TIME = 12.0  # of the two launches that a cut adds
    CALL_TIME, LAST_TIME = 50.0, 10.0  # of gradients besides: of a call; of a chunk on one multiprocessor

    def __init__(self, problem, device, gradient=False, kept=False):
        self.problem, self.device, self.gradient = problem, device, gradient
        self.prepare, self.walk = chunk_kernels(problem, device, gradient)  # of `walk`, `time` needs no field
        self.directions = 1 if kept else self.walk.directions  # of the walks of a launch
        self.steps = ceil_div(problem.spans.longest, self.walk.CHUNK)
        self.segments = min((1, *range(3, min(self.steps // 4, 64) + 1)), key=self.time)
        self.walk = chunk_kernels(problem, device, gradient, self.segments)[1]

    def time(self, segments) -> float:
        """An estimate for the walks of a pass that is cut into so many segments."""
        K, V = self.problem.shape("K V")
        tiles_of_F, tiles_of_V = ceil_div(K, TILES[0]), self.directions * ceil_div(V, TILES[0])
        of_dtype = self.SINGLE if self.problem.dtype == FLOAT32 else 1

        def walk_time(tiles, times):
            """Of a walk of so many tiles of 64 columns per sequence and head. times: such as SUMMARY_TIMES."""
            alone, two = times
            pairs, single = divmod(self.waves(segments, tiles), 2)
            of_chunk = pairs * two + single * alone
            return (self.START + ceil_div(self.steps, segments)) * of_chunk * of_dtype

        outputs = walk_time(segments * tiles_of_V, self.CHUNK_TIMES[self.gradient])
        if segments == 1:
            return outputs
        first_walk = walk_time((segments - 1) * tiles_of_V + (segments - 2) * tiles_of_F, self.SUMMARY_TIMES)
        return outputs + first_walk + join_time(segments, K) + self.LAUNCHES_TIME

    def walk_of(self, direction):
        """The walk for gradients in one direction."""
        problem, walks = self.problem, long_heads(self.problem) * self.segments
        K, V = problem.shape("K V")
        return DeltaBackwardStates.fitting(problem.dtype, K, V, rule_of(problem.op), walks, self.device, of=direction)

    @property
    def pass_time(self) -> float:
        """An estimate for the kernel that prepares chunks, and the walks, if the channels of a token share a gate."""
        return self.all_chunks * self.PREPARE_TIME / self.device.multiprocessors + self.time(self.segments)

    @property
    def all_chunks(self) -> int:
        """Those of all heads."""
        B, H = self.problem.shape("B H")
        return B * H * int(self.problem.spans.chunk_bounds(self.walk.CHUNK)[-1])

    @property
    def call_time(self) -> float:
        """`pass_time`, and, of gradients, the time of what else is launched."""
        last = self.CALL_TIME + self.all_chunks / self.device.multiprocessors * self.LAST_TIME
        return self.pass_time + (last if self.gradient else 0)

    def shape(self, draft):
        return draft.shape(self.problem, spans=self.spans(self.walk.CHUNK), chunk=self.walk.CHUNK)

    def launch_walk(self, draft, shape, read, states, written, walk=None, F=None):
        """Launches the walk; and before it, if sequences are cut, what computes the states from which segments start.

        read, states, written : arguments of the walk by name; those of `states` are [N, H, K, V]. `written`: what only
            a walk with outputs writes
        walk : one of `walk_of`; None: `self.walk`
        F : the memory for that of all segments; of a walk only backwards, F itself
        """
        K, V, P, walk, all_segments = shape.K, shape.V, self.segments, walk or self.walk, shape.B * shape.row_sequences
        read, heads, starts = read | {"shape": shape, "P": P}, all_segments * shape.H, None
        if P > 1:
            # What walks backwards write follows what those forwards do, even where there are none of these.
            memory, starts = memory_of_segments(draft, shape, 2 if walk.only_backwards else walk.directions, FLOAT32)
            F = memory if F is None else F
            first_states = {name: x for name, x in states.items() if name in ("initial", "dht")}
            first, of_F = walk.summary, 0 if walk.only_backwards else walk.summary.grid(K)
            blocks = heads * (walk.directions * first.grid(V) + of_F)
            draft.launch(first, blocks, **read, **first_states, starts=starts, F=F)
            join_segments(draft, F, starts, P, backwards=walk.only_backwards)
        draft.launch(walk, heads * walk.directions * walk.grid(V), **read, **states, **written, starts=starts)


def shape_of_F(all_segments, H, K) -> tuple[int, int, int, int]:
    """Of F of all segments. Rows are padded to a multiple of 4 numbers: F is copied 16 bytes at a time."""
    return all_segments, H, K, 4 * ceil_div(K, 4)


def memory_of_segments(draft, shape, directions, dtype):
    """(F of all segments, `starts`): new arrays. Walks write G to `starts`, in the place of the next segment, and G' in
    that of the previous one; `join_segments` overwrites them with the state, or the gradient, from which the walk of
    that segment starts."""
    all_segments, H, K, V = shape.B * shape.row_sequences, shape.H, shape.K, shape.V
    F = draft.empty(shape_of_F(all_segments, H, K), dtype)
    return F, draft.empty((directions, all_segments, H, K, V), dtype)


def join_segments(draft, F, starts, P, forgets=None, backwards=False):
    """Launches the kernel that joins P segments of each sequence. F, starts: those of `memory_of_segments`. forgets:
    int64 numbers [all segments, H], whether F of a segment is 0; None if that is not known. backwards: whether the
    second direction of `starts` is joined alone."""
    directions, all_segments, H, K, V = starts.shape
    join, N = DeltaJoinSegments(starts.dtype, channels(K)), all_segments // P
    blocks = (1 if backwards else directions) * N * H * ceil_div(V, join.BV)
    sizes = {"N": N, "P": P, "H": H, "K": K, "V": V}
    draft.launch(join, blocks, F=F, starts=starts, forgets=forgets, **sizes, backwards=backwards)


def join_time(segments, K) -> float:
    """An estimate, in microseconds on an H200, for joining so many segments whose states have K channels."""
    return (segments - 2) * (0.4 + K * K * 2.5e-4)


class CutByToken(SegmentCut):
    """How walks token by token over some heads of a call are cut.

    heads : how many heads are computed at a time
    backward : the kernel of gradients, or None for a forward pass

    Times are in microseconds. A pair is (a token's time in a block that is alone on a multiprocessor; its time per
    block where many share a multiprocessor). The larger of two counts: the first; and the second times the blocks of a
    multiprocessor. The times are not fitted: on an H200 walks take 2 to 10 times as long. Of 26 walks that were timed
    there, none became slower by the cuts that the times choose.
    """

    FORWARD_TIMES = {1: (0.16, 0.08), 2: (0.2, 0.13), 4: (0.3, 0.22)}  # by columns of a lane
    BACKWARD_TIMES, SUMMARY_TIMES = (0.6, 0.35), (0.3, 0.15)  # of the backward walk; of the walk for G' alone
    LAUNCHES_TIME = 15.0  # of the launches that a cut adds
    SHORTEST = 32  # tokens of a segment; it also has at least as many tokens as a state has channels
    MOST = 128  # segments
    WORTH = 0.7  # sequences are cut if that takes less than this part of the time

    def __init__(self, problem, device, heads, backward=None):
        self.problem, self.device, self.heads, self.backward = problem, device, heads, backward
        self.all_heads, shortest = problem.sizes["N"] * heads, max(self.SHORTEST, problem.sizes["K"])
        most = 1 if problem.mode == "recurrent" else min(problem.spans.longest // shortest, self.MOST)
        self.segments = min((1, *range(3, most + 1)), key=self.time)
        self.forward = self.forward_kernel(self.segments)

    def forward_kernel(self, segments):
        """The forward walk for so many segments."""
        (K, V), heads = self.problem.shape("K V"), self.all_heads * segments
        return DeltaRecurrentForward.fitting(*instance_of(self.problem), K, V, heads, self.device.multiprocessors)

    def time(self, segments) -> float:
        """An estimate for all walks of so many segments; for whole sequences WORTH times the estimate."""
        (K, V), longest = self.problem.shape("K V"), self.problem.spans.longest
        P, forward = segments, self.forward_kernel(segments)

        def token_time(times, tiles):
            alone, one_of_many = times
            return max(alone, one_of_many * ceil_div(self.all_heads * tiles, self.device.multiprocessors))

        tiles_of_V, tiles_of_F = ceil_div(V, forward.BV), ceil_div(K, forward.BV)
        backward_tiles = ceil_div(V, self.backward.BV) if self.backward else 0
        of_token = token_time(self.FORWARD_TIMES[forward.columns], P * tiles_of_V)
        if self.backward:
            of_token += token_time(self.BACKWARD_TIMES, P * backward_tiles)
        if P == 1:
            return longest * of_token * self.WORTH
        of_token += token_time(self.FORWARD_TIMES[forward.columns], (P - 1) * tiles_of_V + (P - 2) * tiles_of_F)
        if self.backward:
            of_token += token_time(self.SUMMARY_TIMES, (P - 1) * backward_tiles)
        return ceil_div(longest, P) * of_token + join_time(P, K) + self.LAUNCHES_TIME

    def shape(self, draft):
        tokens = self.backward and self.backward.TOKENS  # between stored states
        return replace(draft.shape(self.problem, spans=self.spans(tokens or 1), chunk=tokens), H=self.heads)

    def launch_starts(self, draft, read) -> dict:
        """Launches what computes the states from which segments start, if sequences are cut. Returns the walks'
        arguments `starts` and `P`. `read`: as in `launch_by_token`."""
        P, shape = self.segments, read["shape"]
        if P == 1:
            return {"starts": None, "P": 1}
        F, starts = memory_of_segments(draft, shape, 1 if self.backward is None else 2, self.problem.compute_dtype)
        segment_args = {"starts": starts, "P": P}
        launch_by_token(draft, self.forward, read | segment_args, shape.K, F=F)  # given F, it has no outputs
        if self.backward:
            launch_by_token(draft, replace(self.backward, outputs=False), read | segment_args)
        join_segments(draft, F, starts, P)
        return segment_args


class CutOfSmallHeads(SegmentCut):
    """How the walks of small heads, token by token, are cut. `gradient`: whether they compute gradients. Times are in
    microseconds, for an H200; those of a token by the kernel's D, as pairs like those of `CutByToken`, of warps in
    place of blocks."""

    TOKEN_TIMES = {8: (0.075, 0.019), 16: (0.115, 0.021)}  # of a rule with one write
    WITHOUT_OUTPUTS = 0.75  # times as long
    GRADIENT_TIMES, SUMMARY_TIMES = (1.0, 0.3), (0.3, 0.1)  # of the same rule, whatever D is; of G' alone
    TWO_WRITES = 1.6  # times as long if a token writes twice, as in RWKV-7
    IN_WORDS = 2.0  # times as long alone if rows are no whole pieces of 16 bytes, and are not copied to such
    LAUNCH_TIME, LAUNCHES_TIME = 8.0, 15.0  # of a walk; of the two launches that a cut adds
    GRADIENTS_TIME = 30.0  # of what a cut of gradients adds besides
    SHORTEST, MOST = 64, 256  # tokens of a segment; segments
    START = 32

    def __init__(self, problem, device, gradient=False):
        self.problem, self.device, self.gradient = problem, device, gradient
        D = SMALL_SIZES[max(problem.shape("K V")) > SMALL_SIZES[0]]
        self.forward, self.backward = (cls(*instance_of(problem), D) for cls in (DeltaSmallForward, DeltaSmallBackward))
        self.kernel = self.backward if gradient else self.forward
        self.in_words = common_bytes(*rows_of(problem)) in (4, 8)
        self.steps = problem.spans.longest
        most = 1 if problem.mode == "recurrent" else min(self.steps // self.SHORTEST, self.MOST)
        self.segments = min((1, *range(3, most + 1)), key=self.time)

    def time(self, segments) -> float:
        """An estimate for a call, or its gradients, whose sequences are cut into so many segments."""
        K, longest = self.problem.sizes["K"], ceil_div(self.steps, segments)

        def walk_time(kernel, times, states):
            """Of a walk of so many states of each sequence's head."""
            alone, one_of_many = times
            warps = self.waves(segments, states / kernel.heads)
            token_time = max(alone * (self.IN_WORDS if self.in_words else 1), one_of_many * warps)
            return longest * token_time * (self.TWO_WRITES if kernel.rule == DPLR else 1)

        forward_times = self.TOKEN_TIMES[self.kernel.D]
        time = self.LAUNCH_TIME + walk_time(
            self.kernel, self.GRADIENT_TIMES if self.gradient else forward_times, segments
        )
        if segments == 1:
            return time
        time += self.WITHOUT_OUTPUTS * walk_time(self.forward, forward_times, 2 * segments)
        time += join_time(segments, K) + self.LAUNCHES_TIME
        if self.gradient:
            time += walk_time(self.backward, self.SUMMARY_TIMES, segments) + self.GRADIENTS_TIME
        return time

    def launch(self, draft, read, **written):
        """Launches the walk; and before it, if sequences are cut, what computes the states, and their gradients, from
        which segments start. read, written: arguments of the walk by name."""
        shape, starts = read["shape"], None
        states, read = shape.B * shape.row_sequences * shape.H, read | {"P": self.segments}

        def launch(kernel, states, read, **others):
            launch_reading(draft, kernel, ceil_div(states, kernel.heads), read, starts=starts, **others)

        if self.segments > 1:
            F, starts = memory_of_segments(draft, shape, 1 + self.gradient, FLOAT32)
            launch(replace(self.forward, outputs=False), 2 * states, read, F=F)
            if self.gradient:
                launch(replace(self.backward, outputs=False), states, read | {"dh0": None})
            join_segments(draft, F, starts, self.segments)
        launch(self.kernel, states, read, **written)


def launch_by_token(draft, kernel, read, more_columns=0, **written):
    """Launches a kernel that goes token by token, for the columns of V and so many `more_columns`, those of F. read,
    written: as in `launch_reading`."""
    shape, tiles_of_block = read["shape"], read["tiles"] if "tiles" in kernel.names else 1
    tiles = ceil_div(shape.V, kernel.BV * tiles_of_block) + ceil_div(more_columns, kernel.BV)
    launch_reading(draft, kernel, shape.B * shape.row_sequences * shape.H * tiles, read, **written)


# the names that `launch_reading` knows
READ = {member.name for kernel in (DeltaRecurrentBackward, DeltaDplrPrepare) for member in kernel.arguments}


def launch_reading(draft, kernel, blocks, read, **others):
    """Launches a kernel with those of `read` that it has: arguments by name that some kernels of a call read. It must
    have all of the `others`."""
    assert read.keys() <= READ, read.keys() - READ
    draft.launch(kernel, blocks, **{name: x for name, x in read.items() if name in kernel.names}, **others)
