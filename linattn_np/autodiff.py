"""Gradients without a framework: vector-Jacobian products of every operator."""

from __future__ import annotations

import inspect

from .dispatch import backend_module, choose
from .ops import declaration


def vjp(op, *arrays, backend="auto", **arguments):
    """``(result, pullback)`` of an operator: JAX's convention.

    `result` is what ``op(*arrays, **arguments)`` returns. ``pullback(do)``, or ``pullback(do, dht)`` with the gradient
    of the final state, returns the gradients in the order of `arrays`, then that of `initial_state` when one was given
    (a pair, like the state, for the normalised `linear_attention`). Each has the shape and dtype of what it is the
    gradient of; `dht` needs no `output_final_state`.

    For GLA-like operators dS is carried backwards through the chunks, and the gate's gradient is
    ``revcumsum(q * dq - k * dk)`` plus ``sum_v S_T * dS_T`` (Yang et al., 2024, section 4.4), so that no state but one
    a chunk is ever kept.

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
    declared = declaration(op, "vjp")
    inspect.signature(op).bind(*arrays, **arguments)        # an unknown keyword is Python's own TypeError
    if arguments.get("out") is not None:
        declared.refuse("out", "cannot be given to vjp")
    problem = declared.bind(arrays, gradient=True, **arguments)
    (o, final_state), pull = backend_module(choose(problem, backend)).vjp(problem)

    def pullback(do, dht=None):
        gradients, initial = pull(cotangent("do", do, declared.out, problem), final_cotangent(dht, problem))
        result = tuple(problem.as_caller(problem.in_layout(gradient, axes))
                       for gradient, axes in zip(gradients, declared.arrays.values(), strict=True))
        if problem.initial_state is None:
            return result
        parts = tuple(problem.as_caller(part) for part in initial)
        return (*result, parts if len(parts) > 1 else parts[0])

    result = problem.as_caller(problem.in_layout(o, declared.out))
    if problem.output_final_state:
        parts = tuple(problem.as_caller(part) for part in final_state)
        result = (result, parts if len(parts) > 1 else parts[0])
    return result, pullback


def cotangent(name, x, axes, problem):
    """The caller's gradient of a result, checked against the result's shape and device."""
    native, _ = problem.op.native(name, x)
    view = problem.op.logical(name, native, axes, problem.layout)
    return problem.op.placed(name, view, axes, problem.sizes, problem.home)


def final_cotangent(dht, problem):
    if dht is None:
        return None
    parts = dht if isinstance(dht, tuple) else (dht,)
    if len(parts) != len(problem.op.state):
        problem.op.refuse("dht", f"has {len(parts)} parts, expected {len(problem.op.state)}")
    return tuple(problem.op.placed("dht", part, axes, problem.sizes, problem.home)
                 for part, axes in zip(parts, problem.op.state))
