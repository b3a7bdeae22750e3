"""The tables by which softmax attention's blocks know their tiles; the host makes them with a plan.

A tile is a range of a sequence's queries in one head, or of its keys. A block computes a tile with the range of the
other side's tiles that hold a key which one of its queries sees, or a query that sees one of its keys.
"""

from __future__ import annotations

from heapq import heapreplace

import numpy as np

from .plan import ceil_div

WORK = "batch head start count others length shift first blocks chunk part".split()  # the kernels' struct `Work`
WORDS = 12  # of int32 that a Work takes
STATISTICS = 64  # queries that a piece of the statistics is for
UNBOUNDED = 1 << 30  # tokens beside the diagonal
LEAST_PART = 4  # tiles of keys that are worth a block of their own
SETUP = 0.6  # of a tile of the other side's work: what beginning and ending a tile costs
CACHED = 24 << 20  # bytes of keys and values that stay in L2


def window(problem) -> tuple[int, int]:
    """How many keys a query sees before its own place, and behind it."""
    left, right = (UNBOUNDED if side < 0 else side for side in problem.options["window"])
    return left, right


def statistics_bounds(problem) -> np.ndarray:
    """[N + 1]: where each sequence's statistics begin, in pieces of STATISTICS queries, and how many pieces there
    are."""
    return problem.spans.chunk_bounds(STATISTICS)


def tile_table(problem, tokens: int, other: int, by_keys: bool = False) -> np.ndarray:
    """[heads of all sequences, tiles, WORDS] int32: a row for each tile of `tokens` queries, or keys, with its range of
    tiles of `other` keys, or queries. The range has one tile at least; where nothing is seen, that has no tokens."""
    sides = problem.spans, problem.options["key_spans"]
    own, others = sides[::-1] if by_keys else sides
    before, behind = window(problem)[::-1] if by_keys else window(problem)
    bounds = own.chunk_bounds(tokens)
    sequence = np.repeat(np.arange(own.count), np.diff(bounds))
    token = (np.arange(bounds[-1]) - bounds[sequence]) * tokens
    lengths = others.lengths[sequence]
    count = np.minimum(own.lengths[sequence] - token, tokens)
    shift = token + lengths - own.lengths[sequence]
    lowest, highest = np.maximum(shift - before, 0), np.minimum(shift + count + behind, lengths) - 1
    nothing = highest < lowest
    first = np.where(nothing, 0, lowest // other)
    blocks = np.where(nothing, 1, highest // other - first + 1)
    chunk = statistics_bounds(problem)[sequence] + (0 if by_keys else token // STATISTICS)
    if by_keys:  # the kernels read a piece even where they use none of it
        chunk[nothing] = 0
    columns = (
        own.bounds[sequence] + token,
        count,
        others.bounds[sequence],
        np.where(nothing, 0, lengths),
        shift,
        first,
        blocks,
        chunk,
    )
    heads = problem.sizes["HK" if by_keys else "H"]
    found = np.zeros((problem.sizes["B"] * heads, len(token), WORDS), np.int32)
    found[..., 0], found[..., 1] = (x[:, None] for x in np.divmod(np.arange(len(found)), heads))
    found[..., 2 : 2 + len(columns)] = np.stack(columns, -1)
    found[..., WORK.index("part")] = found[..., 0]
    return found


def parts(problem, tiles: np.ndarray, multiprocessors: int) -> int:
    """How many parts the keys of every tile are split into: one, or, if no sequence has more than a tile of queries, as
    many as give all multiprocessors work."""
    if not tiles.size or tiles.shape[1] > problem.spans.count:
        return 1
    return max(1, min(multiprocessors // tiles[..., 0].size, int(blocks_of(tiles).max()) // LEAST_PART))


def split(tiles: np.ndarray, count: int, batch: int) -> np.ndarray:
    """[count * heads, tiles, WORDS]: the table once for each of `count` parts of the keys, whose results are rows of a
    batch that is so many times larger."""
    first, blocks, length, part = (WORK.index(name) for name in ("first", "blocks", "length", "part"))
    found = np.repeat(tiles[None], count, axis=0)
    ends = tiles[..., blocks] * np.arange(count + 1)[:, None, None] // count
    found[..., first] += ends[:-1]
    found[..., blocks] = np.diff(ends, axis=0)
    nothing = found[..., blocks] == 0
    found[nothing, first], found[nothing, blocks], found[nothing, length] = 0, 1, 0
    found[..., part] += batch * np.arange(count)[:, None, None]
    return found.reshape(-1, *tiles.shape[1:])


def blocks_of(tiles: np.ndarray) -> np.ndarray:
    """How many tiles of the other side each tile has."""
    return tiles[..., WORK.index("blocks")]


def longest_first(tiles: np.ndarray) -> np.ndarray:
    """[all tiles, WORDS]: those with most work first."""
    listed = tiles.swapaxes(0, 1).reshape(-1, WORDS)
    return listed[np.argsort(-blocks_of(listed), kind="stable")]


def balanced(tiles: np.ndarray, multiprocessors: int, heads_at_once: int) -> np.ndarray:
    """[rounds + 1, blocks, WORDS]: the tiles of each block in their order, and an empty one at the end.

    `heads_at_once` heads at a time, the longest tiles of these first, each to the block that has least to do so far:
    the order that a counter shared by all blocks would give them.
    """
    listed = np.concatenate([longest_first(tiles[n : n + heads_at_once]) for n in range(0, len(tiles), heads_at_once)])
    count = min(multiprocessors, len(listed))
    loads, taken = [(0.0, block) for block in range(count)], np.empty(len(listed), np.int64)
    for n, cost in enumerate((blocks_of(listed) + SETUP).tolist()):
        load, taken[n] = loads[0]
        heapreplace(loads, (load + cost, int(taken[n])))
    order, each = np.argsort(taken, kind="stable"), np.bincount(taken, minlength=count)
    table = np.zeros((each.max(initial=0) + 1, count, WORDS), np.int32)
    place = np.arange(len(listed)) - np.repeat(np.cumsum(each) - each, each)
    table[place, taken[order]] = listed[order]
    return table


def heads_at_once(pairs: int, bytes_of_head: int, group: int) -> int:
    """How many of `pairs` (batch, head) pairs are computed at a time: as many as L2 holds keys and values of, in equal
    turns, or all of them if so few would leave blocks idle."""
    fitting = CACHED // max(bytes_of_head, 1) * group
    return pairs if fitting < 4 * group or fitting >= pairs else ceil_div(pairs, ceil_div(pairs, fitting))
