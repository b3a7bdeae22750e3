"""The NumPy backend: the reference recurrences in any float dtype, and the chunked forms on BLAS."""

from functools import partial
from importlib import import_module

import numpy as np

from ...declarations import DELTA_RULES, GATED, GLA_VALUE_GATE, LINEAR_ATTENTION, NORMALIZED, RETENTION, SIMPLE_GLA
from . import (
    chunked,
    chunking,
    delta_chunked,
    delta_rule,
    gla,
    linear_attention,
    parallel,
    recurrent,
    retention,
    rwkv7,
    simple_gla,
    softmax_attention,
    staged,
    value_gate,
)
from .casts import assign, cast

EQUATIONS = {op: import_module(f".{op.name}", __name__) for op in GATED} | {
    GLA_VALUE_GATE: value_gate,
    SIMPLE_GLA: simple_gla,
    RETENTION: retention,
    LINEAR_ATTENTION: linear_attention,
    NORMALIZED: linear_attention,
}
EQUATIONS |= {op: delta_rule if op.strengths else rwkv7 for op in DELTA_RULES}
# The chunked forms of operators that are not of the gated family.
OWN_CHUNKS = {GLA_VALUE_GATE: value_gate, **dict.fromkeys(DELTA_RULES, delta_chunked)}
STEPS = {f"{op.name}_step": equation for op, equation in EQUATIONS.items()}
FORMS = {"auto": chunked, "chunk": chunked, "staged": staged, "parallel": parallel}


def why_not(problem):
    """Why this backend cannot run a call; None when it can."""
    return None if problem.home == "host" else f"arrays live on {problem.home}, NumPy computes on the host"


def run(problem):
    """(o, the final state's parts or None) of an operator, the o of a step, or the results of a stage."""
    name = problem.op.name
    with np.errstate(all="ignore"):
        if name in staged.STAGES:
            return stage(problem)
        o = output(problem)
        if name in STEPS:
            if problem.options["pending"] is None:
                o[...] = recurrent.step(problem, STEPS[name])
            else:
                recurrent.step_of_several(problem, STEPS[name], o)
            return o
        compute, _ = computation(problem, o)
        return o, finished_states(problem, compute(o))


def output(problem):
    """The array for o: the caller's `out`, or a new array with the memory order of the first input."""
    if problem.out is not None:
        return problem.out
    like = next(iter(problem.arrays.values()))
    return np.empty_like(like, shape=problem.shape(problem.op.out), dtype=problem.dtype)


def computation(problem, o):
    """(run, vjp) of a call, two functions of o. Both fill o. run(o) returns the final state's parts in the dtype of the
    arithmetic, vjp(o) returns (these parts, pull)."""
    if problem.op.name == "softmax_attention":
        return partial(softmax_attention.run, problem), partial(softmax_attention.vjp, problem)
    # whether token by token, as calls with an empty o are, too, whose states do not change
    equation, recurrently = EQUATIONS[problem.op], mode_of(problem) == "recurrent" or not o.size
    if recurrently and not linear_attention.is_out_of_range(problem):
        return partial(recurrent.run, problem, equation), partial(recurrent.vjp, problem, equation)
    if problem.op in OWN_CHUNKS:
        chunks = OWN_CHUNKS[problem.op]
        return partial(chunks.run, problem), partial(chunks.vjp, problem)
    member = equation.member(problem)
    return partial(run_member, member, recurrently), partial(vjp_member, member, recurrently)


def mode_of(problem):
    """The mode of a call, with another one in place of "auto"."""
    if problem.mode != "auto":
        return problem.mode
    short = problem.op in DELTA_RULES and problem.spans.longest <= delta_chunked.FEW
    return "recurrent" if short else "chunk"


def stage(problem):
    """The results of a stage."""
    if problem.op.name == "combine":
        o = output(problem)
        staged.combine(problem, o)
        return o
    result = staged.STAGES[problem.op.name](problem)
    if problem.op.name == "inter_chunk":
        return result[0], finished_states(problem, result[1])
    return result


