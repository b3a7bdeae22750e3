"""How a call is computed on a card: by which kernels, and in how many segments its sequences are cut.

Every such decision is made here, once for a plan: `forward_cut` and `backward_cut` for gates of every channel,
`scalar_forward_cut` and `scalar_backward_cut` for gates that channels share. Planners, summaries and `explain` read the
result. A decision says how long a call takes, never what it computes.

Few heads leave multiprocessors idle. Then sequences are cut into segments, which blocks compute at the same time: a
first pass summarises what each segment does to a state, a scan joins the summaries, and the main pass starts every
segment from its state. Hopper is a card of compute capability 9.0, which has kernels of its own; portable kernels run
on every card. Where several cuts are possible, each candidate that the card can hold has a cost, and the
cheapest is taken. Costs are in tokens: the time in which one block of the pass's main kernel takes a token of 128
channels and columns. `benchmarks/fit_segments.py` measures cuts that it forces, and fits the constants below to a card;
these are an H200's, in bfloat16. tests/test_segments.py holds cuts to those that were measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from ...array_kinds import BFLOAT16
from .gated_kernels import (
    CLUSTER_SPLIT_K,
    CLUSTER_SPLIT_V,
    IN_TURN,
    ONE_EACH,
    PANEL,
    SCALAR,
    SEGMENT_STATE,
    SINGLE_PASS,
    SPLIT_CHANNELS,
    TILES,
    GatedBackwardChannels,
    GatedBackwardKeysSm90,
    GatedBackwardQueriesSm90,
    GatedBackwardSegmentsSm90,
    GatedBackwardSm90,
    GatedBackwardStates,
    GatedBackwardValues,
    GatedForward,
    GatedForwardSm90,
    GatedSegmentStates,
    read_order,
)
from .plan import (
    FLOAT32,
    aligned16,
    are_large,
    ceil_div,
    common_bytes,
    has_rows,
    mappable,
    mappable_either_way,
    mappable_once_copied,
    token_arrays,
)
from .scalar_decay_kernels import ScalarBackwardSegments, WeightedSums
from .small_head_kernels import SIZES, GatedSmallBackward, GatedSmallForward, GatedSmallStates
from .wide_head_kernels import GatedWideForward, GatedWideOperands

# -- constants ---------------------------------------------------------------------------------------------------------
RESERVED = 1024  # bytes of shared memory that the driver takes of every block
SEGMENT = 128  # tokens of the shortest segment where no cost decides
MOST_PARTS = 16  # of a segment that is summarised
HARDLY_MORE = 1.01  # times the least cost: then the cut in fewer segments is taken

# Heads of at most 16 channels and columns.
SMALL_TOKENS, SMALL_TOKENS_ON_HOPPER = 1 << 15, 1 << 17  # tokens of all heads from which on these kernels are faster
SMALL_SPARED = 128  # tokens that a cut must spare a block: the time of two launches

# Forward on Hopper, `forward_cost`: 70 shapes, each within 3 % of its best cut.
CUT_SMALL, CUT_LARGE = 300, 520  # the launches of a cut, of up to 64 channels and columns, and of more
CUT_TOKEN = 0.3  # to summarise a token
CUT_JOINED, CUT_STATE = 5, 0.5  # to join one segment more; its state of 128 columns, for each head
CUT_HEAD, CUT_SHARED = 1, 3  # for each head, if every block has a multiprocessor; if two blocks share one
UNSAVED = 14  # to summarise again what the forward pass does not save if segments are no power of 2 of chunks
SPARED = 600  # tokens that a cut must spare a block where no cost decides: two launches and the states
SPLIT_AND_CUT = 4096  # tokens from which on clusters that share columns take sequences in two
FORWARD_START, FORWARD_SUMMARY = 32, 0.5  # a block's start, to summarise a token, beside whole sequences
PART_START = 256  # the start and the state of a part that is summarised

# Backward on Hopper, `backward_cost`: 50 shapes of 1 to 64 heads and 256 to 4,096 tokens, within 3 %.
BLOCK_START = 64  # a block's start
SUMMARY = 0.32  # to summarise a token in both directions, which memory bounds
SHARED = 0.66  # of a wave's time, if two blocks share each multiprocessor, as blocks of 64 channels and columns do
JOIN_START, JOINED = 35, 4  # the launches that summarise and join; to join one segment more
STATE = 0.8  # a segment's state of 128 channels and columns
MOST_WAVES = 8  # of segments: with so many the last wave matters little
MOST_IN_TURN = {1: 512, 2: 128}  # mean tokens up to which blocks take sequences in turn, by blocks a multiprocessor

# Wide heads backward on Hopper, tiles of a state or the portable kernels, `worth_tiles`: 97 shapes of 64 to 4,096
# tokens and 4 to 256 heads; the choice costs 1 % more than the better way on average, 28 % at worst.
TILE_START, SHARED_GATE_START = 20, 180  # the launches of a tile; of one whose channels share a gate
NARROW_TILE = 0.8  # of a tile's time, for one with half of its channels or half of its columns
PORTABLE_START, PORTABLE_SHARED_GATE_START = 160, 400  # the portable kernels' launches; with a gate to spread
PORTABLE_CHANNELS, PORTABLE_COLUMNS = 0.25, 0.88  # portable, of a tile's time: 64 channels; and for every 128 columns
PORTABLE_FINER = 1.7  # times as long in tf32


# -- the card ----------------------------------------------------------------------------------------------------------
def resident_blocks(kernel, device) -> int:
    """How many of a kernel's blocks are on the card at the same time."""
    fitting = device.shared_per_multiprocessor // (kernel.shared_bytes + RESERVED)
    return device.multiprocessors * max(1, min(kernel.resident, fitting))


