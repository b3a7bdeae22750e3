"""Which backend computes a problem, and why the others do not.

The arrays' home decides: host arrays run on `numpy`, device arrays on `cupy`, else `numba`; never across. A backend
is a package under `backends/` with

    why_not(problem) -> str | None          the reason it cannot compute this problem, None when it can
    run(problem)                            native results: (o, final state parts or None); a step's o; a stage's result
    vjp(problem)                            ((o, final state parts or None), pullback), where why_not allows a gradient
    pullback(problem)                       the second of these, for callers that want no result
    describe(problem) -> dict               kernels, tiles and copies, for `explain`
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from .contract import NotSupported, Op, Problem

ORDER = ("numpy", "cupy", "numba")


@cache
def backend_module(name: str):
    return import_module(f"linattn_np.backends.{name}")


def reasons_against(problem: Problem) -> dict[str, str | None]:
    """Each backend's reason not to run, None for those that can."""
    return {name: backend_module(name).why_not(problem) for name in ORDER}


def candidates(problem: Problem, backend: str) -> tuple[str, ...]:
    """The backends that a call asks for, in the order they are tried."""
    if backend == "auto":
        return ORDER
    if backend not in ORDER:
        problem.op.refuse("backend", f"is {backend!r}, expected one of 'auto', {', '.join(map(repr, ORDER))}")
    return (backend,)


def choose(problem: Problem, backend: str = "auto") -> str:
    """The backend's name, or NotSupported with every reason."""
    against = {}
    for name in candidates(problem, backend):   # a backend that is not needed is not even imported
        against[name] = backend_module(name).why_not(problem)
        if against[name] is None:
            return name
    raise NotSupported(f"{problem.op.name}: " + "; ".join(f"{name}: {reason}" for name, reason in against.items()))


def call(op: Op, arrays, *, backend="auto", **arguments):
    """An operator's whole path: bind, choose, run, and hand back what the caller's library would."""
    problem = op.bind(arrays, **arguments)
    o, final_state = backend_module(choose(problem, backend)).run(problem.with_room())
    o = arguments["out"] if problem.out is not None else problem.as_caller(problem.in_layout(o, op.out))
    return (o, problem.states_as_caller(final_state)) if problem.output_final_state else o
