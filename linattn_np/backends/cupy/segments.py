"""How a call is computed on a card: by which kernels, and in how many segments its sequences are cut.

Every such decision is made here, once for a plan: by `forward_cut` and `backward_cut` for gates of every channel, by
`scalar_forward_cut` and `scalar_backward_cut` for gates that channels share. Planners, summaries and `explain` read the
result. A decision changes how long a call takes, and not what it computes.

Few heads leave multiprocessors idle. Then sequences are cut into segments, which blocks compute at the same time: a
first pass summarises what each segment does to a state, a scan joins the summaries, and the main pass starts every
segment from its state. Hopper is a card of compute capability 9.0, which has kernels of its own; portable kernels run
on every card.

Where several cuts are possible, each one whose blocks fit on the card has a cost, and the cheapest is taken. Costs are
in tokens: 1 is the time that a block of the pass's main kernel takes for one token of 128 channels and columns.
`benchmarks/fit_segments.py` measures cuts that it forces, and fits the constants below to a card; these are an H200's,
in bfloat16. tests/test_segments.py compares the cuts with those that were the fastest when measured.

Sizes: B batch, N sequences, H heads, T tokens, K channels, V columns, P segments of a sequence, R parts of a segment.
A *wave* is as many blocks as the card holds at once. `longest` are the tokens of the longest sequence, `blocks` the
blocks of a launch on uncut sequences, `capacity` the blocks or multiprocessors that the card has for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isqrt
from typing import Any

from ...array_kinds import BFLOAT16
from .arithmetic import ceil_div
from .gated_kernels import (
    CLUSTER_SPLIT_K,
    CLUSTER_SPLIT_V,
    IN_TURN,
    ONE_EACH,
    PANEL,
    SCALAR,
    SEGMENT_STATE,
    SHORT_SEQUENCES,
    SINGLE_PASS,
    SMALL_SIZES,
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
    GatedShortBackward,
    GatedShortForward,
    GatedSmallBackward,
    GatedSmallForward,
    GatedWideForward,
    GatedWideOperands,
    ScanBothWays,
    read_order,
)
from .kernel import DOUBLE
from .plan import FLOAT32, common_bytes, has_rows, mappable, mappable_either_way
from .scalar_decay_kernels import SUMS_AT_ONCE, WeightedSums

# -- constants ---------------------------------------------------------------------------------------------------------
SEGMENT = 128  # tokens of the shortest segment, where the number of segments is not chosen by a cost
MOST_PARTS = 16  # the most parts of a segment that is summarised
# A kernel waits for every piece of a row that it loads if pieces have fewer bytes (`load_slowly`): a portable forward
# kernel; one of small heads, or of sequences of at most FEW_TOKENS tokens, as copies would take longer; a backward one.
LEAST_PIECE, LEAST_PIECE_OF_FEW, LEAST_PIECE_BACKWARD, FEW_TOKENS = 8, 4, 16, 64
COST_TOLERANCE = 1.01  # costs up to so many times the least one count as equal: the cut with the fewest segments wins

# Heads of at most 16 channels and columns.
# The least tokens of all heads, in whole chunks, for which their own kernels are faster
SMALL_TOKENS, SMALL_TOKENS_ON_HOPPER = 1 << 15, 1 << 17
SMALLEST_TOKENS_ON_HOPPER = 3 << 14  # those of at most 8 channels and columns
SMALL_SPARED = 128  # sequences are cut if that spares each block so many tokens: the time of the two launches it adds
# Summarising and joining so many heads' segments, even empty ones, takes as long as one token of both walks.
SMALL_JOINED = 133

# Forward on Hopper, `forward_cost`. In each of 70 shapes the chosen cut took at most 3 % longer than the best one.
CUT_SMALL, CUT_LARGE = 300, 520  # the launches that a cut adds: for up to 64 channels and columns, and for more
CUT_TOKEN = 0.3  # to summarise a token
CUT_JOINED, CUT_STATE = 5, 0.5  # to join a segment: always, and for each head's state of 128 columns
CUT_HEAD, CUT_SHARED = 1, 3  # for each head: if every block has a multiprocessor of its own; if two blocks share one
# The pullback must summarise segments if the forward pass has saved no states for it, that is, if a segment's chunks
# are no power of 2.
UNSAVED = 14
SPARED = 600  # where no cost decides: sequences are cut if that spares each block so many tokens
BLOCKS_OF_STAGE = 4  # blocks of stage 3 of mode "staged" on a multiprocessor
SPLIT_AND_CUT = 4096  # the least tokens of sequences that are cut in two if the blocks of a cluster split the columns
FORWARD_START, FORWARD_SUMMARY = 32, 0.5  # in `cut_in_two`: a block's start; to summarise a token
PART_START = 256  # a part that is summarised: its start and its state

# Backward on Hopper, `backward_cost`. In each of 50 shapes of 1 to 64 heads and 256 to 4,096 tokens the chosen cut took
# at most 3 % longer than the best one.
BLOCK_START = 64  # a block's start
SUMMARY = 0.32  # to summarise a token in both directions; the time is that of reading it from memory
SHARED = 0.66  # a wave takes so many times its time if two blocks share a multiprocessor, as small blocks do
JOIN_START, JOINED = 35, 4  # the launches that summarise and join; to join a segment
STATE = 0.8  # each segment's state of 128 channels and columns
MOST_WAVES = 8  # the most waves of segments: with so many, it matters little how full the last one is
# {blocks per multiprocessor: the mean tokens of a sequence up to which blocks compute several sequences in turn}
MOST_IN_TURN = {1: 512, 2: 128}

# Backward on Hopper with more than 128 channels or columns: `worth_tiles` chooses tiles of a state or the portable
# kernels. In 97 shapes of 64 to 4,096 tokens and 4 to 256 heads the chosen way took 1 % longer than the better one on
# average, 28 % at worst.
TILE_START, SHARED_GATE_START = 20, 180  # the launches of a tile: for gates of every channel; for a shared gate
NARROW_TILE = 0.8  # the time of a tile with half of the channels or columns, in times of a whole tile
PORTABLE_START, PORTABLE_SHARED_GATE_START = 160, 400  # the portable kernels' launches; those for a shared gate
PORTABLE_CHANNELS, PORTABLE_COLUMNS = 0.25, 0.88  # portable, a token: for each 64 channels; for each 128 columns too
SUMS_START, SUMS_TOKEN = 53, 0.12  # in `cost_of_sums`: the launches of a tile; a token
PORTABLE_TF32 = 1.7  # the portable kernels take so many times as long if they multiply tf32 numbers


# -- the card ----------------------------------------------------------------------------------------------------------
def segments_that_fill(blocks, longest, capacity, spared=0, shortest=SEGMENT) -> int:
    """The most segments of a sequence, of at least `shortest` tokens each, for which the uncut problem's `blocks`
    become at most `capacity` blocks; 1 if the cut would spare a block less than `spared` tokens."""
    P = max(1, min(capacity // max(blocks, 1), longest // shortest))
    return P if longest * (P - 1) >= spared * P else 1


def heads_at_work(problem) -> int:
    """The heads of all sequences, N H; or, if that is less, so many of the longest one that they have the tokens of
    all: most tokens are then in few sequences. Blocks of short ones end early, and leave the card to the long ones.

    Microseconds on an H200 of 20 sequences of 60,000 tokens, 128 channels and columns, if these were twice the tokens,
    and so: simple_gla, 8 heads, 434, 351, its pullback 1,214, 910; gv, 4 heads, 1,038, 744.
    """
    (B, N, H, T), longest = problem.shape("B N H T"), problem.spans.longest
    return min(N * H, ceil_div(B * H * T, max(longest, 1)))


def in_waves(P, problem, blocks, capacity) -> int:
    """P segments, or as many as take MOST_WAVES waves for so many blocks of each head: with unequal sequences most of
    the segments are empty."""
    return min(P, max(1, MOST_WAVES * capacity // max(1, problem.sizes["N"] * problem.sizes["H"] * blocks)))


def segments_of_sequences(problem, blocks, capacity, spared=0, shortest=SEGMENT) -> int:
    """`segments_that_fill` for so many blocks of each head at work, in at most MOST_WAVES waves of all segments."""
    P = segments_that_fill(heads_at_work(problem) * blocks, problem.spans.longest, capacity, spared, shortest)
    return in_waves(P, problem, blocks, capacity)


def widest_that_fills(kernels, blocks, device):
    """The kernel with the widest blocks that still fill the card, or that with the narrowest if none does. Wide blocks
    need fewer loads: their columns share decays and keys.

    kernels : by rising width of their blocks
    blocks : a function of a kernel, the number of its blocks
    """
    return next((each for each in reversed(kernels) if blocks(each) >= each.resident_blocks(device)), kernels[0])


def tf32_products(problem) -> int:
    """How many products of tf32 numbers are summed for one product: 3 for float32 numbers in full precision; 1 for
    half-precision numbers, which are tf32 numbers already."""
    return 3 if problem.dtype == FLOAT32 and problem.precision == "float32" else 1


# -- one problem -------------------------------------------------------------------------------------------------------
# The ways of computing a pass: each is a set of kernels, and `explain` prints the text.
SMALL, HOPPER, WIDE, PORTABLE = "small heads", "Hopper", "wide heads", "every card"
SHORT = "short sequences"  # one kernel of each pass for sequences of few tokens
TILED = "tiles of the state"  # Hopper's own backward kernels, for one tile of 128 channels and columns after the other
COPIED = "wider copies"  # the same call on copies of its arrays, whose rows are padded to multiples of 16 bytes


def gate_of(problem):
    """The gate, the fourth array: the arrays are q, k, v, g and maybe others, whatever their names."""
    return list(problem.arrays.values())[3]


def gate_dtype(problem):
    """The dtype of the gate."""
    return gate_of(problem).dtype


def has_hoppers_kernels(problem, device) -> bool:
    """Whether the card and the dtype are those of Hopper's own kernels."""
    return device.capability == 90 and problem.dtype.itemsize == 2


