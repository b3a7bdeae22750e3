"""Softmax attention in tiles (Dao et al., FlashAttention, 2022, algorithms 1 and 4), BLAS products on every core.

o_i = sum_j exp(s_ij - L_i) v_j,        s_ij = scale q_i . k_j,     L_i = log sum_j exp(s_ij)

With a softcap, s_ij is softcap tanh(scale q_i . k_j / softcap); a sink adds its exp to L's sum; a window limits j.

Of the T x S scores only one tile per task is in memory at a time. A tile's rows are queries of all the heads that share
a key head; its columns are keys. Where scores could exceed the range of the dtype, a row's scores and their maximum m
are stored divided by 2^exponent, with an exponent for each row.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from . import loop_choice
from .by_token import is_finite, product_over
from .casts import assign, cast
from .cores import in_parallel, workers
from .packing import Scratch, row_blocks, thread_scratch

TILE_KEYS = 256  # the most keys of a tile
TILE_ROWS = 64  # and its most rows
FEW_ROWS = 16  # with at most as many rows BLAS divides each product among the cores; else each core computes its tiles
PRODUCT = 1 << 18  # multiplications of the largest product that OpenBLAS computes on one core
LARGEST_TILES = 1 << 16  # scores of one task's tiles, over all its batch entries and key heads
TASKS = 8  # per core, in Numba's loops: causal tasks are of unequal length, because later queries see more keys
LEAST_SCORES = 1 << 17  # per task, in Numba's loops: those of fewer take no longer than a thread takes to wake


def run(problem, o):
    """Fills o [B, H, T, V]; returns (L [B, H, T],) if the problem asks for it, else ()."""
    attention = Attention(problem, thread_scratch(problem.compute_dtype))
    attention.forward(o)
    return attention.log_sums()


def vjp(problem, o):
    """Fills o; returns ((L,) or (), pull). pull(do, (dL,) or None) gives (gradients, None), as there is no initial
    state; it computes scores again."""
    dtype = problem.compute_dtype
    attention, precise = Attention(problem, Scratch(dtype)), np.empty(o.shape, dtype)
    attention.forward(precise)
    assign(o, precise)

    def pull(do, dht):  # dht: (dL,) or None; recurrent operators have the final state's gradient here
        do = cast(do, precise.dtype)
        delta = np.vecdot(do, precise)
        return attention.backward(do, delta - dht[0].astype(delta.dtype) if dht else delta), None

    return attention.log_sums(), pull


@dataclass(frozen=True)
class Queries:
    """Some queries of a sequence and the tiles of keys that they see. Query i has the position of key i + `ahead`."""

    tokens: slice
    ahead: int
    tiles: tuple[slice, ...]

    @property
    def keys(self):
        """The keys of all tiles."""
        return slice(self.tiles[0].start, self.tiles[-1].stop) if self.tiles else slice(0, 0)


class Attention:
    """A problem in the computing dtype, with each row's maximum m and sum l = sum_j exp(s_j - m) set by `forward`.
    Elsewhere s are the scores of a tile, and p = exp(s - m).

    A block is (slice of the batch, slice of key heads), b by h in size. Its rows are [b, h, G * queries, ...], where G
    query heads share a key head. The keys of a tile are split into n panels [b, h, n, panel_keys, ...], so that the
    product of a tile's rows and one panel is small enough for OpenBLAS to compute on one core.

    group : G
    tile_queries, tile_keys, panel_keys : the most queries of a tile, in each head; its most keys; the keys of a panel
    is_few : whether a tile has so few rows that BLAS computes a tile's product on all cores instead, and a panel is a
        whole tile
    scratch : memory for copies in the computing dtype
    """

    def __init__(self, problem, scratch):
        self.problem, self.dtype, self.finfo = problem, problem.compute_dtype, np.finfo(problem.compute_dtype)
        self.scratch = scratch
        self.q, self.k, self.v = map(self.multipliable, "qkv")
        self.softcap, self.window = problem.options["softcap"], problem.options["window"]
        B, H, T, S, HK = problem.shape("B H T S HK")
        self.group, self.tile_keys = max(H, 1) // max(HK, 1), problem.chunk_size or TILE_KEYS
        self.tile_queries = max(1, min(self.tile_keys, TILE_ROWS) // self.group)
        rows = self.group * min(self.tile_queries, T)  # of a tile
        self.is_few = rows <= FEW_ROWS and S >= T
        on_one_core = PRODUCT // (TILE_ROWS * max(problem.shape("K V"))) // 16 * 16  # the most keys of such a product
        self.panel_keys = self.tile_keys if self.is_few else max(16, min(TILE_ROWS, self.tile_keys, on_one_core))
        heads = B * HK if self.is_few else LARGEST_TILES // max(rows * min(self.tile_keys, S), 1)  # of a block
        self.blocks = row_blocks(B, HK, max(1, heads)) if HK else []
        self.m, self.l = np.empty((2, B, H, T), self.dtype)
        self.exponents, self.sinks = np.zeros((B, H, T), np.int32), None
        if "sinks" in problem.arrays:
            self.sinks = np.broadcast_to(problem["sinks"].astype(self.dtype)[:, None, None], (B, H, T, 1))
        numba_loops = loop_choice.loops(B * H * T * S) if self.dtype == np.float32 and not self.is_few else None
        self.compiled = numba_loops and Compiled(self, numba_loops)

    def multipliable(self, name):
        """An array in the computing dtype with contiguous rows, as BLAS requires."""
        x = self.problem[name]
        if x.dtype == self.dtype and x.strides[-1] == x.itemsize:
            return x
        copy = self.scratch(name, x.shape)
        assign(copy, x)
        return copy

    @cached_property
    def lengths(self):
        """The L2 norms of the keys, [B, HK, S]."""
        return np.sqrt(np.vecdot(self.k, self.k))

    def log_sums(self):
        """(L,), with L = m + log l, m being multiplied by 2^exponent again, if the problem asks for it, else ()."""
        if not self.problem.output_final_state:
            return ()
        return ((self.m if self.softcap else np.ldexp(self.m, self.exponents)) + np.log(self.l),)

    # -- blocks, rows, tiles and panels --------------------------------------------------------------------------------
    def by_key_head(self, x, block, tokens):
        """A view of the tokens of a block of x [B, H, T, ...] as [b, h, G, tokens, ...]."""
        return x.reshape(x.shape[0], -1, self.group, *x.shape[2:])[(*block, slice(None), tokens)]

    def rows(self, x, block, tokens):
        """The tokens of a block of x [B, H, T, ...] as rows [b, h, G * tokens, ...]."""
        part = self.by_key_head(x, block, tokens)
        return part.reshape(*part.shape[:2], -1, *part.shape[4:])

    def write(self, x, block, tokens, rows, mask):
        """Writes the rows for which `mask` [b, h, rows] is True to their places in x [B, H, T, ...]."""
        part = self.by_key_head(x, block, tokens)
        mask = mask.reshape(part.shape[:4])
        part[mask] = rows.reshape(part.shape)[mask]

    def sequences(self):
        """Yields a list of `Queries` for every sequence. Queries that see no key come first, as one `Queries`."""
        left, right = self.window
        for (start, stop), (first_key, last_key) in zip(self.problem.spans, self.problem.options["key_spans"]):
            ahead = last_key - stop
            first_seeing = start if right < 0 else min(max(start, first_key - right - ahead), stop)
            if first_key == last_key:
                first_seeing = stop
            sequence = [Queries(slice(start, first_seeing), ahead, ())] if start < first_seeing else []
            for first in range(first_seeing, stop, self.tile_queries):
                last = min(first + self.tile_queries, stop)
                first_seen = first_key if left < 0 else max(first_key, first + ahead - left)
                end_seen = last_key if right < 0 else min(last_key, last + ahead + right)
                sequence.append(
                    Queries(slice(first, last), ahead, tuple(self.tiles(first_key, last_key, first_seen, end_seen)))
                )
            yield sequence

    def tiles(self, first_key, last_key, begin, end):
        """Yields tiles that cover the keys `begin` to `end` of a sequence.

        Tiles consist of whole panels, counted from the sequence's first key; keys after its last whole panel are the
        last tile.
        """
        whole_end = last_key - (last_key - first_key) % self.panel_keys  # of the whole panels
        begin -= (begin - first_key) % self.panel_keys
        end = min(end + (first_key - end) % self.panel_keys, last_key)
        for j in range(begin, min(end, whole_end), self.tile_keys):
            yield slice(j, min(j + self.tile_keys, end, whole_end))
        if whole_end < end:
            yield slice(max(begin, whole_end), end)

    def panels(self, x, block, tile):
        """A view of the keys of a tile of x [B, HK, S, D] as panels [b, h, n, panel_keys, D]."""
        part = x[(*block, tile)]
        count = part.shape[2]
        return part.reshape(*part.shape[:2], -(-count // self.panel_keys), min(count, self.panel_keys), x.shape[-1])

    def transposed_panels(self, x):
        """A function of (block, tile) that returns the transposed panels [b, h, n, D, panel_keys] of x [B, HK, S, D].

        Unless rows are few, whole panels are transposed in memory once, so that BLAS reads them contiguously.
        """
        if self.is_few:
            return lambda block, tile: self.panels(x, block, tile).swapaxes(-1, -2)
        copy = np.empty(x.shape, self.dtype)
        all_heads = (slice(None), slice(None))
        for first, last in self.problem.options["key_spans"]:
            tile = slice(first, last - (last - first) % self.panel_keys)
            if tile.start < tile.stop:
                self.in_place_of(self.panels(copy, all_heads, tile))[...] = self.panels(x, all_heads, tile).swapaxes(
                    -1, -2
                )

        def panels(block, tile):
            if (tile.stop - tile.start) % self.panel_keys:
                return self.panels(x, block, tile).swapaxes(-1, -2)
            return self.in_place_of(self.panels(copy, block, tile))

        return panels

    def in_place_of(self, panels):
        """The memory of panels [..., panel_keys, D], viewed as [..., D, panel_keys]; no element is moved."""
        return panels.reshape(*panels.shape[:-2], panels.shape[-1], panels.shape[-2])

    def seen(self, queries, tile):
        """The mask [rows, keys] that tells which rows see which keys of a tile; None if all rows see all keys."""
        count = queries.tokens.stop - queries.tokens.start
        distance = tile.start - queries.tokens.start - queries.ahead  # from the first query's position to the first key
        return mask_of_window(distance, count, tile.stop - tile.start, *self.window, self.group)

    # -- scores --------------------------------------------------------------------------------------------------------
    def scaled(self, q, exponents):
        """scale q / 2^exponents."""
        return self.dtype.type(self.problem.scale) * (q if exponents is None else np.ldexp(q, -exponents))

    def fits(self, q, block, keys):
        """Whether no partial sum of a score can overflow: |q| |k|, by Cauchy-Schwarz, is in range. False for NaN."""
        lengths = np.sqrt(np.vecdot(q, q)).max() * self.lengths[(*block, keys)].max(initial=0)
        return lengths < self.finfo.max / 2

    def exponents_of(self, q, k):
        """The exponent of each row [b, h, rows, 1]: dividing by 2^exponent brings every finite score into range."""
        q, k = (finite_largest(q, -1), np.maximum(finite_largest(k, (-2, -1)), 1))
        bound = sum(np.frexp(x)[1] for x in (q, k, self.problem.scale, self.q.shape[-1]))
        return np.maximum(bound - self.finfo.maxexp + 1, 0)

    def scores(self, q, k, exponents):
        """The scores [b, h, rows, keys] of scaled rows q and transposed panels k [b, h, n, K, panel_keys].

        They are divided by 2^exponents, except with a softcap, which brings every score into range.
        """
        s = multiply_panels(q, k, thread_scratch(self.dtype), "scores")
        if self.softcap:
            if exponents is not None:
                np.ldexp(s, exponents, out=s)
            s /= self.softcap
            np.tanh(s, out=s)
            s *= self.softcap
        return s

    def in_units(self, x, exponents):
        """Scores x divided by 2^exponents, as `scores` returns them."""
        return x if exponents is None or self.softcap else np.ldexp(x, -exponents)

    def exp(self, x, exponents):
        """exp of differences of scores x, which are divided by 2^exponents; in place."""
        if exponents is not None and not self.softcap:
            np.ldexp(x, exponents, out=x)
        return np.exp(x, out=x)

    # -- forward -------------------------------------------------------------------------------------------------------
    def forward(self, o):
        """Fills o [B, H, T, V], m, l and the exponents: by Numba's loops, then the rows that these leave."""
        undone = self.compiled.forward(o) if self.compiled else np.ones(self.m.shape, bool)
        if not undone.any():
            return
        keys = self.transposed_panels(self.k)

        def task(block, queries):
            wanted = self.rows(undone, block, queries.tokens)
            if not wanted.any():
                return
            results = self.attend(block, queries, keys)
            not_finite = ~np.isfinite(results[0]).all(-1)
            if not_finite.any():
                margin = np.log(queries.keys.stop - queries.keys.start)
                for x, redone in zip(results, self.attend(block, queries, keys, margin), strict=True):
                    x[not_finite] = redone[not_finite]
            for x, rows in zip((o, self.m, self.l, self.exponents), results, strict=True):
                self.write(x, block, queries.tokens, rows, wanted)

        tasks = [
            (block, queries) for sequence in self.sequences() for queries in reversed(sequence) for block in self.blocks
        ]
        in_parallel(task, *zip(*tasks), caller=True)

    def attend(self, block, queries, keys, margin=0.0, exponents=None):
        """(o, m, l, exponents) of the rows of `queries`: running sums over the tiles of keys.

        m exceeds the largest score by `margin`. With margin = log(number of keys) all weights add up to at most 1, so
        that no sum of values overflows.
        """
        rows_of_q = self.rows(self.q, block, queries.tokens)
        q = self.scaled(rows_of_q, exponents)
        if exponents is None and not self.fits(q, block, queries.keys):
            return self.attend(
                block, queries, keys, margin, self.exponents_of(rows_of_q, self.k[(*block, queries.keys)])
            )
        m, l = self.before_keys(block, queries.tokens, exponents)
        o = np.zeros((*q.shape[:-1], self.v.shape[-1]), q.dtype)
        margin = self.in_units(self.dtype.type(margin), exponents)
        for tile in queries.tiles:
            seen = self.seen(queries, tile)
            s = hide_unseen(self.scores(q, keys(block, tile), exponents), seen, -np.inf)
            shrink = self.weigh(s, l, m, margin, exponents)
            o *= shrink
            o += product(s, self.panels(self.v, block, tile), seen).sum(2)
        if queries.tiles:
            o /= l
        return o, m[..., 0], l[..., 0], np.zeros_like(m[..., 0], np.int32) if exponents is None else exponents[..., 0]

    def weigh(self, s, l, m, margin, exponents):
        """Takes a tile's scores s into the running m and l; s becomes exp(s - m), the tile's weights.

        Returns exp(old m - new m), the factor for sums over the previous tiles.
        """
        new_m = np.maximum(m, s.max(-1, keepdims=True) + margin)
        s -= new_m
        p, shrink = self.exp(s, exponents), self.exp(m - new_m, exponents)
        l *= shrink
        l += p.sum(-1, keepdims=True)
        m[...] = new_m
        return shrink

    def before_keys(self, block, tokens, exponents):
        """(m, l) of some rows before the first key: (sink, 1), or without a sink (the lowest number, 0)."""
        if self.sinks is None:
            m = self.rows(self.m[..., None], block, tokens)
            return np.full_like(m, self.finfo.min), np.zeros_like(m)
        sinks = self.rows(self.sinks, block, tokens)
        return np.maximum(self.in_units(sinks, exponents), self.finfo.min), (sinks > -np.inf).astype(self.dtype)

    # -- backward ------------------------------------------------------------------------------------------------------
    def backward(self, do, delta):
        """Gradients of q, k, v, and of the sinks if there are any. `delta` [B, H, T] is do . o minus L's gradient;
        `forward` must have set m, l and the exponents."""
        dq, dk, dv = gradients = [np.zeros(x.shape, self.dtype) for x in (self.q, self.k, self.v)]
        blocks = self.compiled.backward(do, delta, *gradients) if self.compiled else self.blocks
        keys, values = (self.transposed_panels(x) for x in (self.k, self.v)) if blocks else (None, None)

        def task(block, sequence):
            for queries in sequence:
                self.add_gradients(block, queries, keys, values, do, delta, dq, dk, dv)

        tasks = [(block, sequence) for sequence in self.sequences() for block in blocks]
        in_parallel(task, *zip(*tasks), caller=True)
        if self.sinks is None:
            return gradients
        sinks, share = self.in_units(self.sinks[..., 0], self.exponents), np.zeros_like(self.m)
        has_sink = sinks > -np.inf
        np.subtract(sinks, self.m, out=share, where=has_sink)
        np.divide(self.exp(share, self.exponents), self.l, out=share, where=has_sink)
        return [*gradients, -(np.where(has_sink, share, 0) * delta).sum((0, 2))]

    def add_gradients(self, block, queries, keys, values, do, delta, dq, dk, dv):
        """Writes dq of the rows of `queries`; adds their terms of dk and dv."""
        rows_of_q, do, delta, m, l, exponents = (
            self.rows(x, block, queries.tokens) for x in (self.q, do, delta[..., None], *self.saved())
        )
        exponents = exponents if exponents.any() else None
        # do and delta are divided by l, so that p below need not be: it is exp(s - m)
        q, do, delta, dq_rows = self.scaled(rows_of_q, exponents), do / l, delta / l, 0
        scaled = q if exponents is None else self.scaled(rows_of_q, None)
        for tile in queries.tiles:
            seen = self.seen(queries, tile)
            s = self.scores(q, keys(block, tile), exponents)
            slope = 1 - (s / self.softcap) ** 2 if self.softcap else None
            s -= m
            p = hide_unseen(self.exp(s, exponents), seen, 0)
            dv[(*block, tile)] += self.transposed_product(p, do, seen)
            ds = multiply_panels(do, values(block, tile), thread_scratch(self.dtype), "ds")
            ds -= delta
            ds = hide_unseen(ds, seen, 0)
            ds *= p
            if self.softcap:
                ds *= hide_unseen(slope, seen, 0)
            dq_rows = dq_rows + product(ds, self.panels(self.k, block, tile), seen).sum(2)
            dk[(*block, tile)] += self.transposed_product(ds, scaled, seen)
        if queries.tiles:
            part = self.by_key_head(dq, block, queries.tokens)
            part[...] = self.dtype.type(self.problem.scale) * dq_rows.reshape(part.shape)

    def transposed_product(self, W, x, seen):
        """W^T x for weights W [b, h, rows, keys], x [b, h, rows, D]. Pairs not seen add nothing, even if x is NaN."""
        count = W.shape[-1]
        columns = self.panel_keys if count % self.panel_keys == 0 else count
        panels = split(W, columns).swapaxes(-1, -2) @ x[:, :, None]
        found = panels.reshape(*x.shape[:2], count, x.shape[-1])
        return found if seen is None or is_finite(found) else product_over(W.swapaxes(-1, -2), x, seen.T)

    def saved(self):
        """m, l and the exponents, each [B, H, T, 1]."""
        return self.m[..., None], self.l[..., None], self.exponents[..., None]