def segments_that_fill(blocks, longest, capacity, spared=0) -> int:
    """Segments of a sequence, so that `blocks` blocks of the uncut problem become at most `capacity`; one if the cut
    spares a block fewer tokens than `spared`."""
    P = max(1, min(capacity // max(blocks, 1), longest // SEGMENT))
    return P if longest * (P - 1) >= spared * P else 1


def widest_that_fills(kernels, blocks, device):
    """The kernel with the widest blocks whose `blocks(kernel)` still fill the card, else that with the narrowest. Wide
    blocks need fewer loads: their columns share decays and keys."""
    return next((each for each in reversed(kernels) if blocks(each) >= resident_blocks(each, device)), kernels[0])


def tf32_products(problem) -> int:
    """How many products of tf32 numbers make one product: float16 numbers are tf32 numbers already."""
    return 3 if problem.dtype == FLOAT32 and problem.precision == "float32" else 1


# -- one problem -------------------------------------------------------------------------------------------------------
# The ways of computing a pass: by the kernels named, or as the comment says.
SMALL, HOPPER, WIDE, PORTABLE = "small heads", "Hopper", "wide heads", "every card"
TILED = "tiles of the state"  # Hopper's own backward kernels, for one tile of 128 channels and columns after the other
COPIED = "wider copies"  # the same call on copies of its arrays whose rows are whole pieces of 16 bytes


def longest_sequence(problem) -> int:
    """Tokens of the longest sequence."""
    return int(problem.spans.lengths.max(initial=0))


def gate_dtype(problem):
    """The dtype of the gate: of the fourth array, since arrays are q, k, v, g and perhaps u under any names."""
    return list(problem.arrays.values())[3].dtype


def are_small(problem, device) -> bool:
    """Whether the kernels of small heads, a warp of which computes several, compute a problem."""
    B, H, T, K, V = problem.shape("B H T K V")
    on_hopper = device.capability == 90 and problem.dtype.itemsize == 2  # Hopper's own kernels need fewer tokens
    return max(K, V) <= SIZES[-1] and B * H * T >= (SMALL_TOKENS_ON_HOPPER if on_hopper else SMALL_TOKENS)


def are_wide(problem, device) -> bool:
    """Whether the kernels of wide heads compute a problem: of more channels than one launch of the others has, if a
    block holds all of them, and has room for their operands."""
    K, dtype = problem.sizes["K"], problem.dtype
    if dtype != BFLOAT16 or not TILES[-1] < K <= GatedWideForward.MOST_TILES * GatedWideForward.TILE:
        return False
    kernels = GatedWideForward.fitting(dtype, K), GatedWideOperands(read_order(problem.op), dtype, FLOAT32)
    return max(kernel.shared_bytes for kernel in kernels) <= device.shared_per_block


def fits_hoppers_forward(problem, device, arrays) -> bool:
    """Whether Hopper's own kernel computes a problem from `arrays`: for at most the channels of two blocks, if tensor
    maps can describe the arrays, or else copies of them: copies and this kernel cost less than the portable kernels."""
    arrays = [*arrays, *([] if problem.out is None else [problem.out])]
    own = device.capability == 90 and problem.dtype.itemsize == 2 and problem.sizes["K"] <= 2 * TILES[-1]
    return own and mappable_once_copied(arrays)


# -- forward -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class BackwardSegments:
    """The segments of every sequence in Hopper's own backward kernels."""

    count: int = 0  # 0 if these kernels cannot compute the problem
    short: int = 0  # tokens of the segment that each of the two passes begins with, if the rest is one longer segment


NO_PULLBACK = BackwardSegments()


@dataclass(frozen=True, eq=False)
class ForwardCut:
    """How a forward pass is computed: `kernel` gives o, `summary` what a segment does to a state. The way COPIED has
    neither: the cut of the copies has them."""

    way: str
    kernel: Any = None
    summary: Any = None
    segments: int = 1  # of every sequence
    first: int = 0  # tokens of the first of two segments of which the second has the rest; 0 for equal segments
    spans: Any = None  # the token ranges of all segments
    parts: tuple[int, int] = (1, 1)  # of each summarised segment: of all but a sequence's last one, or of all
    starts_are_the_backwards: bool = False  # whether the pullback's segments start from the same states
    marks: int = 0  # chunks between the states that the kernel leaves on its way, at which the pullback's segments
    # start: a power of two; 0 for none
    backward_segments: int = 0  # of the pullback that may take over states

    @property
    def fits(self):
        """The function that says of an array whether the kernel of o reads or writes it without a copy. Hopper's
        kernels do so even if tokens run backwards in memory, except for CLUSTER_SPLIT_K, which lacks the registers."""
        if self.way != HOPPER:
            return has_rows
        return mappable if getattr(self.kernel, "schedule", None) == CLUSTER_SPLIT_K else mappable_either_way

    @property
    def gives_starts(self) -> bool:
        """Whether this pass has the states at the starts of the pullback's segments."""
        return self.starts_are_the_backwards or self.marks > 0

    @property
    def tiles(self) -> dict:
        return self.kernel.tiles | ({"segments": self.segments} if self.segments > 1 else {})


def cut_into(problem, device, way, kernel, summary, P, first=0, backward=NO_PULLBACK) -> ForwardCut:
    """The cut into P equal segments; or into two, of which the first has `first` tokens, if that is not 0. `backward`:
    the segments of the pullback that follows."""
    N, H, V = problem.shape("N H V")
    spans = problem.spans.split_at(first) if first else problem.spans.segments(P, summary.CHUNK)
    but_last, of_all = (
        1 if way == SMALL else parts(summary, N * H, V, P, longest_sequence(problem), last, device) for last in (0, 1)
    )
    same_starts = not first and 1 < P == backward.count
    chunks = 0 if first or not backward.count or backward.short else marks(problem, P, backward.count)
    return ForwardCut(way, kernel, summary, P, first, spans, (but_last, of_all), same_starts, chunks, backward.count)


def marks(problem, P, backward_segments) -> int:
    """`ForwardCut.marks`: the chunks of a segment of the pullback, if all of its segments start within one of the
    forward pass's P segments or with one; else 0."""
    shortest, longest, chunk = int(problem.spans.lengths.min()), longest_sequence(problem), GatedForwardSm90.CHUNK
    chunks, forward_chunks = (ceil_div(longest, count * chunk) for count in (backward_segments, P))
    same_ends = P == 1 or forward_chunks * P == chunks * backward_segments
    nested = backward_segments > P and backward_segments % P == 0 and same_ends
    none_empty = shortest == longest > (backward_segments - 1) * chunks * chunk
    return chunks if nested and none_empty and chunks & chunks - 1 == 0 else 0


def without_a_short_segment(problem, device, cut) -> ForwardCut:
    """`cut`, or the cut into whole sequences if the segments of `cut` are unequal: for a pass that gives no o."""
    return cut_into(problem, device, cut.way, cut.kernel, cut.summary, 1) if cut.first else cut


def forward_cut(problem, device) -> ForwardCut:
    """For gates of every channel. Where kernels would load 2 bytes at a time, copies and they together are faster."""
    arrays = token_arrays(problem)
    if are_large(arrays) and "final_state" not in problem.options and common_bytes(*arrays) == 2:
        return ForwardCut(COPIED)
    if are_small(problem, device):
        return small_forward_cut(problem, device)
    if fits_hoppers_forward(problem, device, arrays):
        follows = problem.gradient and fits_a_tile(problem)  # a pullback by Hopper's own kernels: all else fits, too
        return hoppers_forward_cut(problem, device, segments_of_pullback(problem, device) if follows else NO_PULLBACK)
    return portable_forward_cut(problem, device)


def cut_that_fills(problem, device, way, kernel, summary, spared=0) -> ForwardCut:
    """The cut into as many segments as fill the card, if that spares each block at least `spared` tokens."""
    (N, H, V), longest = problem.shape("N H V"), longest_sequence(problem)
    P = segments_that_fill(N * H * kernel.grid(V), longest, resident_blocks(kernel, device), spared)
    return cut_into(problem, device, way, kernel, summary, P)


def small_forward_cut(problem, device):
    instance = read_order(problem.op), problem, gate_dtype(problem)
    kernel, summary = GatedSmallForward.fitting(*instance), GatedSmallStates.fitting(*instance)
    return cut_into(problem, device, SMALL, kernel, summary, segments_of_small_heads(kernel, problem, device))


def segments_of_small_heads(kernel, problem, device) -> int:
    """Segments of a sequence for `kernel`, a block of which computes several heads."""
    (N, H), longest = problem.shape("N H"), longest_sequence(problem)
    capacity = resident_blocks(kernel, device) * kernel.heads
    P = max(1, min(capacity // max(N * H, 1), longest // kernel.SEGMENT))
    return P if longest * (P - 1) >= SMALL_SPARED * P else 1


def portable_forward_cut(problem, device):
    sizes, wide = problem.shape("K V"), are_wide(problem, device)
    instance = problem.dtype, gate_dtype(problem), tf32_products(problem), *sizes, device.shared_per_block
    schedule = SPLIT_CHANNELS if sizes[0] > TILES[-1] else SINGLE_PASS
    if wide:
        kernel = GatedWideForward.fitting(problem.dtype, sizes[0])
    else:
        kernel = GatedForward.fitting(read_order(problem.op), schedule, *instance)
    summary = GatedSegmentStates.fitting(*instance)
    return cut_that_fills(problem, device, WIDE if wide else PORTABLE, kernel, summary)


def hoppers_kernel(problem, schedule, gate, columns):
    order = "AfterWrite" if schedule == SEGMENT_STATE else read_order(problem.op)
    return GatedForwardSm90.fitting(order, schedule, problem.dtype, gate, problem.sizes["K"], columns)


def hoppers_forward_cut(problem, device, backward):
    """The cut of Hopper's own kernel. If cutting pays and a pullback follows, it has the segments of the pullback,
    which then takes over the states at their starts."""
    (N, H, K, V), longest, gate = problem.shape("N H K V"), longest_sequence(problem), gate_dtype(problem)
    half = problem.dtype != BFLOAT16 and narrow_blocks(N * H, V, longest, device)  # for bfloat16 clusters are faster
    columns = TILES[0] if half else V
    schedules = SINGLE_PASS, CLUSTER_SPLIT_V
    unshared, shared = (hoppers_kernel(problem, schedule, gate, columns) for schedule in schedules)
    if K > TILES[-1]:
        kernel = hoppers_kernel(problem, CLUSTER_SPLIT_K, gate, V)
    else:
        kernel = shared if split_columns(N * H, V, longest, device, unshared, shared) else unshared
    blocks, capacity = N * H * kernel.grid(V), resident_blocks(kernel, device)
    summary = hoppers_kernel(problem, SEGMENT_STATE, gate, V)
    P = forward_segments(N * H, blocks, longest, kernel, max(K, V), device)
    if P > 1 and backward.count > 1 and blocks * backward.count <= capacity:
        P = backward.count
    first = short_first_of(problem, device, kernel, backward) if P == 1 else 0
    return cut_into(problem, device, HOPPER, kernel, summary, 2 if first else P, first, backward)


def short_first_of(problem, device, kernel, backward=NO_PULLBACK) -> int:
    """Tokens of a short first segment, beside which the rest of a sequence is one segment; 0 for whole sequences: they
    leave the states at the starts of equal segments, if the pullback has such."""
    if problem.varlen or backward.count > 1 and not backward.short:
        return 0
    N, H, T, V = problem.shape("N H T V")
    return short_first_segment(N * H * kernel.grid(V), T, resident_blocks(kernel, device))


def forward_segments(heads, blocks, longest, kernel, widest, device) -> int:
    """The number of segments of a sequence with the least cost, of `blocks` blocks of the uncut problem."""
    finest = min(resident_blocks(kernel, device) // max(blocks, 1), ceil_div(longest, kernel.CHUNK))
    counts = range(1, max(1, finest) + 1)
    return min(counts, key=lambda P: forward_cost(P, heads, blocks, longest, widest, device.multiprocessors))


def forward_cost(P, heads, blocks, longest, widest, multiprocessors) -> float:
    """The cost of Hopper's forward pass in P equal segments."""
    if P == 1:
        return longest
    chunks = ceil_div(longest, P * GatedForwardSm90.CHUNK)
    start = (CUT_SMALL if widest <= TILES[0] else CUT_LARGE) + (UNSAVED if chunks & chunks - 1 else 0)
    of_heads = heads * (CUT_SHARED if blocks * P > multiprocessors else CUT_HEAD)
    joining = P * (CUT_JOINED + CUT_STATE * heads * widest / TILES[-1])
    return start + (1 + CUT_TOKEN) * chunks * GatedForwardSm90.CHUNK + joining + of_heads


def short_first_segment(blocks, T, capacity) -> int:
    """Tokens of the short first segment, beside which the other segment takes less time than whole sequences; or 0."""
    cost, length = cut_in_two(blocks, T, capacity, SEGMENT, FORWARD_START, FORWARD_SUMMARY)
    return length if HARDLY_MORE * (cost + PART_START) < T + FORWARD_START else 0


def cut_in_two(blocks, T, capacity, aligned, start, summary) -> tuple[float, int]:
    """(the least cost, the tokens of a short segment that has it), for sequences cut into a short and a long segment.
    Of the `capacity` blocks that the card holds, `blocks` take the long segments. The others take the short ones, which
    are summarised first."""
    others = capacity - blocks
    if not others > 0:
        return inf, 0

    def cost(length):
        main = max(T - length + start, ceil_div(blocks, others) * (length + start))
        return main + summary * blocks / capacity * length

    return min(((cost(length), length) for length in range(aligned, T // 2 + 1, aligned)), default=(inf, 0))


def parts(summary, heads, V, P, longest, last, device) -> int:
    """How many parts each of P segments is cut into for the pass that summarises them: the number with the least cost
    in waves of blocks (blocks that the card holds at once). `last`: whether a sequence's last segment is summarised,
    too."""
    blocks, at_once = heads * ceil_div(V, summary.BV) * (P if last else P - 1), resident_blocks(summary, device)

    def cost(R):
        return ceil_div(blocks * R, at_once) * (longest / P / R + PART_START)

    return min(range(1, max(1, min(MOST_PARTS, longest // P // SEGMENT)) + 1), key=cost)


def split_columns(heads, V, longest, device, unshared, shared) -> bool:
    """Whether the two blocks of a cluster compute one head, half of its columns of V each, and share the operands that
    their producer warps make (kernel `shared`), or a block computes a head by itself (kernel `unshared`).

    Sharing is faster if the card holds all clusters, and sequences either need no cut or are long and cut in two, where
    `unshared` would have four segments; but not if a block of `shared` has fewer producer warps."""
    blocks, capacity = 2 * heads * ceil_div(V, 2 * PANEL), device.multiprocessors
    P = segments_that_fill(blocks, longest, capacity, SPARED) if V > PANEL and blocks <= capacity else 0
    fits = P == 1 or P == 2 and longest >= SPLIT_AND_CUT and segments_that_fill(blocks // 2, longest, capacity) <= 2 * P
    return fits and shared.producer_groups >= unshared.producer_groups


def narrow_blocks(heads, V, longest, device) -> bool:
    """Whether the card holds all blocks of 64 columns at once, and their sequences need no cut. Such a block takes two
    thirds of the time of a wider one, and no pass summarises segments."""
    blocks, capacity = heads * ceil_div(V, TILES[0]), device.multiprocessors
    return blocks <= capacity and segments_that_fill(blocks, longest, capacity, SPARED) == 1


# -- backward ----------------------------------------------------------------------------------------------------------
# What a pullback is told of the gate: every channel has its own; all share one, whose gradient is the sum of the
# channels' gradients; or all share one, and nobody wants its gradient.
OF_CHANNELS, SHARED_GATE, UNWANTED_GATE = "of channels", "shared", "shared, without a gradient"


@dataclass(frozen=True, eq=False)
class BackwardCut:
    """How a pullback is computed."""

    way: str
    device: Any
    segments: int = 1  # of every sequence
    kernels: tuple = ()  # the kernels that give gradients, in the order of their launches
    summary: Any = None  # the kernel that says what a segment does to a state and to its gradient
    short: int = 0  # as `BackwardSegments` has it
    blocks: int = 0  # of each of Hopper's main kernels
    forward: ForwardCut | None = None  # the pass that gives the states at the segments' starts, if nobody saved them


def backward_cut(problem, device, do, gate=OF_CHANNELS, saved=None, kept=False) -> BackwardCut:
    """For a `gate` of every channel, or for one that all channels share, spread over them. The gradient of a shared
    gate is a sum over channels, which must not be rounded often: the portable kernels then multiply half-precision data
    in float32, and tiles of the state, which round their parts of it, are taken only if nobody wants it.

    `saved`: as `gated_backward.plan_vjp` has it. `kept`: the segments are summarised already.
    """
    backward, arrays = hoppers_backward_segments(problem, device), token_arrays(problem)
    if backward.count:
        unsaved = backward.count > 1 and saved == () and not kept
        forward = hoppers_forward_cut(problem, device, backward) if unsaved else None
        if forward is not None and not forward.gives_starts:
            forward = None
        return hoppers_backward_cut(problem, device, backward, bool(saved) or forward is not None, kept, forward)
    if gate != SHARED_GATE:
        P = tiles_segments(problem, device, arrays)
        if P:
            return BackwardCut(TILED, device, P, short=short_segment_of(problem, device, P))
    if are_large([*arrays, do]) and not aligned16(*arrays, do):  # copies and all are 10 times as fast
        return BackwardCut(COPIED, device)
    if are_small(problem, device):
        return small_backward_cut(problem, device)
    return portable_backward_cut(problem, device, gate)


def small_backward_cut(problem, device):
    instance = read_order(problem.op), problem, gate_dtype(problem)
    kernel, summary = GatedSmallBackward.fitting(*instance), GatedSmallStates.fitting(*instance)
    P = 1 if problem.sizes["V"] % 4 else segments_of_small_heads(kernel, problem, device)
    return BackwardCut(SMALL, device, P, (kernel,), summary)


def portable_backward_cut(problem, device, gate):
    (N, H, K, V), half = problem.shape("N H K V"), problem.dtype.itemsize == 2
    products = 3 if gate != OF_CHANNELS and half else tf32_products(problem)
    instance = read_order(problem.op), problem.dtype, gate_dtype(problem), products

    def blocks(states):
        return N * H * states.blocks(K, V)

    widths = GatedBackwardStates.widths(problem.dtype, products, V)
    states = widest_that_fills([GatedBackwardStates(*instance, BV) for BV in widths], blocks, device)
    P = summarised_segments(states, blocks(states), problem, device)
    values = GatedBackwardValues.fitting(*instance, V, device.shared_per_block)
    return BackwardCut(PORTABLE, device, P, (GatedBackwardChannels(*instance), values), states)


def hoppers_backward_segments(problem, device) -> BackwardSegments:
    """The segments of Hopper's own backward kernels, none if these cannot compute the problem."""
    if are_small(problem, device) or not fits_hoppers_backward(problem, device, token_arrays(problem)):
        return NO_PULLBACK
    return segments_of_pullback(problem, device)


def segments_of_pullback(problem, device) -> BackwardSegments:
    """The segments of Hopper's own backward kernels, which can compute the problem."""
    (N, H, K, V), longest = problem.shape("N H K V"), longest_sequence(problem)
    P = backward_segments(N * H, longest, device.multiprocessors, K, V)
    return BackwardSegments(P, short_segment_of(problem, device, P))


def hoppers_backward_cut(problem, device, backward, starts_known, kept=False, forward=None) -> BackwardCut:
    """The cut of Hopper's own kernels. `starts_known`: the states at the starts of equal segments are saved, or a
    forward pass gives them. `kept`: the segments are summarised already, between two empty ones."""
    N, H, K, V = problem.shape("N H K V")
    short = 0 if starts_known or kept else backward.short
    P = 3 if short else backward.count + 2 * kept
    instance = read_order(problem.op), problem.dtype, gate_dtype(problem), K, V
    schedule = main_schedule(problem, P, GatedBackwardKeysSm90.fitting(*instance, IN_TURN), device)
    kernels = [kernel.fitting(*instance, schedule) for kernel in (GatedBackwardQueriesSm90, GatedBackwardKeysSm90)]
    blocks = resident_blocks(kernels[1], device) if schedule == IN_TURN else (2 if short else P) * N * H
    summarised = (1 if starts_known else 2) * (1 if short else P - 1) * N * H
    capacity = summary_channels(K, summarised, device.multiprocessors)
    summary = GatedBackwardSegmentsSm90.fitting(*instance[:3], capacity, V)
    return BackwardCut(HOPPER, device, backward.count, tuple(kernels), summary, short, blocks, forward)


def fits_hoppers_backward(problem, device, arrays) -> bool:
    """Whether Hopper's own backward kernels can read a problem's arrays, or copies of them."""
    return fits_a_tile(problem) and fits_hoppers_tiles(problem, device, arrays)


def fits_a_tile(problem) -> bool:
    """Whether a problem has at most the channels and columns of one tile of the state."""
    return max(problem.shape("K V")) <= TILES[-1]


def fits_hoppers_tiles(problem, device, arrays) -> bool:
    """Whether Hopper's own backward kernels can read tiles of `arrays` of at most 128 channels and columns."""
    return device.capability == 90 and problem.dtype.itemsize == 2 and mappable_once_copied(arrays)


def tiles_segments(problem, device, arrays, shared=False) -> int:
    """Segments of a sequence of more than 128 channels or columns, where Hopper's own kernels compute its `arrays` in
    tiles; 0 where they do not. `shared`: channels share a gate."""
    N, H, K, V = problem.shape("N H K V")
    if max(K, V) <= TILES[-1] or not fits_hoppers_tiles(problem, device, arrays):
        return 0
    sizes = min(K, TILES[-1]), min(V, TILES[-1])
    P = backward_segments(N * H, longest_sequence(problem), device.multiprocessors, *sizes)
    return P if worth_tiles(problem, P, device, shared) else 0


def backward_segments(blocks, longest, capacity, K, V) -> int:
    """The fewest segments of a sequence that cost hardly more than the least, of `blocks` blocks of the uncut problem,
    on a card of `capacity` multiprocessors."""
    finest = min(ceil_div(longest, GatedBackwardSm90.CHUNK), MOST_WAVES * capacity // max(blocks, 1))
    costs = [backward_cost(P, blocks, longest, capacity, K, V) for P in range(1, max(1, finest) + 1)]
    return 1 + next(n for n, each in enumerate(costs) if each <= HARDLY_MORE * min(costs))


def backward_cost(P, *sizes) -> float:
    """The cost of Hopper's backward pass in P equal segments."""
    return main_cost(P, *sizes) + (joining_cost(P, *sizes) if P > 1 else 0)


def main_cost(P, blocks, longest, capacity, K, V) -> float:
    """The cost of the main kernels, in waves of blocks, and of the pass that summarises all segments but a sequence's
    last, which memory bounds."""
    waves, length = ceil_div(blocks * P, capacity), longest if P == 1 else length_of_segments(P, longest)
    wave_time = SHARED if waves > 1 and max(K, V) <= TILES[0] else 1
    return waves * wave_time * (length + BLOCK_START) + SUMMARY * longest * blocks / capacity * (P - 1) / P


def joining_cost(P, blocks, longest, capacity, K, V) -> float:
    """The cost of joining P segments."""
    chunks = length_of_segments(P, longest) // GatedBackwardSm90.CHUNK
    unsaved = UNSAVED if chunks & chunks - 1 else 0
    return JOIN_START + unsaved + P * (JOINED + STATE * blocks * K * V / TILES[-1] ** 2)


def length_of_segments(P, longest) -> int:
    return ceil_div(longest, P * GatedBackwardSm90.CHUNK) * GatedBackwardSm90.CHUNK


def short_segment_of(problem, device, P) -> int:
    """`short_segment` of a problem, or of its largest tile."""
    if problem.varlen:
        return 0
    N, H, T, K, V = problem.shape("N H T K V")
    sizes = min(K, TILES[-1]), min(V, TILES[-1])
    return short_segment(P, N * H, T, device.multiprocessors, *sizes, GatedBackwardSm90.CHECKPOINT_EVERY)


def short_segment(P, blocks, T, capacity, K, V, aligned) -> int:
    """Tokens, a multiple of `aligned`, of the segment that each backward pass begins a sequence of T with, where the
    rest is one segment; 0 where P equal segments are faster. More than half of the card takes the long segments, the
    others the short ones meanwhile. Only the short ones are summarised, each in one direction."""
    if T % aligned:
        return 0
    cost, length = cut_in_two(blocks, T, capacity, aligned, BLOCK_START, SUMMARY)
    cost += joining_cost(2, blocks, T, capacity, K, V)
    return length if HARDLY_MORE * cost < backward_cost(P, blocks, T, capacity, K, V) else 0


def worth_tiles(problem, P, device, shared) -> bool:
    """Whether Hopper's own backward kernels, for one tile of the state after the other, cost less than the portable
    kernels. Those have chunks of 64 tokens, read every chunk again for every 64 channels, and make scores for 128
    columns at a time. If channels share a gate, a tile takes half of its time, and the portable kernels, which then
    multiply in float32, take PORTABLE_FINER times theirs."""
    (B, N, H, K, V), capacity, lengths = problem.shape("B N H K V"), device.multiprocessors, problem.spans.lengths
    sizes = P, N * H, int(lengths.max()), capacity, min(K, TILES[-1]), min(V, TILES[-1])
    of_tile = main_cost(*sizes) / 2 + SHARED_GATE_START if shared else backward_cost(*sizes) + TILE_START
    chunks, columns = (-(-lengths // 64)).sum(), ceil_div(V, TILES[-1])
    of_channels = B * H * chunks * 64 / capacity * (PORTABLE_CHANNELS + PORTABLE_COLUMNS * columns)
    portable = ceil_div(K, TILES[0]) * of_channels * (PORTABLE_FINER if shared or problem.dtype != BFLOAT16 else 1)
    start = PORTABLE_SHARED_GATE_START if shared else PORTABLE_START
    return whole_tiles(K) * whole_tiles(V) * of_tile < start + portable


def whole_tiles(size) -> float:
    """How many whole tiles take as long as the tiles of `size` channels or columns, of which the last may be narrow."""
    whole, rest = divmod(size, TILES[-1])
    return whole + (0 if not rest else NARROW_TILE if rest <= TILES[0] else 1)


def main_schedule(problem, P, in_turn, device) -> str:
    """Whether each block of Hopper's main backward kernels takes whole sequences in turn, as the kernel `in_turn` does,
    or one segment. Blocks of one segment are the faster program, and fill the last wave of blocks better. But if the
    card holds fewer blocks than there are sequences, and these are so short that the start of a block counts, blocks
    take sequences in turn. How short depends on whether a second block on the multiprocessor hides part of a start."""
    heads, lengths = problem.sizes["N"] * problem.sizes["H"], problem.spans.lengths
    short = lengths.mean() <= MOST_IN_TURN[in_turn.resident]
    return IN_TURN if P == 1 and heads > resident_blocks(in_turn, device) and short else ONE_EACH


def summary_channels(K, blocks, capacity) -> int:
    """Channels of a block that summarises a segment backward: all, or 64 if `blocks` blocks of all channels leave half
    of the card's `capacity` multiprocessors idle."""
    return TILES[0] if ceil_div(K, TILES[0]) * blocks <= capacity else K


def summarised_segments(kernel, blocks, problem, device) -> int:
    """Segments of a sequence, if a first pass of the same `kernel` summarises them: one, or at least four, since the
    two passes and the scan take as long as two to three segments."""
    P = segments_that_fill(blocks, longest_sequence(problem), resident_blocks(kernel, device))
    return P if P >= 4 and problem.sizes["V"] % 4 == 0 else 1


# -- gates that channels share -----------------------------------------------------------------------------------------
def scalar_forward_cut(problem, device) -> ForwardCut | None:
    """For a gate [B, H, T, 1], by Hopper's kernels, which read it as it is; None if they cannot."""
    if problem.mode != "chunk" or not fits_hoppers_forward(problem, device, [problem[name] for name in "qkv"]):
        return None
    (N, H, K, V), longest = problem.shape("N H K V"), longest_sequence(problem)
    narrow = min(V, TILES[not narrow_blocks(N * H, V, longest, device)])
    if problem.dtype == BFLOAT16 and K <= TILES[-1]:  # float16 has not the range of states
        gate = gate_dtype(problem)
        kernel, summary = WeightedSums.fitting("Whole", gate, K, narrow), WeightedSums.fitting("Summary", gate, K, V)
        return cut_that_fills(problem, device, HOPPER, kernel, summary, SPARED)
    if K > TILES[-1]:
        kernel = hoppers_kernel(problem, CLUSTER_SPLIT_K, SCALAR, V)
    else:
        kernel = hoppers_kernel(problem, SINGLE_PASS, SCALAR, narrow)
    summary = hoppers_kernel(problem, SEGMENT_STATE, SCALAR, V)
    cut = cut_that_fills(problem, device, HOPPER, kernel, summary, SPARED)
    first = short_first_of(problem, device, kernel) if cut.segments == 1 else 0
    return cut_into(problem, device, HOPPER, kernel, summary, 2, first) if first else cut


def scalar_backward_cut(problem, device, kept=False) -> BackwardCut:
    """For a gate [B, H, T, 1]: by Hopper's kernels, which read it as it is, or by those of gates for every channel.
    `kept`: the segments are summarised already."""
    arrays = [problem[name] for name in "qkv"]
    if problem.dtype == BFLOAT16 and tiles_segments(problem, device, arrays, shared=True):
        return BackwardCut(TILED, device)
    if problem.dtype == BFLOAT16 and fits_hoppers_backward(problem, device, arrays):
        return sums_backward_cut(problem, device, kept)
    return BackwardCut(PORTABLE, device)


def sums_backward_cut(problem, device, kept=False, one_part=False) -> BackwardCut:
    """The cut of the kernels `WeightedSums`, for a problem or for one tile of it. `one_part`: the gate's gradient must
    not be left in parts for tiles of K. The kernels read a bfloat16 gate as it is if every token has a gate of its own
    and sequences are whole; else a float32 copy."""
    (N, H, K, V), gate = problem.shape("N H K V"), has_own_gates(problem)
    kernels = 1 if gate else 3  # dq, dk and dv each by blocks of their own
    blocks = kernels * N * H * ceil_div(max(K, V), PANEL)
    P = segments_that_fill(blocks, longest_sequence(problem), device.multiprocessors)
    dtype = BFLOAT16 if gate and P == 1 and not kept and gate_dtype(problem) == BFLOAT16 else FLOAT32
    sums = weighted_sums(problem, dtype, P + 2 * kept, device, gate, one_part)
    return BackwardCut(HOPPER, device, P, sums, ScalarBackwardSegments.fitting(V))


def has_own_gates(problem) -> bool:
    """Whether every token has a gate of its own, of which a gradient is asked for."""
    return problem["g"].shape[:3] == problem.shape("B H T")


def weighted_sums(problem, dtype, P, device, gate=False, one_part=False) -> tuple[WeightedSums, ...]:
    """The kernels of dq, dk and dv with the least cost in waves of blocks. Without the gradient of the `gate`, one
    kernel computes all three, by blocks of all columns or of 64, which take three quarters of the time; or one computes
    dq by blocks of 64 columns, and another dk and dv by blocks of all. With it, one kernel computes dq, and another dk
    and dv, by blocks of all columns if dg must be in `one_part`."""
    N, H, K, V = problem.shape("N H K V")
    widest, narrow = max(K, V), TILES[0]

    def waves(sums, BV):
        blocks = sums * P * N * H * ceil_div(widest, BV)
        return (3 if BV < widest else 4) * ceil_div(blocks, device.multiprocessors)

    if gate:
        count = {"GatedQueries": 1, "GatedKeys": 2}
        widths = {what: min((widest, narrow), key=lambda BV: waves(count[what], BV)) for what in count}
        if one_part:
            widths["GatedKeys"] = widest
        return tuple(WeightedSums.fitting(what, dtype, widest, BV) for what, BV in widths.items())
    whole = {BV: waves(3, BV) for BV in (widest, narrow)}
    if P == 1 and waves(1, narrow) + waves(2, widest) < min(whole.values()):
        return WeightedSums.fitting("Queries", dtype, V, narrow), WeightedSums.fitting("Keys", dtype, widest, widest)
    return (WeightedSums.fitting("Gradients", dtype, widest, min(whole, key=whole.__getitem__)),)
