"""A chunk's scores A and gated q and k, exact for every gate, forward and backward.

    A_ij = sum_k q_ik k_jk exp(g_{j+1,k} + ... + g_ik),  j <= i         qg_i = q_i exp(d_i)       kg_j = k_j exp(e_j)

`exclusive` (RWKV-6): the sum in A ends at i - 1, j < i and d_i = b_{i-1}. Two routes, chosen chunk by chunk:

- *factored*: gates so weak that decays to and from the chunk's middle are harmless. Then A is one product,
  (q_i exp(c_i)) (k_j exp(-c_j))^T, with c the sums of gates from the middle.
- *halved* otherwise: blocks of 2, 4, 8, ... tokens. Queries of a block's second half meet the keys of its first, the
  ones decayed from where the halves meet, the others to it; then both are decayed on to the whole block. Every factor
  is a product of decays, and no gate is special. (Yang et al., 2024, section 4.3, secondary chunking, all the way.)

Large q, k or growing gates may still leave a dtype's range. Then results are not finite, or `underflow` says so, and
`by_token` does the chunk.

The gate's gradient is what flows across its token. By halves these are sums in which nothing cancels. Factored, the
pairs of query and key that lie behind the token are added and taken away again; what that leaves behind is rounding of
their size. So chunks go by halves with a gate below LEAST, which makes the flow itself small, or above MOST, which
makes such pairs large.
"""

from functools import wraps

import numpy as np

from ...bounded_cache import Cache
from . import by_token

CONSTANTS = Cache(most=1 << 24, entries=64)
LIMIT = 30.0  # nats from the middle: exp(30) = 1e13 leaves float32 room for values from 1e-25 to 1e25
LEAST = -5.0  # nats of one gate: exp(-5) leaves its gradient four digits in float32, and mostly five
MOST = 1.0


class Gates:
    """The log decays [..., C, K or 1] of a stack of chunks, and which chunks are too strong to be factored.

    With `least`, chunks with a gate below that or above MOST count as strong too.
    """

    def __init__(self, g, scratch, least=None):
        self.g = g = blas_ready(g)
        c = np.matmul(from_middle(g.shape[-2], g.dtype), g, out=scratch("b", g.shape))  # NaN, so not weak, of -inf
        self.strong, self.halves, self.queries, self.keys = None, None, None, None
        if not is_weak(c, g, least, None).all():
            flat = [x.reshape(*x.shape[:-2], -1) for x in (c, g)]
            self.strong = np.nonzero(~is_weak(*flat, least, -1))
        self.any_weak = self.strong is None or len(self.strong[0]) < flat[0][..., 0].size
        if self.any_weak:
            self.start = np.exp(g[..., :1, :] - c[..., :1, :])  # of the chunk's tokens up to its middle
            self.decay = np.exp(c, out=c)

    def underflow(self, *states):
        """Whether some chunk has decays that leave the range beside growth, or beside states [B, H, n, K, V]."""
        if self.strong is None:
            return False
        nats = by_token.largest(*states)
        if nats <= by_token.ROOM and self.g.max() <= 0:
            return False
        return bool(by_token.underflows(self.g[self.strong], nats).any())

    def serve_gradients(self, least):
        """Whether gates told of `least` would be these: then theirs of the forward pass will do for the backward."""
        return self.strong is None and (least is None or bool(is_mild(self.g, least, None)))


def is_weak(c, g, least, axis):
    weak = (c.max(axis, initial=0) <= LIMIT) & (c.min(axis, initial=0) >= -LIMIT)
    return weak if least is None else weak & is_mild(g, least, axis)


def is_mild(g, least, axis):
    return (g.min(axis, initial=0) >= least) & (g.max(axis, initial=0) <= MOST)


def constant(make):
    """`make`, with its arrays kept by their arguments: a short segment would spend as long on them as on a product."""

    @wraps(make)
    def kept(*arguments):
        key = make, *arguments
        found = CONSTANTS.get(key)
        if found is None:
            found = make(*arguments)
            if found.nbytes <= CONSTANTS.most:
                found = CONSTANTS.keep(key, found, found.nbytes)
        return found

    return kept


@constant
def triangle(size, dtype, k=0):
    """Ones on and below diagonal k."""
    return np.tri(size, k=k, dtype=dtype)


