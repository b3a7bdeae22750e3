"""How the walk over a delta rule's states in chunks is cut into segments, on every card, and the kernels it takes."""

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
    DeltaScan,
)
from .gated_kernels import TILES
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
            F = draft.empty((spans, shape.H, K, 4 * ceil_div(K, 4)), FLOAT32)
            starts = draft.empty((walk.directions, spans, shape.H, K, V), FLOAT32)
            given = {name: x for name, x in states.items() if name in ("initial", "dht")}
            blocks = spans * shape.H * (tiles + walk.grid(K))
            draft.launch(replace(walk, outputs=False), blocks, **read, **given, starts=starts, F=F)
            join, N = DeltaJoinSegments(walk.BK), spans // P
            blocks = walk.directions * N * shape.H * ceil_div(V, join.BV)
            draft.launch(join, blocks, F=F, starts=starts, N=N, P=P, H=shape.H, K=K, V=V)
        draft.launch(walk, spans * shape.H * tiles, **read, **states, **written, starts=starts)
