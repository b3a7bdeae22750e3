"""Chunks that products cannot do, token by token: what is not finite, and what leaves the range on the way to a result.

A decay below a dtype's range counts as 0 in a product, although what it meets there may be large: see `underflows`. In
a product a weight of 0 still meets every value, and 0 times NaN is NaN: one value that is not finite would reach
tokens before it. Factors may overflow where their product does not. Either way some result of the chunk is not finite,
which is all that finite data without growth pay to know. The walk below is then the recurrence itself, so a chunk has
no NaN or inf where mode "recurrent" has none.
"""

import numpy as np


def is_finite(*arrays):
    """Cheap, and on the safe side: a sum that overflows counts as well."""
    return all(np.isfinite(x.sum()) for x in arrays)


def finite_rows(*arrays):
    """Which rows [B, H] of arrays [B, H, ...] are finite throughout."""
    return np.logical_and.reduce([np.isfinite(x).all(tuple(range(2, x.ndim))) for x in arrays])


ROOM = 24 * np.log(2)  # nats: decays below the range may count as 0 beside numbers up to 2^24


def largest(*arrays):
    """The product of the arrays' largest magnitudes, none of them below 1, in nats."""
    return sum(np.log(np.maximum(1, np.maximum(x.max(), -x.min()))) for x in arrays if x.size)


def underflows(g, nats):
    """Which chunks [...] of gates [..., C, K] lose in products what the recurrence has.

    In some channel decays come to less than the dtype's smallest normal number, and all growth of the chunk, with what
    `nats` come in beside it, leaves ROOM.
    """
    decayed, grown = np.minimum(g, 0).sum(-2), np.maximum(g, 0).sum(-2)
    return ((decayed < np.log(np.finfo(g.dtype).tiny)) & (grown + nats > ROOM)).any(-1)


def to_redo(results, inputs, states):
    """Rows [B, H] of one chunk for which products did not do; `inputs` are q, k, v, g and what else there is.

    A state that is not finite comes from elsewhere and stays so: what products make of it is right, if the chunk has
    nothing of its own that is not finite, and no growth.
    """
    q, k, v, g, *rest = inputs
    own = finite_rows(q, k, v, *rest) & (g <= 0).all((2, 3))  # NaN is not
    return underflows(g, largest(*states)) | (~finite_rows(*results) & ~(own & ~finite_rows(*states)))


def step(S, decay, k, v):
    return decay[..., None] * S + k[..., :, None] * v[..., None, :]


def forward(q, k, v, g, u, scale, exclusive, S):
    """(o [m, C, V], the state behind) of one chunk for m rows; u [m, K] or None."""
    o, decay = np.empty(v.shape, v.dtype), np.exp(g)
    for t in range(q.shape[1]):
        before, S = S, step(S, decay[:, t], k[:, t], v[:, t])
        o[:, t] = (q[:, t, None] @ (before if exclusive else S))[:, 0]
        if u is not None:
            o[:, t] += np.vecdot(q[:, t], u * k[:, t])[:, None] * v[:, t]
    return scale * o, S


def backward(q, k, v, g, do, u, exclusive, S, dS):
    """(gradient of the state before, du [m, K] or None, dq, dk, dv, dg) of one chunk for m rows; do is scaled."""
    decay, before = np.exp(g), []
    for t in range(q.shape[1]):
        before.append(S)
        S = step(S, decay[:, t], k[:, t], v[:, t])
    dq, dk, dv, dg = (np.empty_like(x) for x in (q, k, v, g))
    du = None if u is None else np.zeros_like(u)
    for t in reversed(range(q.shape[1])):
        read = q[:, t, :, None] * do[:, t, None, :]
        dS = dS if exclusive else dS + read
        seen = before[t] if exclusive else step(before[t], decay[:, t], k[:, t], v[:, t])
        dq[:, t], dk[:, t] = ((x @ y[:, t, :, None])[..., 0] for x, y in ((seen, do), (dS, v)))
        dv[:, t] = (k[:, t, None] @ dS)[:, 0]
        if u is not None:
            own = np.vecdot(v[:, t], do[:, t])[:, None]
            dq[:, t] += u * k[:, t] * own
            dk[:, t] += u * q[:, t] * own
            dv[:, t] += np.vecdot(q[:, t], u * k[:, t])[:, None] * do[:, t]
            du += q[:, t] * k[:, t] * own
        kept = decay[:, t, :, None] * before[t] * dS
        dg[:, t] = kept.sum((-2, -1))[:, None] if g.shape[-1] == 1 else kept.sum(-1)
        dS = decay[:, t, :, None] * dS
        dS = dS + read if exclusive else dS
    return dS, du, dq, dk, dv, dg


def product_over(W, x, seen):
    """W @ x over the pairs that `seen` [..., i, j] allows, where W is 0 elsewhere: those zeros do not meet x."""
    out = W @ x
    if is_finite(out):
        return out
    finite = np.isfinite(x).all(-1, keepdims=True)
    out, rest = W @ np.where(finite, x, 0), np.where(finite, 0, x)
    for j in np.flatnonzero(~finite.all(tuple(range(x.ndim - 2)))):
        rows = np.flatnonzero(seen[:, j])
        out[..., rows, :] += W[..., rows, j, None] * rest[..., j, None, :]
    return out
