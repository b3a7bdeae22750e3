"""Sequences of at most 16 tokens: which kernels compute them, for any sizes, states and gates."""

from dataclasses import replace

import numpy as np
import planned
import pytest
from conftest import HALF, SINGLE
from planned import host
from reference import LIMITS, assert_close, assert_results, double, draw, draw_states, exact_vjp, rms, same_bits
from test_delta_kernels import Case as DeltaCase
from test_gradient_kernels import Call, Case
from test_value_gate import Case as ValueGateCase
from test_value_gate import pulled_back

from linattn_np import gla, simple_gla, vjp
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import segments
from linattn_np.backends.cupy.gated_kernels import SHORT_SEQUENCES
from linattn_np.declarations import GATED_DELTA_RULE, GLA, GLA_VALUE_GATE, KDA, RETENTION, RWKV7, SIMPLE_GLA

TOKENS = SHORT_SEQUENCES[-1]
LENGTHS = (0, 1, TOKENS, 7, 0)  # of packed sequences


def pulled(call, device):
    """(the plan of a call's pullback, its results twice), on a device."""
    options = {name: x for name, x in call.options.items() if name in ("cu_seqlens", "scale")}
    start, final = (x is not None and (device.upload(x),) for x in (call.options.get("initial_state"), call.dht))
    problem = call.op.bind(
        [device.upload(x) for x in call.arrays], gradient=True, initial_state=start[0] if start else None, **options
    )
    do, dht = device.upload(call.do), final or None
    results = [planned.pull(problem, device, do, dht) for _ in range(2)]
    return planned.plan_of_pullback(problem, device, do, dht), [
        [host(x) for x in (*gradients, *(first or ()))] for gradients, first in results
    ]


@pytest.mark.pairwise
@pytest.mark.parametrize("lengths", [(), LENGTHS], ids=["dense", "packed"])
@pytest.mark.parametrize("initial", ["float32", None], ids=["initial", ""])
@pytest.mark.parametrize("dht", [True, False], ids=["dht", ""])
@pytest.mark.parametrize("gate", ["trained", "some-inf", "all-20", "positive"])
@pytest.mark.parametrize("K, V", [(1, 3), (128, 64), (64, 33), (130, 140)])
@pytest.mark.parametrize("T", [1, 2, 7, 13, TOKENS])
@pytest.mark.parametrize(
    "dtype, gate_dtype",
    [("float32", None), ("bfloat16", None), ("float16", "float32")],
)
@pytest.mark.parametrize("op", ["gla", "rwkv6"])
def test_gradients(device, monkeypatch, rng, op, dtype, gate_dtype, T, K, V, gate, dht, initial, lengths):
    monkeypatch.setattr(segments, "takes_short_backward", lambda problem, tile: True)
    case = Case(
        T=T, K=K, V=V, B=2 - bool(lengths), H=2, dtype=dtype, gate=gate, gate_dtype=gate_dtype, lengths=lengths,
        initial=initial, dht=dht,
    )  # fmt: skip
    call = Call(op, case, rng)
    plan, (found, again) = pulled(call, device)
    assert planned.names(plan)[0] == "gated_short_backward"
    call.assert_close("short", found, call.exact[1])
    assert all(map(same_bits, found, again))


@pytest.mark.pairwise
@pytest.mark.parametrize("lengths", [(), (0, 1, 8, 7, 0), LENGTHS], ids=["dense", "packed-8", "packed"])
@pytest.mark.parametrize("final", [True, False], ids=["final", ""])
@pytest.mark.parametrize("gate", ["trained", "some-inf", "all-20", "positive"])
@pytest.mark.parametrize("K, V", [(1, 3), (128, 64), (64, 33), (130, 140), (20, 9), (300, 17)])
@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, TOKENS])
@pytest.mark.parametrize(
    "dtype, gate_dtype",
    [("float32", None), ("bfloat16", None), ("float16", "float32")],
)
@pytest.mark.parametrize("op", ["gla", "rwkv6"])
def test_outputs(device, monkeypatch, rng, op, dtype, gate_dtype, T, K, V, gate, final, lengths):
    monkeypatch.setattr(segments, "takes_short_forward", lambda problem, device: True)
    case = Case(
        T=T, K=K, V=V, B=2 - bool(lengths), H=2, dtype=dtype, gate=gate, gate_dtype=gate_dtype, lengths=lengths,
        initial=None,
    )  # fmt: skip
    call = Call(op, case, rng)
    problem = call.op.bind([device.upload(x) for x in call.arrays], **call.options)
    assert planned.names(planned.plan_of(problem, device))[-1] == "gated_short_forward"
    found, again = (planned.results(call.op, call.arrays, device, final=final, **call.options) for _ in range(2))
    assert_results(call.function, call.arrays, found, dtype, **call.options)
    assert all(map(same_bits, found, again))


