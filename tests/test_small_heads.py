"""The kernels of heads of at most 16 channels and columns: any sizes and number of heads, in segments or not."""

import numpy as np
import planned
import pytest
from planned import results
from reference import assert_close, assert_results, draw, exact_vjp, same_bits
from test_gradient_kernels import Call, Case
from test_value_gate import Case as ValueGateCase
from test_value_gate import computed, pulled_back

from linattn_np import OPS
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import segments
from linattn_np.declarations import GLA, GLA_VALUE_GATE, RWKV6, SIMPLE_GLA

SINGLE, HALF = np.dtype(np.float32), np.dtype(np.float16)
BOUNDS = (0, 0, 5, 105, 138, 138, 212)


@pytest.fixture
def cut(monkeypatch):
    """Cuts sequences into so many segments, however few tokens there are."""
    monkeypatch.setattr(segments, "SMALL_TOKENS", 0)
    monkeypatch.setattr(segments, "SMALL_TOKENS_ON_HOPPER", 0)
    return lambda P: monkeypatch.setattr(segments, "segments_of_small_heads", lambda *sizes: P)


@pytest.mark.pairwise
@pytest.mark.parametrize("P", [1, 2, 5, 20])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("gate", ["trained", "some-inf", "by_channel", "positive"])
@pytest.mark.parametrize("H", [1, 3, 9])
@pytest.mark.parametrize("K, V", [(8, 8), (16, 16), (5, 3), (4, 12), (13, 8), (1, 1)])
@pytest.mark.parametrize(
    "dtype, gate_dtype", [(SINGLE, None), (HALF, None), (BFLOAT16, None), (HALF, SINGLE), (BFLOAT16, SINGLE)]
)
@pytest.mark.parametrize("op", [GLA, RWKV6], ids=lambda op: op.name)
def test_forward(device, rng, cut, op, dtype, gate_dtype, K, V, H, gate, packed, P):
    cut(P)
    sizes = {"B": 1, "H": H, "T": 212, "K": K, "V": V, "N": 6 if packed else 1}
    arguments = {"cu_seqlens": BOUNDS} if packed else {}
    arrays = draw(op, rng, sizes, dtype, gate, gate_dtype)
    start = rng.standard_normal((sizes["N"], H, K, V)).astype(np.float32)
    plan = planned.plan_of(op.bind([device.upload(x) for x in arrays], **arguments), device)
    kernels = [name for name in planned.names(plan) if name != "elementwise_copy_rows"]  # rows of odd halves are copied
    cut_in = ["gated_small_forward", "gated_scan_segments"] * (P > 1)
    assert kernels == [*cut_in, "gated_small_forward"]
    found = results(op, arrays, device, start, True, **arguments)
    assert_results(OPS[op], arrays, found, dtype, initial_state=start, **arguments)
    assert all(map(same_bits, found, results(op, arrays, device, start, True, **arguments)))


