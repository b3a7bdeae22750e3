"""Derived operators: those that backends compute by calling another operator, with arrays that are made for it.

The call of that other operator is the inner call. `dispatch` turns a checked call into its inner call; `autodiff` turns
the gradients of the inner call into those of the call. Every class of derived operators has `copy_note`, `inner_call`,
`inner_call_layout` and `gradients`.

The arrays that are made take new memory, which CuPy would lose in a captured CUDA graph: `refuse_lost_memory` then
raises NotSupported. Its last argument is the subject and verb of the message.
"""

import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .graph_capture import refuse_lost_memory
from .problem import Problem
from .value_heads import in_words


@dataclass(frozen=True)
class KeyFromGate:
    """An operator of a query q, a log gate g and a value v, in this order: it is GLA with k = key(g).

    `inner` is GLA's declaration; `key` and its derivative `slope` are functions of NumPy and CuPy arrays.
    """

    inner: Any
    key: Callable[[Any], Any]
    slope: Callable[[Any], Any]
    copy_note = "k: computed from the gate"  # what `explain` lists among the copies of a call

    def with_key(self, problem: Problem, k) -> Problem:
        """GLA's problem with this k."""
        q, g, v = problem.arrays.values()
        return problem.replace(op=self.inner, arrays=dict(zip(self.inner.arrays, (q, k, v, g), strict=True)))

    def inner_call(self, problem: Problem) -> Problem:
        """GLA's problem. k is computed in float32 or float64 and rounded to the dtype of q."""
        _, g, _ = problem.arrays.values()
        refuse_lost_memory(problem, "g", "the key that is made of it is")
        with on_device_of(problem):
            in_compute_dtype = g.astype(problem.compute_dtype, order_of_axes(g), copy=False)
            return self.with_key(problem, self.key(in_compute_dtype).astype(problem.dtype, copy=False))

    def inner_call_layout(self, problem: Problem) -> Problem:
        """GLA's problem with a k of the shape, dtype and strides that `inner_call` gives it, but without its values.

        Functions of NumPy keep the order of g's axes in memory; those of CuPy give C order. tests/test_hgrn2.py
        compares the strides with `inner_call`'s.
        """
        _, g, _ = problem.arrays.values()
        with on_device_of(problem):
            order: Literal["K", "C"] = order_of_axes(g) if problem.home == "host" else "C"
            return self.with_key(problem, np.empty_like(g, dtype=problem.dtype, order=order))

    def gradients(self, problem: Problem, inner_gradients) -> list:
        """The gradients of q, g and v from GLA's: dg + slope(g) dk, in the memory of GLA's dg."""
        dq, dk, dv, dg = inner_gradients
        _, g, _ = problem.arrays.values()
        refuse_lost_memory(problem, "g", "its gradient through the key is")
        compute_dtype = problem.compute_dtype
        with on_device_of(problem):
            through_k = self.slope(g.astype(compute_dtype, copy=False)) * dk.astype(compute_dtype, copy=False)
            dg[...] = (dg.astype(compute_dtype, copy=False) + through_k).astype(dg.dtype, copy=False)
        return [dq, dg, dv]


@dataclass(frozen=True)
class RepeatedKeyHeads:
    """An operator whose q and k have HK heads, v has H: each head of q and k serves H // HK heads of v.

    The inner call is that of `inner`, the operator's declaration, with every head of q and k repeated H // HK times.
    inner.shared has the names of these arrays.
    """

    inner: Any
    copy_note = "q, k: one for every head of v"

    def inner_call(self, problem: Problem) -> Problem:
        """The inner call, whose q and k are copies of the call's."""
        refuse_lost_memory(problem, "q", "the copies of q and k for every head are")
        inner = self.inner_call_layout(problem)
        with on_device_of(problem):
            for name in self.inner.shared:
                repeated, x = in_words(inner[name], problem[name])
                in_groups(repeated, x)[...] = x[:, :, None]
        return inner

    def inner_call_layout(self, problem: Problem) -> Problem:
        """The inner call with a q and a k of their final shapes, dtypes and strides, but without values."""
        H, shared = problem.sizes["H"], {name: problem[name] for name in self.inner.shared}
        with on_device_of(problem):
            repeated = {name: np.empty_like(x, shape=(len(x), H, *x.shape[2:])) for name, x in shared.items()}
        return problem.replace(op=self.inner, arrays=problem.arrays | repeated, sizes=problem.sizes | {"HK": H})

    def gradients(self, problem: Problem, inner_gradients) -> list:
        """The gradients of the call: those of q and k are summed over the H // HK copies of each head."""
        refuse_lost_memory(problem, "q", "the sums of its gradients over heads are")
        compute_dtype, results = problem.compute_dtype, []
        with on_device_of(problem):
            for (name, x), dx in zip(problem.arrays.items(), inner_gradients, strict=True):
                if name in self.inner.shared:
                    dx = in_groups(dx, x).astype(compute_dtype, copy=False).sum(2).astype(x.dtype, copy=False)
                results.append(dx)
        return results


def order_of_axes(g) -> Literal["K", "C"]:
    """The argument `order` for an array that is made of g: g's order ("K"), or "C" if a stride of 0 leaves it open."""
    return "C" if 0 in g.strides else "K"


def in_groups(repeated, x):
    """`repeated` [B, H, ...] as [B, HK, H // HK, ...], where x has HK heads. It is a view, as one axis is split."""
    return repeated.reshape(*x.shape[:2], repeated.shape[1] // max(x.shape[1], 1), *x.shape[2:])


@contextmanager
def on_device_of(problem: Problem):
    """A context in which the problem's device is the current one and floating-point warnings are off.

    problem.home is "host", or the device: "cuda:0".
    """
    on_host = problem.home == "host"
    device = nullcontext() if on_host else sys.modules["cupy"].cuda.Device(int(problem.home.split(":")[1]))
    with device, np.errstate(all="ignore"):
        yield


def computes(backend, problem: Problem) -> bool:
    """Whether a backend, a module, computes the operator itself: those that are derived are in its OWN."""
    return problem.op.derived is None or problem.op in getattr(backend, "OWN", ())


def inner_call(problem: Problem, backend=None) -> Problem:
    """The problem that a backend computes: `problem` itself, or the inner call of an operator that is derived there."""
    return problem if computes(backend, problem) else problem.op.derived.inner_call(problem)


def inner_call_layout(problem: Problem, backend=None) -> Problem:
    """The problem that a backend plans: as `inner_call`, but without the values of the arrays that are made for it."""
    return problem if computes(backend, problem) else problem.op.derived.inner_call_layout(problem)


def gradients_of_call(problem: Problem, inner_gradients, backend=None):
    """The gradients of a call from those of its `inner_call`."""
    return inner_gradients if computes(backend, problem) else problem.op.derived.gradients(problem, inner_gradients)
