"""Which backend computes a problem, and why the others do not.

Host arrays run on `numpy`, device arrays on `cupy` or, if that cannot compute the problem, on `numba`. No array is
moved from host to device or back. A backend is a package under `backends/` with

    why_not(problem) -> str | None          the reason it cannot compute this problem, None when it can
    run(problem)                            native results: (o, final state parts or None); a step's o; a stage's result
    vjp(problem)                            ((o, final state parts or None), pullback), where why_not, which reads
                                            problem.gradient, has no reason against it
    pullback(problem)                       the second of these, for callers that want no result
    summarise(problem)                      optional: ((final state for an initial state of zero, products of the decays
                                            or None), summaries) without o; None where that is no cheaper than `run`.
                                            `summaries`, if not empty, are arrays about segments of the tokens: passed
                                            as a second argument to `run` or `vjp`, they are not computed again
    SAVES_SUMMARIES                         optional: whether `summaries` is ever not empty
    describe(problem, bytes_moved) -> dict  kernels, tiles and copies, for `explain`

Native arrays are NumPy's or CuPy's, [B, H, T, ...]; states are tuples of parts [N, H, ...], N the number of sequences:
most operators have one part, [N, H, K, V], and normalized linear attention also the sum of keys, [N, H, K].

A backend computes a derived operator (`derived`) that is not its own as the call of another one, the inner call, with
arrays that are made for it. It is chosen for the inner call's layout, before those arrays have values. Steps and stages
are never derived.
"""

from functools import cache
from importlib import import_module

from .contract import Op
from .conversions import in_callers_library, state_to_caller, states_to_caller, to_caller, with_output
from .derived import inner_call, inner_call_layout
from .errors import NotSupported
from .problem import Problem
from .signals import signals_held

AUTO, ORDER = "auto", ("numpy", "cupy", "numba")


@cache
@signals_held()
def backend_module(name: str):
    return import_module(f"linattn_np.backends.{name}")


def choose(problem: Problem, backend: str = "auto") -> str:
    """The name of the backend that computes a problem: for "auto" the first that can, else the given one; NotSupported,
    with every reason, if none can."""
    if backend is not AUTO:
        problem.op.one_of("backend", backend, (AUTO, *ORDER))
    reasons = {}
    for name in ORDER if backend == AUTO else (backend,):  # a backend that is not needed is not even imported
        module = backend_module(name)
        reasons[name] = module.why_not(inner_call_layout(problem, module))
        if reasons[name] is None:
            return name
    raise NotSupported(f"{problem.op.name}: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items()))


def call(op: Op, arrays, *, backend="auto", summaries=(), **arguments):
    """Computes an operator: checks the call, chooses a backend, runs it, and returns arrays of the caller's library.

    `summaries`: those that `summarise` has returned for the same arrays.
    """
    op, arrays = op.fitting(arrays)  # the declaration with or without the last array, if that is optional
    problem = op.bind(arrays, **arguments)
    module = backend_module(choose(problem, backend))
    o, final_state = module.run(inner_call(with_output(problem), module), *([summaries] if summaries else []))
    o, out = to_caller(problem, o, op.out), arguments.get("out")
    if out is None:
        o = in_callers_library(problem, o)  # an array of the caller's library
    else:
        if problem.out is None:  # `bind` found no view of `out` with a backend's axes: the backend did not write there
            out[...] = o
        o = out
    return (o, states_to_caller(problem, final_state)) if problem.output_final_state else o


def call_step(op: Op, arrays, *, backend, out, **arguments):
    """Computes a step: the o of one token. The last of `arrays` is the state, which is updated in place."""
    problem = op.bind(arrays[:-1], state=arrays[-1], out=out, **arguments)
    o = backend_module(choose(problem, backend)).run(problem)
    return in_callers_library(problem, o) if out is None else out


def call_stage(op, arrays, *, backend="auto", **arguments):
    """Computes a stage of the chunked form: a tuple of its results, or the only one."""
    op, arrays = op.fitting(arrays)
    problem = op.bind(arrays, **arguments)
    native = backend_module(choose(problem, backend)).run(problem)
    if arguments.get("out") is not None:  # of `combine`, which has one result: every backend writes it there
        return arguments["out"]
    final_state = ()
    if op.state:
        native, final_state = native
    natives = native if op.pair else (native,)  # op.pair: two results of one shape
    results = [in_callers_library(problem, to_caller(problem, x, op.out)) for x in natives]
    if problem.output_final_state:
        results.append(states_to_caller(problem, final_state))
    return tuple(results) if len(results) > 1 else results[0]


def summarise(op: Op, arrays, *, backend="auto", gradient=False, only_summaries=False, **arguments):
    """What a call does to the state, without its o: (the parts of the final state for an initial state of zero, the
    products of the decays as the backend has them or None, summaries).

    `summaries` is an argument of `call` or, with `gradient`, of `vjp_of`, for the same arrays. The result is None if
    the backend cannot compute it more cheaply than the call; with `only_summaries` also if there are no summaries.
    `op` is the declaration that fits these arrays already.
    """
    problem = op.bind(arrays, gradient=gradient, **arguments)
    module = backend_module(choose(problem, backend))
    possible = hasattr(module, "summarise") and (getattr(module, "SAVES_SUMMARIES", False) or not only_summaries)
    summary = module.summarise(inner_call(problem, module)) if possible else None
    if summary is None:
        return None
    (final, decays), summaries = summary
    return tuple(state_to_caller(problem, part, axes) for part, axes in zip(final, problem.op.state)), decays, summaries
