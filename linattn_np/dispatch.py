"""Which backend computes a problem, and why the others do not.

The arrays' home decides: host arrays run on `numpy`, device arrays on `cupy`, else `numba`; never across. A backend
is a package under `backends/` with

    why_not(problem) -> str | None          the reason it cannot compute this problem, None when it can
    run(problem)                            native results: (o, final state parts or None); a step's o; a stage's result
    vjp(problem)                            ((o, final state parts or None), pullback), where why_not allows a gradient
    pullback(problem)                       the second of these, for callers that want no result
    summarise(problem)                      where there is one: ((final state from zero, decays or None), kept) without
                                            an o, or None; `kept`, not empty, is a second argument of `run` and `vjp`
                                            that spares a call on the same tokens the same work
    KEEPS                                   True where it ever keeps anything
    describe(problem) -> dict               kernels, tiles and copies, for `explain`
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from .contract import Op
from .conversions import in_kind, split_value_heads, state_to_caller, states_to_caller, to_caller, with_output
from .errors import NotSupported
from .key_from_gate import computed, outlined
from .problem import Problem

ORDER = ("numpy", "cupy", "numba")


@cache
def backend_module(name: str):
    return import_module(f"linattn_np.backends.{name}")


def reasons_against(problem: Problem) -> dict[str, str | None]:
    """Each backend's reason not to run, None for those that can."""
    problem = outlined(problem)
    return {name: backend_module(name).why_not(problem) for name in ORDER}


def candidates(problem: Problem, backend: str) -> tuple[str, ...]:
    """The backends that a call asks for, in the order they are tried."""
    if isinstance(backend, str) and backend == "auto":
        return ORDER
    return (problem.op.one_of("backend", backend, ("auto", *ORDER)),)


def choose(problem: Problem, backend: str = "auto") -> str:
    """The backend's name, or NotSupported with every reason."""
    against, asked = {}, outlined(problem)
    for name in candidates(problem, backend):  # a backend that is not needed is not even imported
        against[name] = backend_module(name).why_not(asked)
        if against[name] is None:
            return name
    raise NotSupported(f"{problem.op.name}: " + "; ".join(f"{name}: {reason}" for name, reason in against.items()))


def split_to_fit(problem: Problem, backend: str = "auto") -> tuple[str, list[Problem]]:
    """The backend's name, and the problem in as few parts of its grouped value heads as that takes."""
    refusals: list[NotSupported] = []
    for count in range(1, problem.groups + 1):
        if problem.groups % count == 0:
            parts = split_value_heads(problem, count)
            try:
                return choose(parts[0], backend), parts
            except NotSupported as error:
                refusals.append(error)
    raise refusals[0]


def call(op: Op, arrays, *, backend="auto", kept=(), **arguments):
    """An operator's whole path: bind, choose, run, and hand back what the caller's library would."""
    op, arrays = op.fitting(arrays)
    problem = op.bind(arrays, **arguments)
    o, final_state = backend_module(choose(problem, backend)).run(
        computed(with_output(problem)), *([kept] if kept else [])
    )
    o = handed_out(problem, to_caller(problem, o, op.out), arguments.get("out"))
    return (o, states_to_caller(problem, final_state)) if problem.output_final_state else o


def call_step(op: Op, arrays, *, slots, scale, backend, out):
    """The o of one token; the last of `arrays` is the state, which is updated in place."""
    problem = op.bind(arrays[:-1], state=arrays[-1], slots=slots, scale=scale, out=out)
    o = backend_module(choose(problem, backend)).run(problem)
    return in_kind(problem, o) if out is None else out


def summarise(op: Op, arrays, *, backend="auto", gradient=False, ahead=False, **arguments):
    """(the final state's parts from zero, decays as the backend has them or None, kept) of a call, without its o.

    None where a backend has nothing cheaper than the call itself, and with `ahead`, where nobody asks for the state,
    where it would keep nothing. `kept` is for `call`, or with `gradient` for `vjp`, on the same arrays.
    """
    problem = op.bind(arrays, gradient=gradient, **arguments)
    name, parts = split_to_fit(problem, backend)
    module = backend_module(name)
    possible = hasattr(module, "summarise") and len(parts) == 1 and (getattr(module, "KEEPS", False) or not ahead)
    found = module.summarise(computed(problem)) if possible else None
    if found is None:
        return None
    (final, decays), kept = found
    return tuple(state_to_caller(problem, part, axes) for part, axes in zip(final, problem.op.state)), decays, kept


def handed_out(problem: Problem, o, out):
    """`o` in the caller's kind of array, or in `out`, where a backend could not write it itself."""
    if out is None:
        return in_kind(problem, o)
    if problem.out is None:
        out[...] = o
    return out
