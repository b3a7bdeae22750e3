"""simple_gla, retention and linear_attention through gla's kernels: gradients, the gate that is read in place, what
explain says.
"""

import numpy as np
import planned
import pytest
from conftest import Kernels
from emulator import EmulatedDevice
from reference import (
    DECAYS,
    LIMITS,
    assert_close,
    deviation_of_dg,
    double,
    draw,
    draw_states,
    errors,
    flat,
    rms,
    same_bits,
    size_of_gate_terms,
    size_of_terms,
    stated,
    whole,
)

from linattn_np import linear_attention, retention, simple_gla, vjp
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import PLANNERS, scalar_decay
from linattn_np.layouts import swap_heads
from linattn_np.ops import OPS

OPERATORS = {
    "simple_gla": (simple_gla, {}),
    "retention": (retention, {"gamma": [0.9, 0.0]}),
    "linear_attention": (linear_attention, {}),
    "elu": (linear_attention, {"feature_map": "elu"}),
    "relu-normalized": (linear_attention, {"feature_map": "relu", "normalize": True}),
    "exp-normalized": (linear_attention, {"feature_map": "exp", "normalize": True}),
    "normalized": (linear_attention, {"normalize": True, "feature_map": None}),
}
DECLARED = {function: op for op, function in OPS.items()}
SCALAR = [op for op in OPS if PLANNERS.get(op) is scalar_decay]
SIZES = {"B": 2, "H": 2, "T": 70, "K": 16, "V": 24, "N": 2}
CASES = {
    "float32": {},
    "bfloat16": {"dtype": BFLOAT16},
    "float16": {"dtype": np.float16, "gate": "some-inf"},
    "uneven": {"sizes": {"K": 20, "V": 11, "T": 17}},
    "bthd": {"dtype": BFLOAT16, "layout": "bthd"},
    "packed": {"sizes": {"B": 1, "N": 5}, "cu_seqlens": [0, 0, 33, 34, 70, 70]},
    "empty": {"sizes": {"T": 0}},
    "reverse": {"dtype": BFLOAT16, "reverse": True},
    "v-first": {"state_v_first": True},
    "stateless": {"stateless": True},
    "gate32": {"dtype": BFLOAT16, "gate_dtype": np.float32, "gate": "all-20"},
}


BACKENDS = Kernels


def mapped(f, x):
    return tuple(map(f, x)) if isinstance(x, tuple) else f(x)


@pytest.mark.pairwise
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients(backend, rng, operator, case):
    """Those of NumPy in float64, which test_gradients holds to finite differences."""
    function, options = OPERATORS[operator]
    given = {
        "sizes": {},
        "dtype": np.float32,
        "gate": "logsigmoid",
        "gate_dtype": None,
        "layout": "bhtd",
        "stateless": False,
    } | CASES[case]
    op, sizes = DECLARED[function], SIZES | given.pop("sizes")
    dtype, gate, gate_dtype, stateless = (given.pop(name) for name in ("dtype", "gate", "gate_dtype", "stateless"))
    arrays = draw(op, rng, sizes, dtype, gate, gate_dtype)
    if operator == "normalized":
        arrays[:2] = map(np.abs, arrays[:2])  # else a sum near 0 makes everything large
    elif operator == "relu-normalized":  # so may the sum of a first token, whose gradients are a difference of equals
        for x in arrays[:2]:
            x[..., ::2] = np.abs(x[..., ::2])
    declared = stated(op, options)
    parts = tuple(map(np.abs, draw_states(declared, rng, sizes, np.float32)))
    ends = draw_states(declared, rng, sizes, np.float32)
    if given.get("state_v_first"):
        parts, ends = (tuple(x.swapaxes(2, 3) if x.ndim == 4 else x for x in those) for those in (parts, ends))
    start, dht = whole(parts), whole(ends)
    do = rng.standard_normal([sizes[axis] for axis in op.out.split()]).astype(dtype)
    layout = given["layout"]

    def turned(x, axes):
        return np.ascontiguousarray(swap_heads(x, axes, layout))

    def gradients(run, convert, **more):
        there = [convert(turned(x, axes)) for x, axes in zip(arrays, op.arrays.values())]
        state = {} if stateless else {"initial_state": mapped(convert, start), "output_final_state": True}
        result, pull = run(vjp, function, *there, **options, **given, **state, **more)
        return flat(result), flat(pull(convert(turned(do, op.out)), None if stateless else mapped(convert, dht)))

    results, found = gradients(backend.run, backend.asarray)
    results_exact, wanted = gradients(lambda f, *arrays, **more: f(*arrays, **more), double, mode="recurrent")
    for x, y in zip(results, results_exact, strict=True):
        assert_close("result", backend.tohost(x), y, dtype)
    for name, x, y, like in zip([*op.arrays, "S", "z"], map(backend.tohost, found), wanted, [*arrays, *parts]):
        assert x.dtype == like.dtype
        if name in DECAYS:  # sums of a token's q dq - k dk, of which a strong decay leaves no more than their rounding
            q, k = (double(turned(x, axes)) for x, axes in zip(arrays[:2], op.arrays.values()))
            terms = np.hypot(*(np.linalg.norm(x * dx, axis=-1) for x, dx in zip((q, k), wanted)))
            assert rms(double(x) - y) <= LIMITS[np.dtype(dtype).name][0] * max(rms(y), rms(terms)), name
        else:
            # rows that cancel: dv as in test_gradient_kernels.py, and the quotient's gradient is a difference
            assert_close(f"d{name}", x, y, dtype, rows=10)


