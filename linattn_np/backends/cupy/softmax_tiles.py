"""Tables that tell the blocks of softmax attention which tiles to compute. The host makes them when it plans a call.

There are tables by queries and tables by keys. A *tile* is a range of a sequence's queries in one head, or of its keys.
The *other side* are then the keys, or the queries. A block computes a tile together with a range of the other side's
tiles: those with a key that one of its queries sees, or with a query that sees one of its keys.
"""

from __future__ import annotations

from heapq import heapreplace

import numpy as np

from .plan import ceil_div

WORK = "batch head start count others length shift first blocks chunk part kept".split()  # the kernels' struct `Work`
WORDS = len(WORK)  # int32 numbers of a `Work`
STATISTICS = 64  # queries in a piece of the array of statistics, which the gradients of k and v read
KEPT_KEYS = 128  # keys in a tile whose gradients of scores are kept for the kernel of dq
UNBOUNDED = 1 << 30  # a window of so many tokens has no bound
LEAST_PART = 4  # the fewest tiles of keys in a part, if the keys are split into parts for several blocks
KEPT_BYTES = 4 << 30  # memory for gradients of scores that are kept
KEPT_FROM = 32  # tiles of 64 queries for a tile of keys, on average; fewer take as long as a third kernel's launch
MOST_TIME = 1.1  # of turns for some heads, in times of all heads at once
SETUP = 0.6  # the time of a tile's start and end, in times of computing it with one tile of the other side
CACHED = 24 << 20  # bytes of keys and values that the L2 cache can hold


def window(problem) -> tuple[int, int]:
    """How many keys a query sees before its own position, and after it."""
    left, right = (UNBOUNDED if side < 0 else side for side in problem.options["window"])
    return left, right


def statistics_bounds(problem) -> np.ndarray:
    """[N + 1]: the first piece of each sequence's statistics, and then the number of pieces."""
    return problem.spans.chunk_bounds(STATISTICS)


def tile_table(problem, tokens: int, other: int, by_keys: bool = False) -> np.ndarray:
    """The table [B * heads, tiles, WORDS] int32: a row for each tile of `tokens` queries (or keys, if `by_keys`), with
    its range of tiles of `other` keys (or queries). The range has at least one tile; if nothing is seen, this tile has
    no tokens."""
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
    table = np.zeros((problem.sizes["B"] * heads, len(token), WORDS), np.int32)
    table[..., 0], table[..., 1] = (x[:, None] for x in np.divmod(np.arange(len(table)), heads))
    table[..., 2 : 2 + len(columns)] = np.stack(columns, -1)
    table[..., WORK.index("part")] = table[..., 0]
    table[..., WORK.index("kept")] = (
        np.cumsum(blocks) - blocks - first - chunk if by_keys else others.chunk_bounds(KEPT_KEYS)[sequence]
    )
    return table


def pairs_at_once(keys: np.ndarray, group: int, multiprocessors: int) -> int:
    """For how many (batch, head of keys) pairs at a time the gradients of scores are kept, in equal turns. 0: they are
    not, since there are few of them, or KEPT_BYTES of memory do not hold those of one pair, or those of so few that a
    turn leaves multiprocessors idle. `keys` is the table of keys, with a head of keys for `group` heads of queries."""
    places, tiles = places_of_head(keys), keys.shape[1]
    fitting = KEPT_BYTES // max(1, group * places * KEPT_KEYS * STATISTICS * 2)
    if not fitting or places < KEPT_FROM * tiles:
        return 0
    at_once = ceil_div(len(keys), ceil_div(len(keys), fitting))
    longest = int(blocks_of(keys).max())

    def time_of(pairs):
        return max(longest, ceil_div(pairs * tiles, multiprocessors) * places / tiles)

    full, rest = divmod(len(keys), at_once)
    in_turns = full * time_of(at_once) + (time_of(rest) if rest else 0)
    return at_once if in_turns <= MOST_TIME * time_of(len(keys)) else 0


def places_of_head(keys: np.ndarray) -> int:
    """How many gradients of the scores of a tile of keys and 64 queries are kept for a head."""
    return int(blocks_of(keys)[:1].sum())


def parts(problem, tiles: np.ndarray, multiprocessors: int) -> int:
    """Into how many parts the keys of every tile are split: 1; or, if no sequence has more than one tile of queries, as
    many as give all multiprocessors a block."""
    if not tiles.size or tiles.shape[1] > problem.spans.count:
        return 1
    return max(1, min(multiprocessors // tiles[..., 0].size, int(blocks_of(tiles).max()) // LEAST_PART))


def split(tiles: np.ndarray, count: int, batch: int) -> np.ndarray:
    """[count * heads, tiles, WORDS]: the table once for each of `count` parts of the keys. The results of part n are
    rows n * batch ... of a batch that is so many times larger."""
    first, blocks, length, part = (WORK.index(name) for name in ("first", "blocks", "length", "part"))
    table = np.repeat(tiles[None], count, axis=0)
    ends = tiles[..., blocks] * np.arange(count + 1)[:, None, None] // count
    table[..., first] += ends[:-1]
    table[..., blocks] = np.diff(ends, axis=0)
    nothing = table[..., blocks] == 0
    table[nothing, first], table[nothing, blocks], table[nothing, length] = 0, 1, 0
    table[..., part] += batch * np.arange(count)[:, None, None]
    return table.reshape(-1, *tiles.shape[1:])


def blocks_of(tiles: np.ndarray) -> np.ndarray:
    """How many tiles of the other side each tile is computed with."""
    return tiles[..., WORK.index("blocks")]


def longest_first(tiles: np.ndarray) -> np.ndarray:
    """[all tiles, WORDS], by falling work."""
    listed = tiles.swapaxes(0, 1).reshape(-1, WORDS)
    return listed[np.argsort(-blocks_of(listed), kind="stable")]


def balanced(tiles: np.ndarray, multiprocessors: int, heads_at_once: int) -> np.ndarray:
    """[rounds + 1, blocks, WORDS]: the tiles of each block in order, followed by an empty one.

    Tiles are assigned for `heads_at_once` heads at a time, the longest of these first, each to the block that has the
    least work so far. Blocks that took tiles from a common counter would get the same order.
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
    """How many of the (batch, head) `pairs` are computed at a time, in equal turns: as many as have their keys and
    values in the L2 cache; or all of them, if so few would leave blocks idle. `group`: query heads per key head."""
    fitting = CACHED // max(bytes_of_head, 1) * group
    return pairs if fitting < 4 * group or fitting >= pairs else ceil_div(pairs, ceil_div(pairs, fitting))