def are_small(problem, device) -> bool:
    """Whether a problem is computed by the kernels for small heads, of which a warp computes several. Other kernels
    take a chunk's time for the tokens of a sequence's last chunk, however few.

    Microseconds on an H200 in half precision, by Hopper's kernels and by these; pullbacks: 7 sequences of 7,728 tokens,
    one channel and column 53, 50; 95, 65. 8 heads of 8,192 tokens, 8 of both 38, 32; 72, 36.
    """
    widest, least = max(problem.shape("K V")), SMALL_TOKENS
    if has_hoppers_kernels(problem, device) and "gv" not in problem.arrays:
        smallest = widest <= SMALL_SIZES[0]
        least = min(SMALL_TOKENS_ON_HOPPER, SMALLEST_TOKENS_ON_HOPPER) if smallest else SMALL_TOKENS_ON_HOPPER
    return widest <= SMALL_SIZES[-1] and tokens_in_chunks(problem) >= least


def tokens_in_chunks(problem) -> int:
    """The tokens of all heads, in whole chunks."""
    chunk = GatedForwardSm90.CHUNK
    return problem.sizes["B"] * problem.sizes["H"] * chunk * problem.spans.chunk_bounds(chunk)[-1]


def takes_short_backward(problem, tile) -> bool:
    """Whether the backward kernel for short sequences computes a pullback of heads that are not small: it can, and it
    takes less time than the kernels in chunks.

    tile : the most channels and columns of a state with which those kernels may take less: their tile in half
        precision; 0 if they never do

    Microseconds on an H200 of 4,096 heads in bfloat16, by Hopper's kernels and by this one: 64 channels and columns, 8
    tokens 116, 66, 16 tokens 119, 205; one token from an initial state 145, 265. 128 of both, 16 tokens 259, 211.
    """
    widest, longest = max(problem.shape("K V")), problem.spans.longest
    few = SHORT_SEQUENCES[widest > TILES[0]]
    computes = min(problem.shape("K V")) > 0 and longest <= SHORT_SEQUENCES[-1]
    return computes and (widest > tile or problem.initial_state is None and longest <= few)


def tokens_of_short(problem) -> int:
    """The TOKENS of a kernel for short sequences: the least that hold the longest sequence."""
    return next(most for most in SHORT_SEQUENCES if problem.spans.longest <= most)


def takes_short_forward(problem, device) -> bool:
    """Whether the forward kernel for short sequences computes a call of heads that are not small: it can, and it takes
    less time than the kernels in chunks.

    Microseconds on an H200 of 4,096 heads in bfloat16, by those and by this one: 64 channels and columns, 8 tokens 47,
    32, with final states 57, 61, of 4 tokens 57, 46; 128 of both, 16 tokens 122, 136, in float32 151, 103. 20,600 heads
    of 512 of both, 3 tokens 7,570, 389; 256 heads, 16 tokens 104, 35.
    """
    (N, H, K, V), longest = problem.shape("N H K V"), problem.spans.longest
    final, narrow = problem.output_final_state or "final_state" in problem.options, max(K, V) <= TILES[0]
    few, most = SHORT_SEQUENCES
    if final:
        most = few // 2 if narrow else few
    elif K <= TILES[-1] and (narrow or problem.dtype != FLOAT32):
        most = few
    computes = min(K, V) > 0 and problem.initial_state is None and problem.dtype != DOUBLE
    return computes and N * H > device.multiprocessors and longest <= most


def are_wide(problem, device) -> bool:
    """Whether a problem is computed by the kernels for wide heads: those with more channels than one launch of the
    other portable kernels takes, if the registers and the shared memory of a block can hold them all."""
    K, dtype = problem.sizes["K"], problem.dtype
    if dtype != BFLOAT16 or not TILES[-1] < K <= GatedWideForward.MOST_TILES * GatedWideForward.TILE:
        return False
    kernels = GatedWideForward.fitting(dtype, K), GatedWideOperands(read_order(problem.op), dtype, FLOAT32)
    return max(kernel.shared_bytes for kernel in kernels) <= device.shared_per_block