@pytest.mark.parametrize("operator", OPERATORS)
def test_views_of_any_strides(backend, rng, operator):
    """Columns side by side in memory, axes backwards or repeated: what their copies give."""
    function, options = OPERATORS[operator]
    arrays = [
        np.abs(x) if name in "qk" else x
        for name, x in zip(DECLARED[function].arrays, draw(DECLARED[function], rng, SIZES, np.float32))
    ]
    wanted = backend.tohost(backend.run(function, *map(backend.asarray, arrays), **options))
    columns = [backend.asarray(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2) for x in arrays]
    backwards = [backend.asarray(np.ascontiguousarray(x[:, :, ::-1]))[:, :, ::-1] for x in arrays]
    for views in (columns, backwards):
        assert_close(operator, backend.tohost(backend.run(function, *views, **options)), wanted, np.float32)


def test_scalar_decay_is_read_in_place(device, rng):
    """On Hopper nothing but the one pass runs, for any strides of a float32 gate; elsewhere the gate is spread
    first.
    """
    sizes = {"B": 2, "H": 3, "T": 100, "K": 64, "V": 64}
    for op in SCALAR:
        host = draw(op, rng, sizes, BFLOAT16, gate_dtype=np.float32)
        wanted = OPS[op](*map(double, host), mode="recurrent")
        arrays = [device.upload(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in host]
        problem = op.bind(arrays)
        o, _ = planned.run(problem, device)
        one_pass, plan = device.capability == 90, planned.plan_of(problem, device)
        assert planned.names(plan) == (
            ["scalar_decay_sm90_weighted_sums"] if one_pass else ["elementwise_feature_map", "gated_forward"]
        )
        assert (plan.copies == ()) == one_pass
        assert_close(op.name, planned.host(o), wanted, BFLOAT16, terms=size_of_terms(OPS[op], host))


@pytest.mark.pairwise("gate", "gate_dtype", "K", "V")
@pytest.mark.parametrize(
    "gate, gate_dtype, K, V",
    [
        ("weak", BFLOAT16, 64, 64),
        ("some-inf", np.float32, 64, 128),
        ("spikes-40", BFLOAT16, 128, 128),
        ("all-20", np.float32, 128, 72),
    ],
)
def test_scalar_decay_in_segments(backend, rng, gate, gate_dtype, K, V):
    """Few heads and many tokens: Hopper cuts the sequence."""
    arrays = draw(DECLARED[simple_gla], rng, {"B": 1, "H": 1, "T": 1100, "K": K, "V": V}, BFLOAT16, gate, gate_dtype)
    start = rng.standard_normal((1, 1, K, V)).astype(np.float32)
    wanted = simple_gla(*map(double, arrays), initial_state=double(start), output_final_state=True, mode="recurrent")
    found = backend.run(
        simple_gla, *map(backend.asarray, arrays), initial_state=backend.asarray(start), output_final_state=True
    )
    o, state = map(backend.tohost, found)
    assert_close("o", o, wanted[0], BFLOAT16, terms=size_of_terms(simple_gla, arrays, initial_state=start))
    assert_close("state", state, wanted[1], BFLOAT16)


MANY_HEADS = 70  # more than half as many as a card has multiprocessors: Hopper's blocks take all columns of V


@pytest.mark.pairwise
@pytest.mark.parametrize("gate_dtype", [BFLOAT16, np.float32], ids=["gate16", "gate32"])
def test_scalar_decay_of_many_heads(backend, rng, gate_dtype):
    arrays = draw(
        DECLARED[simple_gla],
        rng,
        {"B": 1, "H": MANY_HEADS, "T": 70, "K": 128, "V": 128},
        BFLOAT16,
        "some-inf",
        gate_dtype,
    )
    found = backend.tohost(backend.run(simple_gla, *map(backend.asarray, arrays)))
    wanted = simple_gla(*map(double, arrays), mode="recurrent")
    assert_close("o", found, wanted, BFLOAT16, terms=size_of_terms(simple_gla, arrays))


@pytest.mark.parametrize(
    "heads, T, forward, backward",
    [  # columns of V a block, segments
        (MANY_HEADS, 70, (128, 1), (128, 1)),
        (2, 70, (64, 1), (64, 1)),
        (11, 300, (64, 1), (64, 2)),
        (11, 1400, (128, 10), (64, 2)),
        (64, 2048, (64, 1), (128, 1)),
    ],
)
def test_how_wide_the_blocks_of_a_scalar_decay_are(heads, T, forward, backward):
    arrays = [np.zeros((1, heads, T, 128), BFLOAT16)] * 3
    for gradient, wanted in ((False, forward), (True, backward)):
        found = planned.plan_of(DECLARED[retention].bind(arrays, gradient=gradient), EmulatedDevice(90)).tiles
        assert (found["BV"], found.get("segments", 1)) == wanted


SCALAR_DECAYS = {
    "logsigmoid-1": {"gate": "logsigmoid", "T": 1, "B": 16},  # one token: rows enough for a figure of them all
    **{
        f"{gate}-{T}": {"gate": gate, "T": T}
        for gate, T in (
            ("weak", 31),
            ("zero", 32),
            ("minus_zero", 33),
            ("all-20", 64),
            ("some-inf", 97),
            ("some-1e30", 70),
            ("spikes-40", 100),
            ("all-inf", 40),
            ("all-1e30", 40),
            ("positive", 90),
            ("positive", 300),
        )
    },
    "gate16": {"gate": "some-inf", "gate_dtype": BFLOAT16},
    "gate16-wide": {"K": 128, "V": 128, "gate_dtype": BFLOAT16},
    "gate16-packed": {"bounds": [0, 0, 33, 34, 70, 70], "gate_dtype": BFLOAT16},
    "wide": {"K": 128, "V": 128},
    "wide-keys": {"K": 72, "V": 24},
    "wide-values": {"K": 24, "V": 104},
    "no-dht": {"dht": False},
    "no-states": {"dht": False, "start": False},
    "packed": {"bounds": [0, 0, 33, 34, 70, 70]},
    "packed-bthd": {"bounds": [0, 5, 69, 70], "layout": "bthd"},
    "bthd": {"layout": "bthd", "H": 3, "B": 2},
    "segments": {"T": 1100, "H": 1, "K": 128, "V": 72},
    "segments-strong": {"T": 1040, "H": 1, "gate": "spikes-40", "dht": False},
    "segments-packed": {"T": 1110, "H": 1, "bounds": [0, 0, 1100, 1110]},
}


def under_scalar_decay(
    rng,
    *,
    function=simple_gla,
    B=1,
    H=2,
    T=70,
    K=64,
    V=64,
    gate="logsigmoid",
    gate_dtype=np.float32,
    dht=True,
    start=True,
    bounds=None,
    layout="bhtd",
    **options,
):
    """Of a call in bfloat16: f(run, convert) that gives gradients, those of NumPy in float64, and f() that gives the
    limit of dg's error."""
    op, sizes = DECLARED[function], {"B": B, "H": H, "T": T, "K": K, "V": V, "N": len(bounds) - 1 if bounds else B}
    arrays = draw(op, rng, sizes, BFLOAT16, gate, gate_dtype)
    (state,), (end,) = (draw_states(op, rng, sizes, np.float32) for _ in range(2))
    do = rng.standard_normal((B, H, T, V)).astype(BFLOAT16)
    turned = [np.ascontiguousarray(swap_heads(x, axes, layout)) for x, axes in zip(arrays, op.arrays.values())]
    options |= {"cu_seqlens": bounds} if bounds else {}

    def gradients(run, convert, **more):
        given = {"initial_state": convert(state)} if start else {}
        _, pull = run(
            vjp, function, *map(convert, turned), layout=layout, output_final_state=True, **options, **given, **more
        )
        return pull(convert(np.ascontiguousarray(swap_heads(do, op.out, layout))), convert(end) if dht else None)

    wanted = gradients(lambda f, *arrays, **more: f(*arrays, backend="numpy", **more), double, mode="recurrent")

    def limit_of_dg():
        """Six standard deviations of bfloat16's part, and float32's."""
        given = options | {"initial_state": state if start else None}
        limit = 6 * deviation_of_dg(T) * rms(size_of_gate_terms(rng, arrays, do, end if dht else None, **given))
        if dht:
            dk = swap_heads(wanted[1], op.arrays["k"], layout)
            limit += CANCELS * np.abs((double(arrays[1]) * dk).sum(-1)).max()
        return limit

    return gradients, wanted, limit_of_dg


# Of dq, dk, dv and dh0: at most three roundings to bfloat16, of 1.67e-3 each, meet in a number: of a decayed value, of
# the state to which it has been added, and of the result: 2.89e-3. A number that comes from scores has two. The largest
# mean of 16 draws of a case is 2.86e-3, their deviation 3.1e-5: six deviations above the model.
SUMS = 3.1e-3
# The same on other cards for a gate without a gradient, by GLA's kernels: decayed queries and keys are bfloat16, too
SUMS_OF_CHANNELS = LIMITS["bfloat16"][0]
CANCELS = 4e-7  # of float32: what comes in with the gradient of a final state, before a strong decay


@pytest.mark.pairwise(half="case")
@pytest.mark.parametrize("case", SCALAR_DECAYS)
def test_gradients_under_scalar_decay(backend, rng, case):
    """With the digits of bfloat16; the gate's own with those of what it is a sum of."""
    gradients, wanted, limit_of_dg = under_scalar_decay(rng, **SCALAR_DECAYS[case])
    found = list(map(backend.tohost, gradients(backend.run, backend.asarray)))
    for name, x, y in zip(("dq", "dk", "dv", "dg", "dh0"), found, wanted):
        if name == "dg":
            assert x.dtype == SCALAR_DECAYS[case].get("gate_dtype", np.float32) and x.shape == y.shape
            assert rms(double(x) - y) <= limit_of_dg()
        else:
            assert errors(x, y)[0] <= SUMS, name


OWN_SIZE = {
    **{f"{gate}-{T}": {"gate": gate, "T": T} for gate in ("weak", "logsigmoid", "all-20") for T in (300, 1100)},
    **{f"zero-{T}": {"gate": "zero", "T": T, "H": 4} for T in (300, 1100)},
    **{f"{gate}-300": {"gate": gate, "T": 300} for gate in ("spikes-40", "some-inf")},
    "all-20-wide": {"gate": "all-20", "T": 600, "K": 128, "V": 72},
    "all-20-packed": {"gate": "all-20", "T": 700, "bounds": [0, 300, 301, 700]},
    "reversed": {"gate": "spikes-40", "T": 300, "reverse": True},
}


@pytest.mark.pairwise(half="case")
@pytest.mark.parametrize("dht", [False, True], ids=["no-dht", "dht"])
@pytest.mark.parametrize("case", OWN_SIZE)
def test_no_gate_drowns_its_gradient(backend, rng, case, dht):
    """dg is right to the size of its terms, which strong gates make far smaller than what every token gives by itself:
    the own weight of a token, which no gate touches, stays out of it; so does what the gradient of a final state gives
    tokens that no gate follows, to float32."""
    given = {"H": 1, "K": 64, "V": 64} | OWN_SIZE[case]
    gradients, wanted, limit_of_dg = under_scalar_decay(rng, dht=dht, **given)
    found = double(backend.tohost(gradients(backend.run, backend.asarray)[3]))
    assert rms(found - wanted[3]) <= limit_of_dg()


FIXED = {
    **{f"{gamma}-{T}": {"gamma": gamma, "T": T, "K": 128} for gamma in ([0.9, 0.0], [1.0, 0.5]) for T in (70, 1100)},
    "wide": {"K": 128, "V": 128},
    "wide-keys": {"K": 72, "V": 24},
    "wide-values": {"K": 24, "V": 104},
    "token": {"T": 1, "H": 3},
    "no-dht": {"dht": False},
    "no-states": {"dht": False, "start": False},
    "unscaled": {"scale": 1.0},
    "scaled-to-0": {"scale": 0.0},
    "packed-bthd": {"bounds": [0, 0, 33, 64, 65, 150], "T": 150, "layout": "bthd"},
    "many-heads": {"H": 7, "T": 70, "K": 128, "V": 104, "multiprocessors": 12},
    **{f"dq-apart-{V}": {"H": 6, "T": 70, "K": 128, "V": V, "multiprocessors": 12} for V in (24, 128)},
    "dq-apart-wide-values": {"H": 6, "T": 66, "K": 24, "V": 104, "multiprocessors": 12},
    "segments-packed": {"T": 1110, "H": 1, "K": 128, "V": 72, "bounds": [0, 0, 1100, 1110]},
}


@pytest.mark.pairwise(half="case")
@pytest.mark.parametrize("case", FIXED)
def test_gradients_under_fixed_decays(backend, rng, monkeypatch, case):
    """Without a gradient of the gate three sums at once."""
    sizes = FIXED[case].copy()
    monkeypatch.setattr(type(backend.device), "multiprocessors", sizes.pop("multiprocessors", 132))
    gradients, wanted, _ = under_scalar_decay(rng, function=retention, **sizes)
    limit = SUMS if backend.device.capability == 90 else SUMS_OF_CHANNELS
    for name, x, y in zip(("dq", "dk", "dv", "dh0"), gradients(backend.run, backend.asarray), wanted):
        assert errors(backend.tohost(x), y)[0] <= limit, name


@pytest.mark.parametrize(
    "multiprocessors, heads, K, kernels",
    [
        (132, 44, 128, ["Gradients 128"]),
        (132, 64, 128, ["Queries 64", "Keys 128"]),
        (132, 64, 64, ["Gradients 64"]),
        (132, 70, 128, ["Gradients 128"]),
        (132, 256, 128, ["Gradients 128"]),
        (12, 7, 128, ["Gradients 128"]),
        (12, 6, 128, ["Queries 64", "Keys 128"]),
    ],
)  # those of FIXED
def test_which_sums_are_made_at_once(monkeypatch, multiprocessors, heads, K, kernels):
    """Those whose blocks leave least of the card idle."""
    device = EmulatedDevice(90)
    monkeypatch.setattr(device, "multiprocessors", multiprocessors, raising=False)
    problem = DECLARED[retention].bind([np.zeros((1, heads, 70, K), BFLOAT16)] * 3, gradient=True)
    found = planned.plan_of(problem, device).kernels
    assert [f"{kernel.what} {kernel.BV}" for kernel in found] == kernels


@pytest.mark.parametrize(
    "heads, T, K, kernels, segments",
    [
        (64, 2048, 128, ["GatedQueries 64", "GatedKeys 128"], 1),
        (64, 2048, 64, ["GatedQueries 64", "GatedKeys 64"], 2),
        (256, 4096, 128, ["GatedQueries 128", "GatedKeys 128"], 1),
        (16, 32768, 128, ["GatedQueries 64", "GatedKeys 128"], 4),
    ],
)
def test_how_the_gates_gradient_is_made(heads, T, K, kernels, segments):
    arrays = [*[np.zeros((1, heads, T, K), BFLOAT16)] * 3, np.zeros((1, heads, T), np.float32)]
    plan = planned.plan_of(DECLARED[simple_gla].bind(arrays, gradient=True), EmulatedDevice(90))
    sums = [f"{kernel.what} {kernel.BV}" for kernel in plan.kernels if kernel.name.endswith("weighted_sums")]
    assert sums == [f"BothSummaries {K}"] * (segments > 1) + kernels
    assert plan.tiles.get("segments", 1) == segments
    assert plan.scratch <= 1.5 * sum(x.nbytes for x in arrays)


@pytest.mark.pairwise
@pytest.mark.parametrize("T", [70, 1100])
def test_the_same_gradients_again_the_same_bits(backend, rng, T):
    gradients, *_ = under_scalar_decay(rng, T=T)
    first, second = (list(map(backend.tohost, gradients(backend.run, backend.asarray))) for _ in range(2))
    assert all(map(same_bits, first, second))


@pytest.mark.parametrize("gate_dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("T", [70, 1100])
def test_what_a_pullback_under_scalar_decay_takes(rng, T, gate_dtype):
    """On Hopper two kernels, or all at once where no gradient of a gate is asked for, and no gradient nobody asks
    for. The two read a bfloat16 gate, and write its gradient, as they are; segments are summarised in float32."""
    for op in SCALAR:
        device = planned.Noting(90)
        problem = op.bind(
            draw(op, rng, {"B": 1, "H": 2, "T": T, "K": 64, "V": 64}, BFLOAT16, gate_dtype=gate_dtype), gradient=True
        )
        gradients, _ = planned.pull(problem, device, problem["v"], None)
        plan = planned.plan_of(problem, device)
        names = [name.removeprefix("scalar_decay_sm90_") for name in planned.names(plan)]
        converted = ["elementwise_feature_map"] * (bool(op.gates) and gate_dtype == BFLOAT16 and T > 1000)
        segments = ["weighted_sums", "gated_scan_both_ways"] * (T > 1000)
        assert names == converted + segments + ["weighted_sums"] * (1 + bool(op.gates)) + converted
        assert tuple(device.launched) == plan.kernels
        assert len(gradients) == len(op.arrays)
        taken = sum(x.nbytes for x in device.made if not any(x is gradient for gradient in gradients))
        assert taken == plan.scratch


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_replay_does_what_the_plan_does(rng, operator, capability, monkeypatch):
    (function, options), device = OPERATORS[operator], EmulatedDevice(capability)
    op = DECLARED[function]
    problems = [op.bind(draw(op, rng, SIZES | {"V": 16}, BFLOAT16), **options) for _ in range(3)]
    wanted = [planned.run(problem, device)[0] for problem in problems]
    found = [planned.replayed(problems[0], device)[0]]
    planned.forbid_planning(monkeypatch, op)
    found += [planned.replayed(problem, device)[0] for problem in problems[1:]]
    assert all(map(same_bits, found, wanted))


@pytest.mark.pairwise
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_replayed_pullback_does_what_the_plan_does(rng, operator, capability, monkeypatch):
    (function, options), device = OPERATORS[operator], EmulatedDevice(capability)
    op = DECLARED[function]
    problems = [op.bind(draw(op, rng, SIZES | {"V": 16}, BFLOAT16), gradient=True, **options) for _ in range(3)]
    wanted = [planned.pull(problem, device, problem["v"], None)[0] for problem in problems]
    found = [planned.replayed_pull(problems[0], device, problems[0]["v"], None)[0]]
    planned.forbid_planning(monkeypatch, op)
    found += [planned.replayed_pull(problem, device, problem["v"], None)[0] for problem in problems[1:]]
    assert all(same_bits(x, y) for left, right in zip(found, wanted) for x, y in zip(left, right, strict=True))


def test_the_normaliser_is_one_more_column(backend, rng):
    q, k, v = draw(DECLARED[linear_attention], rng, SIZES | {"V": 256, "T": 20}, np.float32)
    arrays = abs(q), abs(k), v  # so that no normaliser is near 0
    o, pull = backend.run(
        lambda *a, **given: vjp(linear_attention, *a, normalize=True, **given), *map(backend.asarray, arrays)
    )
    o_exact, exact = vjp(linear_attention, *map(double, arrays), normalize=True, backend="numpy")
    assert errors(backend.tohost(o), o_exact)[0] < 2e-5
    do = rng.standard_normal(o.shape).astype(np.float32)  # o itself would cancel: it is a mean of v
    for x, y in zip(pull(backend.asarray(do)), exact(double(do)), strict=True):
        assert errors(backend.tohost(x), y)[0] < 4e-5  # as other gradients: twice the result's


def test_segments_of_blocks_that_share_a_multiprocessor(card, rng):
    """Products read their operands' registers late there: what the next chunk leaves in these is not read."""
    q, k, v, do = (card.asarray(rng.standard_normal((1, 16, 2048, 128)).astype(BFLOAT16)) for _ in range(4))
    g = card.asarray((-np.abs(rng.standard_normal((1, 16, 2048))) / 16).astype(BFLOAT16))
    first, again = ([*map(card.tohost, vjp(simple_gla, q, k, v, g)[1](do))] for _ in range(2))
    for name, x, y in zip(("dq", "dk", "dv", "dg"), first, again, strict=True):
        assert np.isfinite(double(x)).all() and same_bits(x, y), name
