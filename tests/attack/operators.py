"""The operators and their gradients: against the exact answer in float64, and the laws that they obey."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from conftest import Kernels
from hypothesis import strategies as st
from reference import literal, literal_attention, same_bits, stated, with_value_heads

from attack.calls import (
    DTYPES,
    FUNCTIONS,
    GROWING,
    Call,
    calls,
    double,
    flat,
    given,
    home,
    judge,
    least,
    magnitudes,
    softmax_rows,
    there,
    truth,
)
from attack.harness import Refused, holds_for, require
from linattn_np import NotSupported, vjp
from linattn_np.declarations import DELTA_RULES
from linattn_np.layouts import swap_heads

MOST_GROWTH = 80.0  # nats that a chunk may grow by, and its gradients hold: docs/gates.md


def run(machine, call, arrays, arguments, function=None):
    """A result's parts on the host; NotSupported is a refusal."""
    try:
        return machine.run(call.function, *arrays, **arguments)
    except NotSupported as error:
        raise Refused from error


def results(machine, call):
    arrays, arguments = given(call, machine)
    return home(machine, call, run(machine, call, arrays, arguments))


def finite_alike(machine, call, wanted):
    """Where each result must be finite: where the exact one is, and in the same precision the one token by token."""
    if call.gate not in GROWING:
        return [np.isfinite(x) for x in wanted]
    stepwise = truth_in_own_precision(call)
    return [np.isfinite(x) & np.isfinite(double(y)) for x, y in zip(wanted, stepwise)]


def truth_in_own_precision(call):
    """The NumPy backend's mode "recurrent" on the same numbers."""
    own = replace(call, mode="recurrent", chunk_size=None, materialize=None, layout="bhtd")
    arguments = own.arguments() | {"mode": "recurrent"}
    return flat(own.function(*own.arrays().values(), backend="numpy", **arguments))


def where_planted(call):
    """Faults with numbers that are not finite are told apart from those without, by the arrays that have them."""
    arrays = sorted({name for name, *_ in call.plants})
    return f", {' and '.join(arrays)} not finite" if arrays else ""


def dtypes(call, count):
    """What each result is rounded to."""
    single = "float64" if call.dtype == "float64" else "float32"
    return [call.dtype, *[call.state_dtype or single] * (count - 1)]


def coarser(*names):
    order = ("float64", "float32", "float16", "bfloat16")
    return max(names, key=order.index)


def judge_call(law, call, found, wanted, bounds, must):
    for part, (x, y, bound, where, dtype) in enumerate(
        zip(found, wanted, bounds, must, dtypes(call, len(found)), strict=True)
    ):
        what = f"{law}: {call.op}, {'o' if part == 0 else 'state'}{where_planted(call)}"
        require(x.dtype == DTYPES[dtype], f"{what}: dtype", f"{x.dtype}, expected {dtype}")
        judge(what, x, y, bound, where, coarser(dtype, call.dtype), least=least(call))


def has_signed_terms(call):
    """Delta rules take from a state what was written to it; a key of HGRN2 is below 0 where its gate grows."""
    return call.declared in DELTA_RULES or call.op == "hgrn2" and call.gate == "growth"


def bounded(call):
    if has_signed_terms(call):
        found = truth(call, call.arrays().values(), call.arguments())
        return [np.full(x.shape, 10 * (1 + abs(x[np.isfinite(x)]).max(initial=0))) for x in found]
    arrays, arguments = magnitudes(call, call.arrays(), call.arguments())
    return truth(call, arrays.values(), arguments)


@holds_for(calls)
def operators(call, machine):
    """The exact answer, in memory of the caller's as well; what is read stays as it was."""
    arrays, arguments = given(call, machine)
    before = [machine.tohost(x).copy() for x in arrays]
    result = run(machine, call, arrays, arguments)
    found = home(machine, call, result)
    for name, x, y in zip(call.declared.arrays, arrays, before):
        require(same_bits(machine.tohost(x), y), f"{call.op} writes into {name}")
    wanted = truth(call, call.arrays().values(), call.arguments())
    must = finite_alike(machine, call, wanted)
    must[0] = must[0] & ~excused(call, machine)
    judge_call("operators", call, found, wanted, bounded(call), must)
    into_out(machine, call, arrays, arguments, found)


