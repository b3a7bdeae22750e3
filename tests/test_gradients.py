"""Gradients in float64: against finite differences, and what any right gradient obeys. The kernels' are held to these
in test_gradient_kernels."""

import numpy as np
import pytest
from conftest import Kernels, made
from reference import DECAYS, assert_close, draw, draw_states, flat, rms, same_bits, stated

from linattn_np import (
    ContractError,
    NotSupported,
    gla,
    hgrn2,
    linear_attention,
    rwkv6,
    simple_gla,
    softmax_attention,
    vjp,
)
from linattn_np.array_kinds import BFLOAT16
from linattn_np.ops import OPS

VARIANTS = {
    "gla": (gla, {}),
    "rwkv6": (rwkv6, {"scale": 1.0}),
    "hgrn2": (hgrn2, {}),
    "simple_gla": (simple_gla, {}),
    "retention": (next(f for op, f in OPS.items() if op.name == "retention"), {"gamma": 0.8}),
    "linear_attention": (linear_attention, {}),
    "linear_attention-elu": (linear_attention, {"feature_map": "elu"}),
    "linear_attention-relu": (linear_attention, {"feature_map": "relu"}),
    "linear_attention-exp": (linear_attention, {"feature_map": "exp"}),
    "linear_attention-elu-normalized": (linear_attention, {"feature_map": "elu", "normalize": True}),
    "linear_attention-exp-normalized": (linear_attention, {"feature_map": "exp", "normalize": True}),
    "softmax_attention": (softmax_attention, {}),
    "softmax_attention-full": (softmax_attention, {"causal": False}),
}
DECLARED = {function: op for op, function in OPS.items()}
SMALL = {"B": 2, "H": 2, "T": 6, "K": 3, "V": 2}
LONG = {"B": 1, "H": 2, "T": 37, "K": 5, "V": 3}  # three chunks of 16


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        able = [
            name
            for name, backend in metafunc.config.backends.items()
            if backend.gradients and not issubclass(backend, Kernels)  # test_gradient_kernels has those
        ]
        cases = [
            (name, variant, mode)
            for name in able
            for variant, (function, _) in VARIANTS.items()
            for mode in metafunc.config.backends[name].modes[DECLARED[function].name]
        ]
        if "mode" in metafunc.fixturenames:
            metafunc.parametrize("backend, variant, mode", cases, indirect=["backend"])
        else:
            metafunc.parametrize("backend", able, indirect=True)


class Call:
    """An operator's call and its vjp as functions of the arrays and, where there is one, the initial state."""

    def __init__(self, variant, mode, sizes, rng, *, dtype=np.float64, gate="logsigmoid", bounds=None, initial=True):
        self.function, self.options = VARIANTS[variant]
        self.op = DECLARED[self.function]
        self.declared = stated(self.op, self.options)
        self.rng = rng
        self.sizes = {**sizes, "N": len(bounds) - 1 if bounds else sizes["B"]}
        self.arrays = draw(self.op, rng, self.sizes, dtype, gate)
        self.start = draw_states(self.declared, rng, self.sizes, np.float64 if dtype == np.float64 else np.float32)
        self.start = self.start if initial else ()
        self.fixed = {"mode": mode, **self.options}
        if bounds:
            self.fixed["cu_seqlens"] = bounds
        if mode in ("chunk", "staged"):
            self.fixed["chunk_size"] = 16
        if self.declared.state:
            self.fixed["output_final_state"] = True

    @property
    def inputs(self):
        return [*self.arrays, *self.start]

    @property
    def names(self):
        return [*self.op.arrays, *("initial_state" for _ in self.start)]

    def arguments(self, inputs):
        arrays, start = inputs[: len(self.arrays)], tuple(inputs[len(self.arrays) :])
        return arrays, {**self.fixed, **({"initial_state": start if len(start) > 1 else start[0]} if start else {})}

    def results(self, inputs):
        """(o, *final state parts)."""
        arrays, arguments = self.arguments(inputs)
        return flat(self.function(*arrays, **arguments))

    def pullback(self, inputs=None):
        arrays, arguments = self.arguments(self.inputs if inputs is None else inputs)
        result, pull = vjp(self.function, *arrays, **arguments)
        return flat(result), lambda do, *dht: flat(pull(do, *((dht if len(dht) > 1 else dht[0],) if dht else ())))

    def cotangents(self):
        return [self.rng.standard_normal(x.shape).astype(x.dtype) for x in self.results(self.inputs)]


def dot(xs, ys):
    return sum(
        float((np.asarray(x, np.float64) * np.asarray(y, np.float64)).sum()) for x, y in zip(xs, ys, strict=True)
    )


