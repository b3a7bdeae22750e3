"""A chunk's scores A and gated q and k, exact for every gate, forward and backward.

    A_ij = sum_k q_ik k_jk exp(g_{j+1,k} + ... + g_ik),  j <= i         qg_i = q_i exp(d_i)       kg_j = k_j exp(e_j)

Here b_i is the sum of a chunk's log gates from its first token to token i, and e_j that of the gates after token j. If
outputs read the state before the write (`exclusive`, RWKV-6), the sum in A ends at i - 1, j < i and d_i = b_{i-1};
otherwise d_i = b_i. A chunk [..., C, K] is computed in one of two ways:

- *factored*, if its gates are weak: A is one product (q_i exp(c_i)) (k_j exp(-c_j))^T, where c_i is the sum of the
  gates from the chunk's middle token to token i. Weak gates are those for which exp(c) and exp(-c) stay in range.
- *halved* otherwise: for blocks of 2, 4, 8, ... tokens the queries of a block's second half, decayed from the border
  between the halves, are multiplied by the keys of its first half, decayed to that border. Then queries and keys are
  decayed on to the ends of the whole block. Every factor is a product of decays, so any gate is possible (secondary
  chunking, Yang et al., 2024, section 4.3, in every block).

With large q or k, or with growing gates, products may still leave a dtype's range. Then results are not finite, or
`underflow` is True, and `by_token` computes the row, a pair of batch entry and head, instead.

The gradient of a gate is the sum of all terms q_i dA_ij k_j exp(..) with j before its token and i at or after it.
Halved, it is a sum of such terms alone. Factored, other terms are added and subtracted again, which leaves a rounding
error of their size. So for gradients chunks are also halved if they have a gate below LEAST, which makes the gradient
small, or above MOST, which makes those other terms large.
"""

from functools import wraps
from typing import NamedTuple

import numpy as np

from ...bounded_cache import Cache
from . import by_token

CONSTANTS = Cache(most=1 << 24, entries=64)  # of the functions with @constant: {(function, arguments): array}
LIMIT = 30.0  # gates are weak if all |c| are at most this: float32 then has room for values from 1e-25 to 1e25
LEAST = -5.0  # with gates from here on a factored chunk's dg has four correct digits in float32, and mostly five
MOST = 1.0


class Gates:
    """The log gates g [..., C, K or 1] of a stack of chunks, and which chunks must be halved.

    least : None, or LEAST for gradients: chunks with a gate below it or above MOST are halved, too
    strong : the indices of the chunks that are halved, as `np.nonzero` has them, or None
    start, decay : for factored chunks: the decays to the middle token, and from the middle to each token
    halves, queries, keys : what `gated_scores` stores for `gated_scores_vjp`
    """

    def __init__(self, g, scratch, least=None):
        self.g = g = blas_ready(g)
        # a gate of -inf gives NaN, which is not weak
        c = np.matmul(from_middle(g.shape[-2], g.dtype), g, out=scratch("gate_sums", g.shape))
        self.strong, self.halves, self.queries, self.keys = None, None, None, None
        if not is_weak(c, g, least, None).all():
            flat = [x.reshape(*x.shape[:-2], -1) for x in (c, g)]
            self.strong = np.nonzero(~is_weak(*flat, least, -1))
        self.any_weak = self.strong is None or len(self.strong[0]) < flat[0][..., 0].size
        if self.any_weak:
            self.start = np.exp(g[..., :1, :] - c[..., :1, :])  # of the chunk's tokens up to its middle
            self.decay = np.exp(c, out=c)

    def underflow(self, *states):
        """Whether products would lose something in a halved chunk because decays underflow: see `by_token.underflows`.
        `states` [B, H, n, K, V]: those that the decays multiply."""
        if self.strong is None:
            return False
        log_largest = by_token.log_largest(*states)
        if log_largest <= by_token.ROOM and self.g.max() <= 0:
            return False
        return bool(by_token.underflows(self.g[self.strong], log_largest).any())

    def serve_gradients(self, least):
        """Whether these gates, made with `least` None for the forward pass, are also those for gradients."""
        return self.strong is None and (least is None or bool(is_mild(self.g, least, None)))


def is_weak(c, g, least, axis):
    """Whether chunks can be factored; c: the sums of their gates g from the middle token to each; `axis`: the axes over
    which all numbers must fulfil the conditions."""
    weak = (c.max(axis, initial=0) <= LIMIT) & (c.min(axis, initial=0) >= -LIMIT)
    return weak if least is None else weak & is_mild(g, least, axis)