def into_out(machine, call, arrays, arguments, found):
    """out= in the middle of sentinels: the same bits, and the very array."""
    shape = swap_heads(found[0], call.declared.out, call.layout).shape
    buffer = machine.asarray(np.full((*shape[:-1], shape[-1] + 2), 7, DTYPES[call.dtype]))
    out = buffer[..., 1:-1]
    result = run(machine, call, arrays, arguments | {"out": out})
    given_back = result[0] if call.final and call.declared.state else result
    require(given_back is out, f"{call.op} hands back another array than out")
    after = machine.tohost(buffer)
    require((double(after[..., 0]) == 7).all() and (double(after[..., -1]) == 7).all(), f"{call.op} writes beside out")
    again = home(machine, call, result)
    for x, y in zip(again, found):
        require(same_bits(x, y), f"out: {call.op} gives other bits", f"{x.ravel()[:4]} for {y.ravel()[:4]}")


@holds_for(lambda machine: calls(machine, gates=["zero", "logsigmoid", "weak", "some-inf", "mixed"], plants=False))
def literal_equations(call, machine):
    """The papers' equations a head and a token at a time, with groups, masks and directions written out."""
    call = replace(call, B=min(call.B, 2), H=min(call.H, 2), loudness=1.0)
    if call.T > 40 or call.lengths is None and call.T == 0:
        return
    found = results(machine, call)
    wanted = spelled(call)
    judge_call("literal", call, found, wanted, bounded(call), [np.isfinite(x) for x in wanted])


def spelled(call):
    """[o, *state] from `reference.literal`."""
    arrays = {name: double(x) for name, x in call.arrays().items()}
    states = [double(x) for x in call.states()] if call.initial else None
    if call.state_v_first and states:
        states[0] = states[0].swapaxes(2, 3)
    for name, axes in call.declared.arrays.items():
        if name not in with_value_heads(call.declared) and call.groups > 1:
            arrays[name] = np.repeat(arrays[name], call.groups, axis=axes.split().index("H"))
    if states and len(states) > 1 and call.groups > 1:
        states[1] = np.repeat(states[1], call.groups, axis=1)
    options = {"scale": call.scale, "feature_map": call.feature_map, "normalize": call.normalize}
    if call.op == "retention":
        gamma = 1 - 2.0 ** (-5 - np.arange(call.H)) if call.gamma is None else np.full(call.H, call.gamma)
        options["gamma"] = np.repeat(gamma, call.groups)
    lengths = call.lengths if call.lengths is not None else (call.T,)
    keep = call.arguments().get("mask")
    o, ends = np.zeros(arrays["v"].shape), []
    for b in range(call.B):
        start = 0
        for n, length in enumerate(lengths):
            at = np.arange(start, start + length)
            at = at if keep is None else at[keep[b, at]]
            at = at[::-1] if call.reverse else at
            row = [
                x[b : b + 1, :, at] if "T" in axes.split() else x
                for x, axes in zip(arrays.values(), call.declared.arrays.values())
            ]
            if call.op == "softmax_attention":
                o[b, :, at] = literal_attention(*row, causal=call.causal, scale=call.scale)[0][0].swapaxes(0, 1)
                start += length
                continue
            own = None if states is None else tuple(x[b + n : b + n + 1] for x in states)
            own = own if own is None or call.normalize else own[0]
            part, end = literal(call.declared, row, initial_state=own, **options)
            o[b, :, at] = part[0].swapaxes(0, 1)
            ends.append(end if isinstance(end, tuple) else (end,))
            start += length
    if not (call.final and call.declared.state):
        return [o]
    declared = stated(call.declared, {"normalize": call.normalize}).state
    parts = [np.concatenate(x) for x in zip(*ends)] or [np.zeros(call.shape(axes)) for axes in declared]
    if len(parts) > 1 and ends:
        parts[1] = parts[1][:, :: call.groups]
    return [o, parts[0].swapaxes(2, 3) if call.state_v_first else parts[0], *parts[1:]]


# -- gradients ---------------------------------------------------------------------------------------------------------
def pulled(run_vjp, call, arrays, arguments, do, dht):
    """The gradients on whatever device, flat."""
    _, pull = run_vjp(call.function, *arrays, **arguments)
    return flat(pull(do) if dht is None else pull(do, dht))


def on_numpy(function, *arrays, **arguments):
    return vjp(function, *arrays, backend="numpy", **arguments)