class Compiled:
    """`Attention` in float32 in Numba's loops, which compute all tiles of a key head in one call.

    Rows whose scores exceed the range of float32, or whose results are not finite, are left to NumPy.
    """

    def __init__(self, attention, loops):
        self.attention, self.loops, problem = attention, loops, attention.problem
        self.B, self.HK, self.T, self.S = problem.shape("B HK T S")
        self.q = self.by_head(attention.q)
        self.keys, self.values = self.panels(attention.k), self.panels(attention.v)
        self.softcap = np.float32(attention.softcap) if attention.softcap else None
        self.scale = np.float32(problem.scale)
        self.first_key, self.last_key = key_ranges(problem.spans, problem.options["key_spans"], attention.window)

    def by_head(self, x):
        """x [B, H, T, ...] as contiguous float32 [B HK, G, T, ...], without a copy if it is so already, as every array
        is that the loops write."""
        x = np.ascontiguousarray(x, np.float32)
        return x.reshape(self.B * self.HK, -1, *x.shape[2:])

    def panels(self, x):
        """x [B, HK, S, D] as [B HK, n, PANEL, D']: a view, or a copy in which S and D are padded with zeros."""
        panel, columns, D = self.loops.PANEL, self.loops.BLOCK_COLUMNS, x.shape[-1]
        if self.S % panel == D % columns == 0 and x.flags.c_contiguous:
            return x.reshape(len(self.q), -1, panel, D)
        padded = np.zeros((len(self.q), -(-self.S // panel) * panel, -(-D // columns) * columns), np.float32)
        padded[:, : self.S, :D] = x.reshape(-1, self.S, D)
        return padded.reshape(len(padded), -1, panel, padded.shape[-1])

    def forward(self, o):
        """Fills o, m and l; returns a mask [B, H, T] of the rows that NumPy must compute ([False] if none)."""
        attention, loops = self.attention, self.loops
        sinks = np.full(1, -np.inf) if attention.sinks is None else attention.sinks[..., 0]
        attention.m[...], attention.l[...] = np.maximum(sinks, attention.finfo.min), sinks > -np.inf
        o_float32 = o if o.dtype == np.float32 and o.flags.c_contiguous else attention.scratch("o", o.shape)
        m, l, o_rows = (self.by_head(x) for x in (attention.m, attention.l, o_float32))
        group, count, task_count = o_rows.shape[1], len(o_rows), self.task_count(o_rows.shape[:2])
        tile = max(1, loops.TILE_ROWS // group)
        queries_per_task = -(-self.T * count // (task_count * tile)) * tile
        heads_per_task = max(1, count // task_count) if queries_per_task >= self.T else 1

        def task(head, first):
            heads = head, min(head + heads_per_task, count)
            arrays = self.q, self.keys, self.values, self.first_key, self.last_key
            queries = first, min(first + queries_per_task, self.T)
            return loops.attention_forward(heads, *arrays, *queries, self.softcap, self.scale, o_rows, m, l)

        tasks = [
            (n, first)
            for first in reversed(range(0, self.T, queries_per_task))
            for n in range(0, count, heads_per_task)
        ]
        done = in_parallel(task, *zip(*tasks), caller=True)
        if o_float32 is not o:
            assign(o, o_float32)
        return np.zeros(1, bool) if all(done) else ~np.isfinite(o_float32).all(-1)

    def task_count(self, heads):
        """The number of tasks: TASKS per core, but fewer if a task would have less than LEAST_SCORES scores."""
        most = prod(heads) * self.T * self.S // LEAST_SCORES
        return max(1, min(TASKS * workers(), most))

    def backward(self, do, delta, dq, dk, dv):
        """Fills dq, dk and dv; returns the blocks [(batch entry, key head)] left to NumPy, whose gradients are 0."""
        attention, loops = self.attention, self.loops
        if attention.exponents.any():
            return attention.blocks
        dkeys, dvalues = np.zeros_like(self.keys), np.zeros_like(self.values)
        row_arrays = [self.by_head(x) for x in (do, attention.m, attention.l, delta)]
        dq_rows = self.by_head(dq)

        def task(head):
            keys = self.keys[head], self.values[head], self.first_key, self.last_key
            return loops.attention_backward(
                self.q[head],
                *(x[head] for x in row_arrays),
                *keys,
                self.softcap,
                self.scale,
                dq_rows[head],
                dkeys[head],
                dvalues[head],
            )

        done = in_parallel(task, range(len(dq_rows)), caller=True)
        for x, parts in ((dk, dkeys), (dv, dvalues)):
            x[...] = parts.reshape(self.B, self.HK, -1, parts.shape[-1])[:, :, : self.S, : x.shape[-1]]
        undone = [divmod(head, self.HK) for head, complete in enumerate(done) if not complete]
        blocks = [(slice(b, b + 1), slice(h, h + 1)) for b, h in undone]
        for block in blocks:
            attention.by_key_head(dq, block, slice(None))[...] = dk[block] = dv[block] = 0
        return blocks


def finite_largest(x, axes):
    """The largest magnitude of the finite elements over `axes`, which are kept with size 1; 0 if there are none."""
    return np.max(np.abs(x), axes, where=np.isfinite(x), initial=0, keepdims=True)


def hide_unseen(s, seen, fill):
    """Sets s [b, h, rows, keys] to `fill` where the row does not see the key; returns s."""
    if seen is not None:
        np.copyto(s, fill, where=~seen)
    return s


def split(x, columns):
    """A view of x [b, h, rows, n * columns] as [b, h, n, rows, columns]."""
    return x.reshape(*x.shape[:-1], -1, columns).swapaxes(2, 3)


def multiply_panels(x, panels, scratch, name):
    """x [b, h, rows, D] times panels [b, h, n, D, columns]: [b, h, rows, n * columns] in memory `name` of `scratch`."""
    n, _, columns = panels.shape[2:]
    out = scratch(name, (*x.shape[:3], n * columns))
    np.matmul(x[:, :, None], panels, out=split(out, columns))
    return out


def product(W, panels, seen):
    """Weights W [b, h, rows, n * columns] times panels [b, h, n, columns, D]: partial products [b, h, n, rows, D].

    Keys not seen add nothing, even if they are NaN; if any product is not finite, the result has n = 1.
    """
    out = split(W, panels.shape[3]) @ panels
    if seen is None or is_finite(out):
        return out
    return product_over(W, panels.reshape(*W.shape[:2], W.shape[-1], panels.shape[-1]), seen)[:, :, None]


@lru_cache(maxsize=64)
def key_ranges(spans, key_spans, window):
    """(first, last), both [T]: query i sees the keys first[i] to last[i] - 1."""
    (left, right), position = window, np.arange(spans.bounds[-1])
    of_sequences = key_spans.bounds[1:] - spans.bounds[1:], key_spans.bounds[:-1], key_spans.bounds[1:]
    ahead, first, last = (np.repeat(bounds, spans.lengths) for bounds in of_sequences)
    position += ahead
    first = first if left < 0 else np.maximum(first, position - left)
    return first, last if right < 0 else np.minimum(last, position + right + 1)


@lru_cache(maxsize=64)
def mask_of_window(first_distance, count, keys, left, right, group):
    """The mask [group * count, keys]: which of `count` queries, the same in `group` heads, see which of `keys` keys.

    `first_distance` is the first key's position minus the first query's. None if every query sees every key.
    """
    if (left < 0 or first_distance >= count - 1 - left) and (right < 0 or first_distance + keys - 1 <= right):
        return None
    distance = first_distance + np.arange(keys) - np.arange(count)[:, None]
    seen = ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))
    return np.tile(seen, (group, 1))
