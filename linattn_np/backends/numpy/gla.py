"""Gated linear attention (Yang et al., 2024, eq. 3).

The arrays of a token are q, k, g [N, H, K] and v [N, H, V]; `state` is a tuple of one S [N, H, K, V]; dstate and do are
gradients. From `recurrent`: read(q, S) = S^T q; write(problem, S, g, k, v) = exp(g) S + k v^T, in the memory of S
unless a gradient needs S; `write_and_read_vjp` is the pullback of S = D + k v^T, with D the decayed state, and of o =
scale q^T S to D, q, k and v.
"""

import numpy as np

from .family import Member
from .recurrent import read, write, write_and_read_vjp


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
    (S,), decay = state, np.exp(g)[..., None]
    dS, dq, dk, dv = write_and_read_vjp(problem, decay * S, q, k, v, dstate, do)
    return (decay * dS,), dq, dk, dv, (decay * S * dS).sum(-1)


def member(problem):
    """The call as one of the gated family, for the chunked forms."""
    return Member(problem, *problem.arrays.values())
