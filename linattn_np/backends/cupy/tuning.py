"""How work is cut so that it fills a card: segments, halves and tails of sequences, each choice with its reason.

`device` says how many multiprocessors the card has, and how much shared memory each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .instances import CLUSTER_SPLIT_K, TILES, GatedForwardSm90, WeightedSums
from .plan import ceil_div

RESERVED = 1024  # bytes of shared memory that every block takes besides its own
LATER = 64  # tokens, where a sequence's second half begins: its block goes through some of the first's too
LOOK, START = 64, 256  # tokens that take as long as a block's look at the gates before a cut, and its start behind one
SEGMENT = 128  # tokens that are worth a pass of their own


def grid(kernel, V) -> int:
    """Blocks of a sequence and head: one for every BV columns, in whole clusters."""
    return ceil_div(V, kernel.BV * kernel.cluster) * kernel.cluster


def resident_blocks(kernel, device) -> int:
    """How many of a kernel's blocks are on the card at once."""
    fitting = device.shared_per_multiprocessor // (kernel.shared_bytes + RESERVED)
    return device.multiprocessors * max(1, min(kernel.resident, fitting))


def segments(blocks, longest, most) -> int:
    """Into how many a sequence is cut, so that `blocks` blocks of the uncut problem become at most `most`."""
    return max(1, min(most // max(blocks, 1), longest // SEGMENT))


def halves(kernel, blocks, longest, device) -> bool:
    """Whether sequences are cut in two, and the second half's block makes the state between by itself, instead of a
    pass that summarises segments. gla's milliseconds in halves / segments, and both with weak gates, where nothing
    is forgotten: 1,4096,64,128 .121/.142, .175/.166; 1,16384,64,128 .423/.444, .645/.549. Where two blocks share a
    multiprocessor, segments are quarters: 1,2048,64,64 .040/.049, .059/.059; 4096 .068/.071, .111/.096; 8192
    .127/.119, .210/.164."""
    if segments(blocks, longest, resident_blocks(kernel, device)) == 2:
        return longest <= 8192
    return segments(blocks, longest, device.multiprocessors) == 2 and longest < 4096


def tail(kernel, blocks, lengths, device) -> int:
    """Tokens at the ends of sequences of one length that get blocks of their own, on what the other blocks' last
    wave leaves idle: as many as make those that follow one another there take as long as one of the others. 0 where
    that gains less than a 20th, or than twice what the look costs where gates do not forget. At 1,8192,96,128 it is
    1872 tokens, and gla takes 0.333 ms for 0.416."""
    longest, idle = int(lengths.max()), -blocks % resident_blocks(kernel, device)
    if not idle or lengths.min() < longest:
        return 0
    each = ceil_div(blocks, idle)
    tokens = (longest + LOOK - each * START) // (each + 1)
    return tokens if tokens - LOOK > max(2 * LOOK, longest // 20) else 0


def in_two(kernel, blocks, lengths, device) -> tuple[int, bool] | None:
    """Of sequences that are cut in two: where, in tokens behind their middle, and what becomes of a second part
    where gates do not forget: its block goes through the first half as well, or, for a tail, the first part's block
    goes on to the end."""
    longest, chunk = int(lengths.max()), GatedForwardSm90.CHUNK
    if halves(kernel, blocks, longest, device):
        return LATER, False
    uncut = segments(blocks, longest, resident_blocks(kernel, device)) == 1
    tokens = tail(kernel, blocks, lengths, device) if uncut else 0
    middle = ceil_div(longest, 2 * chunk) * chunk
    return ((longest - tokens) // chunk * chunk - middle, True) if tokens else None


@dataclass(frozen=True)
class Cut:
    """How a forward pass cuts its sequences: into `segments`, or in two parts, the second `later` tokens behind the
    middle."""

    segments: int = 1
    later: int | None = None
    alone: bool = False  # whether the first part's block goes on to the end where gates do not forget


def forward_cut(kernel, blocks, lengths, device) -> Cut:
    """That of a Hopper kernel which takes `blocks` blocks for uncut sequences."""
    if isinstance(kernel, GatedForwardSm90) and kernel.schedule != CLUSTER_SPLIT_K:
        if found := in_two(kernel, blocks, lengths, device):
            return Cut(2, *found)
    return Cut(segments(blocks, int(lengths.max()), resident_blocks(kernel, device)))


def parts(summary, heads, V, P, longest, final, device) -> int:
    """Into how many parts each of P segments is cut for the pass that summarises them, so that those whose state is
    needed, all but the last without a final state, fill the card: at 4,2048,16,128 one part leaves half of it idle."""
    blocks = heads * ceil_div(V, summary.BV) * (P if final else P - 1)
    return max(1, min(resident_blocks(summary, device) // blocks, longest // P // SEGMENT))


def narrow_blocks(heads, V, longest, device) -> bool:
    """Whether blocks of 64 columns of V, all on the card at once, spare its sequences to be cut into segments: under
    a scalar decay they take two thirds of a wider block's time, and no pass that summarises: 0.049 for 0.075 ms at
    4,2048,16,128."""
    blocks, most = heads * ceil_div(V, TILES[0]), device.multiprocessors
    return blocks <= most and segments(blocks, longest, most) == 1


def weighted_sums(problem, dtype, P, device) -> tuple[WeightedSums, ...]:
    """The kernels of dq, dk and dv without a gradient of the gate: one for all three, of blocks as wide as the
    channels, or of half as many, which take three quarters of the time; or one for dq of such and one for dk and dv
    of wide ones: whatever needs the least time for its waves of blocks."""
    N, H, K, V = problem.shape("N H K V")
    widest, narrow = max(K, V), TILES[0]

    def waves(sweeps, BV):
        blocks = sweeps * P * N * H * ceil_div(widest, BV)
        return (3 if BV < widest else 4) * ceil_div(blocks, device.multiprocessors)

    whole = {BV: waves(3, BV) for BV in (widest, narrow)}
    if P == 1 and waves(1, narrow) + waves(2, widest) < min(whole.values()):
        return WeightedSums.fitting("Queries", dtype, V, narrow), WeightedSums.fitting("Keys", dtype, widest, widest)
    return (WeightedSums.fitting("Gradients", dtype, widest, min(whole, key=whole.__getitem__)),)