def differences(call, weights, which, places, step=1e-6):
    """d<weights, results> / d(inputs[which]) at the flat `places`, central differences."""
    found = []
    for place in places:
        values = []
        for side in (step, -step):
            inputs = [x.copy() for x in call.inputs]
            inputs[which].ravel()[place] += side
            values.append(dot(weights, call.results(inputs)))
        found.append((values[0] - values[1]) / (2 * step))
    return np.array(found)


def assert_gradients(call, places_each=None):
    weights = call.cotangents()
    results, pull = call.pullback()
    for x, again in zip(results, call.results(call.inputs), strict=True):
        assert_close("vjp's result", x, again, x.dtype)
    gradients = pull(*weights)
    assert len(gradients) == len(call.inputs)
    for which, (name, x, gradient) in enumerate(zip(call.names, call.inputs, gradients)):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype, name
        places = np.arange(x.size)
        if places_each is not None and x.size > places_each:
            places = call.rng.choice(x.size, places_each, replace=False)
        wanted = differences(call, weights, which, places)
        error = np.abs(gradient.ravel()[places] - wanted)
        size = np.sqrt(np.mean(wanted**2)) + 1e-3
        assert error.max() <= 1e-6 * max(size, 1), f"d{name}: off by {error.max():.1e} where gradients are {size:.1e}"


@pytest.mark.pairwise(half="variant")
def test_every_entry_matches_finite_differences(backend, variant, mode, rng):
    assert_gradients(Call(variant, mode, SMALL, rng))


@pytest.mark.pairwise(half="variant")
def test_across_chunks_matches_finite_differences(backend, variant, mode, rng):
    assert_gradients(Call(variant, mode, LONG, rng), places_each=25)


@pytest.mark.pairwise(half="variant")
def test_packed_with_empty_sequences_matches_finite_differences(backend, variant, mode, rng):
    sizes = {"B": 1, "H": 1, "T": 24, "K": 3, "V": 2}
    assert_gradients(Call(variant, mode, sizes, rng, bounds=[0, 0, 5, 6, 6, 24, 24]), places_each=25)


def test_one_token_matches_finite_differences(backend, variant, mode, rng):
    assert_gradients(Call(variant, mode, {**SMALL, "T": 1}, rng))


def test_without_states(backend, variant, mode, rng):
    call = Call(variant, mode, SMALL, rng, initial=False)
    call.fixed.pop("output_final_state", None)
    assert_gradients(call, places_each=6)


def test_transpose(backend, variant, mode, rng):
    """<do, J dx> = <J^T do, dx> along a random direction."""
    call = Call(variant, mode, LONG, rng)
    weights, direction = call.cotangents(), [rng.standard_normal(x.shape) for x in call.inputs]
    _, pull = call.pullback()
    step = 1e-6
    ahead, behind = (call.results([x + side * d for x, d in zip(call.inputs, direction)]) for side in (step, -step))
    forward = dot(weights, [(a - b) / (2 * step) for a, b in zip(ahead, behind)])
    backward = dot(pull(*weights), direction)
    assert np.isclose(forward, backward, rtol=1e-6, atol=1e-6 * np.sqrt(sum(x.size for x in direction)))


def test_modes_agree(backend, rng):
    """Every mode's gradient is the recurrence's, for every gate it may meet."""
    for variant, (function, _) in VARIANTS.items():
        op = DECLARED[function]
        for gate in (
            ("logsigmoid", "all-20", "some-inf", "all-inf", "some-1e30", "spikes-40", "positive")
            if op.gates
            else ("zero",)
        ):
            calls = [Call(variant, mode, LONG, np.random.default_rng(7), gate=gate) for mode in backend.modes[op.name]]
            weights = calls[0].cotangents()
            wanted, *others = (call.pullback()[1](*weights) for call in calls)
            for call, gradients in zip(calls[1:], others):
                for name, x, y in zip(call.names, gradients, wanted):
                    what = f"{variant}, {call.fixed['mode']}, {gate}: d{name}"
                    assert np.isfinite(y).all(), what
                    if name in DECAYS:
                        # the chunked form has it as a difference of cumulated q dq and k dk, which a strong decay
                        # makes far smaller than either: their rounding is what stays
                        q, dq = call.arrays[0], wanted[0]
                        assert np.abs(x - y).max() <= 1e-11 * max(rms(q * dq), rms(y)), what
                    else:
                        assert_close(what, x, y, np.float64, factor=10)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=["float32", "float16", "bfloat16"])