@constant
def from_middle(size, dtype):
    """The matrix whose product with a chunk's gates [T] is their cumulated sum less the sum up to the middle token."""
    sums = np.tri(size, dtype=dtype)
    return sums - sums[size // 2 - 1]


def blas_ready(x):
    """x itself where matmul can hand it to BLAS, else a copy."""
    return x if x.strides[-1] == x.itemsize and x.strides[-2] >= x.shape[-1] * x.itemsize else np.ascontiguousarray(x)


def diagonal(A):
    """The diagonals of [..., C, C] as a writable view [..., C]."""
    return np.einsum("...ii->...i", A)


def mask_future(A, exclusive):
    """Zeroes A above the diagonal, and on it when exclusive, whatever stands there: bits, not products."""
    bits = np.dtype(f"i{A.itemsize}")
    keep = -triangle(A.shape[-2], bits, -1 if exclusive else 0)
    np.bitwise_and(A.view(bits), keep, out=A.view(bits))


def gated_scores(q, k, gates, exclusive, decay, scratch, keep=False):
    """(qg, kg [..., C, K], A [..., C, C]); fills the chunk's whole decay [..., K or 1]. `keep` for the gradients."""
    qg, kg, A = scratch("qg", q.shape), scratch("kg", k.shape), scratch("A", (*q.shape[:-1], q.shape[-2]))
    if gates.any_weak:
        gates.queries, gates.keys = (scratch("queries", q.shape), scratch("keys", k.shape)) if keep else (qg, kg)
        factored(q, k, gates, exclusive, qg, kg, A, decay)
    if gates.strong is not None:
        at = gates.strong
        gates.halves = halves = Halves(q[at], k[at], gates.g[at], exclusive, keep)
        qg[at], kg[at], A[at], decay[at] = halves.q, halves.k, halves.A, halves.decay[:, 0]
    return qg, kg, A


def gated_keys(k, gates, decay, scratch):
    """kg alone, and the chunk's whole decay in `decay`."""
    kg = scratch("kg", k.shape)
    if gates.any_weak:
        end = gates.decay[..., -1:, :]
        np.divide(k, gates.decay, out=kg)
        kg *= end
        np.multiply(gates.start, end, out=decay[..., None, :])
    if gates.strong is not None:
        b, e = prefix_suffix_sums(gates.g[gates.strong])
        kg[gates.strong] = k[gates.strong] * np.exp(e)
        decay[gates.strong] = np.exp(b[..., -1, :])
    return kg


def factored(q, k, gates, exclusive, qg, kg, A, decay):
    """Right for weak gates. Fills their `queries` and `keys` too, as seen from the middle; they may be qg and kg."""
    E, queries, keys = gates.decay, gates.queries, gates.keys
    decay_query(q, E, exclusive, out=queries)
    np.divide(k, E, out=keys)
    np.matmul(queries, keys.swapaxes(-1, -2), out=A)
    mask_future(A, exclusive)
    after = slice(exclusive, None)  # reading before the write, the first query is as it was
    np.multiply(queries[..., after, :], gates.start, out=qg[..., after, :])
    if exclusive:
        qg[..., :1, :] = queries[..., :1, :]
    np.multiply(keys, E[..., -1:, :], out=kg)
    np.multiply(gates.start, E[..., -1:, :], out=decay[..., None, :])


def decay_query(q, E, exclusive, out=None):
    """q_i exp(d_i) from E = exp(b): d = b, or b of the token before."""
    if not exclusive:
        return np.multiply(q, E, out=out)
    out = np.empty(q.shape, q.dtype) if out is None else out
    np.multiply(q[..., 1:, :], E[..., :-1, :], out=out[..., 1:, :])
    out[..., :1, :] = q[..., :1, :]
    return out


def prefix_suffix_sums(g):
    """b_i = g_1 + ... + g_i and e_j = g_{j+1} + ... + g_C along axis -2: sums only, so -inf stays exact."""
    b, e = np.array(g, order="C"), np.zeros(g.shape, g.dtype)
    for i in range(1, g.shape[-2]):
        b[..., i, :] += b[..., i - 1, :]
        np.add(e[..., -i, :], g[..., -i, :], out=e[..., -i - 1, :])
    return b, e


# -- backward ---------------------------------------------------------------------------------------------------------


def gated_scores_vjp(gates, exclusive, dA, dqg, dkg, through, out, scratch):
    """Gradients `out` = (dq, dk, dg) of A, qg and kg [..., C, .]; dA [..., C, C] is 0 on and above the diagonal.

    `through` [..., K or 1] is what flows across the whole chunk, of the state before it to the one behind it.
    Needs `gates` as `gated_scores` has left them, told to keep; overwrites dqg and dkg.
    """
    dq, dk, dg = out
    at = gates.strong
    if at is not None:
        found = gates.halves.vjp(dA[at], dqg[at], dkg[at], through[at])
    if gates.any_weak:
        factored_vjp(gates, exclusive, dA, dqg, dkg, through, scratch, dq, dk, dg)
    if at is not None:
        dq[at], dk[at], dg[at] = found


def factored_vjp(gates, exclusive, dA, dqg, dkg, through, scratch, dq, dk, dg):
    """dg_t = sum_{i >= t} (q dq - k dk) of A, or what comes to the same, sum_{i < t} (k dk - q dq)
    + sum_{i >= t} qg dqg + sum_{j < t} kg dkg + through      (i > t where the read comes before the write)
    """
    E, queries, keys = gates.decay, gates.queries, gates.keys
    after = slice(int(exclusive), None)  # the queries that come after the first token's gate
    dqg[..., after, :] *= gates.start
    read = np.multiply(queries, dqg, out=scratch("read", dqg.shape))
    of_query = scratch.product("of_query", dA, keys)
    dqg += of_query
    decay_query(dqg, E, exclusive, out=dq)
    of_key = scratch.product("of_key", dA.swapaxes(-1, -2), queries)
    dkg *= E[..., -1:, :]
    np.add(of_key, dkg, out=dk)
    dk /= E

    of_query *= queries
    of_key *= keys
    dkg *= keys
    gate_sums(*(channels_of(gates.g, x) for x in (of_query, of_key, read, dkg)), exclusive, scratch, dg)
    dg += through[..., None, :]


def gate_sums(of_query, of_key, read, stored, exclusive, scratch, dg):
    """The sums of `factored_vjp` over a chunk's tokens, in two products: one for the gates of each half.

    Pairs are summed from the nearer end of the chunk, since all of them together are 0.
    """
    C = of_query.shape[-2]
    half = C // 2
    first, second = (..., slice(0, half), slice(None)), (..., slice(half, C), slice(None))
    of_first, of_second = half_sums(C, dg.dtype, exclusive)
    terms = scratch("terms", (*of_query.shape[:-2], half + C, of_query.shape[-1]))
    before, behind = terms[..., :half, :], terms[..., half:, :]
    np.subtract(of_key[first], of_query[first], out=before)
    before += stored[first]
    behind[...] = read
    np.matmul(of_first, terms, out=dg[first])

    before, behind = terms[..., :C, :], terms[..., C:, :]
    before[...] = stored
    np.subtract(of_query[second], of_key[second], out=behind)
    behind += read[second]
    np.matmul(of_second, terms, out=dg[second])
    if exclusive:
        dg[first] -= of_query[first]
        dg[second] -= of_key[second]


@constant
def half_sums(size, dtype, exclusive):
    """The matrices that sum a chunk's terms into its gates' gradients, one matrix for each half of the chunk's gates.

    Columns are the terms that count before a token, then those that count from the token on (`exclusive`: behind it).
    Terms of the second half never count before the first half's tokens [0], nor those of the first half behind the
    second's [1], so those columns are left out.
    """
    half, until, since = size // 2, np.tri(size, k=-1, dtype=dtype), np.tri(size, k=-int(exclusive), dtype=dtype).T
    return np.stack(
        [
            np.concatenate([until[:half, :half], since[:half]], axis=1),
            np.concatenate([until[half:], since[half:, half:]], axis=1),
        ]
    )


def channels_of(g, x):
    """x summed over channels, where they share a gate."""
    return x.sum(-1, keepdims=True) if g.shape[-1] == 1 else x


# -- by halves --------------------------------------------------------------------------------------------------------


def doubling(C):
    """(blocks, tokens of the first half, of the second), from pairs of tokens up to the whole chunk."""
    size = 1
    while C % (2 * size) == 0:
        yield C // (2 * size), size, size
        size *= 2
    for first in range(size, C, size):
        yield 1, first, size


def halves_of(x, level):
    """Views [m, blocks, tokens, D] of x [m, C, D]."""
    blocks, first, second = level
    x = x[:, : blocks * (first + second)].reshape(len(x), blocks, first + second, x.shape[-1])
    return x[:, :, :first], x[:, :, first:]


def square_of(A, level):
    """The second halves' queries and the first halves' keys: a view [m, blocks, tokens, tokens] of A [m, C, C]."""
    blocks, first, second = level
    size, C = first + second, blocks * (first + second)
    A = A[:, :C, :C].reshape(len(A), blocks, size, blocks, size)
    return np.einsum("mbibj->mbij", A)[:, :, first:, :first]


class Halves:
    """Any gates, m chunks [m, C, K]: qg and kg as `q` and `k`, A [m, C, C], decay [m, 1, K or 1]."""

    def __init__(self, q, k, g, exclusive, keep):
        m, C, _ = q.shape
        decay = np.exp(g)
        self.of_query = None if exclusive else decay  # a token's own gate comes before its read, or after
        self.q, self.k = q.copy() if exclusive else q * decay, k.copy()
        self.A, self.levels = np.zeros((m, C, C), q.dtype), []
        self.own = self.q.copy() if keep and not exclusive else None
        if not exclusive:
            diagonal(self.A)[...] = np.vecdot(q, k)
        for level in doubling(C):
            n = level[0]
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
        """(dq, dk, dg): the loop above backwards. `flow` [m, blocks, K or 1] is what crosses a whole block."""
        dq, dk, flow = dqg.copy(), dkg.copy(), through[:, None]
        for level, first, second, queries, keys in reversed(self.levels):
            n, square = level[0], square_of(dA, level)
            dqueries, dkeys = halves_of(dq, level)[1], halves_of(dk, level)[0]
            dqueries *= first
            dkeys *= second
            across = np.stack([(queries * dqueries).sum(2), (keys * dkeys).sum(2)], axis=2)
            across = flow[:, :n, None] + channels_of(flow, across)
            flow = np.concatenate([across.reshape(len(dq), 2 * n, -1), flow[:, n:]], axis=1)
            dqueries += square @ keys
            dkeys += square.swapaxes(-1, -2) @ queries
        if self.own is not None:
            flow = flow + channels_of(flow, self.own * dq)
            dq *= self.of_query
        return dq, dk, flow