@pytest.mark.parametrize("nats", [70.0, -70.0, 300.0])
def test_gates_that_cancel(device, rng, nats):
    """Growth of channels that columns take back, beyond float32 by itself, or the other way round."""
    case = ValueGateCase(T=9, K=20, V=24, regimes=("weak", "weak"))
    arrays, (start, dht) = case.drawn(rng)
    arrays[3] += np.float32(nats)
    arrays[4] -= np.float32(nats)
    do = rng.standard_normal(arrays[2].shape).astype(np.float32)
    problem = GLA_VALUE_GATE.bind([device.upload(x) for x in arrays], gradient=True, initial_state=device.upload(start))
    do_there, dht_there = device.upload(do), (device.upload(dht),)
    assert planned.names(planned.plan_of_pullback(problem, device, do_there, dht_there)) == ["gated_short_backward"]
    gradients, first = planned.pull(problem, device, do_there, dht_there)
    exact, dh0 = pulled_back(case, arrays, start, None, do, dht)
    for name, x, y in zip((*GLA_VALUE_GATE.arrays, "h0"), (*gradients, *first), (*exact, dh0), strict=True):
        assert_close(f"d{name}", host(x), y, SINGLE, factor=10)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "D, T, initial, dtype, short",
    [
        (64, 8, None, "bfloat16", True),
        (64, 9, None, "bfloat16", False),
        (64, 9, None, "float32", True),
        (64, 1, "float32", "float16", False),
        (128, TOKENS, None, "float16", True),
        (128, TOKENS + 1, None, "float16", False),
        (60, TOKENS, "float32", "bfloat16", True),
        (136, TOKENS, "float32", "bfloat16", True),
    ],
)
def test_hoppers_kernels_compute_what_they_compute_faster(hopper, rng, D, T, initial, dtype, short):
    """Of rows that they cannot read without copies, the kernel for short sequences computes all."""
    call = Call("gla", Case(T=T, K=D, V=D, dtype=dtype, gate="weak", initial=initial), rng)
    plan, _ = pulled(call, hopper)
    assert (planned.names(plan)[0] == "gated_short_backward") == short


@pytest.mark.parametrize(
    "H, T, K, V, initial, short",
    [
        (3, 3, 256, 512, False, True),
        (3, 3, 256, 512, True, False),
        (3, TOKENS + 1, 256, 512, False, False),
        (66, 3, 64, 128, False, False),
        (67, 3, 64, 128, False, True),  # more blocks than multiprocessors
        (67, 9, 64, 64, False, False),
    ],
)
def test_heads_under_a_shared_gate(H, T, K, V, initial, short):
    arrays = [np.zeros((2, H, T, width), BFLOAT16) for width in (K, K, V)]
    start = np.zeros((2, H, K, V), np.float32) if initial else None
    problem = RETENTION.bind(arrays, gradient=True, initial_state=start)
    assert ("gated_short_backward" in planned.names(planned.plan_of(problem, planned.Noting(90)))) == short


@pytest.mark.parametrize("T, kernel", [(TOKENS, "gated_short_backward"), (TOKENS + 1, "gated_backward_states")])
def test_the_longest_sequence_decides(device, rng, T, kernel):
    call = Call("gla", Case(lengths=(1, T, 2), V=20, gate="weak"), rng)
    plan, _ = pulled(call, device)
    assert planned.names(plan)[0] == kernel


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", ["auto", "chunk", "recurrent"])
@pytest.mark.parametrize("bounds", [(), (0, 0, 1, 9, 13)], ids=["dense", "packed"])
@pytest.mark.parametrize("initial", [True, False], ids=["initial", ""])
@pytest.mark.parametrize("gate", ["trained", "some-inf"])
@pytest.mark.parametrize("K, V", [(20, 33), (100, 20)])
@pytest.mark.parametrize("T", [1, 8, 9, TOKENS])
@pytest.mark.parametrize("dtype", [SINGLE, HALF, BFLOAT16], ids=str)
@pytest.mark.parametrize("op", [GATED_DELTA_RULE, KDA, RWKV7], ids=lambda op: op.name)
def test_delta_rules(kernel_backend, rng, op, dtype, T, K, V, gate, initial, bounds, mode):
    """o and gradients; the states that a walk forwards would keep are the initial ones, or computed again."""
    options = {"cu_seqlens": list(bounds)} if bounds else {}
    case = DeltaCase(op, B=2 - bool(bounds), T=bounds[-1] if bounds else T, K=K, V=V, dtype=dtype, gate=gate)
    arrays, start, do, dht = replace(case, options=options).drawn(rng)
    given = options | ({"initial_state": start} if initial else {})
    o, _, exact = exact_vjp(case.function, arrays, do, dht, **given)
    there = {name: kernel_backend.asarray(x) if name == "initial_state" else x for name, x in given.items()}
    found, pull = kernel_backend.run(vjp, case.function, *map(kernel_backend.asarray, arrays), mode=mode, **there)
    assert_close("o", kernel_backend.tohost(found), o, dtype)
    gradients = pull(kernel_backend.asarray(do), kernel_backend.asarray(dht))
    for name, x, y in zip((*op.arrays, *["initial_state"] * initial), gradients, exact, strict=True):
        if name in op.decays:  # all of it may be far below what its sums are made of
            size = max(rms(y), rms(double(arrays[0]) * exact[0]))
            assert rms(double(kernel_backend.tohost(x)) - y) <= 10 * LIMITS[dtype.name][0] * size, name
        else:
            assert_close(f"d{name}", kernel_backend.tohost(x), y, dtype, factor=10)


