"""Gradients without a framework: vector-Jacobian products of every operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .contract import Op
from .conversions import (
    array_to_backend,
    callers_sizes,
    in_callers_library,
    state_to_backend,
    state_to_caller,
    states_to_caller,
    to_caller,
    with_output,
)
from .derived import gradients_of_call, inner_call
from .dispatch import backend_module, choose
from .ops import declaration
from .typing import Array, Backend, Pullback
from .value_heads import grouped_axes


def vjp(
    op: Callable[..., Any], *arrays: Array | None, backend: Backend = "auto", **arguments: Any
) -> tuple[Any, Pullback]:
    """``(result, pullback)`` of an operator: JAX's convention.

    `result` is what ``op(*arrays, **arguments)`` returns. ``pullback(do)``, or ``pullback(do, dht)`` with the gradient
    of the final state, returns the gradients in the order of `arrays`, then that of `initial_state` when one was given
    (a pair, like the state, for the normalised `linear_attention`). Each has the shape and dtype of what it is the
    gradient of; `dht` needs no `output_final_state`.

    Arrays are not copied: the pullback reads them and `initial_state` again when it is called. Written to in between,
    they give the gradients of neither call. A `mask` is copied, so that it may change.

    For GLA-like operators dS is carried backwards through the chunks, and the gate's gradient is
    ``revcumsum(q * dq - k * dk)`` plus ``sum_v S_T * dS_T`` (Yang et al., 2024, section 4.4), so that no state but one
    a chunk is ever kept. On a GPU the sums stay within chunks or begin anew at states that are kept: two for every 64
    tokens, one for every 1024 on Hopper, or none (`explain` with `gradient` gives the bytes). There the pullbacks of
    `kda` and `rwkv7` hold what their calls have prepared for them: up to 2.6 times the bytes of the arrays.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 20, 8))
    >>> g = -np.exp(rng.standard_normal((1, 2, 20, 8)))
    >>> o, pullback = linattn_np.vjp(linattn_np.gla, q, k, v, g)
    >>> dq, dk, dv, dg = pullback(np.ones_like(o))
    >>> bool(np.allclose((dv * v).sum(), o.sum()))         # o is linear in v
    True
    """
    declared, arrays, arguments = declaration(op, "vjp").taken_apart(arrays, arguments)
    return vjp_of(declared, arrays, backend=backend, **arguments)


def vjp_of(op: Op, arrays, *, backend="auto", summaries=(), **arguments):
    """`vjp` of a declared operator; `summaries`: those that `dispatch.summarise` has returned for the same call."""
    problem = bind(op, arrays, arguments)
    module = backend_module(choose(problem, backend))
    (o, final_state), pull = module.vjp(inner_call(with_output(problem), module), *([summaries] if summaries else []))
    result = in_callers_library(problem, to_caller(problem, o, problem.op.out))
    if problem.output_final_state:
        result = (result, states_to_caller(problem, final_state))
    return result, CheckedPullback(problem, pull, module)


def pullback_of(op: Op, arrays, *, backend="auto", **arguments):
    """The pullback of `vjp` without the result: where a backend's backward needs no forward pass, none runs."""
    problem = bind(op, arrays, arguments)
    module = backend_module(choose(problem, backend))
    return CheckedPullback(problem, module.pullback(inner_call(problem, module)), module)


def bind(op: Op, arrays, arguments):
    """The checked call, whose gradient is wanted."""
    op, arrays = op.fitting(arrays)
    if arguments.get("out") is not None:
        op.refuse("out", "cannot be given to vjp")
    return op.bind(arrays, gradient=True, **arguments)


class CheckedPullback:
    """The pullback that `vjp` returns: it checks the caller's arrays, calls the pullback `pull` of a backend, a module,
    and returns arrays of the caller's library."""

    def __init__(self, problem, pull, backend):
        self.problem, self.pull, self.backend = problem, pull, backend

    def __call__(self, do, dht=None):
        return self.gradients(do, dht)

    def gradients(self, do, dht, summaries=()):
        """The gradients. `summaries`: those that `summarise` has returned for the same `do`."""
        problem, op = self.problem, self.problem.op
        do, dht = placed_cotangents(problem, do, dht, callers_sizes(problem))
        dht = dht and tuple(state_to_backend(problem, part, axes) for part, axes in zip(dht, op.state))
        gradients, initial = self.pull(array_to_backend(problem, do, op.out), dht, *([summaries] if summaries else []))
        gradients = gradients_of_call(problem, gradients, self.backend)
        result = tuple(
            in_callers_library(problem, to_caller(problem, gradient, axes))
            for gradient, axes in zip(gradients, op.arrays.values(), strict=True)
        )
        return result if problem.initial_state is None else (*result, states_to_caller(problem, initial))

    def summarise(self, do):
        """(the parts of the initial state's gradient for a dht of zero, the products of the decays as the backend has
        them, summaries); None where that is no cheaper than the whole pullback."""
        problem = self.problem
        if not hasattr(self.pull, "summarise"):
            return None
        do, _ = placed_cotangents(problem, do, None, callers_sizes(problem))
        summary = self.pull.summarise(array_to_backend(problem, do, problem.op.out))
        if summary is None:
            return None
        (dstate, decays), summaries = summary
        dstate = tuple(state_to_caller(problem, part, axes) for part, axes in zip(dstate, problem.op.state))
        return dstate, decays, summaries


def placed_cotangents(problem, do, dht, sizes):
    """(do, the parts of dht or None) as native arrays [B, H, T, ...] of these sizes, on the device of the call."""
    op = problem.op
    view = op.logical("do", op.native("do", do)[0], op.out, problem.layout)
    do = op.placed("do", view, grouped_axes(op.out, problem.groups), sizes, problem.home)
    if dht is None:
        return do, None
    parts = dht if isinstance(dht, tuple) else (dht,)
    if len(parts) != len(op.state):
        op.refuse("dht", f"has {len(parts)} parts, expected {len(op.state)}")
    return do, op.placed_states("dht", parts, sizes, problem.home, problem.state_v_first, problem.groups)
