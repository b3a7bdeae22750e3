"""Computes token by token the rows, pairs of batch entry and head, for which matrix products give wrong results.

Products are wrong in three cases. A decay below the dtype's range becomes 0, although it multiplies large numbers: see
`underflows`. A value that is not finite reaches tokens before it, since a product multiplies it by their weight 0, and
0 times NaN is NaN. Two factors overflow although their product would not. In the last two cases some result of the
row is not finite, so that other rows only pay for that check. Token by token a row has a NaN or inf only where the
recurrence itself has one.
"""

from types import SimpleNamespace

import numpy as np

from . import gla, rwkv6


def is_finite(*arrays):
    """Whether all numbers of the arrays are finite, by their sums: False also if a sum of finite numbers overflows."""
    return all(np.isfinite(x.sum()) for x in arrays)


ROOM = 24 * np.log(2)  # decays below the range may become 0 if they multiply numbers up to exp(ROOM) = 2^24


def log_largest(*arrays):
    """The logarithm of the product of the arrays' largest magnitudes, each at least 1."""
    return sum(np.log(np.maximum(1, np.maximum(x.max(), -x.min()))) for x in arrays if x.size)


def underflows(g, log_size):
    """Which chunks [...] of log gates [..., C, K] products would compute wrongly: in some channel the decays multiply
    to less than the dtype's smallest normal number, and they may multiply numbers above exp(ROOM): the product of the
    chunk's growing gates and exp(log_size)."""
    decay, growth = np.minimum(g, 0).sum(-2), np.maximum(g, 0).sum(-2)
    return ((decay < np.log(np.finfo(g.dtype).tiny)) & (growth + log_size > ROOM)).any(-1)


def recurrence(u, scale, exclusive):
    """(the operator's file with the equation, its arguments `problem` and, in a tuple, u) for the bonus u [H, K] or
    None; `exclusive`: whether o_t reads S_{t-1}. Of a problem these equations read no more than what is here."""
    problem = SimpleNamespace(scale=scale, gradient=True)  # gradient: no step overwrites the state before it
    return (rwkv6, problem, (0 if u is None else u,)) if exclusive else (gla, problem, ())


def forward(q, k, v, g, u, scale, exclusive, S):
    """(o [B, H, C, V], the state after the chunk) of one chunk; u [H, K] or None."""
    o, (equation, problem, bonus) = np.empty(v.shape, v.dtype), recurrence(u, scale, exclusive)
    for t in range(q.shape[2]):
        (S,), o[:, :, t] = equation.step(problem, (S,), *(x[:, :, t] for x in (q, k, v, g)), *bonus)
    return o, S


def backward(q, k, v, g, do, u, scale, exclusive, S, dS):
    """(the gradient of the state before the chunk, du [B, H, K] or None, dq, dk, dv, dg) of one chunk; dS is the
    gradient of the state after the chunk."""
    equation, problem, bonus = recurrence(u, scale, exclusive)
    inputs = [x[None] for x in (q, k, v, g)]  # `step_vjp` sums du over the first axis
    state, dstate, before = (S[None],), (dS[None],), []
    for t in range(q.shape[2]):
        before.append(state)
        state, _ = equation.step(problem, state, *(x[..., t, :] for x in inputs), *bonus)
    gradients, du = [np.empty_like(x) for x in inputs], 0
    for t in reversed(range(q.shape[2])):
        token = *(x[..., t, :] for x in inputs), *bonus
        dstate, *dtoken, dg = equation.step_vjp(problem, before[t], *token, dstate, do[None, :, :, t])
        if exclusive:
            du, (*dtoken, dg) = du + dg, dtoken
        dtoken.append(dg if g.shape[-1] > 1 else dg.sum(-1, keepdims=True))
        for gradient, part in zip(gradients, dtoken, strict=True):
            gradient[..., t, :] = part
    return dstate[0][0], None if u is None else du, *(x[0] for x in gradients)


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