@pytest.mark.pairwise
@pytest.mark.parametrize("P", [1, 2, 5, 20])
@pytest.mark.parametrize("lengths", [(), (0, 5, 100, 33, 0, 74)], ids=["dense", "packed"])
@pytest.mark.parametrize("gate", ["trained", "some-inf", "by_channel", "positive"])
@pytest.mark.parametrize("H", [1, 3, 17])
@pytest.mark.parametrize("dht", [True, False], ids=["dht", ""])
@pytest.mark.parametrize("K, V", [(8, 8), (16, 16), (5, 4), (4, 12), (13, 8), (16, 3), (1, 1)])
@pytest.mark.parametrize(
    "dtype, gate_dtype", [("float32", None), ("float16", "float32"), ("bfloat16", None), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("op", ["gla", "rwkv6"])
def test_gradients(device, rng, cut, op, dtype, gate_dtype, K, V, H, gate, lengths, dht, P):
    cut(P)
    call = Call(
        op, Case(T=133, K=K, V=V, H=H, dtype=dtype, gate=gate, gate_dtype=gate_dtype, lengths=lengths, dht=dht), rng
    )
    options = {name: x for name, x in call.options.items() if name == "cu_seqlens"}
    arrays, start, do = (
        [device.upload(x) for x in of] for of in (call.arrays, [call.options["initial_state"]], [call.do])
    )
    problem = call.op.bind(arrays, gradient=True, initial_state=start[0], **options)
    final = (device.upload(call.dht),) if dht else None
    plan = planned.plan_of_pullback(problem, device, do[0], final)  # on copies, where rows are no whole 16 bytes
    cut_in = ["gated_small_forward"] * (P > 1) + ["gated_scan_both_ways"] * (P > 2)
    names = [name for name in planned.names(plan) if name != "elementwise_copy_rows"]
    assert names[: len(cut_in) + 1] == [*cut_in, "gated_small_backward"]
    found, first = planned.pull(problem, device, do[0], final)
    call.assert_close("small", [planned.host(x) for x in (*found, *first)], call.exact[1])
    again, _ = planned.pull(problem, device, do[0], final)
    assert all(same_bits(planned.host(x), planned.host(y)) for x, y in zip(found, again, strict=True))


@pytest.mark.pairwise
@pytest.mark.parametrize("P", [1, 2, 5, 20])
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "regimes", [("trained", "weak"), ("some-inf", "spikes-40"), ("by_channel", "some-inf"), ("weak", "positive")]
)
@pytest.mark.parametrize("H", [1, 3, 17])
@pytest.mark.parametrize("K, V", [(8, 8), (16, 16), (5, 4), (4, 12), (13, 8), (1, 1), (7, 7)])
@pytest.mark.parametrize(
    "dtype, gates",
    [(SINGLE, (None, None)), (HALF, (SINGLE, SINGLE)), (BFLOAT16, (None, None)), (BFLOAT16, (None, SINGLE))],
)
def test_gates_of_columns(device, rng, cut, dtype, gates, K, V, H, regimes, bounds, P):
    cut(P)
    case = ValueGateCase(H=H, T=212, K=K, V=V, dtype=dtype, gates=gates, regimes=regimes, bounds=bounds)
    arrays, (start, dht) = case.drawn(rng)
    do = rng.standard_normal(arrays[2].shape).astype(dtype)
    given, do_, dht_ = [device.upload(x) for x in arrays], device.upload(do), (device.upload(dht),)
    options = {"initial_state": device.upload(start), "cu_seqlens": bounds}
    problem = GLA_VALUE_GATE.bind(given, output_final_state=True, gradient=True, **options)
    plans = (
        planned.plan_of(problem.replace(gradient=False), device),
        planned.plan_of_pullback(problem, device, do_, dht_),
    )
    for plan, kernel in zip(plans, ("gated_small_forward", "gated_small_backward"), strict=True):
        assert kernel in planned.names(plan) and plan.tiles.get("segments", 1) == P
    o, final = planned.run(problem, device)
    found, first = planned.pull(problem, device, do_, dht_)
    results_ = zip(("o", "state"), (o, *final), computed(case, arrays, start, None), strict=True)
    gradients, dh0 = pulled_back(case, arrays, start, None, do, dht)
    pulled = zip(("dq", "dk", "dv", "dg", "dgv", "dh0"), (*found, *first), (*gradients, dh0), strict=True)
    for name, x, exact in (*results_, *pulled):
        assert_close(name, planned.host(x), exact, dtype, factor=10)
    again, _ = planned.pull(problem, device, do_, dht_)
    assert all(same_bits(planned.host(x), planned.host(y)) for x, y in zip(found, again, strict=True))


@pytest.mark.parametrize(
    "lengths, P",
    [
        ((63110, 46010, 35576, *[300] * 964), 58),
        ((1000,) * 967, 1),
        ((1100,) * 400 + (900,) * 400, 2),
        ((1 << 17, 10), 1408),
    ],
)
def test_a_long_sequence_among_many_is_cut(lengths, P):
    bounds = np.cumsum([0, *lengths])
    arrays = [np.zeros((1, 5, bounds[-1], 2), SINGLE)] * 4
    problem = GLA.bind(arrays, cu_seqlens=bounds, gradient=True)
    assert planned.plan_of(problem, planned.Noting(90)).tiles.get("segments", 1) == P


@pytest.mark.parametrize("count, small", [(200, False), (4000, True)])
def test_sequences_count_by_whole_chunks(count, small):
    """Other kernels take a block for each, however few its tokens."""
    arrays = [np.zeros((1, 3, 8000, 2), BFLOAT16)] * 4
    problem = GLA.bind(arrays, cu_seqlens=np.linspace(0, 8000, count + 1).astype(int))
    names = planned.names(planned.plan_of(problem, planned.Noting(90)))
    assert ("gated_small_forward" in names) == small


@pytest.mark.pairwise(half="dtype")
@pytest.mark.parametrize("K, V", [(1, 1), (2, 8), (3, 5)])
@pytest.mark.parametrize("dtype", [BFLOAT16, HALF], ids=str)
def test_forward_under_a_shared_gate(hopper, rng, cut, dtype, K, V):
    """Hopper's own kernels pad such rows to 64; these read a copy of the gate for every channel."""
    cut(2)
    arrays = draw(SIMPLE_GLA, rng, {"B": 1, "H": 3, "T": 212, "K": K, "V": V, "N": 6}, dtype)
    start = rng.standard_normal((6, 3, K, V)).astype(np.float32)
    found = results(SIMPLE_GLA, arrays, hopper, start, True, cu_seqlens=BOUNDS)
    assert_results(OPS[SIMPLE_GLA], arrays, found, dtype, initial_state=start, cu_seqlens=BOUNDS)


@pytest.mark.parametrize("gradient, kernel", [(False, "gated_small_forward"), (True, "gated_small_backward")])
@pytest.mark.parametrize("K, V, taken", [(8, 8, True), (8, 16, False), (9, 8, False)])
def test_small_heads_under_a_shared_gate(K, V, taken, gradient, kernel):
    arrays = [np.zeros((1, 4, 1 << 15, *axis), BFLOAT16) for axis in ((K,), (K,), (V,), ())]
    names = planned.names(planned.plan_of(SIMPLE_GLA.bind(arrays, gradient=gradient), planned.Noting(90)))
    assert (kernel in names) == taken == ("scalar_decay_sm90_weighted_sums" not in names)


@pytest.mark.parametrize("K, V", [(8, 8), (3, 5)])
def test_gradients_under_a_shared_gate(hopper, rng, cut, K, V):
    cut(2)
    arrays = draw(SIMPLE_GLA, rng, {"B": 2, "H": 3, "T": 140, "K": K, "V": V, "N": 2}, BFLOAT16)
    do = rng.standard_normal((2, 3, 140, V)).astype(BFLOAT16)
    problem = SIMPLE_GLA.bind([hopper.upload(x) for x in arrays], gradient=True)
    assert "gated_small_backward" in planned.names(planned.plan_of(problem, hopper))
    found, _ = planned.pull(problem, hopper, hopper.upload(do), None)
    _, _, wanted = exact_vjp(OPS[SIMPLE_GLA], arrays, do, None)
    for name, x, y in zip(SIMPLE_GLA.arrays, found, wanted, strict=False):
        assert_close(f"d{name}", planned.host(x), y, BFLOAT16, factor=2, rows=4)
