"""RWKV-6 (Peng et al., 2024, eq. 18-19).

The arrays of a token are r, k, w [N, H, K] and v [N, H, V], and u is [H, K]; `state` is a tuple of one S [N, H, K, V];
dstate and do are gradients. From `recurrent`: outer(k, v) = k v^T; read(q, S) = S^T q; write(problem, S, g, k, v) =
exp(g) S + k v^T, in the memory of S unless a gradient needs S; `read_vjp` is the pullback of `read` to q, `write_vjp`
that of a sum with k v^T.
"""

import numpy as np

from .family import Member
from .recurrent import outer, read, read_vjp, write, write_vjp


def step(problem, state, r, k, v, w, u):
    """o_t = scale r_t^T (S_{t-1} + diag(u) k_t v_t^T),     S_t = diag(exp w_t) S_{t-1} + k_t v_t^T."""
    (S,) = state
    o = problem.scale * (read(r, S) + np.vecdot(r, u * k)[..., None] * v)
    return (write(problem, S, w, k, v),), o


def writes(problem, S, r, k, v, w, u):
    """(decay [B, H, K], [(k, u), ...]) of a token: S_t = diag(decay) S + sum of k u^T."""
    return np.exp(w), [(k, v)]


def step_vjp(problem, state, r, k, v, w, u, dstate, do):
    """The gradients of `step`: (those of the state before it, that of each array)."""
    (S,), (dS,), decay = state, dstate, np.exp(w)[..., None]
    do = problem.scale * do
    dr = read_vjp(S + outer(u * k, v), do)
    dseen = outer(r, do)  # gradient of S_{t-1} + diag(u) k_t v_t^T
    dbonus, dv_bonus = write_vjp(u * k, v, dseen)
    dk, dv = write_vjp(k, v, dS)
    dw = (decay * S * dS).sum(-1)
    du = (k * dbonus).sum(0)
    return (decay * dS + dseen,), dr, dk + u * dbonus, dv + dv_bonus, dw, du


def member(problem):
    """The call as one of the gated family, for the chunked forms."""
    return Member(problem, *problem.arrays.values())
