"""Which backend computes a problem, and why the others do not.

Host arrays run on `numpy`, device arrays on `cupy` or, if that cannot compute the problem, on `numba`. No array is
moved from host to device or back. A backend is a package under `backends/` with

    why_not(problem) -> str | None          the reason it cannot compute this problem, None when it can
    run(problem)                            native results: (o, final state parts or None); a step's o; a stage's result
    vjp(problem)                            ((o, final state parts or None), pullback), where why_not allows a gradient
    pullback(problem)                       the second of these, for callers that want no result
    summarise(problem)                      optional: ((final state from zero, decays or None), kept) without an o, or
                                            None; `kept`, if not empty, is a second argument of `run` and `vjp`, which
                                            then reuse these results for the same tokens
    KEEPS                                   optional: whether `kept` is ever not empty
    describe(problem) -> dict               kernels, tiles and copies, for `explain`
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from .contract import Op
from .conversions import in_kind, state_to_caller, states_to_caller, to_caller, with_output
from .derived import inner_call, inner_call_layout
from .errors import NotSupported
from .problem import Problem

ORDER = ("numpy", "cupy", "numba")


@cache
def backend_module(name: str):
    return import_module(f"linattn_np.backends.{name}")


def reasons_against(problem: Problem) -> dict[str, str | None]:
    """Each backend's reason not to run, None for those that can."""
    problem = inner_call_layout(problem)
    return {name: backend_module(name).why_not(problem) for name in ORDER}


def candidates(problem: Problem, backend: str) -> tuple[str, ...]:
    """The backends that a call asks for, in the order they are tried."""
    if isinstance(backend, str) and backend == "auto":
        return ORDER
    return (problem.op.one_of("backend", backend, ("auto", *ORDER)),)


def choose(problem: Problem, backend: str = "auto") -> str:
    """The backend's name, or NotSupported with every reason."""
    against, asked = {}, inner_call_layout(problem)
    for name in candidates(problem, backend):  # a backend that is not needed is not even imported
        against[name] = backend_module(name).why_not(asked)
        if against[name] is None:
            return name
    raise NotSupported(f"{problem.op.name}: " + "; ".join(f"{name}: {reason}" for name, reason in against.items()))


def call(op: Op, arrays, *, backend="auto", kept=(), **arguments):
    """Computes an operator: checks the call, chooses a backend, runs it, and returns arrays of the caller's library."""
    op, arrays = op.fitting(arrays)
    problem = op.bind(arrays, **arguments)
    o, final_state = backend_module(choose(problem, backend)).run(
        inner_call(with_output(problem)), *([kept] if kept else [])
    )
    o = handed_out(problem, to_caller(problem, o, op.out), arguments.get("out"))
    return (o, states_to_caller(problem, final_state)) if problem.output_final_state else o


def call_step(op: Op, arrays, *, backend, out, **arguments):
    """The o of one token; the last of `arrays` is the state, which is updated in place."""
    problem = op.bind(arrays[:-1], state=arrays[-1], out=out, **arguments)
    o = backend_module(choose(problem, backend)).run(problem)
    return in_kind(problem, o) if out is None else out


def call_stage(op, arrays, *, backend="auto", **arguments):
    """The results of a stage of the chunked form; an array, not a tuple, if there is only one."""
    op, arrays = op.fitting(arrays)
    problem = op.bind(arrays, **arguments)
    found = backend_module(choose(problem, backend)).run(problem)
    if arguments.get("out") is not None:
        return arguments["out"]
    final_state = ()
    if op.state:
        found, final_state = found
    results = [in_kind(problem, to_caller(problem, x, op.out)) for x in (found if op.pair else (found,))]
    if problem.output_final_state:
        results.append(states_to_caller(problem, final_state))
    return tuple(results) if len(results) > 1 else results[0]


def summarise(op: Op, arrays, *, backend="auto", gradient=False, only_kept=False, **arguments):
    """(the final state's parts from zero, decays as the backend has them or None, kept) of a call, without its o.

    None if the backend has no way that is cheaper than the call itself. `only_kept`: nothing else is wanted, so that
    the result is None, too, if the backend keeps nothing. `kept` is an argument of `call` on the same arrays, or, with
    `gradient`, of `vjp`.
    """
    problem = op.bind(arrays, gradient=gradient, **arguments)
    module = backend_module(choose(problem, backend))
    possible = hasattr(module, "summarise") and (getattr(module, "KEEPS", False) or not only_kept)
    found = module.summarise(inner_call(problem)) if possible else None
    if found is None:
        return None
    (final, decays), kept = found
    return tuple(state_to_caller(problem, part, axes) for part, axes in zip(final, problem.op.state)), decays, kept


def handed_out(problem: Problem, o, out):
    """`o` in the caller's kind of array, or copied to `out` if the backend could not write there."""
    if out is None:
        return in_kind(problem, o)
    if problem.out is None:
        out[...] = o
    return out
