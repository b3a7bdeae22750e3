"""Retention (Sun et al., 2023, eq. 6).

The arrays of a token are q, k [N, H, K] and v [N, H, V], of N sequences; `state` is a tuple of one S [N, H, K, V];
dstate, such a tuple, and do are the gradients of the state after the token and of o. From `recurrent`: outer(k, v) =
k v^T; read(q, S) = S^T q; `write_and_read_vjp` is the pullback of S = D + k v^T, with D the decayed state, and of
o = scale q^T S to D, q, k and v.
"""

import numpy as np

from .family import Member
from .recurrent import outer, read, write_and_read_vjp


def decay(problem):
    """gamma [H, 1, 1]."""
    return np.exp(problem.options["log_decay"]).astype(problem.compute_dtype)[:, None, None]


def step(problem, state, q, k, v):
    """S_t = gamma S_{t-1} + k_t v_t^T,     o_t = scale q_t^T S_t."""
    (S,) = state
    S = decay(problem) * S + outer(k, v)
    return (S,), problem.scale * read(q, S)


def step_vjp(problem, state, q, k, v, dstate, do):
    """The gradients of `step`: (those of the state before it, that of each array)."""
    (S,) = state
    dS, dq, dk, dv = write_and_read_vjp(problem, decay(problem) * S, q, k, v, dstate, do)
    return (decay(problem) * dS,), dq, dk, dv


class Retention(Member):
    """Retention as one of the gated family (`Member`): the gate is log gamma at every token, one channel wide. It is an
    option of the call, which has no gradient."""

    def __init__(self, problem):
        g = problem.options["log_decay"].astype(problem.compute_dtype)[:, None, None]
        super().__init__(
            problem,
            problem["q"],
            problem["k"],
            problem["v"],
            np.broadcast_to(g, (*problem.shape("B H T"), 1)),
            constant_gate=True,
        )

    def gradients(self, dq, dk, dv, dg, du):
        """Those of the operator's arrays, in their order: the gate and u are none of them."""
        return [dq, dk, dv]


member = Retention  # the name by which modules of the family give their class
