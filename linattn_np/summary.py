"""`Summary`: the map S -> F S + S_own by which a segment of tokens changes the state S [K, V] before it.

F, the transition of the segment, is the product of its tokens' transitions. S_own is the segment's final state if its
initial state is zero. The map of the state's gradient runs backwards in time with the transposed F: dS -> F^T dS +
dS_own.

The arrays may be NumPy's, CuPy's or JAX's. Sizes: N sequences, H heads of keys, HV heads of values (a multiple of H),
K channels, V columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np


class Transition(Enum):
    """The form of a token's transition. A segment's transition, the product of its tokens', has the same form, but for
    RANK_ONE: the product is a full matrix."""

    NONE = "none"  # S_t = S_{t-1} + k_t v_t^T
    SCALAR = "scalar"  # exp(g_t) S_{t-1} + ..., one decay a head
    DIAGONAL = "diagonal"  # diag(exp g_t) S_{t-1} + ..., a decay a channel; with gv also S_{t-1} diag(exp gv_t)
    RANK_ONE = "rank one"  # (diag(exp g_t) + b_t a_t^T) S_{t-1} + ...: a segment's product is a full matrix [K, K]


@dataclass(frozen=True)
class Summary:
    """One segment's map of the state.

    own : (S_own [N, HV, K, V],); for an operator with a normaliser z [N, H, K], which never decays, (S_own, z_own)
    factors : the arrays that make F: () for 1, ([N, H],) for a scalar, ([N, H, K],) or ([N, H, K], [N, HV, V]) for
        decays of channels and of columns, ([N, H, K, K],) for a matrix. N may be 1 if all sequences share them.
    """

    transition: Transition
    own: tuple[Any, ...]
    factors: tuple[Any, ...] = ()

    def apply(self, state) -> tuple[Any, ...]:
        """The parts of the state after the segment, from those before it; None stands for zero."""
        if state is None:
            return self.own
        S, *normaliser = state
        return tuple(part + own for part, own in zip((self.transitioned(S), *normaliser), self.own, strict=True))

    def of_gradient(self, own) -> Summary:
        """The map of the state's gradient; `own`: the initial state's gradient if the final state's is zero."""
        factors = self.factors
        if self.transition is Transition.RANK_ONE:
            factors = tuple(F.swapaxes(-1, -2) for F in factors)
        return Summary(self.transition, own, factors)

    def transitioned(self, S):
        """F S. A factor that growth has made infinite is replaced by 0 if it multiplies zeros alone: inf * 0 is NaN.

        The factor is replaced and not the product, so that JAX's gradients of zeros are right where factors are finite.
        """
        if not self.factors:
            return S
        xp = getattr(S, "__array_namespace__", lambda: np)()
        F, *columns = (for_value_heads(factor, S.shape[1]) for factor in self.factors)
        if self.transition is Transition.RANK_ONE:
            times_zeros = (S == 0).all(-1)[..., None, :]
        else:
            F = F[..., None, None] if self.transition is Transition.SCALAR else F[..., None]
            F, times_zeros = F * columns[0][..., None, :] if columns else F, S == 0
        F = xp.where(times_zeros & ~xp.isfinite(F), F.dtype.type(0), F)
        return F @ S if self.transition is Transition.RANK_ONE else F * S


def for_value_heads(factor, heads: int):
    """`factor` [N, H, ...] as [N, heads, ...]: the value heads of a group share the factor of their head of keys."""
    groups = heads // max(factor.shape[1], 1)
    return factor if groups == 1 else factor.repeat(groups, axis=1)


def factor_shapes(op, N: int, H: int, HV: int, K: int, V: int) -> list[tuple[int, ...]]:
    """The shapes of the factors that the gates of a declared operator make; none where it has no gates."""
    decays = [op.arrays[name].split() for name in op.decays]
    if op.transition is Transition.RANK_ONE:
        return [(N, H, K, K)]
    if op.transition is Transition.DIAGONAL:
        return [(N, HV, V) if axes[-1] == "V" else (N, H, K) for axes in decays]
    return [(N, H) for _ in decays]
