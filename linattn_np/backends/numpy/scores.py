"""A chunk's scores A and gated q and k, exact for every gate, forward and backward.

    A_ij = sum_k q_ik k_jk exp(g_{j+1,k} + ... + g_ik),  j <= i         qg_i = q_i exp(d_i)       kg_j = k_j exp(e_j)

`exclusive` (RWKV-6): the sum in A ends at i - 1, j < i and d_i = b_{i-1}. Two routes, chosen chunk by chunk:

- *factored*: gates so weak over the chunk that both exp(b_i) and exp(-b_j) are harmless. Then A is one product,
  (q exp d) (k / exp b)^T. A chunk in which large q, k or gradients overflow all the same is redone stepwise.
- *stepwise* otherwise: sub-chunks of 16. Between them every exponent is a sum of gates, taken along as the reference
  point moves; within one, factored again where that block allows it, else decays multiplied up one token at a time.

(Secondary chunking: Yang et al., 2024, section 4.3.)
"""

import numpy as np

from ...caches import Cache
from ...contract import SUB_CHUNK
from .packing import Scratch

CONSTANTS = Cache(most=1 << 24, entries=64)
LIMIT = 60.0                # nats: exp(60) = 1e26 leaves float32 room for keys up to 1e12


class Gates:
    """The log decays [..., C, K or 1] of a stack of chunks, and which chunks are too strong to be factored."""

    def __init__(self, g, scratch):
        self.g = g = blas_ready(g)
        b = np.matmul(triangle(g.shape[-2], g.dtype), g, out=scratch("b", g.shape))   # where g is infinite this is NaN, and so not weak
        self.strong = None
        if not within_limit(b, None).all():
            flat = b.reshape(*b.shape[:-2], -1)
            self.strong = np.nonzero(~within_limit(flat, -1))
        self.any_weak = self.strong is None or len(self.strong[0]) < flat[..., 0].size
        self.decay = np.exp(b, out=b) if self.any_weak else None

    def drop_overflown(self, *results):
        """Has chunks count as strong where one of the factored `results` [..., D] is not finite."""
        overflown = np.isnan(sum(np.vecdot(x, zeros(x.shape[-1], x.dtype)) for x in results))   # 0 * inf
        if overflown.any():
            if self.strong is not None:
                overflown[self.strong] = True
            self.strong = np.nonzero(overflown)


def zeros(size, dtype):
    return kept(np.zeros, size, dtype=dtype)


def triangle(size, dtype, k=0):
    """Ones on and below diagonal k."""
    return kept(np.tri, size, k=k, dtype=dtype)


def kept(make, size, **options):
    """`make(size, **options)`, which a short segment would spend as long on as on a product."""
    key = make, size, *options.values()
    found = CONSTANTS.get(key)
    if found is None:
        found = make(size, **options)
        if found.nbytes <= CONSTANTS.most:
            found = CONSTANTS.keep(key, found, found.nbytes)
    return found


def within_limit(b, axis):
    return (b.max(axis, initial=0) <= LIMIT) & (b.min(axis, initial=0) >= -LIMIT)


def blas_ready(x):
    """x itself where matmul can hand it to BLAS, else a copy."""
    return x if x.strides[-1] == x.itemsize and x.strides[-2] >= x.shape[-1] * x.itemsize else np.ascontiguousarray(x)


def mask_future(A, exclusive):
    """Zeroes A above the diagonal, and on it when exclusive, whatever stands there: bits, not products."""
    bits = np.dtype(f"i{A.itemsize}")
    keep = -triangle(A.shape[-2], bits, -1 if exclusive else 0)
    np.bitwise_and(A.view(bits), keep, out=A.view(bits))


def gated_scores(q, k, gates, exclusive, decay, scratch):
    """(qg, kg [..., C, K], A [..., C, C]); fills the chunk's whole decay [..., K or 1]."""
    qg, kg, A = scratch("qg", q.shape), scratch("kg", k.shape), scratch("A", (*q.shape[:-1], q.shape[-2]))
    if gates.any_weak:
        factored(q, k, gates, exclusive, qg, kg, A, decay)
    if gates.strong is not None:
        at = gates.strong
        qg[at], kg[at], A[at], decay[at] = stepwise(q[at], k[at], gates.g[at], exclusive)
    return qg, kg, A


