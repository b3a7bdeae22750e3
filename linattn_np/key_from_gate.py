"""Operators that are GLA with a key which is a function of the gate.

Backends compute GLA. `dispatch` and `autodiff` convert a checked call to GLA's, and GLA's gradients to the operator's.
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
    """An operator of a query, a gate g and a value, in this order: GLA with k = key(g).

    `family` is GLA's declaration; `key` and its derivative `slope` are functions of NumPy and CuPy arrays.
    """

    family: Any
    key: Callable[[Any], Any]
    slope: Callable[[Any], Any]

    def arrays(self, problem: Problem, k) -> Problem:
        """GLA's problem with this k."""
        q, g, v = problem.arrays.values()
        return problem.replace(op=self.family, arrays=dict(zip(self.family.arrays, (q, k, v, g), strict=True)))

    def with_key(self, problem: Problem) -> Problem:
        """GLA's problem. k is computed in single precision at least and has the dtype of q."""
        _, g, _ = problem.arrays.values()
        refuse_lost_memory(problem, "g", "the key that is made of it is")
        with computing(problem):
            k = self.key(g.astype(problem.compute_dtype, copy=False)).astype(problem.dtype, copy=False)
            return self.arrays(problem, k)

    def with_blank_key(self, problem: Problem) -> Problem:
        """GLA's problem with a k that nobody may read: of its shape, dtype and strides."""
        _, g, _ = problem.arrays.values()
        with computing(problem):
            return self.arrays(problem, g if g.dtype == problem.dtype else np.empty_like(g, dtype=problem.dtype))

    def gradients(self, problem: Problem, found) -> list:
        """The gradients of q, g and v from GLA's: dg + slope(g) dk, in the memory of GLA's dg."""
        dq, dk, dv, dg = found
        _, g, _ = problem.arrays.values()
        refuse_lost_memory(problem, "g", "its gradient through the key is")
        wide = problem.compute_dtype
        with computing(problem):
            through_k = self.slope(g.astype(wide, copy=False)) * dk.astype(wide, copy=False)
            dg[...] = (dg.astype(wide, copy=False) + through_k).astype(dg.dtype, copy=False)
        return [dq, dg, dv]


@contextmanager
def computing(problem: Problem):
    """Makes the arrays' device the current one and silences floating-point warnings."""
    on_host = problem.home == "host"
    device = nullcontext() if on_host else sys.modules["cupy"].cuda.Device(int(problem.home.split(":")[1]))
    with device, np.errstate(all="ignore"):
        yield


def with_key(problem: Problem) -> Problem:
    """The problem that a backend computes."""
    return problem if problem.op.derived is None else problem.op.derived.with_key(problem)


def with_blank_key(problem: Problem) -> Problem:
    """The problem that a backend is asked about: whether it can compute it, and how."""
    return problem if problem.op.derived is None else problem.op.derived.with_blank_key(problem)