def is_mild(g, least, axis):
    """Whether gates are from `least` to MOST."""
    return (g.min(axis, initial=0) >= least) & (g.max(axis, initial=0) <= MOST)


def constant(make):
    """Decorates a function of hashable arguments that returns an array: the arrays are cached. For a short segment,
    making them would take as long as a product."""

    @wraps(make)
    def cached(*arguments):
        key = make, *arguments
        array = CONSTANTS.get(key)
        if array is None:
            array = make(*arguments)
            if array.nbytes <= CONSTANTS.most:
                array = CONSTANTS.keep(key, array, array.nbytes)
        return array

    return cached


@constant
def triangle(size, dtype, k):
    """Ones on and below diagonal k."""
    return np.tri(size, k=k, dtype=dtype)


@constant
def from_middle(size, dtype):
    """The matrix whose product with a chunk's gates [T] is their cumulated sum less the sum up to the middle token."""
    sums = np.tri(size, dtype=dtype)
    return sums - sums[size // 2 - 1]


def blas_ready(x):
    """x if np.matmul can pass it to BLAS, else a contiguous copy."""
    return x if x.strides[-1] == x.itemsize and x.strides[-2] >= x.shape[-1] * x.itemsize else np.ascontiguousarray(x)


def diagonal(A):
    """The diagonals of [..., C, C] as a writable view [..., C]."""
    return np.einsum("...ii->...i", A)


def mask_future(A, exclusive):
    """Sets A to 0 above the diagonal, and on it if exclusive, also where it is NaN: by masks of bits."""
    bits = np.dtype(f"i{A.itemsize}")
    keep = -triangle(A.shape[-2], bits, -1 if exclusive else 0)
    np.bitwise_and(A.view(bits), keep, out=A.view(bits))


def gated_scores(q, k, gates, exclusive, decay, scratch, keep=False):
    """(qg, kg [..., C, K], A [..., C, C]); fills the chunk's whole decay [..., K or 1]. `keep`: whether `gates` keeps
    what `gated_scores_vjp` needs."""
    qg, kg, A = scratch("qg", q.shape), scratch("kg", k.shape), scratch("A", (*q.shape[:-1], q.shape[-2]))
    if gates.any_weak:
        gates.queries, gates.keys = (scratch("queries", q.shape), scratch("keys", k.shape)) if keep else (qg, kg)
        factored(q, k, gates, exclusive, qg, kg, A, decay)
    if gates.strong is not None:
        strong = gates.strong
        gates.halves = halves = Halves(q[strong], k[strong], gates.g[strong], exclusive, keep)
        qg[strong], kg[strong], A[strong], decay[strong] = halves.q, halves.k, halves.A, halves.decay[:, 0]
    return qg, kg, A


def factored(q, k, gates, exclusive, qg, kg, A, decay):
    """Writes qg, kg, A and decay of all chunks in the factored way, which is right for weak gates. Also writes
    `gates.queries` = q exp(c) and `gates.keys` = k exp(-c), which may have the memory of qg and kg."""
    decays, queries, keys = gates.decay, gates.queries, gates.keys
    decay_query(q, decays, exclusive, out=queries)
    np.divide(k, decays, out=keys)
    np.matmul(queries, keys.swapaxes(-1, -2), out=A)
    mask_future(A, exclusive)
    after = slice(exclusive, None)  # if exclusive, the first query is not decayed
    np.multiply(queries[..., after, :], gates.start, out=qg[..., after, :])
    if exclusive:
        qg[..., :1, :] = queries[..., :1, :]
    np.multiply(keys, decays[..., -1:, :], out=kg)
    np.multiply(gates.start, decays[..., -1:, :], out=decay[..., None, :])


def decay_query(q, decays, exclusive, out=None):
    """q_i times its token's decays, such as exp(b_i); if exclusive, times those of the token before, and q_1 as it
    is."""
    if not exclusive:
        return np.multiply(q, decays, out=out)
    out = np.empty(q.shape, q.dtype) if out is None else out
    np.multiply(q[..., 1:, :], decays[..., :-1, :], out=out[..., 1:, :])
    out[..., :1, :] = q[..., :1, :]
    return out


def prefix_suffix_sums(g):
    """(b, e): b_i = g_1 + ... + g_i and e_j = g_{j+1} + ... + g_C along axis -2. There are no differences, so gates may
    be -inf."""
    b, e = np.array(g, order="C"), np.zeros(g.shape, g.dtype)
    for i in range(1, g.shape[-2]):
        b[..., i, :] += b[..., i - 1, :]
        np.add(e[..., -i, :], g[..., -i, :], out=e[..., -i - 1, :])
    return b, e


# -- backward ---------------------------------------------------------------------------------------------------------


def gated_scores_vjp(gates, exclusive, dA, dqg, dkg, through, out, scratch):
    """Writes the gradients `out` = (dq, dk, dg) from those of A, qg and kg; dA [..., C, C] is 0 on and above the
    diagonal.

    through : [..., K or 1], the term of every gate's gradient from the state before the chunk to the one after it
    gates : as `gated_scores` has left them when it was asked to keep what this needs

    dqg and dkg are overwritten.
    """
    dq, dk, dg = out
    strong = gates.strong
    if strong is not None:
        gradients = gates.halves.vjp(dA[strong], dqg[strong], dkg[strong], through[strong])
    if gates.any_weak:
        factored_vjp(gates, exclusive, dA, dqg, dkg, through, scratch, dq, dk, dg)
    if strong is not None:
        dq[strong], dk[strong], dg[strong] = gradients


def factored_vjp(gates, exclusive, dA, dqg, dkg, through, scratch, dq, dk, dg):
    """Writes dq, dk and dg in the factored way:

        dg_t = sum_{i >= t} (q dq - k dk) of A + sum_{i >= t} qg dqg + sum_{j < t} kg dkg + through

    with i > t if exclusive. The first sum is equal to sum_{i < t} (k dk - q dq) of A.
    """
    decays, queries, keys = gates.decay, gates.queries, gates.keys
    after = slice(int(exclusive), None)  # the queries that come after the first token's gate
    dqg[..., after, :] *= gates.start
    read_terms = np.multiply(queries, dqg, out=scratch("read_terms", dqg.shape))
    query_terms = scratch.product("query_terms", dA, keys)
    dqg += query_terms
    decay_query(dqg, decays, exclusive, out=dq)
    key_terms = scratch.product("key_terms", dA.swapaxes(-1, -2), queries)
    dkg *= decays[..., -1:, :]
    np.add(key_terms, dkg, out=dk)
    dk /= decays

    query_terms *= queries
    key_terms *= keys
    dkg *= keys
    gate_sums(*(channels_of(gates.g, x) for x in (query_terms, key_terms, read_terms, dkg)), exclusive, scratch, dg)
    dg += through[..., None, :]


def gate_sums(query_terms, key_terms, read_terms, write_terms, exclusive, scratch, dg):
    """Writes the sums of `factored_vjp` over a chunk's tokens to dg, in two products: one for the gates of each half of
    the chunk. Of the two equal sums over A, that with fewer terms is taken.

    query_terms, key_terms : q dq and k dk through A
    read_terms, write_terms : qg dqg and kg dkg, the terms through the states
    """
    C = query_terms.shape[-2]
    half = C // 2
    first, second = (..., slice(0, half), slice(None)), (..., slice(half, C), slice(None))
    sums_of_first, sums_of_second = half_sums(C, dg.dtype, exclusive)
    terms = scratch("terms", (*query_terms.shape[:-2], half + C, query_terms.shape[-1]))
    earlier, later = terms[..., :half, :], terms[..., half:, :]
    np.subtract(key_terms[first], query_terms[first], out=earlier)
    earlier += write_terms[first]
    later[...] = read_terms
    np.matmul(sums_of_first, terms, out=dg[first])

    earlier, later = terms[..., :C, :], terms[..., C:, :]
    earlier[...] = write_terms
    np.subtract(query_terms[second], key_terms[second], out=later)
    later += read_terms[second]
    np.matmul(sums_of_second, terms, out=dg[second])
    if exclusive:
        dg[first] -= query_terms[first]
        dg[second] -= key_terms[second]


@constant
def half_sums(size, dtype, exclusive):
    """The matrices by which `gate_sums` sums a chunk's terms: [0] for the gates of the chunk's first half, [1] for
    those of its second half.

    The first columns are for terms that are summed over tokens before the gate's, the others for terms that are summed
    from the gate's token on (if exclusive: after it). Columns that would be 0 for all gates are left out: the second
    half of the former in [0], the first half of the latter in [1].
    """
    half, until, since = size // 2, np.tri(size, k=-1, dtype=dtype), np.tri(size, k=-int(exclusive), dtype=dtype).T
    return np.stack(
        [
            np.concatenate([until[:half, :half], since[:half]], axis=1),
            np.concatenate([until[half:], since[half:, half:]], axis=1),
        ]
    )


def channels_of(g, x):
    """x, summed over the channels if they share the gate g."""
    return x.sum(-1, keepdims=True) if g.shape[-1] == 1 else x


def decay_vjp(decay, h, dh_after):
    """The gradient of each chunk's log decay through the states: decay * sum_v h dh, [B, H, n, K or 1].

    h, dh_after : the states before the chunks, the gradients of the states after them, [B, H, n, K, V]
    """
    return channels_of(decay, decay * np.vecdot(h, dh_after))


# -- by halves --------------------------------------------------------------------------------------------------------


class Level(NamedTuple):
    """A level of halving: the number of its blocks, which begin with the chunk's first token, and the tokens of their
    first half and of their second half."""

    blocks: int
    first: int
    second: int


def levels(C):
    """Yields the levels from pairs of tokens up to the whole chunk of C tokens. Where C is no power of two, the last
    levels have one block, which grows by a second part of the same size."""
    size = 1
    while C % (2 * size) == 0:
        yield Level(C // (2 * size), size, size)
        size *= 2
    for first in range(size, C, size):
        yield Level(1, first, size)


def halves_of(x, level):
    """Views (first halves, second halves) of the blocks of a level, each [m, blocks, tokens, D], of x [m, C, D]."""
    blocks, first, second = level
    x = x[:, : blocks * (first + second)].reshape(len(x), blocks, first + second, x.shape[-1])
    return x[:, :, :first], x[:, :, first:]


def square_of(A, level):
    """The part of A [m, C, C] for queries of second halves and keys of first halves: a view [m, blocks, tokens,
    tokens].
    """
    blocks, first, second = level
    size, C = first + second, blocks * (first + second)
    A = A[:, :C, :C].reshape(len(A), blocks, size, blocks, size)
    return np.einsum("mbibj->mbij", A)[:, :, first:, :first]


class Halves:
    """m chunks [m, C, K] in the halved way: qg and kg are the attributes `q` and `k`; A [m, C, C], decay [m, 1, K or
    1]. `keep`: whether to store what `vjp` needs."""

    def __init__(self, q, k, g, exclusive, keep):
        m, C, _ = q.shape
        decay = np.exp(g)
        self.query_decay = None if exclusive else decay  # if exclusive, a query is not decayed by its token's own gate
        self.q, self.k = q.copy() if exclusive else q * decay, k.copy()
        self.A, self.levels = np.zeros((m, C, C), q.dtype), []
        self.decayed_queries = self.q.copy() if keep and not exclusive else None  # by their tokens' own gates
        if not exclusive:
            diagonal(self.A)[...] = np.vecdot(q, k)
        for level in levels(C):
            n = level.blocks
            merged = decay[:, : 2 * n].reshape(m, n, 2, 1, -1)
            first, second = merged[:, :, 0], merged[:, :, 1]
            queries, keys = halves_of(self.q, level)[1], halves_of(self.k, level)[0]
            square_of(self.A, level)[...] = queries @ keys.swapaxes(-1, -2)
            if keep:
                self.levels.append((level, first, second, queries.copy(), keys.copy()))
            queries *= first
            keys *= second
            decay = np.concatenate([(first * second)[:, :, 0], decay[:, 2 * n :]], axis=1)
        self.decay = decay

    def vjp(self, dA, dqg, dkg, through):
        """(dq, dk, dg), by the loop of `__init__` backwards; dA is 0 on and above the diagonal."""
        dq, dk = dqg.copy(), dkg.copy()
        # [m, blocks, K or 1]: the term of the gradient that all gates of a block have in common. At first one block, in
        # the end one for each token
        flow = through[:, None]
        for level, first, second, queries, keys in reversed(self.levels):
            n, square = level.blocks, square_of(dA, level)
            dqueries, dkeys = halves_of(dq, level)[1], halves_of(dk, level)[0]
            dqueries *= first
            dkeys *= second
            across = np.stack([(queries * dqueries).sum(2), (keys * dkeys).sum(2)], axis=2)
            across = flow[:, :n, None] + channels_of(flow, across)
            flow = np.concatenate([across.reshape(len(dq), 2 * n, -1), flow[:, n:]], axis=1)
            dqueries += square @ keys
            dkeys += square.swapaxes(-1, -2) @ queries
        if self.decayed_queries is not None:
            flow = flow + channels_of(flow, self.decayed_queries * dq)
            dq *= self.query_decay
        return dq, dk, flow