def factored(q, k, gates, exclusive, qg, kg, A, decay):
    """Right for weak gates."""
    E = gates.decay
    decay_query(q, E, exclusive, out=qg)
    np.divide(k, E, out=kg)
    factored_product(qg, kg, gates, exclusive, A)
    decay[...] = E[..., -1, :]
    kg *= E[..., -1:, :]


def factored_product(qg, kg, gates, exclusive, A):
    np.matmul(qg, kg.swapaxes(-1, -2), out=A)
    gates.drop_overflown(A[..., -1, :], A[..., 0])  # the last query met all keys, the first key all queries
    mask_future(A, exclusive)


def decay_query(q, E, exclusive, out=None):
    """q_i exp(d_i) from E = exp(b): d = b, or b of the token before."""
    if not exclusive:
        return np.multiply(q, E, out=out)
    out = np.empty(q.shape, q.dtype) if out is None else out
    np.multiply(q[..., 1:, :], E[..., :-1, :], out=out[..., 1:, :])
    out[..., :1, :] = q[..., :1, :]
    return out


def stepwise(q, k, g, exclusive):
    """Any gates, m chunks: qg, kg [m, C, K], A [m, C, C], decay [m, K or 1]."""
    m, C, K = q.shape
    S = C // SUB_CHUNK
    b, e = prefix_suffix_sums(subchunks(g))
    decays = np.exp(b)
    E = decays[:, :, -1:]                       # [m, S, 1, K] of a whole sub-chunk
    qs, ks = decay_query(subchunks(q), decays, exclusive), subchunks(k) * np.exp(e)
    A = np.zeros((m, S, SUB_CHUNK, S, SUB_CHUNK), q.dtype)
    diagonal = diagonal_blocks(*map(subchunks, (q, k, g)), exclusive)
    decay = np.ones_like(E[:, 0])
    for i in range(S):                          # ks: keys decayed to the end of sub-chunk i - 1
        scores = qs[:, i] @ ks[:, :i].reshape(m, -1, K).swapaxes(1, 2)
        A[:, i, :, :i] = scores.reshape(m, SUB_CHUNK, i, SUB_CHUNK)
        A[:, i, :, i] = diagonal[:, i]
        qs[:, i] *= decay
        ks[:, :i] *= E[:, i:i + 1]
        decay *= E[:, i]
    return qs.reshape(q.shape), ks.reshape(q.shape), A.reshape(m, C, C), decay[:, 0]


def subchunks(x):
    return x.reshape(x.shape[0], -1, SUB_CHUNK, x.shape[-1])


def prefix_suffix_sums(g):
    """b_i = g_1 + ... + g_i and e_j = g_{j+1} + ... + g_C along axis -2: sums only, so -inf stays exact."""
    b, e = np.array(g, order="C"), np.zeros(g.shape, g.dtype)
    for i in range(1, g.shape[-2]):
        b[..., i, :] += b[..., i - 1, :]
        np.add(e[..., -i, :], g[..., -i, :], out=e[..., -i - 1, :])
    return b, e


def diagonal_blocks(q, k, g, exclusive):
    """A within sub-chunks [m, S, 16, 16]."""
    gates = Gates(g, Scratch(g.dtype))
    A = np.empty((*q.shape[:-1], q.shape[-2]), q.dtype)
    if gates.any_weak:
        factored_product(decay_query(q, gates.decay, exclusive), k / gates.decay, gates, exclusive, A)
    if gates.strong is not None:
        at = gates.strong
        A[at] = running_product(q[at], k[at], np.exp(g[at]), exclusive)
    return A


def running_product(q, k, decay, exclusive):
    """A [m, 16, 16] one diagonal at a time: w_j = k_j exp(g_{j+1}) ... exp(g_{j+offset})."""
    m, C, _ = q.shape
    A, w = np.zeros((m, C * C), q.dtype), k
    if not exclusive:
        A[:, ::C + 1] = np.vecdot(q, k)
    for offset in range(1, C):
        w = w[:, :C - offset]
        decayed = w * decay[:, offset:]
        A[:, offset * C::C + 1] = np.vecdot(q[:, offset:], w if exclusive else decayed)
        w = decayed
    return A.reshape(m, C, C)


# -- backward ---------------------------------------------------------------------------------------------------------

