"""Softmax attention in tiles (Dao et al., FlashAttention, 2022, algorithms 1 and 4), BLAS over heads.

o_i = sum_j exp(s_ij - L_i) v_j,        s_ij = scale q_i . k_j,     L_i = log sum_j exp(s_ij)
"""

import numpy as np

from .by_token import product_over

TILE = 256  # queries and keys at once; the scores of one tile are all that exists of T x T


def run(problem, o):
    """Fills o; there is no state."""
    forward(problem, o)
    return ()


def forward(problem, o):
    """Fills o [B, H, T, V], returns L [B, H, T]."""
    q, k, v = cast_inputs(problem)
    L = np.empty(problem.shape("B H T"), q.dtype)
    for rows, keys in tiles(problem):
        o[:, :, rows], L[:, :, rows] = attend(problem, q[:, :, rows], k, v, rows, keys)
    return L


def cast_inputs(problem):
    """scale q, k and v in the computing dtype."""
    q, k, v = (np.ascontiguousarray(x, problem.compute_dtype) for x in problem.arrays.values())
    return problem.scale * q, k, v


def tiles(problem):
    """(rows, [tiles of keys they see]) of every sequence."""
    tile = problem.chunk_size or TILE
    for start, stop in problem.spans:
        for first in range(start, stop, tile):
            rows = slice(first, min(first + tile, stop))
            seen = rows.stop if problem.options["causal"] else stop
            yield rows, [slice(j, min(j + tile, seen)) for j in range(start, seen, tile)]


def seen_pairs(problem, rows, keys):
    """Which queries see which keys [rows, keys], or None where all do."""
    if problem.options["causal"] and keys.stop > rows.start:
        return np.arange(keys.start, keys.stop) <= np.arange(rows.start, rows.stop)[:, None]


def only(s, seen, fill):
    """s [B, H, rows, keys] itself, `fill` where the key is not seen."""
    if seen is not None:
        np.copyto(s, fill, where=~seen)
    return s


def product(W, x, seen):
    """W @ x, of which nothing unseen is part, NaN neither."""
    return W @ x if seen is None else product_over(W, x, seen)


def attend(problem, q, k, v, rows, keys):
    """One tile of queries over its keys: the running maximum m, sum l and weighted values o."""
    o, l, m = 0, 0, np.full((*q.shape[:-1], 1), -np.inf, q.dtype)
    for tile in keys:
        seen = seen_pairs(problem, rows, tile)
        s = only(q @ k[:, :, tile].swapaxes(-1, -2), seen, -np.inf)
        higher = np.maximum(m, s.max(-1, keepdims=True))
        p, kept = np.exp(s - higher), np.exp(m - higher)
        o, l, m = kept * o + product(p, v[:, :, tile], seen), kept * l + p.sum(-1, keepdims=True), higher
    return o / l, (m + np.log(l))[..., 0]


def vjp(problem, o):
    """((), pull), o filled: the scores are recomputed tile by tile from L."""
    precise = np.empty(o.shape, problem.compute_dtype)
    L = forward(problem, precise)
    o[...] = precise

    def pull(do, dht):
        q, k, v = cast_inputs(problem)
        do = do.astype(q.dtype)
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        own = np.vecdot(do, precise)[..., None]
        for rows, keys in tiles(problem):
            for tile in keys:
                seen = seen_pairs(problem, rows, tile)
                turned = None if seen is None else seen.T
                scores = q[:, :, rows] @ k[:, :, tile].swapaxes(-1, -2)
                p = only(np.exp(scores - L[:, :, rows, None]), seen, 0)
                ds = do[:, :, rows] @ v[:, :, tile].swapaxes(-1, -2) - own[:, :, rows]
                ds = p * only(ds, seen, 0)
                dq[:, :, rows] += product(ds, k[:, :, tile], seen)
                dk[:, :, tile] += product(ds.swapaxes(-1, -2), q[:, :, rows], turned)
                dv[:, :, tile] += product(p.swapaxes(-1, -2), do[:, :, rows], turned)
        return [problem.scale * dq, dk, dv], None

    return (), pull