def vjp(problem):
    """((o, the final state's parts or None), pull). The pullback is the same in all modes but "recurrent"."""
    o = output(problem)
    with np.errstate(all="ignore"):
        _, compute = computation(problem, o)
        final, pull_arrays = compute(o)

    def pull(do, dht):
        with np.errstate(all="ignore"):
            results, initial = pull_arrays(do, dht)
            return as_inputs(problem, results), as_initial(problem, initial)

    with np.errstate(all="ignore"):
        return (o, finished_states(problem, final)), pull


def pullback(problem):
    """The pullback of `vjp`, which runs the forward pass, too."""
    return vjp(problem)[1]


def run_member(member, recurrently, o):
    """`run` of a member of the gated family; `recurrently`: token by token, as gla, which `RunningMaximum` alone is."""
    buffer = member.buffer(o)
    if recurrently:
        (final,) = recurrent.run(member.as_gla(), gla, buffer)
    else:
        final = FORMS[member.problem.mode].run(member, buffer)
    member.output(o, buffer)
    return member.split(final)


def vjp_member(member, recurrently, o):
    """`vjp` of a member of the gated family."""
    buffer = member.buffer(o)
    if recurrently:
        (final,), pull_tokens = recurrent.vjp(member.as_gla(), gla, buffer)
    else:
        final, pull_family = chunked.vjp(member, buffer)
    member.output(o, buffer)

    def pull(do, dht):
        do, dht = member.output_vjp(cast(do, member.problem.compute_dtype)), member.state_vjp(dht)
        if recurrently:
            results, (initial,) = pull_tokens(do, (dht,))
            results = *results, None
        else:
            results, initial = pull_family(do, dht)
        return member.gradients(*results), member.initial_vjp(initial)

    return member.split(final), pull


def finished_states(problem, parts):
    """The final state's parts in the dtype that the caller wants, or None if the caller does not want them."""
    return tuple(part.astype(problem.state_dtype) for part in parts) if problem.output_final_state else None


def as_inputs(problem, gradients):
    """The gradients of the arrays, each in the dtype and memory order of its array."""
    results = []
    for gradient, x in zip(gradients, problem.arrays.values(), strict=True):
        if gradient.dtype != x.dtype or gradient.strides != x.strides:
            computed, gradient = gradient, np.empty_like(x, shape=x.shape)
            assign(gradient, computed)
        results.append(gradient)
    return results


def as_initial(problem, parts):
    """The gradients of the initial state's parts, in their dtypes; None if there is no initial state."""
    if problem.initial_state is None:
        return None
    return tuple(part.astype(x.dtype) for part, x in zip(parts, problem.initial_state, strict=True))


def describe(problem, bytes_moved):
    """What `explain` shows. `floor_ms` is None, since the host's bandwidth is not known."""
    mode = mode_of(problem)
    copies = tuple(
        f"{name}: {x.dtype} is computed in {problem.compute_dtype}"
        for name, x in problem.arrays.items()
        if x.dtype != problem.compute_dtype
    )
    return dict(mode=mode, kernels=(kernel(problem, mode),), tiles=tiles(problem, mode), copies=copies, floor_ms=None)


def kernel(problem, mode):
    """The module that computes a call, for `explain`."""
    if problem.op.name == "softmax_attention":
        return softmax_attention.__name__
    if mode == "recurrent":
        return recurrent.__name__
    return OWN_CHUNKS.get(problem.op, FORMS[mode]).__name__


def tiles(problem, mode):
    """The sizes that `explain` shows."""
    if mode == "recurrent":
        return {}
    if problem.op.name == "softmax_attention":
        return {"chunk": problem.chunk_size or softmax_attention.TILE_KEYS}
    return {"chunk": problem.chunk_size or chunking.CHUNK}