# -- forward -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", [GLA, SIMPLE_GLA], ids=lambda op: op.name)
@pytest.mark.parametrize(
    "N, T, K, V, dtype, given, short",
    [
        (133, 8, 64, 64, BFLOAT16, (), True),
        (132, 8, 64, 64, BFLOAT16, (), False),  # no more than there are multiprocessors
        (133, 8, 64, 64, BFLOAT16, ("final",), False),
        (133, 4, 64, 64, BFLOAT16, ("final",), True),
        (133, 8, 64, 72, HALF, ("final",), True),
        (133, 9, 64, 72, SINGLE, ("final",), False),
        (133, 8, 64, 64, BFLOAT16, ("initial",), False),
        (133, 9, 128, 64, BFLOAT16, (), False),
        (133, TOKENS, 136, 64, BFLOAT16, (), True),
        (133, TOKENS, 64, 72, SINGLE, (), True),
        (133, TOKENS + 1, 136, 72, SINGLE, (), False),
    ],
)
def test_outputs_of_many_short_sequences(op, N, T, K, V, dtype, given, short):
    arrays = [np.zeros(size, dtype) for size in sizes_of(op, {"B": N, "H": 1, "T": T, "K": K, "V": V})]
    start = np.zeros((N, 1, K, V), np.float32) if "initial" in given else None
    problem = op.bind(arrays, initial_state=start, output_final_state="final" in given)
    assert ("gated_short_forward" in planned.names(planned.plan_of(problem, planned.Noting(90)))) == short


@pytest.mark.parametrize(
    "op, N, T, K, V, taken",
    [
        (GLA, 265, 32, 128, 64, True),
        (GLA, 264, 32, 128, 64, False),
        (GLA, 265, 33, 128, 64, False),
        (GLA, 133, 17, 64, 136, True),
        (SIMPLE_GLA, 265, 32, 64, 72, True),
        (SIMPLE_GLA, 265, 32, 64, 64, False),
        (SIMPLE_GLA, 265, 32, 72, 128, False),
    ],
)
def test_many_take_the_kernels_of_every_card(op, N, T, K, V, taken):
    """Of these more blocks share a multiprocessor: where Hopper's own kernels take several waves of one chunk."""
    arrays = [np.zeros(size, BFLOAT16) for size in sizes_of(op, {"B": N, "H": 1, "T": T, "K": K, "V": V})]
    names = planned.names(planned.plan_of(op.bind(arrays), planned.Noting(90)))
    assert (names[-1] == "gated_forward") == taken


def sizes_of(op, sizes):
    return [[sizes[axis] for axis in axes.split()] for axes in op.arrays.values()]


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "odd"])
@pytest.mark.parametrize("op", [GLA, SIMPLE_GLA], ids=lambda op: op.name)
def test_forward_of_many(hopper, rng, op, offset):
    sizes = {"B": 1, "H": 89, "T": 7, "K": 8, "V": 72, "N": 3}
    arrays, state = draw(op, rng, sizes, BFLOAT16), draw_states(op, rng, sizes, SINGLE)[0]
    there = [hopper.upload(np.r_[x.ravel()[:offset], x.ravel()])[offset:].reshape(x.shape) for x in arrays]
    options = {"cu_seqlens": [0, 3, 3, 7]}
    problem = op.bind(there, initial_state=hopper.upload(state), output_final_state=True, **options)
    assert planned.names(planned.plan_of(problem, hopper))[-1] == "gated_forward"
    o, final = planned.run(problem, hopper)
    found = host(o), host(final[0])
    assert_results(gla if op is GLA else simple_gla, arrays, found, BFLOAT16, initial_state=state, **options)