def gated_scores_vjp(q, k, gates, dA, exclusive):
    """Gradients of q and k [..., C, K] in A; dA [..., C, C] is 0 on and above the diagonal."""
    dq, dk = np.empty(q.shape, q.dtype), np.empty(k.shape, k.dtype)
    if gates.any_weak:
        factored_vjp(q, k, gates, dA, exclusive, dq, dk)
    if gates.strong is not None:
        at = gates.strong
        dq[at], dk[at] = stepwise_vjp(q[at], k[at], gates.g[at], dA[at], exclusive)
    return dq, dk


def factored_vjp(q, k, gates, dA, exclusive, dq, dk):
    E = gates.decay
    decay_query(dA @ (k / E), E, exclusive, out=dq)
    np.matmul(dA.swapaxes(-1, -2), decay_query(q, E, exclusive), out=dk)
    dk /= E
    gates.drop_overflown(*(x.reshape(*x.shape[:-2], -1) for x in (dq, dk)))


def stepwise_vjp(q, k, g, dA, exclusive):
    m, C, K = q.shape
    S = C // SUB_CHUNK
    b, e = prefix_suffix_sums(subchunks(g))
    decays, to_end = np.exp(b), np.exp(e)
    E = decays[:, :, -1:]
    qs, ks = decay_query(subchunks(q), decays, exclusive), subchunks(k) * to_end
    dA = dA.reshape(m, S, SUB_CHUNK, C)
    dqs, dks = np.zeros_like(qs), np.zeros_like(ks)
    for i in range(1, S):
        dqs[:, i] = dA[:, i, :, :i * SUB_CHUNK] @ ks[:, :i].reshape(m, -1, K)
        ks[:, :i] *= E[:, i:i + 1]
    for i in reversed(range(1, S)):             # and back: dks stands where ks stood in step i
        dks[:, :i] *= E[:, i:i + 1]
        scores = dA[:, i, :, :i * SUB_CHUNK].swapaxes(1, 2) @ qs[:, i]
        dks[:, :i] += scores.reshape(m, i, SUB_CHUNK, K)
    own = np.stack([dA[:, i, :, i * SUB_CHUNK:(i + 1) * SUB_CHUNK] for i in range(S)], axis=1)
    dq, dk = diagonal_blocks_vjp(*map(subchunks, (q, k, g)), own, exclusive)
    dq += decay_query(dqs, decays, exclusive)
    dk += dks * to_end
    return dq.reshape(q.shape), dk.reshape(k.shape)


def diagonal_blocks_vjp(q, k, g, dA, exclusive):
    gates = Gates(g, Scratch(g.dtype))
    dq, dk = np.empty(q.shape, q.dtype), np.empty(k.shape, k.dtype)
    if gates.any_weak:
        factored_vjp(q, k, gates, dA, exclusive, dq, dk)
    if gates.strong is not None:
        at = gates.strong
        dq[at], dk[at] = running_product_vjp(q[at], k[at], np.exp(g[at]), dA[at], exclusive)
    return dq, dk


def running_product_vjp(q, k, decay, dA, exclusive):
    m, C, _ = q.shape
    dA = dA.reshape(m, C * C)
    dq, dk = np.zeros_like(q), np.zeros_like(k)
    w = np.ones_like(decay)
    for offset in range(1, C):
        w = w[:, :C - offset]
        decayed = w * decay[:, offset:]
        d = dA[:, offset * C::C + 1, None] * (w if exclusive else decayed)
        dq[:, offset:] += d * k[:, :C - offset]
        dk[:, :C - offset] += d * q[:, offset:]
        w = decayed
    return dq, dk


def chunk_decays(gates, exclusive):
    """exp(d_i) and exp(e_j) over the chunk [..., C, K or 1]: what takes q to its start and k to its end."""
    ones = np.ones_like(gates.g)
    query, key = np.empty_like(ones), np.empty_like(ones)
    if gates.any_weak:
        decay_query(ones, gates.decay, exclusive, out=query)
        np.divide(gates.decay[..., -1:, :], gates.decay, out=key)
    if gates.strong is not None:
        at = gates.strong
        b, e = prefix_suffix_sums(gates.g[at])
        query[at], key[at] = decay_query(ones[at], np.exp(b), exclusive), np.exp(e)
    return query, key
