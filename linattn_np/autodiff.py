"""Gradients without a framework: vector-Jacobian products of every operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .contract import Op
from .conversions import (
    array_to_backend,
    callers_sizes,
    in_kind,
    state_to_backend,
    state_to_caller,
    states_to_caller,
    to_caller,
    with_output,
)
from .dispatch import backend_module, split_to_fit
from .key_from_gate import computed
from .ops import declaration
from .typing import Array, Backend, Pullback
from .value_heads import added, beside, callers, cotangents, has_columns


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
    tokens, one for every 1024 on Hopper, or none (`explain` with `gradient` gives the bytes).

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


def vjp_of(op: Op, arrays, *, backend="auto", kept=(), **arguments):
    """`vjp` of a declared operator; `kept` is what `dispatch.summarise` kept of the same call."""
    problem = bind(op, arrays, arguments)
    name, parts = split_to_fit(problem, backend)
    done = [backend_module(name).vjp(computed(with_output(part)), *([kept] if kept else [])) for part in parts]
    o, final_state = together([result for result, _ in done], problem)
    result = in_kind(problem, to_caller(problem, o, problem.op.out))
    if problem.output_final_state:
        result = (result, states_to_caller(problem, final_state))
    return result, Checked(problem, [turned_back(part, pull) for part, (_, pull) in zip(parts, done)])


def pullback_of(op: Op, arrays, *, backend="auto", **arguments):
    """The pullback of `vjp` without the result: where a backend's backward needs no forward pass, none runs."""
    problem = bind(op, arrays, arguments)
    name, parts = split_to_fit(problem, backend)
    return Checked(problem, [turned_back(part, backend_module(name).pullback(computed(part))) for part in parts])


def turned_back(problem, pull):
    """A backend's pullback of the problem that it computes, as that of `problem`."""
    return pull if problem.op.derived is None else DerivedPull(problem, pull)


class DerivedPull:
    """The pullback of an operator that a backend computes as another one."""

    def __init__(self, problem, pull):
        self.problem, self.pull = problem, pull
        if hasattr(pull, "summarise"):  # the states are those of the operator that is computed
            self.summarise = pull.summarise

    def __call__(self, do, dht, **kept):
        found, initial = self.pull(do, dht, **kept)
        return self.problem.op.derived.gradients(self.problem, found), initial


def bind(op: Op, arrays, arguments):
    op, arrays = op.fitting(arrays)
    if arguments.get("out") is not None:
        op.refuse("out", "cannot be given to vjp")
    return op.bind(arrays, gradient=True, **arguments)


def together(results, problem):
    """(o, final state's parts or None) of the problem from those of its parts."""
    o, finals = zip(*results)
    if finals[0] is None:
        return beside(o), None
    return beside(o), tuple(
        beside(parts) if has_columns(axes) else parts[0] for parts, axes in zip(zip(*finals), problem.op.state)
    )


def pulled(pulls, problem, do, dht):
    """(gradients in the order of the arrays, those of the initial state or None), from the pullbacks of the parts."""
    V, op = problem.sizes["V"] // len(pulls), problem.op
    done = []
    for n, pull in enumerate(pulls):
        shared = dht and tuple(cotangents(part, axes, n * V, V) for part, axes in zip(dht, op.state))
        done.append(pull(cotangents(do, op.out, n * V, V), shared))

    def joined(parts, axes):
        return beside(parts) if has_columns(axes) else added(parts, problem.compute_dtype)

    gradients, initial = zip(*done)
    gradients = [joined(parts, axes) for parts, axes in zip(zip(*gradients), op.arrays.values(), strict=True)]
    if initial[0] is None:
        return gradients, None
    return gradients, tuple(joined(parts, axes) for parts, axes in zip(zip(*initial), op.state))


class Checked:
    """The pullbacks of a problem's parts as the caller's: of any arrays that fit, and with results in kind."""

    def __init__(self, problem, pulls):
        self.problem, self.pulls = problem, pulls

    def __call__(self, do, dht=None):
        return self.resumed(do, dht)

    def resumed(self, do, dht, kept=()):
        """The gradients; what `summarise` kept of the same `do` spares them the same work."""
        problem, declared = self.problem, self.problem.op
        pulls = [partial(self.pulls[0], kept=kept)] if kept else self.pulls
        gradients, initial = pulled(
            pulls, problem, cotangent("do", do, declared.out, problem), final_cotangent(dht, problem)
        )
        result = tuple(
            in_kind(problem, to_caller(problem, gradient, axes))
            for gradient, axes in zip(gradients, declared.arrays.values(), strict=True)
        )
        if problem.initial_state is None:
            return result
        return (*result, states_to_caller(problem, initial))

    def summarise(self, do):
        """(the initial state's gradient for a dht of zero, decays as the backend has them, kept), or None where that
        takes all of a pullback."""
        problem, summary = self.problem, getattr(self.pulls[0], "summarise", None)
        found = summary(cotangent("do", do, problem.op.out, problem)) if summary and len(self.pulls) == 1 else None
        if found is None:
            return None
        (own, decays), kept = found
        return tuple(state_to_caller(problem, part, axes) for part, axes in zip(own, problem.op.state)), decays, kept


def cotangent(name, x, axes, problem):
    """The caller's gradient of a result, checked against the result's shape and device."""
    native, _ = problem.op.native(name, x)
    view = problem.op.logical(name, native, axes, problem.layout)
    wanted = callers(axes, problem.groups)
    placed = problem.op.placed(name, view, wanted, callers_sizes(problem), problem.home)
    return array_to_backend(problem, placed, axes)


def final_cotangent(dht, problem):
    if dht is None:
        return None
    parts = dht if isinstance(dht, tuple) else (dht,)
    if len(parts) != len(problem.op.state):
        problem.op.refuse("dht", f"has {len(parts)} parts, expected {len(problem.op.state)}")
    placed = problem.op.placed_states(
        "dht", parts, callers_sizes(problem), problem.home, problem.state_v_first, problem.groups
    )
    return tuple(state_to_backend(problem, part, axes) for part, axes in zip(placed, problem.op.state))
