"""Gated linear attention (Yang et al., 2024, eq. 3).

The arrays of a token are q, k, g [N, H, K] and v [N, H, V]; `state` is a tuple of one S [N, H, K, V]; dstate and do are
gradients. From `recurrent`: outer(k, v) = k v^T; read(q, S) = S^T q; write(problem, S, g, k, v) = exp(g) S + k v^T, in
the memory of S unless a gradient needs S; `read_vjp` is the pullback of `read` to q, `write_vjp` that of a sum with k
v^T.
"""

import numpy as np

from .family import Member
from .recurrent import outer, read, read_vjp, write, write_vjp


def step(problem, state, q, k, v, g):
    """S_t = diag(exp g_t) S_{t-1} + k_t v_t^T,     o_t = scale q_t^T S_t."""
    (S,) = state
    S = write(problem, S, g, k, v)
    return (S,), problem.scale * read(q, S)


def writes(problem, S, q, k, v, g):
    """(decay [B, H, K], [(k, u), ...]) of a token: S_t = diag(decay) S + sum of k u^T."""
    return np.exp(g), [(k, v)]


def step_vjp(problem, state, q, k, v, g, dstate, do):
    """The gradients of `step`: (those of the state before it, that of each array)."""
    (S,), (dS,), decay = state, dstate, np.exp(g)[..., None]
    do = problem.scale * do
    dq = read_vjp(decay * S + outer(k, v), do)
    dS = dS + outer(q, do)
    dk, dv = write_vjp(k, v, dS)
    dg = (decay * S * dS).sum(-1)
    return (decay * dS,), dq, dk, dv, dg


def member(problem):
    """The call as one of the gated family, for the chunked forms."""
    return Member(problem, *problem.arrays.values())