def mappable_once_copied(arrays) -> bool:
    """Whether tensor maps can describe contiguous copies of the arrays: none is empty, and the rows of each are a
    multiple of 16 bytes long."""
    return all(x.size and x.shape[-1] * x.dtype.itemsize % 16 == 0 for x in arrays)


def fits_hopper(problem, device, arrays) -> bool:
    """Whether Hopper's own kernels can read or write `arrays` of half-precision data, or copies of them. Copies and
    these kernels cost less than portable kernels."""
    return has_hoppers_kernels(problem, device) and mappable_once_copied(arrays)


def fits_two_blocks(problem) -> bool:
    """Whether a problem has at most the channels of two blocks, as Hopper's own forward kernels take them."""
    return problem.sizes["K"] <= 2 * TILES[-1]


def are_many_short(problem, device) -> bool:
    """Whether the forward pass of many short sequences takes less time by the portable kernels, of which more blocks
    share a multiprocessor: sequences have one chunk of Hopper's own kernels, of which the card does not hold all blocks
    at once. Under a gate that channels share, portable kernels read a copy of it for every channel.

    Microseconds on an H200 in bfloat16, by Hopper's kernels and by the portable ones: 4,096 heads of 64 channels and
    columns, 16 tokens 74, 50; of 128 of both, 32 tokens 153, 132; of 256 and 128, 16 tokens 351, 292. Under a shared
    gate, 64 and 128, 32 tokens 233, 154; 64 of both, 16 tokens 58, 61; 128 of both 136, 146.
    """
    N, H, K, V = problem.shape("N H K V")
    many = N * H * ceil_div(V, TILES[-1]) > 2 * device.multiprocessors
    fits = gate_of(problem).shape[-1] == K or K <= TILES[0] < V
    return many and fits and problem.spans.longest <= GatedForwardSm90.CHUNK


def fits_hoppers_forward(problem, device, arrays) -> bool:
    """Whether a problem is computed by Hopper's own forward kernels."""
    arrays = [*arrays, *([] if problem.out is None else [problem.out])]
    fits = fits_two_blocks(problem) and fits_hopper(problem, device, arrays)
    return fits and not are_many_short(problem, device)


def takes_small_heads(problem) -> bool:
    """Whether a call under a gate that channels share, or its pullback if that has a gradient of the gate, is computed
    by the kernels for small heads, which read a copy of the gate for every channel.

    Microseconds on an H200 in bfloat16, by Hopper's kernels for shared gates and by these: 220 sequences of 37,518
    tokens, 2 channels and columns 1,318, 560; 256 of 4,096 tokens, 16 of both 113, 167; of 8 of both 121, 108, its
    pullback 415, 229.
    """
    return max(problem.shape("K V")) <= SMALL_SIZES[0] and tokens_in_chunks(problem) >= SMALL_TOKENS_ON_HOPPER


# -- forward -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class BackwardSegments:
    """The segments of every sequence in Hopper's own backward kernels: `count` equal ones; or two, if `short` is not 0.

    Then the kernel of dq, which goes forwards in time, has a short segment of so many tokens at the sequence's start,
    and the kernel of dk and dv, which goes backwards, has one at its end. The rest is each kernel's long segment.
    """

    count: int = 0  # 0 if these kernels cannot compute the problem
    short: int = 0


NO_PULLBACK = BackwardSegments()  # no pullback follows, or not by Hopper's own kernels


@dataclass(frozen=True, eq=False)
class ForwardCut:
    """How a forward pass is computed. The way COPIED has no kernels: the copies have a cut of their own."""

    way: str
    kernel: Any = None  # the kernel that computes o
    summary: Any = None  # the kernel that summarises segments
    segments: int = 1  # of every sequence
    first_tokens: int = 0  # if there are two unequal segments: the tokens of the first; 0 for equal segments
    spans: Any = None  # the token ranges of all segments, a `varlen.Spans`
    # into how many parts a summary divides a segment: if each sequence's last segment is not summarised; if it is
    parts: tuple[int, int] = (1, 1)
    same_as_pullback: bool = False  # whether the pullback has these segments, and can reuse the states at their starts
    mark_every: int = 0  # the kernel stores a state every so many chunks, at the pullback's segments; 0 for never
    backward_segments: int = 0  # of every sequence in the pullback that may reuse the states

    @property
    def fits(self):
        """A function of an array: whether the kernel of o can read or write the array without a copy. Hopper's kernels
        can even if the array's tokens run backwards in memory; with CLUSTER_SPLIT_K they lack the registers for it."""
        if self.way != HOPPER:
            return has_rows
        return mappable if getattr(self.kernel, "schedule", None) == CLUSTER_SPLIT_K else mappable_either_way

    @property
    def gives_starts(self) -> bool:
        """Whether this pass computes the states at the starts of the pullback's segments."""
        return self.same_as_pullback or self.mark_every > 0

    @property
    def tiles(self) -> dict:
        """The sizes that `explain` shows."""
        return self.kernel.tiles | ({"segments": self.segments} if self.segments > 1 else {})


def cut_into(problem, device, way, kernel, summary, P, first_tokens=0, backward=NO_PULLBACK) -> ForwardCut:
    """The cut into P equal segments; or, if `first_tokens` is not 0, into two, of which the first has so many tokens.
    `backward`: the segments of the pullback that follows."""
    unequal = first_tokens > 0
    assert not unequal or P == 2
    assert summary.CHUNK % kernel.CHUNK == 0  # a segment has whole chunks of both kernels
    spans = problem.spans.split_at(first_tokens) if unequal else problem.spans.segments(P, summary.CHUNK)
    parts = (1, 1) if way == SMALL else parts_of_segments(problem, device, summary, P)
    same = not unequal and 1 < P == backward.count
    no_marks = unequal or not backward.count or backward.short
    mark_every = 0 if no_marks else chunks_between_marks(problem, P, backward.count)
    return ForwardCut(way, kernel, summary, P, first_tokens, spans, parts, same, mark_every, backward.count)


def parts_of_segments(problem, device, summary, P) -> tuple:
    """`ForwardCut.parts` for P segments of each sequence."""
    (N, H, K, V), longest = problem.shape("N H K V"), problem.spans.longest
    heads = N * H * tiles_at_once(summary, K)
    return tuple(parts_per_segment(summary, heads, V, P, longest, with_last, device) for with_last in (False, True))