def test_narrow_dtypes(backend, variant, mode, dtype, rng):
    """Gradients come in their inputs' dtypes, near the float64 ones of the same values."""
    call = Call(variant, mode, {"B": 1, "H": 2, "T": 70, "K": 16, "V": 8}, rng, dtype=dtype)
    weights = call.cotangents()
    gradients = call.pullback()[1](*weights)
    exact = Call(variant, mode, call.sizes, rng)
    wanted = exact.pullback([np.asarray(x, np.float64) for x in call.inputs])[1](
        *(np.asarray(x, np.float64) for x in weights)
    )
    for name, x, gradient, y in zip(call.names, call.inputs, gradients, wanted):
        assert gradient.dtype == x.dtype and gradient.shape == x.shape
        assert_close(f"d{name}", gradient, y, dtype, factor=3)


def test_same_call_twice_same_bits(backend, variant, mode, rng):
    call = Call(variant, mode, LONG, rng, dtype=np.float32)
    weights = call.cotangents()
    before = [x.copy() for x in (*call.inputs, *weights)]
    _, pull = call.pullback()
    first, again, anew = pull(*weights), pull(*weights), call.pullback()[1](*weights)
    assert all(same_bits(x, y) and same_bits(x, z) for x, y, z in zip(first, again, anew, strict=True))
    assert all(same_bits(x, y) for x, y in zip((*call.inputs, *weights), before)), "an input was changed"


def test_split_sequence_equals_whole(backend, variant, mode, rng):
    """Backpropagation through the state between two calls is that through one."""
    call = Call(variant, mode, LONG, rng)
    if not call.declared.state:
        with pytest.raises(ContractError):
            vjp(call.function, *call.arrays, mode=mode)[1](call.cotangents()[0], np.zeros(1))
        return
    do, *dht = call.cotangents()
    whole = call.pullback()[1](do, *dht)
    at, axes = 21, [axes.split() for axes in call.op.arrays.values()]

    def part(tokens, start):
        return [x[:, :, tokens] if "T" in a else x for x, a in zip(call.arrays, axes)] + list(start)

    (_, *half), pull_first = call.pullback(part(slice(0, at), call.start))
    _, pull_rest = call.pullback(part(slice(at, None), half))
    rest = pull_rest(do[:, :, at:], *dht)
    first = pull_first(do[:, :, :at], *rest[len(axes) :])
    for name, a, x, y, wanted in zip(call.names, [*axes, *([["N"]] * len(call.start))], first, rest, whole):
        joined = np.concatenate([x, y], axis=2) if "T" in a else x if name == "initial_state" else x + y
        assert_close(f"d{name}", joined, wanted, np.float64, factor=100)


@pytest.mark.parametrize("gate", ["all-inf", "some-inf", "all-1e30", "all-20"])
def test_hard_gates_give_no_nan_in_float32(backend, gate, rng):
    for variant, (function, _) in VARIANTS.items():
        if DECLARED[function].gates:
            for mode in backend.modes[DECLARED[function].name]:
                call = Call(variant, mode, LONG, rng, dtype=np.float32, gate=gate)
                for name, x in zip(call.names, call.pullback()[1](*call.cotangents())):
                    assert np.isfinite(x).all(), f"{variant}, {mode}: d{name}"


def test_layouts_and_strides(backend, rng):
    """bthd in, bthd out; views of any strides."""
    q, k, v, g = draw(DECLARED[gla], rng, LONG)
    do = rng.standard_normal(v.shape)
    wanted = vjp(gla, q, k, v, g)[1](do)
    turned = [x.swapaxes(1, 2) for x in (q, k, v, g)]
    o, pull = vjp(gla, *turned, layout="bthd")
    assert o.shape == v.swapaxes(1, 2).shape
    for x, y in zip(pull(do.swapaxes(1, 2)), wanted):
        assert_close("layout", x.swapaxes(1, 2), y, np.float64)
    backwards = [np.ascontiguousarray(x[..., ::-1])[..., ::-1] for x in (q, k, v, g)]
    for x, y in zip(vjp(gla, *backwards)[1](do[:, ::1]), wanted):
        assert_close("strides", x, y, np.float64)


def test_dht_needs_no_final_state(backend, rng):
    arrays = draw(DECLARED[gla], rng, SMALL)
    do, dht = rng.standard_normal((2, 2, 6, 2)), rng.standard_normal((2, 2, 3, 2))
    o, pull = vjp(gla, *arrays)
    (o_too, _), pull_too = vjp(gla, *arrays, output_final_state=True)
    assert same_bits(o, o_too)
    assert all(same_bits(x, y) for x, y in zip(pull(do, dht), pull_too(do, dht), strict=True))


def test_backends_without_gradients_say_so(request, rng, backends):
    for name, listed in request.config.backends.items():
        if not listed.gradients:
            backend = made(name, backends)
            arrays = [backend.asarray(x) for x in draw(DECLARED[gla], rng, SMALL, np.float32)]
            with pytest.raises(NotSupported, match="gradient"):
                backend.run(lambda *arrays, **given: vjp(gla, *arrays, **given), *arrays)