@holds_for(lambda machine: calls(machine, gradient=True))
def gradients(call, machine):
    """Those of mode "recurrent" in float64, with NaN nowhere that they have none."""
    if not machine.gradients:
        raise Refused
    arrays, arguments = given(call, machine)
    do, dht = call.cotangents()
    there_do = machine.asarray(swap_heads(do, call.declared.out, call.layout))
    try:
        found = pulled(
            lambda *a, **k: machine.run(vjp, *a, **k),
            call,
            arrays,
            arguments,
            there_do,
            None if dht is None else there(machine, dht),
        )
    except NotSupported as error:
        raise Refused from error
    found = [machine.tohost(x) for x in found]
    found = [
        *(swap_heads(x, axes, call.layout) for x, axes in zip(found, call.declared.arrays.values())),
        *found[len(arrays) :],
    ]
    wanted = exact_gradients(call, call.arrays(), call.arguments(), do, dht)
    bounds = gradient_bounds(call, wanted, do, dht)
    stepwise = wanted if call.gate not in GROWING else stepwise_gradients(call, do, dht)
    names = [*call.declared.arrays, *["initial_state"] * (len(found) - len(arrays))]
    beyond = excused(call, machine, gradient=True)
    for name, x, y, bound, own in zip(names, found, wanted, bounds, stepwise, strict=True):
        own = np.where(spread(beyond, call, name), np.nan, own)
        dtype = coarser(str(x.dtype), call.dtype)
        judge(
            f"gradients: {call.op}, d{name}{where_planted(call)}",
            x,
            y,
            bound,
            np.isfinite(y) & np.isfinite(double(own)),
            dtype,
            2.0,
            least(call),
        )


def spread(beyond, call, name):
    """`beyond` [B, HV, T, 1] as the gradient of `name` has its axes; of one without tokens all or nothing."""
    axes = call.declared.arrays.get(name, "")
    if "T" not in axes.split() or beyond.size == 1:
        return beyond.any()
    if name not in with_value_heads(call.declared):
        B, heads, T, _ = beyond.shape
        beyond = beyond.reshape(B, heads // call.groups, call.groups, T).any(2)[..., None]
    return beyond if axes.count(" ") == 3 else beyond[..., 0]


def exact_gradients(call, arrays, arguments, do, dht):
    arrays = [double(x) for x in arrays.values()]
    if call.op == "softmax_attention":
        return softmax_gradients(call, *arrays, arguments.get("cu_seqlens"), double(do))
    kept = {
        name: x for name, x in arguments.items() if name not in ("layout", "chunk_size", "materialize", "state_dtype")
    } | {"mode": "recurrent"}
    if kept.get("initial_state") is not None:
        kept["initial_state"] = double(kept["initial_state"])
    return pulled(on_numpy, call, arrays, kept, double(do), None if dht is None else double(dht))


def stepwise_gradients(call, do, dht):
    """Those of the NumPy backend's mode "recurrent" in the call's own precision."""
    kept = {
        name: x
        for name, x in call.arguments().items()
        if name not in ("layout", "chunk_size", "materialize", "state_dtype")
    } | {"mode": "recurrent"}
    return pulled(on_numpy, call, list(call.arrays().values()), kept, do, dht)


def softmax_gradients(call, q, k, v, bounds, do):
    scale = call.K**-0.5 if call.scale is None else call.scale
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    with np.errstate(all="ignore"):
        for t, seen, p in softmax_rows(call, q, k, bounds, scale):
            dp = np.einsum("bhv,bhsv->bhs", do[:, :, t], v[:, :, seen])
            ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True))
            dv[:, :, seen] += p[..., None] * do[:, :, t, None]
            dq[:, :, t] = np.einsum("bhs,bhsk->bhk", ds, k[:, :, seen])
            dk[:, :, seen] += ds[..., None] * q[:, :, t, None]
    return [dq, dk, dv]


def gradient_bounds(call, wanted, do, dht):
    """What the terms of each come to without their signs; where no call says that, the size of the whole.

    A gate's gradient is a difference of running sums, so its limit is what these sums come to.
    """
    whole = call.op == "softmax_attention" or has_signed_terms(call)
    if whole or call.feature_map or call.normalize:
        return [
            np.full(x.shape, 10 * (1 + abs(x[np.isfinite(x)]).max(initial=0)) * (1 + call.loudness)) for x in wanted
        ]
    arrays, arguments = magnitudes(call, call.arrays(), call.arguments())
    bounds = exact_gradients(call, arrays, arguments, abs(double(do)), None if dht is None else abs(double(dht)))
    names = list(call.declared.arrays)
    gates = [name for name in ("g", "gv", "w") if name in names]
    if gates:
        with np.errstate(all="ignore"):
            q, k = names[:2]
            total = sum(np.nansum(abs(double(arrays[x])) * bounds[names.index(x)]) for x in (q, k, "v"))
        for name in gates:
            i = names.index(name)
            bounds[i] = bounds[i] + np.where(np.isfinite(bounds[i]), total, 0)
    return bounds


