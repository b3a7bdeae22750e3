"""How work is cut so that it fills a card: segments of sequences and columns of V, each choice with its reason.

`device` says how many multiprocessors the card has, and how much shared memory each of them.

Where several cuts are possible, a model says which takes least time. It counts in tokens: the time that a block of the
pass's main kernel takes for one, of 128 channels and columns where nothing else is said. Its constants were fitted to
times on an H200, in bfloat16, of calls whose cuts were forced: they decide how long a call takes, never what it
computes. Docstrings hold a choice to calls that were measured: B,T,H,D (or B,T,H,K,V), milliseconds so / otherwise.
"""

from __future__ import annotations

from math import inf

from ...arrays import BFLOAT16
from .instances import PANEL, TILES, GatedBackwardSm90, GatedForwardSm90
from .plan import FLOAT32, ceil_div
from .scalar_instances import WeightedSums

RESERVED = 1024  # bytes of shared memory that every block takes besides its own
STATES_AT_LEAST = 1 << 26  # bytes of states that may be kept whatever the inputs' size
SEGMENT = 128  # tokens that are worth a pass of their own: the shortest segment where no model says otherwise
HARDLY_MORE = 1.01  # times the least time: as good, where a cut in fewer is simpler

# Hopper's forward pass. `forward_segments`: fitted on 70 shapes, within 3 % of the best cut of each.
CUT_SMALL, CUT_LARGE = 300, 520  # what a cut takes besides: launches, by up to 64 channels and columns, and by more
CUT_TOKEN, CUT_JOINED, CUT_STATE = 0.3, 5, 0.5  # to summarise a token; to join a segment more; its 128 columns of state
CUT_HEAD, CUT_SHARED = 1, 3  # what a head adds where each block has a multiprocessor; where two share one
UNSAVED = 14  # what it costs gradients that segments are no power of 2 of chunks: their states are not stored
SPARED = 600  # what a cut must spare a block where no model decides: as long as two launches more and states take
SPLIT_AND_CUT = 4096  # tokens from which on clusters that share columns take sequences in two
FORWARD_START, FORWARD_SUMMARY = 32, 0.5  # a block's start; to summarise a token (`short_first_segment`)
PART_START, MOST_PARTS = 256, 16  # a part's start and state (`parts`, `short_first_segment`); parts of a segment

# Hopper's backward pass. `backward_segments`: 50 shapes of 1 to 64 heads and 256 to 4,096 tokens, within 3 %.
BLOCK_START = 64  # a block's start
SUMMARY = 0.32  # to summarise a token both ways, which memory bounds
SHARED = 0.66  # of a wave's time, where two blocks share each multiprocessor, as those of small heads do
JOIN_START, JOINED = 35, 4  # the launches that summarise and join; to join a segment more
STATE = 0.8  # a segment's state of 128 channels and columns
MOST_WAVES = 8  # of segments: so many fill the last one well enough
MOST_IN_TURN = {1: 512, 2: 128}  # tokens a sequence up to which a start counts, on average, by blocks a multiprocessor

# Tiles of wide heads beside the kernels for every card. `worth_tiles`: 97 shapes of 64 to 4,096 tokens and 4 to 256
# heads; its choice takes 1 % longer than the better way on average, and 28 % at worst.
TILE_START, SHARED_GATE_START = 20, 180  # the launches of a tile; of one whose channels share a gate
NARROW_TILE = 0.8  # of a tile's time, with half of its channels or of its columns
OTHERS_START, OTHERS_SHARED_GATE_START = 160, 400  # the same two of the kernels for every card
OTHERS_CHANNELS, OTHERS_COLUMNS = 0.25, 0.88  # there, of a tile's time: 64 channels, and for every 128 columns more
OTHERS_FINER = 1.7  # times as long there, in tf32


def grid(kernel, V) -> int:
    """Blocks of a sequence and head: one for every BV columns, in whole clusters."""
    return ceil_div(V, kernel.BV * kernel.cluster) * kernel.cluster


def resident_blocks(kernel, device) -> int:
    """How many of a kernel's blocks are on the card at once."""
    fitting = device.shared_per_multiprocessor // (kernel.shared_bytes + RESERVED)
    return device.multiprocessors * max(1, min(kernel.resident, fitting))