def chunks_between_marks(problem, P, backward_segments) -> int:
    """`ForwardCut.mark_every`: the chunks of a segment of the pullback, if these are a power of 2, each of the forward
    pass's P segments consists of several whole ones of them, all sequences have the same length, and no segment is
    empty; else 0."""
    shortest, longest, chunk = int(problem.spans.lengths.min()), problem.spans.longest, GatedForwardSm90.CHUNK
    chunks, forward_chunks = (ceil_div(longest, count * chunk) for count in (backward_segments, P))
    same_ends = P == 1 or forward_chunks * P == chunks * backward_segments
    nested = backward_segments > P and backward_segments % P == 0 and same_ends
    none_empty = shortest == longest > (backward_segments - 1) * chunks * chunk
    return chunks if nested and none_empty and chunks & chunks - 1 == 0 else 0


def without_a_short_segment(problem, device, cut) -> ForwardCut:
    """`cut`, or the cut into whole sequences if the segments of `cut` are unequal. A pass that only summarises
    sequences takes no unequal segments."""
    return cut_into(problem, device, cut.way, cut.kernel, cut.summary, 1) if cut.first_tokens else cut


def forward_cut(problem, device) -> ForwardCut:
    """How the forward pass is computed for gates of every channel."""
    small = are_small(problem, device)
    if not small and takes_short_forward(problem, device):
        instance = read_order(problem.op), problem.dtype, gate_dtype(problem)
        return ForwardCut(SHORT, GatedShortForward(*instance, tokens_of_short(problem)))
    hopper = not small and fits_hoppers_forward(problem, device, problem.token_arrays)
    # The option "final_state" is an array of a model, to which kernels write the last states themselves.
    if not hopper and "final_state" not in problem.options and copies_are_faster(problem, device):
        return ForwardCut(COPIED)
    if hopper:
        follows = problem.gradient and backward_way(problem, device) == HOPPER
        return hoppers_forward_cut(problem, device, segments_of_pullback(problem, device) if follows else NO_PULLBACK)
    return small_forward_cut(problem, device) if small else portable_forward_cut(problem, device)


def copies_are_faster(problem, device) -> bool:
    """Whether a forward pass that Hopper's own kernels cannot compute as it is takes less time on copies whose rows are
    whole pieces of 16 bytes: if Hopper's own kernels can read these, or if the kernels of every card load slowly.
    (Where Hopper's own kernels can read rows of these lengths, only arrays at other addresses are copied: see
    `Draft.mapped`.)"""
    arrays, few = problem.token_arrays, are_few(problem, device)
    return not few and only_copies_fit_hopper(problem, device, arrays) or loads_forward_slowly(problem, device, arrays)


def are_few(problem, device) -> bool:
    """Whether heads are so small, or sequences so short, that pieces of 4 bytes are loaded in less time than copies
    take."""
    return are_small(problem, device) or problem.spans.longest <= FEW_TOKENS


def loads_forward_slowly(problem, device, arrays) -> bool:
    """Whether the forward kernels of every card load rows of `arrays` slowly."""
    return load_slowly(arrays, LEAST_PIECE_OF_FEW if are_few(problem, device) else LEAST_PIECE)


def only_copies_fit_hopper(problem, device, arrays) -> bool:
    """Whether Hopper's own forward kernels can read `arrays` only as copies, since rows are no whole pieces of 16
    bytes."""
    has_kernels = has_hoppers_kernels(problem, device) and fits_two_blocks(problem)
    return has_kernels and all(x.size for x in arrays) and not mappable_once_copied(arrays)


def load_slowly(arrays, least_piece) -> bool:
    """Whether kernels load rows of `arrays` slowly, since the pieces that they can load at a time have less than
    `least_piece` bytes. They then load numbers one by one, and wait for each. A copy takes less time even of the
    smallest arrays; empty ones need none."""
    return all(x.size for x in arrays) and common_bytes(*arrays) < least_piece


def cut_that_fills(problem, device, way, kernel, summary, spared=0, shortest=SEGMENT) -> ForwardCut:
    """The cut into as many segments as fill the card, if that spares each block at least `spared` tokens."""
    blocks, capacity = kernel.grid(problem.sizes["V"]), kernel.resident_blocks(device)
    P = segments_of_sequences(problem, blocks, capacity, spared, shortest)
    return cut_into(problem, device, way, kernel, summary, P)


def small_forward_cut(problem, device):
    """The cut for the kernels of small heads."""
    kernel = GatedSmallForward.fitting(problem, gate_dtype(problem))
    summary = replace(kernel, outputs=False)
    return cut_into(problem, device, SMALL, kernel, summary, segments_of_small_heads(kernel, problem, device))


