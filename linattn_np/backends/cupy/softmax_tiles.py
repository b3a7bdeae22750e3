"""Tables that tell the blocks of softmax attention which tiles to compute. The host makes them when it plans a call.

There are tables by queries and tables by keys. A *tile* is a range of a sequence's queries in one head, or of its keys.
The *other side* are then the keys, or the queries. A block computes a tile together with a range of the other side's
tiles: those with a key that one of its queries sees, or with a query that sees one of its keys.
"""

from __future__ import annotations

from heapq import heapreplace
from itertools import pairwise

import numpy as np

from .arithmetic import ceil_div

WORK = (  # the members of the kernels' struct `Work`, int32, in its order
    "batch head start tokens other_start other_length diagonal first_tile tiles statistics_chunk output_batch ds_index"
).split()
WORDS = len(WORK)
CHUNK_QUERIES = 64  # queries in a chunk of the array of statistics, which the gradients of k and v read
UNBOUNDED = 1 << 30  # a window of so many tokens has no bound
LEAST_PART = 4  # the fewest tiles of keys in a part, if the keys are split into parts for several blocks
SETUP = 0.6  # the time of a tile's start and end, in times of computing it with one tile of the other side
CACHED = 24 << 20  # bytes of keys and values that the L2 cache can hold
FEW_TILES = 4  # heads of at most so many tiles have turns of one tile for each multiprocessor; 8 are not faster so

# Gradients of scores, ds, that the kernel of dk and dv stores for the kernel of dq. An *entry* has those of one tile of
# keys and one chunk of queries, in half precision.
DS_KEYS = 128  # keys in a tile of the kernel of dk and dv
DS_ENTRY_BYTES = 2 * DS_KEYS * CHUNK_QUERIES
MOST_DS_BYTES = 4 << 30  # memory for ds: at most so many bytes ...
MOST_DS_SHARE = 1 / 16  # ... and at most this part of the card's memory
assert MOST_DS_BYTES // DS_ENTRY_BYTES < 1 << 31, "kernels number entries by int32"
LEAST_CHUNKS = 32  # chunks of queries for a tile of keys, on average; with fewer, ds saves less than a launch takes
MOST_TIME_OF_TURNS = 1.1  # the most time of all turns, in times of one turn for all heads; else ds is not stored


def window(problem) -> tuple[int, int]:
    """How many keys a query sees before its own position, and after it."""
    left, right = (UNBOUNDED if side < 0 else side for side in problem.options["window"])
    return left, right


def statistics_bounds(problem) -> np.ndarray:
    """[N + 1]: the first chunk of each sequence's statistics, and then the number of chunks."""
    return problem.spans.chunk_bounds(CHUNK_QUERIES)


