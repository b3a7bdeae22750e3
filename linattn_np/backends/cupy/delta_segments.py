"""How a delta rule's forward pass in chunks is cut into segments, on every card, and the kernels it takes."""

from __future__ import annotations

from .delta_kernels import (
    DPLR,
    GATED_DELTA,
    KDA,
    KINDS_OF_RESIDUALS,
    DeltaChannelPrepare,
    DeltaDplrPrepare,
    DeltaPrepare,
    DeltaScan,
)
from .gated_kernels import TILES
from .plan import FLOAT32, ceil_div


def forward_kernels(problem, device):
    """The kernels in chunks of a forward pass, for every card: what prepares chunks, and the walk over states."""
    N, H, K, V = problem.shape("N H K V")
    scan = DeltaScan.fitting(problem.dtype, K, V, KINDS_OF_RESIDUALS[rule_of(problem.op)], N * H, device)
    return prepare_kernel(problem, scan.BK, gradient=False), scan


def prepare_kernel(problem, BK, gradient):
    """What prepares chunks of at most BK channels; `gradient`: for walks in both directions."""
    kinds = {GATED_DELTA: DeltaPrepare, KDA: DeltaChannelPrepare, DPLR: DeltaDplrPrepare}
    return kinds[rule_of(problem.op)](problem.dtype, gate_dtype(problem), BK, gradient)


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
    """How a forward pass in chunks is cut into segments, and its kernels.

    Few heads leave multiprocessors idle, as one block goes through all chunks of 64 or 128 columns of a head. So
    sequences are cut into segments: a first walk finds what each segment does to a state (F, by a walk whose values are
    zeros and whose state is the identity at first, and G, by one from a state of zeros), and the walk that computes
    outputs takes all segments at the same time. Times are in microseconds, of an H200.
    """

    PREPARE_TIME = 4.3  # of a multiprocessor's chunk under a gate for all channels of a token
    CHUNK_TIME, SEGMENT_TIME, MORE_LAUNCHES = 1.0, 9.0, 12.0  # of a block's chunk; of a segment as it is joined

    def __init__(self, problem, device):
        self.problem, self.device = problem, device
        self.prepare, scan = forward_kernels(problem, device)
        longest = int(problem.spans.lengths.max(initial=0))
        self.chunks = ceil_div(longest, scan.CHUNK)
        counts = [1 << n for n in range(7) if 4 << n <= self.chunks or n == 0]
        self.segments = min(counts, key=self.time)
        self.scan = self.walk(problem.sizes["V"])
        self.of_segments = self.walk(sum(problem.shape("K V")), outputs=False)

    def walk(self, columns, outputs=True):
        """The kernel that walks over so many columns of states."""
        problem, (N, H, K) = self.problem, self.problem.shape("N H K")
        kinds, heads = KINDS_OF_RESIDUALS[rule_of(problem.op)], N * H * self.segments
        return DeltaScan.fitting(problem.dtype, K, columns, kinds, heads, self.device, outputs=outputs)

    def time(self, segments) -> float:
        """An estimate for the walks of a pass that is cut into so many segments."""
        N, H, K, V = self.problem.shape("N H K V")
        chunks = ceil_div(self.chunks, segments)

        def of_walk(*columns):
            blocks = sum(ceil_div(n, TILES[0]) for n in columns) * N * H * segments
            return ceil_div(blocks, 2 * self.device.multiprocessors) * chunks * self.CHUNK_TIME

        if segments == 1:
            return of_walk(V)
        return of_walk(V) + of_walk(K, V) + segments * self.SEGMENT_TIME + self.MORE_LAUNCHES

    def shape(self, draft):
        spans = self.problem.spans.segments(self.segments, self.scan.CHUNK) if self.segments > 1 else None
        return draft.shape(self.problem, spans=spans, chunk=self.scan.CHUNK)

    @property
    def whole_time(self) -> float:
        """An estimate for a pass: what prepares chunks, and the walks."""
        N, H = self.problem.shape("N H")
        return N * H * self.chunks * self.PREPARE_TIME / self.device.multiprocessors + self.time(self.segments)
