"""Operators that backends compute by calling another operator: the inner call.

`dispatch` and `autodiff` convert a checked call to its inner call, and the inner call's gradients to the call's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from .graph_capture import refuse_lost_memory
from .problem import Problem


@dataclass(frozen=True)
class KeyFromGate:
    """An operator of a query q, a log gate g and a value v, in this order: it is GLA with k = key(g).

    `inner` is GLA's declaration; `key` and its derivative `slope` are functions of NumPy and CuPy arrays.
    """

    inner: Any
    key: Callable[[Any], Any]
    slope: Callable[[Any], Any]
    copies = "k: computed from the gate"

    def arrays(self, problem: Problem, k) -> Problem:
        """GLA's problem with this k."""
        q, g, v = problem.arrays.values()
        return problem.replace(op=self.inner, arrays=dict(zip(self.inner.arrays, (q, k, v, g), strict=True)))

    def inner_call(self, problem: Problem) -> Problem:
        """GLA's problem. k is computed in float32 or float64 and rounded to the dtype of q."""
        _, g, _ = problem.arrays.values()
        refuse_lost_memory(problem, "g", "the key that is made of it is")
        with computing(problem):
            k = self.key(g.astype(problem.compute_dtype, copy=False)).astype(problem.dtype, copy=False)
            return self.arrays(problem, k)

    def blank_inner_call(self, problem: Problem) -> Problem:
        """GLA's problem for planning: k has the right shape, dtype and strides, but no meaningful values."""
        _, g, _ = problem.arrays.values()
        with computing(problem):
            return self.arrays(problem, g if g.dtype == problem.dtype else np.empty_like(g, dtype=problem.dtype))

    def gradients(self, problem: Problem, found) -> list:
        """The gradients of q, g and v from GLA's: dg + slope(g) dk, in the memory of GLA's dg."""
        dq, dk, dv, dg = found
        _, g, _ = problem.arrays.values()
        refuse_lost_memory(problem, "g", "its gradient through the key is")
        compute_dtype = problem.compute_dtype
        with computing(problem):
            through_k = self.slope(g.astype(compute_dtype, copy=False)) * dk.astype(compute_dtype, copy=False)
            dg[...] = (dg.astype(compute_dtype, copy=False) + through_k).astype(dg.dtype, copy=False)
        return [dq, dg, dv]


@dataclass(frozen=True)
class KeysOfEveryHead:
    """An operator whose q and k have HK heads, each shared by H // HK heads of v.

    The inner call is `inner`'s with q and k copied to all H heads.
    """

    inner: Any
    copies = "q, k: one for every head of v"

    def inner_call(self, problem: Problem) -> Problem:
        refuse_lost_memory(problem, "q", "the copies of q and k for every head are")
        inner = self.blank_inner_call(problem)
        with computing(problem):
            for name in self.inner.shared:
                x = problem[name]
                in_groups(inner[name], x)[...] = x[:, :, None]
        return inner

    def blank_inner_call(self, problem: Problem) -> Problem:
        """The inner call for planning: q and k have the right shapes and dtypes, but no meaningful values."""
        H, shared = problem.sizes["H"], {name: problem[name] for name in self.inner.shared}
        with computing(problem):
            spread = {name: np.empty_like(x, shape=(len(x), H, *x.shape[2:])) for name, x in shared.items()}
        return problem.replace(op=self.inner, arrays=problem.arrays | spread, sizes=problem.sizes | {"HK": H})

    def gradients(self, problem: Problem, found) -> list:
        """The call's gradients from the inner call's: those of q and k are summed over the heads that share them."""
        refuse_lost_memory(problem, "q", "the sums of its gradients over heads are")
        compute_dtype, results = problem.compute_dtype, []
        with computing(problem):
            for (name, x), dx in zip(problem.arrays.items(), found, strict=True):
                if name in self.inner.shared:
                    dx = in_groups(dx, x).astype(compute_dtype, copy=False).sum(2).astype(x.dtype, copy=False)
                results.append(dx)
        return results


def in_groups(spread, x):
    """A view of `spread` [B, H, ...] as [B, HK, H // HK, ...]; HK is the number of heads of `x` [B, HK, ...]."""
    return spread.reshape(*x.shape[:2], spread.shape[1] // max(x.shape[1], 1), *x.shape[2:])


@contextmanager
def computing(problem: Problem):
    """Makes the arrays' device the current one and silences floating-point warnings."""
    on_host = problem.home == "host"
    device = nullcontext() if on_host else sys.modules["cupy"].cuda.Device(int(problem.home.split(":")[1]))
    with device, np.errstate(all="ignore"):
        yield


def inner_call(problem: Problem) -> Problem:
    """The problem that a backend computes: the inner call of a derived operator, else `problem` itself."""
    return problem if problem.op.derived is None else problem.op.derived.inner_call(problem)


def blank_inner_call(problem: Problem) -> Problem:
    """The problem that a backend plans: as `inner_call`, but without computing the arrays that are derived."""
    return problem if problem.op.derived is None else problem.op.derived.blank_inner_call(problem)