@holds_for(
    lambda machine: calls(
        machine, gradient=True, plants=False, edges=False, gates=["zero", "logsigmoid", "weak", "growth", "few-20"]
    ),
    machines=("numpy",),
)
def slopes(call, machine):
    """<do, J dx> by central differences in float64 is <pullback(do), dx>."""
    call = replace(
        call,
        dtype="float64",
        gate_dtype=None,
        initial=call.initial and "float64",
        state_dtype=None,
        T=min(call.T, 40) or 1,
        lengths=None,
        loudness=1.0,
        memory="plain",
        layout="bhtd",
        K=min(call.K, 20),
        V=min(call.V, 20),
    )
    if call.feature_map == "relu":
        return  # its kink has no slope
    arrays, arguments = given(call, machine)
    do, dht = call.cotangents()
    inputs = [*arrays, *flat(arguments.get("initial_state", ()))]
    rng = np.random.default_rng([call.seed, 4])
    directions = [rng.standard_normal(x.shape) for x in inputs]

    def value(step):
        moved = [x + step * d for x, d in zip(inputs, directions)]
        kept, start = dict(arguments), tuple(moved[len(arrays) :])
        if start:
            kept["initial_state"] = start if len(start) > 1 else start[0]
        parts = flat(machine.run(call.function, *moved[: len(arrays)], **kept))
        return sum(float((x * y).sum()) for x, y in zip(parts, flat((do,) if dht is None else (do, dht))))

    found = pulled(lambda *a, **k: machine.run(vjp, *a, **k), call, arrays, arguments, do, dht)
    terms = [float((x * d).sum()) for x, d in zip(found, directions, strict=True)]
    differences = [(value(h) - value(-h)) / (2 * h) for h in (1e-5, 1e-6)]
    size = sum(abs(x * d).sum() for x, d in zip(found, directions)) + abs(value(0)) + 1e-3
    error = min(abs(d - sum(terms)) for d in differences) / size
    require(error < 1e-5, f"slopes: {call.op}", f"<pullback, dx> = {sum(terms)!r}, differences give {differences}")


# -- laws --------------------------------------------------------------------------------------------------------------
def cut(call, machine, start, stop):
    """(arrays, arguments) of the tokens start:stop of a dense call."""
    arrays, arguments = given(call, machine)
    at = 1 if call.layout == "bthd" else 2
    tokens = (slice(None),) * at + (slice(start, stop),)
    arrays = [x[tokens] if "T" in axes.split() else x for x, axes in zip(arrays, call.declared.arrays.values())]
    if "mask" in arguments:
        arguments["mask"] = arguments["mask"][:, start:stop]
    return arrays, arguments | {"state_dtype": None}


@dataclass(frozen=True)
class Split:
    """A call and a token to split it at."""

    call: Call
    at: int


def splits(machine):
    ops = [name for name, (op, _) in FUNCTIONS.items() if op.state]
    return st.builds(
        Split, calls(machine, ops=ops, plants=False).map(lambda c: replace(c, lengths=None)), st.integers(0, 130)
    )


@holds_for(splits)
def split_is_whole(split, machine):
    """Up to a token and on from its state is one pass."""
    call = replace(split.call, final=True, state_dtype=None)
    at, T = split.at % (call.T + 1), call.T
    arrays, arguments = given(call, machine)
    whole = home(machine, call, run(machine, call, arrays, arguments))
    first, second = ((at, T), (0, at)) if call.reverse else ((0, at), (at, T))
    arrays, arguments = cut(call, machine, *first)
    o_first, state = run(machine, call, arrays, arguments)
    arrays, arguments = cut(call, machine, *second)
    o_second, end = run(machine, call, arrays, arguments | {"initial_state": state})
    parts = [swap_heads(machine.tohost(x), call.declared.out, call.layout) for x in (o_first, o_second)]
    o = np.concatenate(parts[::-1] if call.reverse else parts, axis=2)
    found = [o, *map(machine.tohost, flat(end))]
    wanted = truth(call, call.arrays().values(), call.arguments())
    must = [np.isfinite(double(x)) & y for x, y in zip(whole, finite_alike(machine, call, wanted))]
    judge_call("split", call, found, [double(x) for x in whole], [2 * x for x in bounded(call)], must)


