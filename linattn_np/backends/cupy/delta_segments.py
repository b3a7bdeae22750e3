"""How the walks over a delta rule's states are cut into segments, on every card, and the kernels they take."""

from __future__ import annotations

from dataclasses import replace

from .delta_kernels import (
    DPLR,
    GATED_DELTA,
    KDA,
    DeltaBackwardStates,
    DeltaChannelPrepare,
    DeltaDplrPrepare,
    DeltaJoinSegments,
    DeltaPrepare,
    DeltaRecurrentForward,
    DeltaScan,
)
from .gated_kernels import TILES, channels
from .plan import FLOAT32, ceil_div


def chunk_kernels(problem, device, gradient, segments=1):
    """What prepares chunks, and the walk over states, for every card; `gradient`: the walk in both directions."""
    walk, (N, H, K, V) = DeltaBackwardStates if gradient else DeltaScan, problem.shape("N H K V")
    heads, rule = walk.directions * N * H * segments, rule_of(problem.op)
    fitting = walk.fitting(problem.dtype, K, V, rule, heads, device)
    prepares = {GATED_DELTA: DeltaPrepare, KDA: DeltaChannelPrepare, DPLR: DeltaDplrPrepare}
    return prepares[rule](problem.dtype, gate_dtype(problem), fitting.BK, gradient), fitting


def rule_of(op):
    """The template argument `Rule` of an operator, or of a step."""
    if "a" in op.arrays:
        return DPLR
    return KDA if any("K" in op.arrays[name].split() for name in op.decays) else GATED_DELTA


def gate_dtype(problem):
    """The dtype in which kernels get gates and write strengths: their own if they share one, else float32."""
    dtypes = {problem[name].dtype for name in (*problem.op.decays, *problem.op.strengths)}
    return dtypes.pop() if len(dtypes) == 1 else FLOAT32