def segments_of_small_heads(kernel, problem, device) -> int:
    """Segments of a sequence for `kernel`, a block of which computes several heads."""
    capacity, longest = kernel.resident_blocks(device) * kernel.heads, problem.spans.longest
    P = segments_that_fill(heads_at_work(problem), longest, capacity, SMALL_SPARED, kernel.SEGMENT)
    # Of the cost, 2 longest / P + heads P / SMALL_JOINED, the least is where both terms are equal.
    all_heads = max(1, problem.sizes["N"] * problem.sizes["H"])
    return min(P, max(1, isqrt(2 * SMALL_JOINED * longest // all_heads)))


def portable_forward_cut(problem, device):
    """The cut for the portable kernels, those of wide heads or the others."""
    (N, H, K, V), memory = problem.shape("N H K V"), device.shared_per_block
    instance, split = (problem.dtype, gate_dtype(problem), tf32_products(problem), K), K > TILES[-1]
    summary = GatedSegmentStates.fitting(*instance, V, memory)
    if are_wide(problem, device):
        return cut_that_fills(problem, device, WIDE, GatedWideForward.fitting(problem.dtype, K), summary)
    # a token takes longer, the more launches for channels and products: shorter segments are then worth two launches
    shortest = SEGMENT // (4 if split else 2 if K > TILES[0] and problem.dtype == FLOAT32 else 1)
    order, schedule = read_order(problem.op), SPLIT_CHANNELS if split else SINGLE_PASS
    for columns in (TILES[0], V):  # narrow blocks take less time, if each has a multiprocessor for itself
        kernel = GatedForward.fitting(order, schedule, *instance, min(V, columns), memory)
        cut = cut_that_fills(problem, device, PORTABLE, kernel, summary, shortest=shortest)
        if N * H * kernel.grid(V) * cut.segments <= device.multiprocessors:
            break
    # Two segments put a second block on each multiprocessor, which then takes almost twice as long
    halves = split and tf32_products(problem) == 3 and cut.segments == 2
    return cut_into(problem, device, PORTABLE, kernel, summary, 1) if halves else cut


def tiles_at_once(summary, K) -> int:
    """How many times its channels a launch of the kernel `summary` has, for K channels."""
    return ceil_div(K, summary.channels) if isinstance(summary, GatedSegmentStates) else 1


def instance_for(problem, schedule, gate, columns):
    """Hopper's own forward kernel for a schedule, a dtype of gates (or SCALAR) and blocks of at most so many
    `columns`."""
    order = "AfterWrite" if schedule == SEGMENT_STATE else read_order(problem.op)
    return GatedForwardSm90.fitting(order, schedule, problem.dtype, gate, problem.sizes["K"], columns)


def hoppers_forward_kernel(problem, device):
    """Hopper's own kernel of o that takes the least time for gates of every channel."""
    (N, H, K, V), longest, gate = problem.shape("N H K V"), problem.spans.longest, gate_dtype(problem)
    if K > TILES[-1]:
        return instance_for(problem, CLUSTER_SPLIT_K, gate, V)
    single, cluster = (instance_for(problem, schedule, gate, V) for schedule in (SINGLE_PASS, CLUSTER_SPLIT_V))
    if split_columns(N * H, V, longest, device, single, cluster):
        return cluster
    narrow = problem.dtype != BFLOAT16 and narrow_blocks(N * H, V, longest, device)
    return instance_for(problem, SINGLE_PASS, gate, TILES[0]) if narrow else single


def hoppers_forward_cut(problem, device, backward):
    """The cut for Hopper's own kernel. If cutting is faster and a pullback follows, the segments are those of the
    pullback, which then reuses the states at their starts."""
    (N, H, K, V), kernel = problem.shape("N H K V"), hoppers_forward_kernel(problem, device)
    summary = instance_for(problem, SEGMENT_STATE, gate_dtype(problem), V)
    # of_head: blocks of a head
    of_head, heads, capacity = kernel.grid(V), heads_at_work(problem), kernel.resident_blocks(device)
    P = cheapest_forward_count(heads, heads * of_head, problem.spans.longest, kernel, max(K, V), device)
    P = in_waves(P, problem, of_head, capacity)
    if P > 1 and backward.count > 1 and N * H * of_head * backward.count <= capacity:
        P = backward.count
    first_tokens = short_first_segment_of(problem, device, kernel, backward) if P == 1 else 0
    return cut_into(problem, device, HOPPER, kernel, summary, 2 if first_tokens else P, first_tokens, backward)


def short_first_segment_of(problem, device, kernel, backward=NO_PULLBACK) -> int:
    """The tokens of a short first segment, if the rest of each sequence is to be the second one; 0 for uncut sequences.
    These are uncut if the pullback has equal segments, since the kernel then stores states for it as `marks`."""
    if problem.varlen or backward.count > 1 and not backward.short:
        return 0
    N, H, T, V = problem.shape("N H T V")
    return short_first_segment(N * H * kernel.grid(V), T, kernel.resident_blocks(device))


def cheapest_forward_count(heads, blocks, longest, kernel, widest, device) -> int:
    """The number of segments of a sequence with the least `forward_cost`. `widest`: the larger of K and V."""
    most = min(kernel.resident_blocks(device) // max(blocks, 1), ceil_div(longest, kernel.CHUNK))
    counts = range(1, max(1, most) + 1)
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
    """The tokens of the best short first segment, or 0 if uncut sequences take less time."""
    cost, length = cut_in_two(blocks, T, capacity, SEGMENT, FORWARD_START, FORWARD_SUMMARY)
    return length if COST_TOLERANCE * (cost + PART_START) < T + FORWARD_START else 0


def cut_in_two(blocks, T, capacity, multiple, start, summary) -> tuple[float, int]:
    """(the least cost, the tokens of the short segment that has it), for sequences of T tokens that are cut into a
    short and a long segment. Of the `capacity` blocks that the card holds, `blocks` compute the long segments. The
    others compute the short ones, which must be summarised first.

    multiple : the tokens of the short segment are a multiple of it
    start, summary : the costs of a block's start and of summarising a token
    """
    others = capacity - blocks
    if not others > 0:
        return inf, 0

    def cost(length):
        main = max(T - length + start, ceil_div(blocks, others) * (length + start))
        return main + summary * blocks / capacity * length

    return min(((cost(length), length) for length in range(multiple, T // 2 + 1, multiple)), default=(inf, 0))


def parts_per_segment(summary, heads, V, P, longest, with_last, device) -> int:
    """How many parts each of P segments is cut into for the pass that summarises them: the number with the least cost.
    `with_last`: whether each sequence's last segment is summarised, too."""
    blocks, at_once = heads * ceil_div(V, summary.BV) * (P if with_last else P - 1), summary.resident_blocks(device)

    def cost(R):
        return ceil_div(blocks * R, at_once) * (longest / P / R + PART_START)

    return min(range(1, max(1, min(MOST_PARTS, longest // P // SEGMENT)) + 1), key=cost)


def split_columns(heads, V, longest, device, single, cluster) -> bool:
    """Whether the two blocks of a cluster compute one head, with half of its columns each, and share the operands that
    their producer warps make (kernel `cluster`). Otherwise one block computes a head (kernel `single`).

    Clusters are faster if the card holds all of them, and if sequences need no cut, or are long and cut in two where
    `single` would have at most four segments. They are not faster if their blocks have fewer producer warps.
    """
    blocks, capacity = heads * cluster.grid(V), device.multiprocessors
    if V <= PANEL or blocks > capacity or cluster.producer_groups < single.producer_groups:
        return False
    P = segments_that_fill(blocks, longest, capacity, SPARED)
    if P != 2:
        return P == 1
    segments_of_single = segments_that_fill(blocks // 2, longest, capacity)  # `single` has half as many blocks
    return longest >= SPLIT_AND_CUT and segments_of_single <= 4


def narrow_blocks(heads, V, longest, device) -> bool:
    """Whether the card holds all blocks of 64 columns at once, and sequences then need no cut. Such a block takes two
    thirds of the time of one with 128 columns."""
    blocks, capacity = heads * ceil_div(V, TILES[0]), device.multiprocessors
    return blocks <= capacity and segments_that_fill(blocks, longest, capacity, SPARED) == 1


# -- backward ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class BackwardCut:
    """How a pullback is computed."""

    way: str
    device: Any  # for which it was made: TILED makes a cut for each tile
    segments: int = 1  # of every sequence
    # The kernels that compute gradients, in the order of their launches: SMALL and SHORT have one; HOPPER that of dq
    # and that of dk and dv, for a shared gate those of `weighted_sums`; PORTABLE that of channels and that of values.
    kernels: tuple = ()
    summary: Any = None  # the kernel that summarises what a segment does to a state and to the state's gradient
    short: int = 0  # as in `BackwardSegments`
    blocks: int = 0  # of a launch of each of Hopper's two kernels
    forward: ForwardCut | None = None  # a forward pass that computes the states at the segments' starts, if none saved


def backward_cut(problem, device, do, sums_dg=False, saved=None, summarised=False) -> BackwardCut:
    """How the pullback is computed for gates [B, H, T, K].

    With `sums_dg` these are copies of a gate that all channels share, whose gradient is the sum of theirs. It must not
    be rounded often. So the portable kernels then multiply half-precision data in float32; and no tiles of the state
    are taken, since their terms of this sum are rounded.

    saved : the states at the segments' starts or none, as in `gated_backward.plan_vjp`
    summarised : whether the segments are summarised already
    """
    way = backward_way(problem, device, sums_dg)
    if way == SHORT:
        instance = read_order(problem.op), problem.dtype, gate_dtype(problem)
        kernel = GatedShortBackward(*instance, TOKENS=tokens_of_short(problem))
        return BackwardCut(SHORT, device, kernels=(kernel,))
    if way in (HOPPER, TILED):
        backward = segments_of_pullback(problem, device)
        if way == TILED:
            return BackwardCut(TILED, device, backward.count, short=backward.short)
        forward = None  # the pass that computes the states at the segments' starts
        if backward.count > 1 and saved == () and not summarised:
            forward = hoppers_forward_cut(problem, device, backward)
            if not forward.gives_starts:
                forward = None
        return hoppers_backward_cut(problem, device, backward, bool(saved) or forward is not None, summarised, forward)
    if load_slowly([*problem.token_arrays, do], LEAST_PIECE_BACKWARD):
        return BackwardCut(COPIED, device)
    return small_backward_cut(problem, device) if way == SMALL else portable_backward_cut(problem, device, sums_dg)


def backward_way(problem, device, sums_dg=False) -> str:
    """The way of a pullback for gates of every channel, if no array is copied. `sums_dg` as in `backward_cut`."""
    hopper = fits_hopper(problem, device, problem.token_arrays)
    if are_small(problem, device):
        return SMALL
    if takes_short_backward(problem, TILES[-1] if hopper else 0):
        return SHORT
    if hopper and fits_a_tile(problem):
        return HOPPER
    return TILED if hopper and not sums_dg and worth_tiles(problem, device) else PORTABLE


def small_backward_cut(problem, device):
    """The cut for the kernels of small heads."""
    kernel, forward = (cls.fitting(problem, gate_dtype(problem)) for cls in (GatedSmallBackward, GatedSmallForward))
    P = segments_of_small_heads(kernel, problem, device) if can_be_joined(problem) else 1
    return BackwardCut(SMALL, device, P, (kernel,), replace(forward, outputs=False))


def can_be_joined(problem) -> bool:
    """Whether a scan can join the summaries of a pullback's segments."""
    return problem.sizes["V"] % ScanBothWays.COLUMNS == 0


def portable_backward_cut(problem, device, sums_dg):
    """The cut for the portable kernels; `sums_dg` as in `backward_cut`."""
    (N, H, K, V), half = problem.shape("N H K V"), problem.dtype.itemsize == 2
    products = 3 if sums_dg and half else tf32_products(problem)
    instance = read_order(problem.op), problem.dtype, gate_dtype(problem), products

    def blocks(states):
        return N * H * states.blocks(K, V)

    widths = GatedBackwardStates.widths(problem.dtype, products, V)
    states = widest_that_fills([GatedBackwardStates(*instance, BV) for BV in widths], blocks, device)
    P = summarised_segments(states, states.blocks(K, V), problem, device)
    values = GatedBackwardValues.fitting(*instance, V, device.shared_per_block)
    return BackwardCut(PORTABLE, device, P, (GatedBackwardChannels(*instance), values), states)


def segments_of_pullback(problem, device) -> BackwardSegments:
    """The segments of Hopper's own backward kernels, for a problem that these can compute, or for its largest tile."""
    (N, H, T, K, V), capacity = problem.shape("N H T K V"), device.multiprocessors
    sizes = capacity, min(K, TILES[-1]), min(V, TILES[-1])
    P = cheapest_backward_count(heads_at_work(problem), problem.spans.longest, *sizes)
    P = in_waves(P, problem, 1, capacity)
    return BackwardSegments(P, 0 if problem.varlen else short_segment(P, N * H, T, *sizes))


def hoppers_backward_cut(problem, device, backward, starts_known, summarised=False, forward=None) -> BackwardCut:
    """The cut for Hopper's own kernels.

    backward : the segments, a `BackwardSegments`
    starts_known : whether the states at the starts of equal segments are saved, or computed by the pass `forward`
    summarised : whether the segments are summarised already; each sequence then has two more segments, which are empty
        (see `gated_backward.HopperBackward`)
    """
    N, H, K, V = problem.shape("N H K V")
    short = 0 if starts_known or summarised else backward.short
    # as `HopperBackward` cuts: a short segment at both ends and the rest, which a block computes together with one of
    # them; or equal segments, maybe between two empty ones
    P = 3 if short else backward.count + 2 * summarised
    instance = read_order(problem.op), problem.dtype, gate_dtype(problem), K, V
    schedule = main_schedule(problem, P, GatedBackwardKeysSm90.fitting(*instance, IN_TURN), device)
    kernels = [kernel.fitting(*instance, schedule) for kernel in (GatedBackwardQueriesSm90, GatedBackwardKeysSm90)]
    blocks = kernels[1].resident_blocks(device) if schedule == IN_TURN else (2 if short else P) * N * H
    directions = 1 if starts_known else 2  # in time, in which segments must be summarised
    summary_blocks = directions * (1 if short else P - 1) * N * H
    channels = summary_channels(K, summary_blocks, device.multiprocessors)
    summary = GatedBackwardSegmentsSm90.fitting(*instance[:3], channels, V)
    return BackwardCut(HOPPER, device, backward.count, tuple(kernels), summary, short, blocks, forward)


def fits_a_tile(problem) -> bool:
    """Whether a problem has at most the channels and columns of one tile of the state."""
    return max(problem.shape("K V")) <= TILES[-1]


def cheapest_backward_count(blocks, longest, capacity, K, V) -> int:
    """The fewest segments of a sequence whose cost is at most COST_TOLERANCE times the least, on a card of `capacity`
    multiprocessors."""
    most = min(ceil_div(longest, GatedBackwardSm90.CHUNK), MOST_WAVES * capacity // max(blocks, 1))
    costs = [backward_cost(P, blocks, longest, capacity, K, V) for P in range(1, max(1, most) + 1)]
    return 1 + next(n for n, cost in enumerate(costs) if cost <= COST_TOLERANCE * min(costs))


def backward_cost(P, *sizes) -> float:
    """The cost of Hopper's backward pass in P equal segments; `sizes` are the parameters of `main_cost` after P."""
    return main_cost(P, *sizes) + (joining_cost(P, *sizes) if P > 1 else 0)


def main_cost(P, blocks, longest, capacity, K, V) -> float:
    """The cost of the main kernels, wave by wave, and of the pass that summarises all segments but each sequence's
    last, whose time is that of reading the arrays."""
    waves, length = ceil_div(blocks * P, capacity), longest if P == 1 else length_of_segments(P, longest)
    wave_time = SHARED if waves > 1 and max(K, V) <= TILES[0] else 1
    return waves * wave_time * (length + BLOCK_START) + SUMMARY * longest * blocks / capacity * (P - 1) / P


def joining_cost(P, blocks, longest, capacity, K, V) -> float:
    """The cost of joining P segments."""
    chunks = length_of_segments(P, longest) // GatedBackwardSm90.CHUNK
    unsaved = UNSAVED if chunks & chunks - 1 else 0
    return JOIN_START + unsaved + P * (JOINED + STATE * blocks * K * V / TILES[-1] ** 2)


def length_of_segments(P, longest) -> int:
    """The tokens of each of P equal segments, a multiple of a chunk's."""
    return ceil_div(longest, P * GatedBackwardSm90.CHUNK) * GatedBackwardSm90.CHUNK


def short_segment(P, blocks, T, capacity, K, V) -> int:
    """`BackwardSegments.short` for sequences of T tokens: the best length, a multiple of CHECKPOINT_EVERY; 0 if P equal
    segments are faster. More than half of the card computes the long segments, the rest of it the short ones at the
    same time. Only the short ones are summarised, each in one direction."""
    multiple = GatedBackwardSm90.CHECKPOINT_EVERY
    if T % multiple:
        return 0
    cost, length = cut_in_two(blocks, T, capacity, multiple, BLOCK_START, SUMMARY)
    cost += joining_cost(2, blocks, T, capacity, K, V)
    return length if COST_TOLERANCE * cost < backward_cost(P, blocks, T, capacity, K, V) else 0


def worth_tiles(problem, device, shared=False) -> bool:
    """Whether Hopper's own backward kernels, for one tile of the state after the other, cost less than the portable
    kernels, if they can read the arrays. Portable kernels read every chunk again for every 64 channels (TILES[0]), and
    compute scores for 128 columns (TILES[-1]) at a time. If channels share a gate (`shared`) whose gradient is
    wanted, a tile takes half of the time, and the portable kernels take PORTABLE_TF32 times as long, since they then
    multiply float32 numbers as tf32 ones."""
    (B, N, H, K, V), capacity, lengths = problem.shape("B N H K V"), device.multiprocessors, problem.spans.lengths
    P = segments_of_pullback(problem, device).count
    sizes = P, N * H, problem.spans.longest, capacity, min(K, TILES[-1]), min(V, TILES[-1])
    sums_dg = shared and has_own_gates(problem)
    if sums_dg:
        tile_cost = main_cost(*sizes) / 2 + SHARED_GATE_START
    else:
        tile_cost = cost_of_sums(problem, device) if shared else backward_cost(*sizes) + TILE_START
    chunk = GatedBackwardChannels.CHUNK
    chunks, column_tiles = (-(-lengths // chunk)).sum(), ceil_div(V, TILES[-1])
    cost_of_64_channels = B * H * chunks * chunk / capacity * (PORTABLE_CHANNELS + PORTABLE_COLUMNS * column_tiles)
    tf32 = PORTABLE_TF32 if sums_dg or problem.dtype != BFLOAT16 else 1
    start = PORTABLE_SHARED_GATE_START if shared else PORTABLE_START
    portable_cost = start + ceil_div(K, TILES[0]) * cost_of_64_channels * tf32
    return equivalent_tiles(K) * equivalent_tiles(V) * tile_cost < portable_cost


def cost_of_sums(problem, device) -> float:
    """The cost of a tile's dq, dk and dv by `WeightedSums`, without a gradient of the gate. If sequences are cut, their
    summaries cost as much again.

    Microseconds of a tile on an H200, by this cost (a unit: 0.18) and as measured: 2,048 tokens of 16 heads 54, 41; 364
    of 63 25, 35; 3,476 of 8, cut in two, 94, 83.
    """
    (N, H), P = problem.shape("N H"), segments_of_sums(problem, device)
    waves = ceil_div(SUMS_AT_ONCE["Gradients"] * N * H * P, device.multiprocessors)
    return (1 + (P > 1)) * (SUMS_START + SUMS_TOKEN * waves * problem.spans.longest / P)


def equivalent_tiles(size) -> float:
    """The time of all tiles of `size` channels or columns, in times of a whole tile: the last tile may be narrow."""
    whole_tiles, rest = divmod(size, TILES[-1])
    return whole_tiles + (0 if not rest else NARROW_TILE if rest <= TILES[0] else 1)


def main_schedule(problem, P, in_turn, device) -> str:
    """The schedule of Hopper's main backward kernels: ONE_EACH, where a block computes one segment, or IN_TURN (the
    kernel `in_turn`), where it computes whole sequences one after the other.

    ONE_EACH is the faster program, and fills the last wave better. IN_TURN is taken if there are more sequences than
    the card holds blocks, and these are so short that a block's start matters. How short depends on whether a second
    block on the multiprocessor hides part of a start.
    """
    heads, lengths = problem.sizes["N"] * problem.sizes["H"], problem.spans.lengths
    short = lengths.mean() <= MOST_IN_TURN[in_turn.blocks_per_multiprocessor]
    return IN_TURN if P == 1 and heads > in_turn.resident_blocks(device) and short else ONE_EACH


def summary_channels(K, blocks, capacity) -> int:
    """The channels of a block that summarises a segment for the pullback: all K, or 64 if `blocks` blocks of all
    channels would leave half of the card's `capacity` multiprocessors idle."""
    return TILES[0] if ceil_div(K, TILES[0]) * blocks <= capacity else K


def summarised_segments(kernel, blocks, problem, device) -> int:
    """The segments of a sequence, if a first pass of the same `kernel` summarises them, with so many blocks of each
    head: 1, or at least 4, since the two passes and the scan together take as long as the kernel does for two to three
    segments."""
    P = segments_of_sequences(problem, blocks, kernel.resident_blocks(device))
    return P if P >= 4 and can_be_joined(problem) else 1


# -- stage by stage ----------------------------------------------------------------------------------------------------
def stage_cut(problem, device, chunk, blocks) -> ForwardCut:
    """How stage 3 of mode "staged" is cut, whose kernel has so many `blocks` for each head, and BLOCKS_OF_STAGE on a
    multiprocessor. Segments consist of whole chunks of `chunk` tokens. There is no kernel of o."""
    (K, V), memory = problem.shape("K V"), device.shared_per_block
    capacity = BLOCKS_OF_STAGE * device.multiprocessors
    P = 1 if problem.dtype == DOUBLE else segments_of_sequences(problem, blocks, capacity, SPARED)
    if P == 1:
        return ForwardCut(PORTABLE)
    kernel = GatedSegmentStates.fitting(problem.dtype, gate_dtype(problem), tf32_products(problem), K, V, memory)
    spans, parts = problem.spans.segments(P, chunk), parts_of_segments(problem, device, kernel, P)
    return ForwardCut(PORTABLE, None, kernel, P, spans=spans, parts=parts)


# -- gates that channels share -----------------------------------------------------------------------------------------
def scalar_forward_cut(problem, device, only_summary=False) -> ForwardCut:
    """How the forward pass is computed for a gate [B, H, T, 1]: by Hopper's kernels, which read it as it is; or (the
    way PORTABLE) as `forward_cut` says, with a copy of the gate for every channel. `only_summary`: whether no o is
    computed but a summary, which is never made of padded copies."""
    arrays, small = [problem[name] for name in "qkv"], takes_small_heads(problem)
    if problem.mode != "chunk" or not small and takes_short_forward(problem, device):
        return ForwardCut(PORTABLE)
    only_copies_fit = not small and only_copies_fit_hopper(problem, device, arrays)
    if not only_summary and (only_copies_fit or loads_forward_slowly(problem, device, arrays)):
        return ForwardCut(COPIED)
    if small or not fits_hoppers_forward(problem, device, arrays):
        return ForwardCut(PORTABLE)
    (N, H, K, V), longest = problem.shape("N H K V"), problem.spans.longest
    columns = min(V, TILES[0] if narrow_blocks(N * H, V, longest, device) else TILES[-1])
    if problem.dtype == BFLOAT16 and K <= TILES[-1]:  # `WeightedSums` multiplies states in the dtype of the data
        gate = gate_dtype(problem)
        kernel, summary = WeightedSums.fitting("Whole", gate, K, columns), WeightedSums.fitting("Summary", gate, K, V)
        return cut_that_fills(problem, device, HOPPER, kernel, summary, SPARED)
    if K > TILES[-1]:
        kernel = instance_for(problem, CLUSTER_SPLIT_K, SCALAR, V)
    else:
        kernel = instance_for(problem, SINGLE_PASS, SCALAR, columns)
    summary = instance_for(problem, SEGMENT_STATE, SCALAR, V)
    cut = cut_that_fills(problem, device, HOPPER, kernel, summary, SPARED)
    first_tokens = short_first_segment_of(problem, device, kernel) if cut.segments == 1 else 0
    return cut_into(problem, device, HOPPER, kernel, summary, 2, first_tokens) if first_tokens else cut


def scalar_backward_cut(problem, device, do=None, summarised=False) -> BackwardCut:
    """How the pullback is computed for a gate [B, H, T, 1]: by Hopper's kernels, which read it as it is, or (the way
    PORTABLE) by the kernels for gates of every channel.

    do : the gradient of o; None for a summary, which is never made of padded copies
    summarised : whether the segments are summarised already
    """
    arrays = [problem[name] for name in "qkv"]
    # The kernel for short sequences reads any rows. Those of others are copied before the gate is: its copies fit, too
    reads_any_rows = not are_small(problem, device) and takes_short_backward(problem, 0)
    if do is not None and load_slowly([*arrays, do], LEAST_PIECE_BACKWARD) and not reads_any_rows:
        return BackwardCut(COPIED, device)
    fits = problem.dtype == BFLOAT16 and fits_hopper(problem, device, arrays)
    if not fits or has_own_gates(problem) and takes_small_heads(problem):
        return BackwardCut(PORTABLE, device)
    # The kernel for short sequences has a launch instead of one for each tile, and more blocks on a multiprocessor.
    # Microseconds on an H200: 486 sequences of 5 tokens, 32 heads of 128 of both, 2,457, 196; 320 heads of 64 18, 17.
    short = takes_short_backward(problem, TILES[-1]) and problem.initial_state is None
    many = problem.sizes["N"] * problem.sizes["H"] > device.multiprocessors
    if fits_a_tile(problem) and not (short and many):
        return sums_backward_cut(problem, device, summarised)
    return BackwardCut(TILED if not short and worth_tiles(problem, device, True) else PORTABLE, device)


def sums_backward_cut(problem, device, summarised=False, one_part=False) -> BackwardCut:
    """The cut for the kernels `WeightedSums`, for a problem or for one tile of it. `one_part`: whether the kernels must
    write the gate's gradient as one array, and not as a term for each tile of K.

    They read a bfloat16 gate as it is if every token has a gate of its own and sequences are not cut; else they read a
    float32 copy.
    """
    (K, V), sums_dg, P = problem.shape("K V"), has_own_gates(problem), segments_of_sums(problem, device)
    gate = BFLOAT16 if sums_dg and P == 1 and not summarised and gate_dtype(problem) == BFLOAT16 else FLOAT32
    sums = weighted_sums(problem, gate, P + 2 * summarised, device, sums_dg, one_part)  # two empty segments, if any
    return BackwardCut(HOPPER, device, P, sums, WeightedSums.fitting("BothSummaries", FLOAT32, K, V))


def segments_of_sums(problem, device) -> int:
    """The segments of a sequence in the kernels `WeightedSums` of a pullback, for a problem or for its largest tile."""
    widest = min(max(problem.shape("K V")), TILES[-1])
    # without a gate's gradient, other blocks compute dq, dk and dv at the same time
    sums_at_once = 1 if has_own_gates(problem) else SUMS_AT_ONCE["Gradients"]
    return segments_of_sequences(problem, sums_at_once * ceil_div(widest, PANEL), device.multiprocessors)


def has_own_gates(problem) -> bool:
    """Whether every token has a gate of its own, whose gradient is then wanted."""
    return problem["g"].shape[:3] == problem.shape("B H T")


def weighted_sums(problem, gate, P, device, sums_dg, one_part) -> tuple[WeightedSums, ...]:
    """The kernels of dq, dk and dv that need the least time, counted in waves, for gates of the dtype `gate`.

    With the gradient of the gate (`sums_dg`), one kernel computes dq, and another one dk and dv, the latter by blocks
    of all columns if dg must be in `one_part`. Without it, either one kernel computes all three, by blocks of all
    columns or of 64 columns, which take three quarters of the time; or one kernel computes dq by blocks of 64 columns,
    and another one dk and dv by blocks of all columns.
    """
    N, H, K, V = problem.shape("N H K V")
    widest, narrow = max(K, V), TILES[0]

    def quarters_of_waves(sums, BV):
        blocks = sums * P * N * H * ceil_div(widest, BV)
        return (3 if BV < widest else 4) * ceil_div(blocks, device.multiprocessors)

    if sums_dg:
        count = {"GatedQueries": 1, "GatedKeys": 2}
        widths = {what: min((widest, narrow), key=lambda BV: quarters_of_waves(count[what], BV)) for what in count}
        if one_part:
            widths["GatedKeys"] = widest
        return tuple(WeightedSums.fitting(what, gate, widest, BV) for what, BV in widths.items())
    of_one_kernel = {BV: quarters_of_waves(3, BV) for BV in (widest, narrow)}
    of_two_kernels = quarters_of_waves(1, narrow) + quarters_of_waves(2, widest)
    if P == 1 and of_two_kernels < min(of_one_kernel.values()):
        return WeightedSums.fitting("Queries", gate, V, narrow), WeightedSums.fitting("Keys", gate, widest, widest)
    return (WeightedSums.fitting("Gradients", gate, widest, min(of_one_kernel, key=of_one_kernel.__getitem__)),)
