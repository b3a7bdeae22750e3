"""RWKV-6 (Peng et al., 2024, eq. 18-19)."""

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
