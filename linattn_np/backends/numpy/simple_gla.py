"""Gated linear attention with one gate a head (Dao and Gu, 2024, eq. 6).

The arrays of a token are q, k [N, H, K], v [N, H, V] and g [N, H]; `state` is a tuple of one S [N, H, K, V]; dstate and
do are gradients. From `recurrent`: read(q, S) = S^T q; write(problem, S, g, k, v) = exp(g) S + k v^T, where exp(g) gets
the axes that g lacks, in the memory of S unless a gradient needs S; `write_and_read_vjp` is the pullback of S = D + k
v^T, with D the decayed state, and of o = scale q^T S to D, q, k and v.
"""

import numpy as np

from .family import Member
from .recurrent import read, write, write_and_read_vjp


def step(problem, state, q, k, v, g):
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T,      o_t = scale q_t^T S_t."""
    (S,) = state
    S = write(problem, S, g, k, v)
    return (S,), problem.scale * read(q, S)


def step_vjp(problem, state, q, k, v, g, dstate, do):
    """The gradients of `step`: (those of the state before it, that of each array)."""
    (S,), decay = state, np.exp(g)[..., None, None]
    dS, dq, dk, dv = write_and_read_vjp(problem, decay * S, q, k, v, dstate, do)
    return (decay * dS,), dq, dk, dv, (decay * S * dS).sum((-2, -1))


class SimpleGLA(Member):
    """`simple_gla` as one of the gated family (`Member`): the gate is one channel wide and broadcasts over K."""

    def __init__(self, problem):
        super().__init__(problem, problem["q"], problem["k"], problem["v"], problem["g"][..., None])

    def gradients(self, dq, dk, dv, dg, du):
        """dg is one channel wide, as the gate; du is None, since there is no u."""
        return [dq, dk, dv, dg[..., 0]]


member = SimpleGLA