def tile_table(problem, size: int, other_size: int, by_keys: bool = False) -> np.ndarray:
    """The table [B * heads, tiles, WORDS] int32: a row for each tile of `size` queries (or keys, if `by_keys`), with
    its range of tiles of `other_size` keys (or queries). The range has at least one tile; if nothing is seen, this tile
    has no tokens."""
    sides = problem.spans, problem.options["key_spans"]
    own, others = sides[::-1] if by_keys else sides
    before, after = window(problem)[::-1] if by_keys else window(problem)
    bounds = own.chunk_bounds(size)
    sequence = np.repeat(np.arange(own.count), np.diff(bounds))
    token = (np.arange(bounds[-1]) - bounds[sequence]) * size
    lengths = others.lengths[sequence]
    tokens = np.minimum(own.lengths[sequence] - token, size)
    diagonal = token + lengths - own.lengths[sequence]
    lowest, highest = np.maximum(diagonal - before, 0), np.minimum(diagonal + tokens + after, lengths) - 1
    nothing = highest < lowest
    first_tile = np.where(nothing, 0, lowest // other_size)
    tiles = np.where(nothing, 1, highest // other_size - first_tile + 1)
    chunk = statistics_bounds(problem)[sequence] + (0 if by_keys else token // CHUNK_QUERIES)
    if by_keys:  # the kernels read a chunk even where they use none of it
        chunk[nothing] = 0
        # ds_index + chunk + the number of a tile of queries: the entry of this tile of keys and that tile of queries
        ds_index = np.cumsum(tiles) - tiles - first_tile - chunk
    else:
        ds_index = others.chunk_bounds(DS_KEYS)[sequence]
    columns = {
        "start": own.bounds[sequence] + token,
        "tokens": tokens,
        "other_start": others.bounds[sequence],
        "other_length": np.where(nothing, 0, lengths),
        "diagonal": diagonal,
        "first_tile": first_tile,
        "tiles": tiles,
        "statistics_chunk": chunk,
        "ds_index": ds_index,
    }
    heads = problem.sizes["HK" if by_keys else "H"]
    table = np.zeros((problem.sizes["B"] * heads, len(token), WORDS), np.int32)
    batch, head = (x[:, None] for x in np.divmod(np.arange(len(table)), heads))
    for name, x in (columns | {"batch": batch, "head": head, "output_batch": batch}).items():
        table[..., WORK.index(name)] = x
    return table


def heads_per_turn(keys: np.ndarray, group: int, device) -> int:
    """How many (batch, head of keys) pairs have their gradients of scores in memory at a time, in equal turns.

    0: none has, since these gradients are few, or memory does not hold those of one pair, or those of so few pairs that
    a turn leaves multiprocessors idle. `keys` is the table of keys, with a head of keys for `group` heads of queries.
    """
    entries, tiles = ds_entries(keys), keys.shape[1]
    fitting = most_ds_bytes(device) // max(1, group * entries * DS_ENTRY_BYTES)
    if not fitting or entries < LEAST_CHUNKS * tiles:
        return 0
    per_turn = ceil_div(len(keys), ceil_div(len(keys), fitting))
    longest = int(other_tiles(keys).max())

    def time_of(pairs):
        return max(longest, ceil_div(pairs * tiles, device.multiprocessors) * entries / tiles)

    full, rest = divmod(len(keys), per_turn)
    in_turns = full * time_of(per_turn) + (time_of(rest) if rest else 0)
    return per_turn if in_turns <= MOST_TIME_OF_TURNS * time_of(len(keys)) else 0


def most_ds_bytes(device) -> int:
    """The most memory for gradients of scores. It depends on the card, not on what is free: equal calls on one card
    have equal plans."""
    return min(MOST_DS_BYTES, int(MOST_DS_SHARE * device.memory))


def ds_entries(keys: np.ndarray) -> int:
    """How many entries of gradients of scores a head of queries has; `keys` is the table of keys."""
    return int(other_tiles(keys)[:1].sum())


def parts(problem, tiles: np.ndarray, multiprocessors: int) -> int:
    """Into how many parts the keys of every tile are split: 1; or, if no sequence has more than one tile of queries, as
    many as give all multiprocessors a block."""
    if not tiles.size or tiles.shape[1] > problem.spans.count:
        return 1
    return max(1, min(multiprocessors // tiles[..., 0].size, int(other_tiles(tiles).max()) // LEAST_PART))


def split(tiles: np.ndarray, count: int, batch: int) -> np.ndarray:
    """[count * heads, tiles, WORDS]: the table once for each of `count` parts of the keys. The arrays of results have
    count * batch sequences; part n writes those from n * batch on."""
    first, number, length, output = map(WORK.index, ("first_tile", "tiles", "other_length", "output_batch"))
    table = np.repeat(tiles[None], count, axis=0)
    ends = tiles[..., number] * np.arange(count + 1)[:, None, None] // count
    table[..., first] += ends[:-1]
    table[..., number] = np.diff(ends, axis=0)
    nothing = table[..., number] == 0
    table[nothing, first], table[nothing, number], table[nothing, length] = 0, 1, 0
    table[..., output] += batch * np.arange(count)[:, None, None]
    return table.reshape(-1, *tiles.shape[1:])


def other_tiles(tiles: np.ndarray) -> np.ndarray:
    """How many tiles of the other side each tile is computed with."""
    return tiles[..., WORK.index("tiles")]


def longest_first(tiles: np.ndarray) -> np.ndarray:
    """[all tiles, WORDS]: the tiles by falling work."""
    listed = tiles.swapaxes(0, 1).reshape(-1, WORDS)
    return listed[np.argsort(-other_tiles(listed), kind="stable")]


def balanced(tiles: np.ndarray, multiprocessors: int, turns: int) -> np.ndarray:
    """[rounds + 1, blocks, WORDS]: the tiles of each block in order, followed by an empty one.

    Tiles are assigned turn by turn, the longest of a turn first, each to the block that has the least work so far. The
    turns have equally many heads, the last one at most one more than the others, so that its short tiles even out the
    blocks. Blocks that took tiles from a common counter would get the same order.
    """
    bounds = [len(tiles) * turn // turns for turn in range(turns + 1)]
    listed = np.concatenate([longest_first(tiles[start:stop]) for start, stop in pairwise(bounds)])
    count = min(multiprocessors, len(listed))
    loads, block_of = [(0.0, block) for block in range(count)], np.empty(len(listed), np.int64)
    for n, cost in enumerate((other_tiles(listed) + SETUP).tolist()):
        load, block_of[n] = loads[0]
        heapreplace(loads, (load + cost, int(block_of[n])))
    order, tiles_per_block = np.argsort(block_of, kind="stable"), np.bincount(block_of, minlength=count)
    table = np.zeros((tiles_per_block.max(initial=0) + 1, count, WORDS), np.int32)
    first_of_block = np.cumsum(tiles_per_block) - tiles_per_block
    rounds = np.arange(len(listed)) - np.repeat(first_of_block, tiles_per_block)
    table[rounds, block_of[order]] = listed[order]
    return table


def turns(tiles: np.ndarray, bytes_of_head: int, group: int, multiprocessors: int) -> int:
    """In how many turns the heads of a table are computed: so many that the L2 cache holds the keys and values of a
    turn; one, if a turn of so few heads would leave blocks idle. Heads of few tiles have turns of one tile for each
    multiprocessor: other blocks then read a head's keys while they are in the cache, and memory is read at an even
    rate. `group`: query heads per key head."""
    pairs, tiles_of_head = tiles.shape[:2]
    heads = CACHED // max(bytes_of_head, 1) * group
    if heads < 4 * group or not tiles.size:
        return 1
    if tiles_of_head <= FEW_TILES:
        heads = min(heads, max(1, multiprocessors // tiles_of_head))
    return ceil_div(pairs, heads)