class Cut:
    """How the walk over states is cut into segments, and the kernels in chunks of a call or of its gradients.

    Few heads leave multiprocessors idle, as one block goes through all chunks of 64 or 128 columns of a head. So
    sequences are cut into segments: a first walk finds what each segment does to a state, and to the gradient of one
    (F, by a walk whose values are zeros and whose state is the identity at first, and G, by one from a state of zeros).
    Another kernel joins them to the states from which segments start, and the walk that computes outputs takes all
    segments at the same time. F of the segments at both ends, and G of the last, are not needed. Times are in
    microseconds, of an H200.
    """

    PREPARE_TIME = 4.3  # of a multiprocessor's chunk under a gate for all channels of a token
    CHUNK_TIME, TWO_CHUNKS = 1.0, 1.3  # of 64 columns of a multiprocessor, and of two such at the same time
    SEGMENT_TIME, MORE_LAUNCHES = 9.0, 12.0  # of a segment as it is joined; of two launches

    def __init__(self, problem, device, gradient=False):
        self.problem, self.device = problem, device
        self.prepare, self.walk = chunk_kernels(problem, device, gradient)
        self.chunks = ceil_div(int(problem.spans.lengths.max(initial=0)), self.walk.CHUNK)
        self.segments = min((1, *range(3, min(self.chunks // 4, 64) + 1)), key=self.time)  # two would gain nothing
        self.walk = chunk_kernels(problem, device, gradient, self.segments)[1]

    def time(self, segments) -> float:
        """An estimate for the walks of a pass that is cut into so many segments."""
        N, H, K, V = self.problem.shape("N H K V")
        of_F, of_values = ceil_div(K, TILES[0]), self.walk.directions * ceil_div(V, TILES[0])

        def of_walk(tiles):
            twos, one = divmod(ceil_div(N * H * tiles, self.device.multiprocessors), 2)
            return ceil_div(self.chunks, segments) * (twos * self.TWO_CHUNKS + one * self.CHUNK_TIME)

        if segments == 1:
            return of_walk(of_values)
        joined = (segments - 2) * self.SEGMENT_TIME + self.MORE_LAUNCHES
        return of_walk(segments * of_values) + of_walk((segments - 1) * of_values + (segments - 2) * of_F) + joined

    @property
    def tiles(self):
        """The sizes that `explain` shows, beside those of kernels."""
        return {"segments": self.segments} if self.segments > 1 else {}

    @property
    def whole_time(self) -> float:
        """An estimate for a pass: what prepares chunks, and the walks."""
        N, H = self.problem.shape("N H")
        return N * H * self.chunks * self.PREPARE_TIME / self.device.multiprocessors + self.time(self.segments)

    def shape(self, draft):
        spans = self.problem.spans.segments(self.segments, self.walk.CHUNK) if self.segments > 1 else None
        return draft.shape(self.problem, spans=spans, chunk=self.walk.CHUNK)

    def launch_walk(self, draft, shape, read, states, written):
        """Launches the walk, and before it what finds the states from which segments start."""
        (K, V), P, walk, spans = (shape.K, shape.V), self.segments, self.walk, shape.B * shape.count
        read, tiles, starts = read | {"shape": shape, "P": P}, walk.directions * walk.grid(V), None
        if P > 1:
            F, starts = memory_of_maps(draft, shape, walk.directions, FLOAT32)
            given = {name: x for name, x in states.items() if name in ("initial", "dht")}
            blocks = spans * shape.H * (tiles + walk.grid(K))
            draft.launch(replace(walk, outputs=False), blocks, **read, **given, starts=starts, F=F)
            join_segments(draft, F, starts, P)
        draft.launch(walk, spans * shape.H * tiles, **read, **states, **written, starts=starts)


def memory_of_maps(draft, shape, directions, dtype):
    """(F, starts): new arrays for what segments do to states, and for the states from which they start."""
    spans, H, K, V = shape.B * shape.count, shape.H, shape.K, shape.V
    F = draft.empty((spans, H, K, 4 * ceil_div(K, 4)), dtype)
    return F, draft.empty((directions, spans, H, K, V), dtype)


def join_segments(draft, F, starts, P):
    """Launches the kernel that makes the states from which segments start, P a sequence, of what each of them does."""
    directions, spans, H, K, V = starts.shape
    join, N = DeltaJoinSegments(starts.dtype, channels(K)), spans // P
    blocks = directions * N * H * ceil_div(V, join.BV)
    draft.launch(join, blocks, F=F, starts=starts, N=N, P=P, H=H, K=K, V=V)


class CutByToken:
    """How walks token by token over some heads of a call are cut into segments: as `Cut`, with one walk a direction.

    instance : the first template arguments of kernels
    backward : the kernel of gradients, where they are computed

    Times are in microseconds: those of a token are a block's that has a multiprocessor alone, and a multiprocessor's
    for each of many blocks. They are estimates, not fitted: on an H200 walks take 2 to 10 times as long. Of 26 walks
    that were timed there, none became slower by the cuts that they choose.
    """

    FORWARD = {1: (0.16, 0.08), 4: (0.3, 0.22)}  # by columns of a lane
    BACKWARD, SUMMARY = (0.6, 0.35), (0.3, 0.15)
    JOINED, JOINED_CHANNEL, MORE_LAUNCHES = 1.5, 0.03, 15.0  # of a segment as it is joined; of three launches
    SHORTEST = 32  # tokens of a segment, which has as many as a state has channels, too
    MOST = 128
    WORTH = 0.7  # sequences are cut where that takes less than so much of the time

    def __init__(self, problem, device, instance, heads, backward=None):
        self.problem, self.device, self.instance, self.backward = problem, device, instance, backward
        self.heads = heads
        self.pairs, self.longest = problem.sizes["N"] * heads, int(problem.spans.lengths.max(initial=0))
        shortest = max(self.SHORTEST, problem.sizes["K"])
        most = 1 if problem.mode == "recurrent" else min(self.longest // shortest, self.MOST)
        self.segments = min((1, *range(3, most + 1)), key=self.time)
        self.forward = self.forward_of(self.segments)

    def forward_of(self, segments):
        """The kernel that goes forwards through so many segments."""
        K, V = self.problem.shape("K V")
        return DeltaRecurrentForward.fitting(*self.instance, K, V, self.pairs * segments, self.device.multiprocessors)

    def time(self, segments) -> float:
        """An estimate for all walks, of so many segments; of whole sequences WORTH of it."""
        (K, V), P, forward = self.problem.shape("K V"), segments, self.forward_of(segments)

        def of_walk(times, blocks):
            alone, one_of_many = times
            return max(alone, one_of_many * ceil_div(self.pairs * blocks, self.device.multiprocessors))

        of_values, of_F = ceil_div(V, forward.BV), ceil_div(K, forward.BV)
        of_token = of_walk(self.FORWARD[forward.columns], P * of_values)
        joined = 0
        if self.backward:
            of_token += of_walk(self.BACKWARD, P * ceil_div(V, self.backward.BV))
        if P > 1:
            of_token += of_walk(self.FORWARD[forward.columns], (P - 1) * of_values + (P - 2) * of_F)
            if self.backward:
                of_token += of_walk(self.SUMMARY, (P - 1) * ceil_div(V, self.backward.BV))
            joined = self.MORE_LAUNCHES + (P - 2) * (self.JOINED + self.JOINED_CHANNEL * K)
        return ceil_div(self.longest, P) * of_token * (self.WORTH if P == 1 else 1) + joined

    @property
    def tiles(self):
        """The sizes that `explain` shows, beside those of kernels."""
        return {"segments": self.segments} if self.segments > 1 else {}

    def shape(self, draft):
        chunk, spans = self.backward and self.backward.TOKENS, None
        if self.segments > 1:
            spans = self.problem.spans.segments(self.segments, chunk or 1)
        return replace(draft.shape(self.problem, spans=spans, chunk=chunk), H=self.heads)

    def launch_starts(self, draft, read) -> dict:
        """Launches what finds the states from which segments start; returns the kernels' arguments that say so."""
        P, shape = self.segments, read["shape"]
        if P == 1:
            return {"starts": None, "P": 1}
        F, starts = memory_of_maps(draft, shape, 1 if self.backward is None else 2, self.problem.compute_dtype)
        at = {"starts": starts, "P": P}
        launch_by_token(draft, self.forward, read | at, shape.K, F=F)
        if self.backward:
            launch_by_token(draft, replace(self.backward, outputs=False), read | at)
        join_segments(draft, F, starts, P)
        return at


def launch_by_token(draft, kernel, read, more_columns=0, **written):
    """Launches a kernel that goes token by token. `read`: what all such kernels of a call read, by name."""
    shape = read["shape"]
    tiles = ceil_div(shape.V, kernel.BV) + ceil_div(more_columns, kernel.BV)
    arguments = {name: x for name, x in read.items() if name in kernel.names} | written
    draft.launch(kernel, shape.B * shape.count * shape.H * tiles, **arguments)