def segments(blocks, longest, most, spared=0) -> int:
    """Into how many a sequence is cut, so that `blocks` blocks of the uncut problem become at most `most`; one where
    that spares a block fewer tokens than `spared`."""
    P = max(1, min(most // max(blocks, 1), longest // SEGMENT))
    return P if longest * (P - 1) >= spared * P else 1


def forward_segments(heads, blocks, longest, kernel, widest, device) -> int:
    """Into how many Hopper's forward pass cuts a sequence whose channels have gates of their own, of `blocks` blocks of
    the uncut problem: what takes the least time, in tokens. gla's milliseconds so / whole: 1,513,8,64 .018/.021,
    1,512,16,64 .0187/.0199, 1,1024,8,128 .030/.045; and where it is whole for that, 1,512,32,64 .022/.020, 1,768,64,64
    .032/.031, 1,513,8,128 .025/.023. In a finer cut / in segments of 128 tokens: 1,1024,1,128 .024/.026, 1,3000,8,64
    .032/.034; in a coarser one 1,32768,1,64 .081/.105."""
    chunk, most = GatedForwardSm90.CHUNK, resident_blocks(kernel, device)

    def time(P):
        chunks = ceil_div(longest, P * chunk)
        start = (CUT_SMALL if widest <= TILES[0] else CUT_LARGE) + (UNSAVED if chunks & chunks - 1 else 0)
        of_heads = heads * (CUT_SHARED if blocks * P > device.multiprocessors else CUT_HEAD)
        each = CUT_JOINED + CUT_STATE * heads * widest / TILES[-1]
        return start + (1 + CUT_TOKEN) * chunks * chunk + each * P + of_heads

    finest = min(most // max(blocks, 1), ceil_div(longest, chunk))
    P = min(range(2, finest + 1), key=time, default=1)
    return P if P > 1 and time(P) < longest else 1


def summarised_segments(kernel, blocks, problem, device) -> int:
    """Into how many a sequence is cut where a pass of the same kernel has to summarise them first: from four on, since
    the two passes and what joins them take as long as two to three segments."""
    P = segments(blocks, int(problem.spans.lengths.max(initial=0)), resident_blocks(kernel, device))
    return P if P >= 4 and problem.sizes["V"] % 4 == 0 else 1


def widest_that_fills(kernels, blocks, device):
    """Of kernels that differ in their blocks' columns the widest one whose `blocks(kernel)` fill the card, or the
    narrowest: columns that share a block share its decays and loads of keys, too."""
    return next((each for each in reversed(kernels) if blocks(each) >= resident_blocks(each, device)), kernels[0])


def heads_at_once(heads, bytes_of_a_head, inputs) -> int:
    """Of how many heads the states are kept at once: no more bytes than the inputs have, in turns of equal size."""
    most = max(1, max(inputs, STATES_AT_LEAST) // max(1, bytes_of_a_head))
    return max(1, ceil_div(heads, ceil_div(heads, most)) if heads else 1)


def backward_segments(blocks, longest, most, K, V) -> int:
    """Into how many the backward pass cuts a sequence, of `blocks` blocks of the uncut problem where the card has
    `most` multiprocessors: the fewest that take hardly more than the least time. gla's milliseconds so / in segments of
    at least 128 tokens: 1,513,8,128 .045/.057, 1,2048,48,128 .227/.269, 1,8192,32,64 .209/.247."""
    finest = min(ceil_div(longest, GatedBackwardSm90.CHUNK), MOST_WAVES * most // max(blocks, 1))
    times = [time_in_segments(P, blocks, longest, most, K, V) for P in range(1, max(1, finest) + 1)]
    return 1 + next(n for n, each in enumerate(times) if each <= HARDLY_MORE * min(times))


def in_turn(kernel, heads, lengths, device) -> bool:
    """Whether blocks of a main backward kernel take `heads` (sequence, head)s of these lengths in turn, of which the
    card holds fewer at once: where sequences are so short that a block's start counts, which a second block on the
    multiprocessor hides in part. Otherwise a block each is the faster program, which also fills a last wave better:
    gla's milliseconds in turn / so, 64,37,64,128 0.43/0.57, 1,256,384,128 .168/.176, 1,64,1024,64 .061/.072;
    4,4096,64,128 1.62/1.54, 1,256,264,64 .061/.059, 1,512,384,64 .182/.148."""
    return heads > resident_blocks(kernel, device) and lengths.mean() <= MOST_IN_TURN[kernel.resident]


def time_in_segments(P, *sizes) -> float:
    """Of all kernels of the backward pass, in tokens of a main one."""
    return equal_segments_time(P, *sizes) + (joining_time(P, *sizes) if P > 1 else 0)


def equal_segments_time(P, blocks, longest, most, K, V) -> float:
    """Of the main backward kernels, in waves, and the pass that summarises all segments but a sequence's last, which
    memory bounds, in tokens of one of them."""
    waves, length = ceil_div(blocks * P, most), longest if P == 1 else length_of_segments(P, longest)
    of_wave = SHARED if waves > 1 and max(K, V) <= TILES[0] else 1
    return waves * of_wave * (length + BLOCK_START) + SUMMARY * longest * blocks / most * (P - 1) / P


def joining_time(P, blocks, longest, most, K, V) -> float:
    """What P segments take besides."""
    chunks = length_of_segments(P, longest) // GatedBackwardSm90.CHUNK
    unsaved = UNSAVED if chunks & chunks - 1 else 0
    return JOIN_START + unsaved + P * (JOINED + STATE * blocks * K * V / TILES[-1] ** 2)


def length_of_segments(P, longest) -> int:
    return ceil_div(longest, P * GatedBackwardSm90.CHUNK) * GatedBackwardSm90.CHUNK


def short_segment(P, blocks, T, most, K, V, aligned) -> int:
    """Of how many tokens, a multiple of `aligned`, the segment is that each backward pass begins a sequence of T with,
    where the rest is another; 0 where P of equal size are faster. More than half of the card is busy with the long
    ones, and the others make the short ones meanwhile. Only those are summarised, each in one direction."""
    if T % aligned:
        return 0
    time, length = cut_in_two(blocks, T, most, aligned, BLOCK_START, SUMMARY)
    time += joining_time(2, blocks, T, most, K, V)
    return length if HARDLY_MORE * time < time_in_segments(P, blocks, T, most, K, V) else 0


def short_first_segment(blocks, T, most) -> int:
    """The same of the forward pass, beside whole sequences. gla's milliseconds at 1,8192,96,128 with weak / trained
    gates: with 1,920 tokens .382/.369, with 2,048 .377/.362, with 2,112 .386/.372."""
    time, length = cut_in_two(blocks, T, most, SEGMENT, FORWARD_START, FORWARD_SUMMARY)
    return length if HARDLY_MORE * (time + PART_START) < T + FORWARD_START else 0


def cut_in_two(blocks, T, most, aligned, start, summary) -> tuple[float, int]:
    """(the least time, in tokens, for which length of sequences' first segments): of the `most` blocks on the card
    `blocks` make the rest of theirs, and the others all first ones, which are summarised before."""
    others = most - blocks
    if not others > 0:
        return inf, 0

    def time(length):
        main = max(T - length + start, ceil_div(blocks, others) * (length + start))
        return main + summary * blocks / most * length

    return min(((time(length), length) for length in range(aligned, T // 2 + 1, aligned)), default=(inf, 0))


def worth_tiles(problem, P, device, shared) -> bool:
    """Whether Hopper's own backward kernels, tiles of the state one after the other, take less time than the kernels
    for every card, counted in tokens of a whole tile on a multiprocessor. These have chunks of 64 tokens, read what a
    chunk has for every 64 channels, and make scores for 128 columns at a time. gla's milliseconds in tiles / by these:
    8,1024,32,256,256 1.64/2.86, 64,37,64,256,256 2.37/3.35, 1,128,256,256,512 .57/.81, 1,512,128,192,192 .37/.52,
    1,4096,16,192,192 .55/.68; 1,512,64,256,512 .79/.76, 1,512,16,256,256 .24/.12. Where channels have a `shared` gate,
    tiles take half of that time, and the others twice as long, in float32: retention 2,2048,8,256,512 .34/1.52,
    1,512,8,200,64 .07/.12; 1,1024,4,256,512 .31/.23; simple_gla 2,512,16,256,256 .20/.40; 1,1024,4,256,256 .16/.12."""
    (B, N, H, K, V), most, lengths = problem.shape("B N H K V"), device.multiprocessors, problem.spans.lengths
    sizes = P, N * H, int(lengths.max()), most, min(K, TILES[-1]), min(V, TILES[-1])
    of_tile = equal_segments_time(*sizes) / 2 + SHARED_GATE_START if shared else time_in_segments(*sizes) + TILE_START
    chunks, columns = (-(-lengths // 64)).sum(), ceil_div(V, TILES[-1])
    of_channels = B * H * chunks * 64 / most * (OTHERS_CHANNELS + OTHERS_COLUMNS * columns)
    others = ceil_div(K, TILES[0]) * of_channels * (OTHERS_FINER if shared or problem.dtype != BFLOAT16 else 1)
    start = OTHERS_SHARED_GATE_START if shared else OTHERS_START
    return whole_tiles(K) * whole_tiles(V) * of_tile < start + others


def whole_tiles(size) -> float:
    """How many tiles of a state side by side take as long as those of so many channels or columns."""
    whole, rest = divmod(size, TILES[-1])
    return whole + (0 if not rest else NARROW_TILE if rest <= TILES[0] else 1)


def summary_channels(K, blocks, most) -> int:
    """Of how many channels at most a block summarises a segment backward: half of them where `blocks` of all channels
    leave half of the card's `most` multiprocessors idle: 0.254 for 0.257 ms at 4,2048,16,128."""
    return TILES[0] if ceil_div(K, TILES[0]) * blocks <= most else K


def split_columns(heads, V, longest, device, alone, split) -> bool:
    """Whether two blocks of a cluster share a head's columns of V, and what producers make of it: where the card holds
    them all, sequences need not be cut, or are long and cut in two where blocks alone have four segments, and a block
    of theirs (`split`) has as many producers as one that shares nothing (`alone`). gla's milliseconds so / in segments
    alone, with gates as trained models have them: 4,2048,16,128 .069/.101; in two and four segments, 1,2048,32,128
    .071/.068, 1,4096,32,128 .101/.109; in two and five, 1,4096,26,128 .105/.095; in float16, where shared memory has
    room for half the producers, 4,2048,16,128 .109/.102, 2,16384,16,128 .473/.357."""
    blocks, most = 2 * heads * ceil_div(V, 2 * PANEL), device.multiprocessors
    P = segments(blocks, longest, most, SPARED) if V > PANEL and blocks <= most else 0
    fits = P == 1 or P == 2 and longest >= SPLIT_AND_CUT and segments(blocks // 2, longest, most) <= 2 * P
    return fits and split.producer_groups >= alone.producer_groups


def parts(summary, heads, V, P, longest, final, device) -> int:
    """Into how many parts each of P segments is cut for the pass that summarises them: what takes the least time for
    the waves of blocks that summarise those whose state is needed, all but the last without a final state."""
    blocks, at_once = heads * ceil_div(V, summary.BV) * (P if final else P - 1), resident_blocks(summary, device)

    def time(R):
        return ceil_div(blocks * R, at_once) * (longest / P / R + PART_START)

    return min(range(1, max(1, min(MOST_PARTS, longest // P // SEGMENT)) + 1), key=time)


def tf32_products(problem) -> int:
    """Of how many products in tf32 a product of numbers is the sum: float16 ones are tf32 numbers."""
    return 3 if problem.dtype == FLOAT32 and problem.precision == "float32" else 1


def narrow_blocks(heads, V, longest, device) -> bool:
    """Whether blocks of 64 columns of V, all on the card at once, spare its sequences to be cut into segments. Under a
    scalar decay they take two thirds of a wider block's time, and no pass that summarises: 0.049 for 0.075 ms at
    4,2048,16,128; with gates for all channels in float16 0.106 for 0.110 ms."""
    blocks, most = heads * ceil_div(V, TILES[0]), device.multiprocessors
    return blocks <= most and segments(blocks, longest, most, SPARED) == 1


def weighted_sums(problem, dtype, P, device, gate=False, one_part=False) -> tuple[WeightedSums, ...]:
    """The kernels of dq, dk and dv: one for all three, of blocks as wide as the channels, or of half as many, which
    take three quarters of the time; or one for dq of such and one for dk and dv of wide ones: whatever needs the least
    time for its waves of blocks. With the gradient of the gate always one for dq and one for the others, which takes
    all of K where dg is to be in `one_part`."""
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
