"""Gated linear attention with one gate a head (Dao and Gu, 2024, eq. 6).

The arrays of a token are q, k [N, H, K], v [N, H, V] and g [N, H]; `state` is a tuple of one S [N, H, K, V]; dstate and
do are gradients. From `recurrent`: outer(k, v) = k v^T; read(q, S) = S^T q; write(problem, S, g, k, v) = exp(g) S + k
v^T, where exp(g) gets the axes that g lacks, in the memory of S unless a gradient needs S; `read_vjp` is the pullback
of `read` to q, `write_vjp` that of a sum with k v^T.
"""

import numpy as np

from .family import Member
from .recurrent import outer, read, read_vjp, write, write_vjp


def step(problem, state, q, k, v, g):
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T,      o_t = scale q_t^T S_t."""
    (S,) = state
    S = write(problem, S, g, k, v)
    return (S,), problem.scale * read(q, S)


def step_vjp(problem, state, q, k, v, g, dstate, do):
    """The gradients of `step`: (those of the state before it, that of each array)."""
    (S,), (dS,), decay = state, dstate, np.exp(g)[..., None, None]
    do = problem.scale * do
    dq = read_vjp(decay * S + outer(k, v), do)
    dS = dS + outer(q, do)
    dk, dv = write_vjp(k, v, dS)
    dg = (decay * S * dS).sum((-2, -1))
    return (decay * dS,), dq, dk, dv, dg


class SimpleGLA(Member):
    """`simple_gla` as one of the gated family (`Member`): the gate is one channel wide and broadcasts over K."""

    def __init__(self, problem):
        super().__init__(problem, problem["q"], problem["k"], problem["v"], problem["g"][..., None])

    def gradients(self, dq, dk, dv, dg, du):
        """dg is one channel wide, as the gate; du is None, since there is no u."""
        return [dq, dk, dv, dg[..., 0]]


member = SimpleGLA
