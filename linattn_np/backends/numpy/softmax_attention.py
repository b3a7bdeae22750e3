"""Softmax attention in tiles (Dao et al., FlashAttention, 2022, algorithms 1 and 4), BLAS products on every core.

o_i = sum_j exp(s_ij - L_i) v_j,        s_ij = scale q_i . k_j,     L_i = log sum_j exp(s_ij)

Of the T x S scores one tile exists at a time. Its rows are queries of all the heads that share a key head, its columns
keys that they see. Scores beyond the range of the dtype are computed in units of 2^exponent, one exponent a row; the
maximum m is in these units too.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from .by_token import is_finite, product_over
from .casts import assign, cast
from .cores import in_parallel, workers
from .loop_choice import loops
from .packing import row_blocks, thread_scratch

TILE = 256  # keys of a tile
ROWS = 64  # rows of a tile
FEW_ROWS = 16  # up to which BLAS shares each product among the cores, else the cores share the tiles
PRODUCT = 1 << 18  # multiplications of a product that OpenBLAS gives one core
LARGEST_TILES = 1 << 16  # scores of the tiles that are computed side by side
TASKS = 8  # of a core, by Numba's loops: one more query of a causal call takes longer than one before
LEAST_SCORES = 1 << 15  # of a task, by Numba's loops


def run(problem, o):
    """Fills o, returns (L,) where it is asked for."""
    attention = Attention(problem)
    attention.forward(o)
    return attention.finals()


def vjp(problem, o):
    """((L,) or (), pull), o filled: the scores are computed again tile by tile."""
    attention, precise = Attention(problem), np.empty(o.shape, problem.compute_dtype)
    attention.forward(precise)
    assign(o, precise)

    def pull(do, dht):
        do = cast(do, precise.dtype)
        own = np.vecdot(do, precise)
        return attention.backward(do, own - dht[0].astype(own.dtype) if dht else own), None

    return attention.finals(), pull


@dataclass(frozen=True)
class Queries:
    """Some queries of a sequence, and the tiles of keys that they see. Query i stands at key i + `ahead`."""

    tokens: slice
    ahead: int
    tiles: tuple[slice, ...]

    @property
    def keys(self):
        """The keys of all tiles."""
        return slice(self.tiles[0].start, self.tiles[-1].stop) if self.tiles else slice(0, 0)


class Attention:
    """A problem in the computing dtype with the sums l and maxima m of its rows [B, H, T], filled by `forward`.

    A block is a slice of the batch and one of key heads. Its rows are [b, h, G * queries, ...], G query heads a key
    head. A tile's keys are read as panels [b, h, n, columns, ...], whose products with a tile's rows are small enough
    for one core.
    """

    def __init__(self, problem):
        self.problem, self.dtype, self.range = problem, problem.compute_dtype, np.finfo(problem.compute_dtype)
        self.q, self.k, self.v = (multipliable(problem[name], self.dtype) for name in "qkv")
        self.softcap, self.window = problem.options["softcap"], problem.options["window"]
        B, H, T, S, HK = problem.shape("B H T S HK")
        self.group, self.size = max(H, 1) // max(HK, 1), problem.chunk_size or TILE
        self.count = max(1, min(self.size, ROWS) // self.group)  # queries of a tile
        rows = self.group * min(self.count, T)
        self.is_few = rows <= FEW_ROWS and S >= T
        width = max(problem.shape("K V"))
        self.columns = self.size if self.is_few else max(16, min(ROWS, self.size, PRODUCT // (ROWS * width) // 16 * 16))
        heads = B * HK if self.is_few else LARGEST_TILES // max(rows * min(self.size, S), 1)
        self.blocks = row_blocks(B, HK, max(1, heads)) if HK else []
        self.m, self.l = np.empty((2, B, H, T), self.dtype)
        self.exponents, self.sinks = np.zeros((B, H, T), np.int32), None
        if "sinks" in problem.arrays:
            self.sinks = np.broadcast_to(problem["sinks"].astype(self.dtype)[:, None, None], (B, H, T, 1))
        found = loops(B * H * T * S) if self.dtype == np.float32 and not self.is_few else None
        self.compiled = found and Compiled(self, found)

    @cached_property
    def lengths(self):
        """Of keys [B, HK, S]."""
        return np.sqrt(np.vecdot(self.k, self.k))

    def finals(self):
        if not self.problem.output_final_state:
            return ()
        return ((self.m if self.softcap else np.ldexp(self.m, self.exponents)) + np.log(self.l),)

    # -- the parts of the problem --------------------------------------------------------------------------------------
    def by_key_head(self, x, block, tokens):
        """The tokens of a block of x [B, H, T, ...] as [b, h, G, tokens, ...], a view."""
        return x.reshape(x.shape[0], -1, self.group, *x.shape[2:])[(*block, slice(None), tokens)]

    def rows(self, x, block, tokens):
        part = self.by_key_head(x, block, tokens)
        return part.reshape(*part.shape[:2], -1, *part.shape[4:])

    def write(self, x, block, tokens, rows, which):
        part = self.by_key_head(x, block, tokens)
        which = which.reshape(part.shape[:4])
        part[which] = rows.reshape(part.shape)[which]

    def sequences(self):
        """A list of `Queries` for every sequence; the first of them may see no key."""
        left, right = self.window
        for (start, stop), (first_key, last_key) in zip(self.problem.spans, self.problem.options["key_spans"]):
            ahead = last_key - stop
            seeing = start if right < 0 else min(max(start, first_key - right - ahead), stop)
            if first_key == last_key:
                seeing = stop
            found = [Queries(slice(start, seeing), ahead, ())] if start < seeing else []
            for first in range(seeing, stop, self.count):
                last = min(first + self.count, stop)
                begin = first_key if left < 0 else max(first_key, first + ahead - left)
                end = last_key if right < 0 else min(last_key, last + ahead + right)
                found.append(Queries(slice(first, last), ahead, tuple(self.tiles(first_key, last_key, begin, end))))
            yield found

    def tiles(self, first_key, last_key, begin, end):
        """The keys `begin` to `end` of a sequence in tiles of whole panels, and one of those behind the last panel."""
        behind = last_key - (last_key - first_key) % self.columns
        begin, end = begin - (begin - first_key) % self.columns, min(end + (first_key - end) % self.columns, last_key)
        for j in range(begin, min(end, behind), self.size):
            yield slice(j, min(j + self.size, end, behind))
        if behind < end:
            yield slice(max(begin, behind), end)

    def panels(self, x, block, tile):
        """The keys of a tile of x [B, HK, S, ...] as [b, h, n, columns, ...], a view."""
        part = x[(*block, tile)]
        count = part.shape[2]
        return part.reshape(*part.shape[:2], -(-count // self.columns), min(count, self.columns), x.shape[-1])

    def turned(self, x):
        """A function of (block, tile): the panels of x [b, h, n, D, columns], contiguous if that pays."""
        if self.is_few:
            return lambda block, tile: self.panels(x, block, tile).swapaxes(-1, -2)
        copy = np.empty(x.shape, self.dtype)
        whole = (slice(None), slice(None))
        for first, last in self.problem.options["key_spans"]:
            tile = slice(first, last - (last - first) % self.columns)
            if tile.start < tile.stop:
                self.in_place_of(self.panels(copy, whole, tile))[...] = self.panels(x, whole, tile).swapaxes(-1, -2)

        def panels(block, tile):
            if (tile.stop - tile.start) % self.columns:
                return self.panels(x, block, tile).swapaxes(-1, -2)
            return self.in_place_of(self.panels(copy, block, tile))

        return panels

    def in_place_of(self, panels):
        """Panels [..., columns, D] as [..., D, columns], the same memory in another order."""
        return panels.reshape(*panels.shape[:-2], panels.shape[-1], panels.shape[-2])

    def seen(self, queries, tile):
        """Which rows see which keys of a tile, or None where all do."""
        count = queries.tokens.stop - queries.tokens.start
        place = tile.start - queries.tokens.start - queries.ahead  # of the first key, from the first query's
        return band(place, count, tile.stop - tile.start, *self.window, self.group)

    # -- scores --------------------------------------------------------------------------------------------------------
    def scaled(self, q, exponents):
        return self.dtype.type(self.problem.scale) * (q if exponents is None else np.ldexp(q, -exponents))

    def fits(self, q, block, keys):
        """Whether no sum on the way to a score can overflow, by Cauchy and Schwarz; False where NaN hides that."""
        lengths = np.sqrt(np.vecdot(q, q)).max() * self.lengths[(*block, keys)].max(initial=0)
        return lengths < self.range.max / 2

    def exponents_of(self, q, k):
        """By how many powers of two the scores of every row must shrink, judged by what is finite; mostly 0."""
        q, k = (finite_largest(q, -1), np.maximum(finite_largest(k, (-2, -1)), 1))
        bound = sum(np.frexp(x)[1] for x in (q, k, self.problem.scale, self.q.shape[-1]))
        return np.maximum(bound - self.range.maxexp + 1, 0)

    def scores(self, q, k, exponents):
        """s [b, h, rows, keys] of panels k [b, h, n, K, columns]. Capped scores are in units of 1."""
        s = against(q, k, thread_scratch(self.dtype), "scores")
        if self.softcap:
            if exponents is not None:
                np.ldexp(s, exponents, out=s)
            s /= self.softcap
            np.tanh(s, out=s)
            s *= self.softcap
        return s

    def in_units(self, x, exponents):
        """A score in the units of some rows; of capped ones 1."""
        return x if exponents is None or self.softcap else np.ldexp(x, -exponents)

    def exp(self, x, exponents):
        """exp(x) of differences of scores, in place."""
        if exponents is not None and not self.softcap:
            np.ldexp(x, exponents, out=x)
        return np.exp(x, out=x)

    # -- forward -------------------------------------------------------------------------------------------------------
    def forward(self, o):
        """Fills o [B, H, T, V], m, l and the exponents."""
        undone = self.compiled.forward(o) if self.compiled else np.ones(self.m.shape, bool)
        if not undone.any():
            return
        keys = self.turned(self.k)

        def task(block, queries):
            rows = self.rows(undone, block, queries.tokens)
            if not rows.any():
                return
            found = self.attend(block, queries, keys)
            bad = ~np.isfinite(found[0]).all(-1)
            if bad.any():
                margin = np.log(queries.keys.stop - queries.keys.start)
                for x, again in zip(found, self.attend(block, queries, keys, margin), strict=True):
                    x[bad] = again[bad]
            for x, part in zip((o, self.m, self.l, self.exponents), found, strict=True):
                self.write(x, block, queries.tokens, part, rows)

        tasks = [(block, queries) for found in self.sequences() for queries in reversed(found) for block in self.blocks]
        in_parallel(task, *zip(*tasks), caller=True)

    def attend(self, block, queries, keys, margin=0.0, exponents=None):
        """(o, m, l, exponents) of some rows: running sums over the tiles of keys.

        m is higher than every score by `margin`. With the logarithm of their number no sum of values overflows.
        """
        raw = self.rows(self.q, block, queries.tokens)
        q = self.scaled(raw, exponents)
        if exponents is None and not self.fits(q, block, queries.keys):
            return self.attend(block, queries, keys, margin, self.exponents_of(raw, self.k[(*block, queries.keys)]))
        (m, l), o = self.before(block, queries.tokens, exponents), np.zeros((*q.shape[:-1], self.v.shape[-1]), q.dtype)
        margin = self.in_units(self.dtype.type(margin), exponents)
        for tile in queries.tiles:
            seen = self.seen(queries, tile)
            s = only(self.scores(q, keys(block, tile), exponents), seen, -np.inf)
            kept = self.weigh(s, l, m, margin, exponents)
            o *= kept
            o += product(s, self.panels(self.v, block, tile), seen).sum(2)
        if queries.tiles:
            o /= l
        return o, m[..., 0], l[..., 0], np.zeros_like(m[..., 0], np.int32) if exponents is None else exponents[..., 0]

    def weigh(self, s, l, m, margin, exponents):
        """exp(s - m) in place of s, with l and m of all keys so far; what the weights of those before shrink by."""
        higher = np.maximum(m, s.max(-1, keepdims=True) + margin)
        s -= higher
        p, kept = self.exp(s, exponents), self.exp(m - higher, exponents)
        l *= kept
        l += p.sum(-1, keepdims=True)
        m[...] = higher
        return kept

    def before(self, block, tokens, exponents):
        """(m, l) of some rows before any key: those of the sinks, or of nothing, below every score."""
        m = self.rows(self.m[..., None], block, tokens)
        if self.sinks is None:
            return np.full_like(m, self.range.min), np.zeros_like(m)
        return self.in_units(self.rows(self.sinks, block, tokens), exponents).copy(), np.ones_like(m)

    # -- backward ------------------------------------------------------------------------------------------------------
    def backward(self, do, own):
        """Gradients of q, k, v, and of the sinks where there are any; `own` [B, H, T] is do . o less L's gradient."""
        dq, dk, dv = gradients = [np.zeros(x.shape, self.dtype) for x in (self.q, self.k, self.v)]
        blocks = self.compiled.backward(do, own, *gradients) if self.compiled else self.blocks
        keys, values = (self.turned(x) for x in (self.k, self.v)) if blocks else (None, None)

        def task(block, found):
            for queries in found:
                self.pull(block, queries, keys, values, do, own, dq, dk, dv)

        tasks = [(block, found) for found in self.sequences() for block in blocks]
        in_parallel(task, *zip(*tasks), caller=True)
        if self.sinks is None:
            return gradients
        share = self.exp(self.in_units(self.sinks[..., 0], self.exponents) - self.m, self.exponents)
        return [*gradients, -(share / self.l * own).sum((0, 2))]

    def pull(self, block, queries, keys, values, do, own, dq, dk, dv):
        """Writes dq of some rows, adds what they give to dk and dv."""
        raw, do, own, m, l, exponents = (
            self.rows(x, block, queries.tokens) for x in (self.q, do, own[..., None], *self.saved())
        )
        exponents = exponents if exponents.any() else None
        q, do, own, total = self.scaled(raw, exponents), do / l, own / l, 0
        scaled = q if exponents is None else self.scaled(raw, None)
        for tile in queries.tiles:
            seen = self.seen(queries, tile)
            s = self.scores(q, keys(block, tile), exponents)
            slope = 1 - (s / self.softcap) ** 2 if self.softcap else None
            s -= m
            p = only(self.exp(s, exponents), seen, 0)
            dv[(*block, tile)] += self.turned_product(p, do, seen)
            ds = against(do, values(block, tile), thread_scratch(self.dtype), "ds")
            ds -= own
            ds = only(ds, seen, 0)
            ds *= p
            if self.softcap:
                ds *= only(slope, seen, 0)
            total = total + product(ds, self.panels(self.k, block, tile), seen).sum(2)
            dk[(*block, tile)] += self.turned_product(ds, scaled, seen)
        if queries.tiles:
            part = self.by_key_head(dq, block, queries.tokens)
            part[...] = self.dtype.type(self.problem.scale) * total.reshape(part.shape)

    def turned_product(self, W, x, seen):
        """W^T x of W [b, h, rows, keys] and x [b, h, rows, D], of which nothing unseen is part, NaN neither."""
        count = W.shape[-1]
        columns = self.columns if count % self.columns == 0 else count
        panels = split(W, columns).swapaxes(-1, -2) @ x[:, :, None]
        found = panels.reshape(*x.shape[:2], count, x.shape[-1])
        return found if seen is None or is_finite(found) else product_over(W.swapaxes(-1, -2), x, seen.T)

    def saved(self):
        return self.m[..., None], self.l[..., None], self.exponents[..., None]


