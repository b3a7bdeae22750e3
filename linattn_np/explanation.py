"""What a call would do, without doing it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .derived import computes, inner_call_layout
from .dispatch import ORDER, backend_module, choose
from .errors import NotSupported
from .kernel_choice import KERNELS, choose_kernels
from .ops import declaration
from .problem import Problem
from .typing import Array, Backend, Kernels


def explain(
    op: Callable[..., Any],
    *arrays: Array | None,
    backend: Backend = "auto",
    gradient: bool = False,
    kernels: Kernels = "auto",
    **arguments: Any,
) -> Explanation:
    """The route of ``op(*arrays, **arguments)``: backend, kernels, tiles, copies, bytes, floor, and why not the others.

    With `gradient` that of the pullback which ``vjp(op, *arrays, **arguments)`` returns, and the memory it takes
    besides what the call keeps for it.
    With ``kernels="portable"`` that of the kernels which every card has, on one that has its own for this call too.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> q = k = v = g = np.zeros((1, 2, 64, 16), np.float32)
    >>> linattn_np.explain(linattn_np.gla, q, k, v, g).backend
    'numpy'
    """
    problem = problem_of("explain", op, arrays, gradient, arguments)
    with choose_kernels(problem.op.one_of("kernels", kernels, KERNELS)):
        return explain_problem(problem, backend)


def warm_up(
    op: Callable[..., Any], *arrays: Array | None, backend: Backend = "auto", gradient: bool = False, **arguments: Any
) -> None:
    """Compiles and loads what ``op(*arrays, **arguments)`` runs, without running it: for servers, before a first call.

    With `gradient` what ``vjp(op, *arrays, **arguments)`` and its pullback run, too. What is compiled depends on
    dtypes, on options and on K and V, seldom on other sizes, and not on values. CuPy's kernels are compiled side by
    side; NumPy has nothing to compile, and Numba compiles at a first call. Errors are those of the call. Models have
    a `warm_up` of their own.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> q = k = v = g = np.zeros((1, 2, 64, 16), np.float32)
    >>> linattn_np.warm_up(linattn_np.gla, q, k, v, g, gradient=True)
    """
    problem = problem_of("warm_up", op, arrays, gradient, arguments)
    module = backend_module(choose(problem, backend))
    prepare = getattr(module, "warm_up", None)
    if prepare is not None:
        prepare(inner_call_layout(problem, module))


def problem_of(caller: str, op, arrays, gradient, arguments) -> Problem:
    """The call ``op(*arrays, **arguments)``, checked; errors about `op` begin with `caller`, the public function."""
    declared = declaration(op, caller)
    declared, arrays, arguments = declared.taken_apart(arrays, arguments)
    return declared.bind(arrays, gradient=declared.flag("gradient", gradient), **arguments)


@dataclass(frozen=True)
class Explanation:
    """What a call would do: the route, what it moves, and why the other backends are out."""

    op: str
    backend: str | None
    mode: str | None = None
    kernels: tuple[str, ...] = ()
    tiles: dict = field(default_factory=dict)
    copies: tuple[str, ...] = ()  # arrays that must be copied first, with the reason
    bytes: int = 0  # that must move once: every input read, every output written
    scratch: int | None = None  # bytes that a pullback takes besides the gradients, where they are known
    floor_ms: float | None = None  # those bytes over the device's peak bandwidth; None on the host
    reasons: dict = field(default_factory=dict)  # backend, or another way of the chosen one -> why not

    def __str__(self):
        lines = [f"{self.op}: {self.backend or 'no backend'}" + (f", mode {self.mode}" if self.mode else "")]
        lines += [f"  kernel {name}" for name in self.kernels]
        lines += [f"  {name} = {value}" for name, value in self.tiles.items()]
        lines += [f"  copy: {copy}" for copy in self.copies]
        lines.append(
            f"  {self.bytes:,} bytes must move once"
            + (f", {self.floor_ms:.4f} ms at peak bandwidth" if self.floor_ms else "")
        )
        if self.scratch is not None:
            lines.append(f"  {self.scratch:,} bytes besides the gradients while they are computed")
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def explain_problem(problem: Problem, backend="auto") -> Explanation:
    """`explain` of a checked call."""
    moved = bytes_moved(problem)
    inner = {name: inner_call_layout(problem, backend_module(name)) for name in ORDER}
    reasons = {name: reason for name in ORDER if (reason := backend_module(name).why_not(inner[name])) is not None}
    try:
        name = choose(problem, backend)
    except NotSupported:
        return Explanation(problem.op.name, None, bytes=moved, reasons=reasons)
    description = backend_module(name).describe(inner[name], moved)
    description["copies"] = (*copies(problem, backend_module(name)), *description["copies"])
    description["reasons"] = reasons | description.get("reasons", {})
    return Explanation(problem.op.name, name, bytes=moved, **description)


def copies(problem: Problem, backend) -> list[str]:
    """Why arrays are copied before a backend, a module, gets them."""
    reasons = [f"{name}: the {problem.groups} value heads of a head, side by side" for name in problem.copied_arrays]
    reasons += [f"{', '.join(problem.arrays)}: without padding"] if problem.mask is not None else []
    return reasons + ([] if computes(backend, problem) else [problem.op.derived.copy_note])


def bytes_moved(problem: Problem) -> int:
    """Every input read once and every output written once; of a pullback the inputs' gradients are outputs too."""

    def size(shape, dtype):
        return math.prod(shape) * dtype.itemsize

    total = sum(size(view.shape, view.dtype) for view in problem.arrays.values())
    total += sum(size(part.shape, part.dtype) for part in problem.initial_state or ())
    if problem.gradient:
        total *= 2
    total += size(problem.shape(problem.op.out), problem.dtype)
    if problem.output_final_state:
        total += sum(size(problem.shape(axes), problem.state_dtype) for axes in problem.op.state)
    return total
