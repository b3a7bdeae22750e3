"""What the chunked forms compute: one recurrence that all gated operators reduce to.

    S_t = diag(exp g_t) S_{t-1} + k_t v_t^T
    o_t = scale q_t^T S_t                                   or, reading before the write (RWKV-6),
    o_t = scale q_t^T (S_{t-1} + diag(u) k_t v_t^T)

with g [B, H, T, K], or [B, H, T, 1] for a gate that all channels share.
"""

import numpy as np


class Member:
    """A problem's arrays as the family's, and the way back. Operators with more to do override the methods.

    scale : by default the problem's
    constant_gate : whether all tokens of a head have one gate, which has no gradient
    """

    def __init__(self, problem, q, k, v, g, u=None, *, scale=None, constant_gate=False):
        self.problem, self.constant_gate = problem, constant_gate
        self.q, self.k, self.v, self.g, self.u = q, k, v, g, u
        self.scale = problem.scale if scale is None else scale
        self.exclusive = problem.op.reads_before_write  # o_t sees S_{t-1}

    def bonus(self, rows):
        """u [H, 1, 1, K] for a block of rows, or None."""
        return None if self.u is None else self.u[rows[1], None, None].astype(self.problem.compute_dtype)

    def initial_state(self):
        """A fresh [N, H, K, V]."""
        return self.state(self.problem.initial_state)

    def state(self, parts):
        """The operator's state, or its gradient, as the family's: a fresh [N, H, K, V], zeros for None."""
        problem = self.problem
        if parts is None:
            shape = (problem.sizes["N"], *self.k.shape[1:2], self.k.shape[-1], self.v.shape[-1])
            return np.zeros(shape, problem.compute_dtype)
        return self.joined(tuple(part.astype(problem.compute_dtype) for part in parts))

    def joined(self, parts):
        """State parts of the operator as the family's one [N, H, K, V]."""
        return parts[0]

    def split(self, state):
        """The family's state as the operator's parts; the opposite of `joined`."""
        return (state,)

    def state_vjp(self, dparts):
        """The gradient of the family's final state, from those of the operator's parts."""
        return self.state(dparts)

    def initial_vjp(self, dstate):
        """The gradients of the operator's initial state, from the family's."""
        return self.split(dstate)

    def buffer(self, o):
        """The array for the family's o: the operator's o, if both are the same."""
        return o

    def output(self, o, family):
        """Fills the operator's o from the family's, if these are not the same."""

    def output_vjp(self, do):
        """The gradient of the family's o, from that of the operator's."""
        return do

    def gradients(self, dq, dk, dv, dg, du):
        """The family's gradients as those of the operator's arrays, in the order of the call."""
        return [dq, dk, dv, dg] if self.u is None else [dq, dk, dv, dg, du]