class Compiled:
    """`Attention` in float32 by Numba's loops, which do all of a key head's tiles in one call: no sequence, mask or
    group of heads is special. Scores beyond the range, and what is not finite, they leave to NumPy.
    """

    def __init__(self, attention, loops):
        self.attention, self.loops, problem = attention, loops, attention.problem
        self.B, self.HK, self.T, self.S = problem.shape("B HK T S")
        self.q = self.by_head(attention.q)
        self.keys, self.values = self.panels(attention.k), self.panels(attention.v)
        self.softcap, self.scale = np.float32(attention.softcap), np.float32(problem.scale)
        self.first_key, self.last_key = key_ranges(problem.spans, problem.options["key_spans"], attention.window)

    def by_head(self, x):
        """x [B, H, T, ...] as contiguous [B HK, G, T, ...], itself if that can be."""
        x = np.ascontiguousarray(x, np.float32)
        return x.reshape(self.B * self.HK, -1, *x.shape[2:])

    def panels(self, x):
        """x [B, HK, S, D] as [B HK, n, PANEL, D'], itself if that can be, else with zeros behind both."""
        panel, columns, D = self.loops.PANEL, self.loops.BLOCK_COLUMNS, x.shape[-1]
        if self.S % panel == D % columns == 0 and x.flags.c_contiguous:
            return x.reshape(len(self.q), -1, panel, D)
        found = np.zeros((len(self.q), -(-self.S // panel) * panel, -(-D // columns) * columns), np.float32)
        found[:, : self.S, :D] = x.reshape(-1, self.S, D)
        return found.reshape(len(found), -1, panel, found.shape[-1])

    def forward(self, o):
        """Fills o, m and l; for which rows [B, H, T] that did not do."""
        attention, loops = self.attention, self.loops
        attention.m[...], attention.l[...] = (
            (attention.range.min, 0) if attention.sinks is None else (attention.sinks[..., 0], 1)
        )
        filled = o if o.dtype == np.float32 and o.flags.c_contiguous else np.empty(o.shape, np.float32)
        m, l, found = (self.by_head(x) for x in (attention.m, attention.l, filled))
        group, count, tasks = found.shape[1], len(found), self.tasks(found.shape[:2])
        tile = max(1, loops.TILE // group)
        step = -(-self.T * count // (tasks * tile)) * tile  # queries of a task
        together = max(1, count // tasks) if step >= self.T else 1  # heads of a task

        def task(head, first):
            heads = head, min(head + together, count)
            arrays = self.q, self.keys, self.values, self.first_key, self.last_key
            queries = first, min(first + step, self.T), self.softcap, self.scale
            return loops.attention_forward(heads, *arrays, *queries, found, m, l)

        tasks = [(n, first) for first in reversed(range(0, self.T, step)) for n in range(0, count, together)]
        done = in_parallel(task, *zip(*tasks), caller=True)
        if filled is not o:
            assign(o, filled)
        return np.zeros(1, bool) if all(done) else ~np.isfinite(filled).all(-1)

    def tasks(self, heads):
        """How many: a few for every core, but none so short that beginning it takes longer than a tenth of it."""
        most = prod(heads) * self.T * self.S // LEAST_SCORES
        return max(1, min(TASKS * workers(), most))

    def backward(self, do, own, dq, dk, dv):
        """Fills the gradients; the blocks [(batch, key head)] that are left to do, and are 0 so far."""
        attention, loops = self.attention, self.loops
        if attention.exponents.any():
            return attention.blocks
        dkeys, dvalues = np.zeros_like(self.keys), np.zeros_like(self.values)
        of_rows = [self.by_head(x) for x in (do, attention.m, attention.l, own)]
        found = self.by_head(dq)

        def task(head):
            keys = self.keys[head], self.values[head], self.first_key, self.last_key
            return loops.attention_backward(
                self.q[head],
                *(x[head] for x in of_rows),
                *keys,
                self.softcap,
                self.scale,
                found[head],
                dkeys[head],
                dvalues[head],
            )

        done = in_parallel(task, range(len(found)), caller=True)
        for x, parts in ((dk, dkeys), (dv, dvalues)):
            x[...] = parts.reshape(self.B, self.HK, -1, parts.shape[-1])[:, :, : self.S, : x.shape[-1]]
        left = [divmod(head, self.HK) for head, well in enumerate(done) if not well]
        blocks = [(slice(b, b + 1), slice(h, h + 1)) for b, h in left]
        for block in blocks:
            attention.by_key_head(dq, block, slice(None))[...] = dk[block] = dv[block] = 0
        return blocks


def multipliable(x, dtype):
    """x in `dtype`, its rows contiguous, which BLAS asks for."""
    x = cast(x, dtype)
    return x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


def finite_largest(x, axes):
    return np.max(np.abs(x), axes, where=np.isfinite(x), initial=0, keepdims=True)


def only(s, seen, fill):
    """s [b, h, rows, keys] itself, `fill` where the key is not seen."""
    if seen is not None:
        np.copyto(s, fill, where=~seen)
    return s


def split(x, columns):
    """x [b, h, rows, n columns] as [b, h, n, rows, columns], a view."""
    return x.reshape(*x.shape[:-1], -1, columns).swapaxes(2, 3)


def against(x, panels, scratch, name):
    """x [b, h, rows, D] times panels [b, h, n, D, columns]: [b, h, rows, n columns] in the memory of `scratch`."""
    n, _, columns = panels.shape[2:]
    out = scratch(name, (*x.shape[:3], n * columns))
    np.matmul(x[:, :, None], panels, out=split(out, columns))
    return out


def product(W, panels, seen):
    """W [b, h, rows, n columns] times each of panels [b, h, n, columns, D], of which nothing unseen is part, NaN
    neither: [b, h, n, rows, D]."""
    out = split(W, panels.shape[3]) @ panels
    if seen is None or is_finite(out):
        return out
    return product_over(W, panels.reshape(*W.shape[:2], W.shape[-1], panels.shape[-1]), seen)[:, :, None]


@lru_cache(maxsize=64)
def key_ranges(spans, key_spans, window):
    """(first, last): every query sees the keys from first [T] to last [T] - 1."""
    (left, right), place = window, np.arange(spans.bounds[-1])
    of_sequences = key_spans.bounds[1:] - spans.bounds[1:], key_spans.bounds[:-1], key_spans.bounds[1:]
    ahead, first, last = (np.repeat(bounds, spans.lengths) for bounds in of_sequences)
    place += ahead
    first = first if left < 0 else np.maximum(first, place - left)
    return first, last if right < 0 else np.minimum(last, place + right + 1)


@lru_cache(maxsize=64)
def band(place, count, keys, left, right, group):
    """Which of `count` queries, of each of `group` heads, see which keys [group * count, keys], or None where all do.

    The first key is `place` keys on from where the first query stands.
    """
    if (left < 0 or place >= count - 1 - left) and (right < 0 or place + keys - 1 <= right):
        return None
    on = place + np.arange(keys) - np.arange(count)[:, None]
    seen = ((left < 0) | (on >= -left)) & ((right < 0) | (on <= right))
    return np.tile(seen, (group, 1))
