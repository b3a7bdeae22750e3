"""Rows for which matrix products give wrong results are computed token by token, by `forward` and `backward`.

Products are wrong in three cases. A decay below the dtype's range becomes 0, although it multiplies large numbers: see
`underflows`. A value that is not finite reaches tokens before it, since a product multiplies it by their weight 0, and
0 times NaN is NaN. Two factors overflow although their product would not. In the last two cases some result of the
row is not finite, so that other rows only pay for that check. Token by token a row has a NaN or inf only where the
recurrence itself has one.
"""

import numpy as np


def is_finite(*arrays):
    """Whether all numbers of the arrays are finite, by their sums: False also if a sum of finite numbers overflows."""
    return all(np.isfinite(x.sum()) for x in arrays)


ROOM = 24 * np.log(2)  # decays below the range may become 0 if they multiply numbers up to exp(ROOM) = 2^24


def largest(*arrays):
    """The logarithm of the product of the arrays' largest magnitudes, each at least 1."""
    return sum(np.log(np.maximum(1, np.maximum(x.max(), -x.min()))) for x in arrays if x.size)


def underflows(g, nats):
    """Which chunks [...] of log gates [..., C, K] products would compute wrongly: in some channel the decays multiply
    to less than the dtype's smallest normal number, and they may multiply numbers above exp(ROOM): the product of the
    chunk's growing gates and exp(nats)."""
    decay, growth = np.minimum(g, 0).sum(-2), np.maximum(g, 0).sum(-2)
    return ((decay < np.log(np.finfo(g.dtype).tiny)) & (growth + nats > ROOM)).any(-1)


def step(S, decay, k, v):
    """The state after a token."""
    return decay[..., None] * S + k[..., :, None] * v[..., None, :]


def forward(q, k, v, g, u, scale, exclusive, S):
    """(o [B, H, C, V], the state after the chunk) of one chunk; u [H, K] or None."""
    o, decay = np.empty(v.shape, v.dtype), np.exp(g)
    for t in range(q.shape[2]):
        before, S = S, step(S, decay[:, :, t], k[:, :, t], v[:, :, t])
        o[:, :, t] = (q[:, :, t, None] @ (before if exclusive else S))[..., 0, :]
        if u is not None:
            o[:, :, t] += np.vecdot(q[:, :, t], u * k[:, :, t])[..., None] * v[:, :, t]
    return scale * o, S


def backward(q, k, v, g, do, u, exclusive, S, dS):
    """(the gradient of the state before the chunk, du [B, H, K] or None, dq, dk, dv, dg) of one chunk; `do` is
    multiplied by the scale already, and dS is the gradient of the state after the chunk."""
    decay, before = np.exp(g), []
    for t in range(q.shape[2]):
        before.append(S)
        S = step(S, decay[:, :, t], k[:, :, t], v[:, :, t])
    dq, dk, dv, dg = (np.empty_like(x) for x in (q, k, v, g))
    du = None if u is None else np.zeros_like(q[:, :, 0])
    for t in reversed(range(q.shape[2])):
        dS_of_output = q[:, :, t, :, None] * do[:, :, t, None, :]
        dS = dS if exclusive else dS + dS_of_output
        read = before[t] if exclusive else step(before[t], decay[:, :, t], k[:, :, t], v[:, :, t])
        dq[:, :, t], dk[:, :, t] = ((x @ y[:, :, t, :, None])[..., 0] for x, y in ((read, do), (dS, v)))
        dv[:, :, t] = (k[:, :, t, None] @ dS)[..., 0, :]
        if u is not None:
            own = np.vecdot(v[:, :, t], do[:, :, t])[..., None]
            dq[:, :, t] += u * k[:, :, t] * own
            dk[:, :, t] += u * q[:, :, t] * own
            dv[:, :, t] += np.vecdot(q[:, :, t], u * k[:, :, t])[..., None] * do[:, :, t]
            du += q[:, :, t] * k[:, :, t] * own
        gate_terms = decay[:, :, t, :, None] * before[t] * dS
        dg[:, :, t] = gate_terms.sum((-2, -1))[..., None] if g.shape[-1] == 1 else gate_terms.sum(-1)
        dS = decay[:, :, t, :, None] * dS
        dS = dS + dS_of_output if exclusive else dS
    return dS, du, dq, dk, dv, dg


def product_over(W, x, seen):
    """W @ x for weights W that are 0 where `seen` [i, j] is False; values x_j that are not finite are not multiplied by
    those zeros."""
    out = W @ x
    if is_finite(out):
        return out
    finite = np.isfinite(x).all(-1, keepdims=True)
    out, not_finite = W @ np.where(finite, x, 0), np.where(finite, 0, x)
    for j in np.flatnonzero(~finite.all(tuple(range(x.ndim - 2)))):
        rows = np.flatnonzero(seen[:, j])
        out[..., rows, :] += W[..., rows, j, None] * not_finite[..., j, None, :]
    return out
