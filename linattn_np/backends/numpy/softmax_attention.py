"""Softmax attention in tiles (Dao et al., FlashAttention, 2022, algorithms 1 and 4), BLAS products on every core.

o_i = sum_j exp(s_ij - L_i) v_j,        s_ij = scale q_i . k_j,     L_i = log sum_j exp(s_ij)

Of the T x S scores one tile exists at a time. Its rows are queries of all the heads that share a key head, its columns
keys that they see. Scores beyond the range of the dtype are computed in units of 2^exponent, one exponent a row; the
maximum m is in these units too.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .by_token import product_over
from .cores import in_parallel
from .packing import row_blocks, thread_scratch

TILE = 256  # rows and keys of a tile


def run(problem, o):
    """Fills o, returns (L,) where it is asked for."""
    attention = Attention(problem)
    attention.forward(o)
    return attention.finals()


def vjp(problem, o):
    """((L,) or (), pull), o filled: the scores are computed again tile by tile."""
    attention, precise = Attention(problem), np.empty(o.shape, problem.compute_dtype)
    attention.forward(precise)
    o[...] = precise

    def pull(do, dht):
        do = do.astype(precise.dtype)
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
        """Those of all tiles."""
        return slice(self.tiles[0].start, self.tiles[-1].stop) if self.tiles else slice(0, 0)


class Attention:
    """A problem in the computing dtype with the sums l and maxima m of its rows [B, H, T], filled by `forward`.

    A block is a slice of the batch and one of key heads. Its rows are [b, h, G * queries, ...], G query heads a key
    head.
    """

    def __init__(self, problem):
        self.problem, self.dtype, self.range = problem, problem.compute_dtype, np.finfo(problem.compute_dtype)
        self.q, self.k, self.v = (multipliable(problem[name], self.dtype) for name in "qkv")
        self.softcap, self.window = problem.options["softcap"], problem.options["window"]
        B, H, T, S, HK = problem.shape("B H T S HK")
        self.group, self.size = max(H, 1) // max(HK, 1), problem.chunk_size or TILE
        self.count = max(1, self.size // self.group)  # queries of a tile
        scores = self.group * min(self.count, T) * min(self.size, S)
        self.blocks = row_blocks(B, HK, max(1, self.size**2 // max(scores, 1))) if HK else []
        self.m, self.l = np.empty((2, B, H, T), self.dtype)
        self.exponents, self.sinks = np.zeros((B, H, T), np.int32), None
        if "sinks" in problem.arrays:
            self.sinks = np.broadcast_to(problem["sinks"].astype(self.dtype)[:, None, None], (B, H, T, 1))

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

    def write(self, x, block, tokens, rows):
        part = self.by_key_head(x, block, tokens)
        part[...] = rows.reshape(part.shape)

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
                tiles = tuple(slice(j, min(j + self.size, end)) for j in range(begin, end, self.size))
                found.append(Queries(slice(first, last), ahead, tiles))
            yield found

    def seen(self, queries, keys):
        """Which rows see which keys of a tile, or None where all do."""
        count = queries.tokens.stop - queries.tokens.start
        place = keys.start - queries.tokens.start - queries.ahead  # of the first key, from the first query's
        return band(place, count, keys.stop - keys.start, *self.window, self.group)

    # -- scores --------------------------------------------------------------------------------------------------------
    def scaled(self, q, exponents):
        return self.dtype.type(self.problem.scale) * (q if exponents is None else np.ldexp(q, -exponents))

    def fits(self, q, k):
        """Whether no sum on the way to a score can overflow; False where NaN hides that."""
        return largest(q) * largest(k) * k.shape[-1] < float(self.range.max) / 2

    def exponents_of(self, q, k):
        """By how many powers of two the scores of every row must shrink, judged by what is finite; mostly 0."""
        q, k = (finite_largest(q, -1), np.maximum(finite_largest(k, (-2, -1)), 1))
        bound = sum(np.frexp(x)[1] for x in (q, k, self.problem.scale, self.q.shape[-1]))
        return np.maximum(bound - self.range.maxexp + 1, 0)

    def scores(self, q, k, exponents):
        """s [b, h, rows, keys]. Capped scores are in units of 1."""
        s = thread_scratch(self.dtype).product("scores", q, k.swapaxes(-1, -2))
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

        def task(block, queries):
            found = self.attend(block, queries)
            for x, rows in zip((o, self.m, self.l, self.exponents), found, strict=True):
                self.write(x, block, queries.tokens, rows)

        tasks = [(block, queries) for found in self.sequences() for queries in reversed(found) for block in self.blocks]
        in_parallel(task, *zip(*tasks), caller=True)

    def attend(self, block, queries, exponents=None):
        """(o, m, l, exponents) of some rows: running sums over the tiles of keys.

        m is higher than every score by the logarithm of their number, so that sums of values do not overflow either.
        """
        raw = self.rows(self.q, block, queries.tokens)
        (m, l), o, q = self.before(block, queries.tokens, exponents), 0, self.scaled(raw, exponents)
        margin = self.in_units(self.dtype.type(np.log(max(1, queries.keys.stop - queries.keys.start))), exponents)
        for tile in queries.tiles:
            k, v, seen = self.k[(*block, tile)], self.v[(*block, tile)], self.seen(queries, tile)
            if exponents is None and not self.fits(q, k):
                return self.attend(block, queries, self.exponents_of(raw, self.k[(*block, queries.keys)]))
            s = only(self.scores(q, k, exponents), seen, -np.inf)
            higher = np.maximum(m, s.max(-1, keepdims=True) + margin)
            s -= higher
            p, kept = self.exp(s, exponents), self.exp(m - higher, exponents)
            o, l, m = kept * o + product(p, v, seen), kept * l + p.sum(-1, keepdims=True), higher
        o = o / l if queries.tiles else np.zeros((*q.shape[:-1], self.v.shape[-1]), self.dtype)
        return o, m[..., 0], l[..., 0], np.zeros_like(m[..., 0], np.int32) if exponents is None else exponents[..., 0]

    def before(self, block, tokens, exponents):
        """(m, l) of some rows before any key: those of the sinks, or of nothing, below every score."""
        m = self.rows(self.m[..., None], block, tokens)
        if self.sinks is None:
            return np.full_like(m, self.range.min), np.zeros_like(m)
        return self.in_units(self.rows(self.sinks, block, tokens), exponents), np.ones_like(m)

    # -- backward ------------------------------------------------------------------------------------------------------
    def backward(self, do, own):
        """Gradients of q, k, v, and of the sinks where there are any; `own` [B, H, T] is do . o less L's gradient."""
        dq, dk, dv = (np.zeros(x.shape, self.dtype) for x in (self.q, self.k, self.v))

        def task(block, found):
            for queries in found:
                self.pull(block, queries, do, own, dq, dk[block], dv[block])

        tasks = [(block, found) for found in self.sequences() for block in self.blocks]
        in_parallel(task, *zip(*tasks), caller=True)
        if self.sinks is None:
            return [dq, dk, dv]
        share = self.exp(self.in_units(self.sinks[..., 0], self.exponents) - self.m, self.exponents)
        return [dq, dk, dv, -(share / self.l * own).sum((0, 2))]

    def pull(self, block, queries, do, own, dq, dk, dv):
        """Writes dq of some rows, adds what they give to dk and dv [b, h, S, ...] of their block."""
        raw, do, own, m, l, exponents = (
            self.rows(x, block, queries.tokens) for x in (self.q, do, own[..., None], *self.saved())
        )
        exponents = exponents if exponents.any() else None
        q, do, own, total = self.scaled(raw, exponents), do / l, own / l, 0
        scaled = q if exponents is None else self.scaled(raw, None)
        for tile in queries.tiles:
            k, v, seen = self.k[(*block, tile)], self.v[(*block, tile)], self.seen(queries, tile)
            turned = None if seen is None else seen.T
            s = self.scores(q, k, exponents)
            slope = 1 - (s / self.softcap) ** 2 if self.softcap else None
            s -= m
            p = only(self.exp(s, exponents), seen, 0)
            dv[:, :, tile] += product(p.swapaxes(-1, -2), do, turned)
            ds = thread_scratch(self.dtype).product("ds", do, v.swapaxes(-1, -2))
            ds -= own
            ds = only(ds, seen, 0)
            ds *= p
            if self.softcap:
                ds *= only(slope, seen, 0)
            total = total + product(ds, k, seen)
            dk[:, :, tile] += product(ds.swapaxes(-1, -2), scaled, turned)
        if queries.tiles:
            self.write(dq, block, queries.tokens, self.dtype.type(self.problem.scale) * total)

    def saved(self):
        return self.m[..., None], self.l[..., None], self.exponents[..., None]


def multipliable(x, dtype):
    """x in `dtype`, its rows contiguous, which BLAS asks for."""
    x = np.asarray(x, dtype)
    return x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


def largest(x):
    return max(float(x.max(initial=0)), -float(x.min(initial=0)))


def finite_largest(x, axes):
    return np.max(np.abs(x), axes, where=np.isfinite(x), initial=0, keepdims=True)


def only(s, seen, fill):
    """s [b, h, rows, keys] itself, `fill` where the key is not seen."""
    if seen is not None:
        np.copyto(s, fill, where=~seen)
    return s


def product(W, x, seen):
    """W @ x, of which nothing unseen is part, NaN neither."""
    return W @ x if seen is None else product_over(W, x, seen)


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