@holds_for(lambda machine: calls(machine).filter(lambda call: call.lengths is not None))
def packed_is_one_by_one(call, machine):
    """Every packed sequence is what it is alone."""
    arrays, arguments = given(call, machine)
    together = home(machine, call, run(machine, call, arrays, arguments))
    wanted = truth(call, call.arrays().values(), call.arguments())
    bounds, must = bounded(call), finite_alike(machine, call, wanted)
    start = 0
    for n, length in enumerate(call.lengths):
        arrays, arguments = cut(call, machine, start, start + length)
        arguments.pop("state_dtype") if not call.declared.state else arguments.update(state_dtype=call.state_dtype)
        del arguments["cu_seqlens"]
        if "initial_state" in arguments:
            own = tuple(x[n : n + 1] for x in flat(arguments["initial_state"]))
            arguments["initial_state"] = own if len(own) > 1 else own[0]
        alone = home(machine, call, run(machine, call, arrays, arguments))
        stop = start + length
        parts = [x[:, :, start:stop] if i == 0 else x[n : n + 1] for i, x in enumerate(together)]
        limits = [x[:, :, start:stop] if i == 0 else x[n : n + 1] for i, x in enumerate(bounds)]
        where = [x[:, :, start:stop] if i == 0 else x[n : n + 1] for i, x in enumerate(must)]
        where = [x & np.isfinite(double(y)) for x, y in zip(where, alone)]
        judge_call("packed", call, parts, [double(x) for x in alone], [2 * x for x in limits], where)
        start = stop


@holds_for(lambda machine: calls(machine))
def the_past_is_the_past(call, machine):
    """No token before one that is not finite, of its own sequence or another, row or head, is moved by it."""
    if not call.plants or not call.causal or call.gate in GROWING:
        return
    sound = replace(call, plants=())
    before, after = results(machine, sound)[0], results(machine, call)[0]
    reached = reached_by_plants(call, 1) | excused(call, machine)
    bound = bounded(sound)[0]
    judge(
        f"past: {call.op}{where_planted(call)}",
        after,
        double(before),
        2 * bound,
        ~reached & np.isfinite(double(before)),
        call.dtype,
        least=least(call),
    )


def reached_by_plants(call, block):
    """[B, HV, T, 1]: all behind a planted number in its sequence, and before it within a block of so many tokens."""
    reached, keep = np.zeros((*call.shape("B H T V")[:3], 1), bool), call.arguments().get("mask")
    ends = np.cumsum([0, *(call.lengths or (call.T,))])
    for name, token, place, _ in call.plants:
        shape = call.shape_of(name)
        if not np.prod(shape):
            continue
        b, head, *_ = np.unravel_index(place % (int(np.prod(shape)) // call.T), shape[:2] + shape[3:])
        if keep is not None and not keep[b, token]:
            continue
        sequence = int(np.searchsorted(ends, token, side="right")) - 1
        start, stop = ends[sequence], ends[sequence + 1]
        if call.reverse:
            future = slice(start, stop - (stop - 1 - token) // block * block)
        else:
            future = slice(start + (token - start) // block * block, stop)
        own = name in with_value_heads(call.declared)
        heads = [head] if own else range(head * call.groups, (head + 1) * call.groups)
        for h in heads:
            reached[b, h, future] = True
    return reached


def growth(call):
    """The most nats by which a channel's gates above 0 let a state grow, on either side."""
    gates = (x for name, x in call.arrays().items() if name in ("g", "gv", "w"))
    return sum(np.maximum(np.nan_to_num(double(x)), 0).sum(2).max(initial=0) for x in gates)


def excused(call, machine, gradient=False):
    """[B, HV, T, 1]: where the docstrings let kernels that multiply whole blocks have a NaN of the block's future.

    A gate's gradient, which is summed up from the end, may have it in the whole sequence. Growth of a chunk beyond
    float32 may leave NaN in the gradients of its earlier tokens.
    """
    if not isinstance(machine, Kernels) or call.mode == "recurrent" and not gradient:
        return np.zeros((1, 1, 1, 1), bool)
    if gradient and growth(call) > MOST_GROWTH:
        return np.ones((1, 1, 1, 1), bool)
    return reached_by_plants(call, max(call.T, 1) if gradient else max(128, call.chunk_size or 0))
