"""Gradients of heads wider than Hopper's own backward kernels, which these compute a tile of the state after the other:
what adds up is held to NumPy's in float64."""

import numpy as np
import planned
import pytest
from conftest import Hopper, Kernels
from emulator import EmulatedDevice
from planned import host
from reference import assert_close, double, draw, exact_vjp, rms, same_bits
from test_gradient_kernels import Call, Case, large

from linattn_np import gla, retention, simple_gla, vjp
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import segments as cuts
from linattn_np.declarations import GLA, LINEAR_ATTENTION, RETENTION, RWKV6, SIMPLE_GLA

CASES = {  # on both sides of the tiles' edges; each for one operator, since every instance takes seconds to compile
    "gla-K136-V264": Case(T=70, K=136, V=264, dtype="bfloat16"),
    "gla-K128-V136": Case(T=33, K=128, V=136, H=3, dtype="bfloat16", gate="weak", initial="bfloat16"),
    "gla-K256-V128-bthd": Case(T=64, K=256, V=128, B=2, dtype="bfloat16", layout="bthd", dht=False),
    "gla-K8-V192-packed": Case(lengths=(0, 33, 64, 3, 1), K=8, V=192, dtype="bfloat16", layout="bthd"),
    "gla-K320-V8": Case(T=40, K=320, V=8, H=1, dtype="bfloat16", gate="all-20", initial=None, dht=False),
    "gla-growth": Case(T=70, K=136, V=136, H=1, dtype="bfloat16", gate="positive"),
    "rwkv6-K200-V136": Case(T=70, K=200, V=136, dtype="float16"),
    "rwkv6-K72-V200-gate32": Case(T=40, K=72, V=200, H=1, dtype="bfloat16", gate_dtype="float32"),
    "rwkv6-K136-V72-packed": Case(lengths=(65, 0, 31), K=136, V=72, dtype="bfloat16", gate="some-inf"),
}


BACKENDS = Kernels


@pytest.fixture(autouse=True)
def few_heads_are_worth_it(monkeypatch):
    monkeypatch.setattr(cuts, "worth_tiles", lambda *_: True)


class WideCall(Call):
    """A call of which a device's planner gives the gradients."""

    def __init__(self, name, case, rng):
        super().__init__(name.partition("-")[0], case, rng)
        self.rows = Hopper.gradient_rows

    def problem(self, device):
        there = [self.placed(x, device) for x in self.arrays]
        start = self.options.get("initial_state")
        options = self.options | ({} if start is None else {"initial_state": device.upload(start)})
        return self.op.bind(there, gradient=True, **options)

    def placed(self, x, device):
        turns = self.case.layout == "bthd" and x.ndim == 4
        return device.upload(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) if turns else device.upload(x)

    def pulled(self, device):
        dht = None if self.dht is None else (device.upload(self.dht),)
        found, start = planned.pull(self.problem(device), device, self.placed(self.do, device), dht)
        return [host(x) for x in (*found, *(start or ()))]


def steps_of(plan, name):
    return [step for step in plan.launches if step.kernel.name == f"gated_sm90_backward_{name}"]


@pytest.mark.pairwise(half="name")
@pytest.mark.parametrize("name", CASES)
def test_tiles_add_up(hopper, name, rng):
    call = WideCall(name, CASES[name], rng)
    plan = planned.plan_of(call.problem(hopper), hopper)
    assert plan.tiles["tiles"] == len(steps_of(plan, "queries")) == len(steps_of(plan, "keys")) > 1
    call.assert_close(name, call.pulled(hopper), call.exact[1])


def test_tiles_of_segments_add_up(hopper, rng, monkeypatch):
    monkeypatch.setattr(cuts, "cheapest_backward_count", lambda *_: 3)
    call = WideCall("gla", Case(T=300, K=136, V=136, H=1, dtype="bfloat16", gate="weak"), rng)
    assert len(steps_of(planned.plan_of(call.problem(hopper), hopper), "segments")) == 4
    call.assert_close("in segments", call.pulled(hopper), call.exact[1])


def test_rows_that_are_not_whole_pieces_are_copied(hopper, rng, monkeypatch):
    monkeypatch.setattr("linattn_np.backends.cupy.aligned_copies.LARGE_BYTES", 0)
    call = WideCall("gla", Case(T=40, K=130, V=131, H=1, dtype="bfloat16"), rng)
    assert planned.plan_of(call.problem(hopper), hopper).tiles["tiles"] == 4
    call.assert_close("uneven rows", call.pulled(hopper), call.exact[1])


def test_same_call_again_same_bits(hopper, rng):
    call = WideCall("gla", CASES["gla-K136-V264"], rng)
    assert all(same_bits(x, y) for x, y in zip(call.pulled(hopper), call.pulled(hopper), strict=True))


def test_results_add_from_the_second_tile_on():
    """dq, dk and dg over columns, dv over channels; what queries leave for dg has memory of its own from then on."""
    plan = planned.plan_of(large(GLA, K=200, V=264), EmulatedDevice(90))
    queries, keys = steps_of(plan, "queries"), steps_of(plan, "keys")
    assert [step.args["adds"] for step in queries] == [step.args["adds"] for step in keys] == [False] * 2 + [True] * 4
    assert [step.args["adds_dv"] for step in keys] == [False, True] * 3
    own = [step.args["query_share"].array.memory is not step.args["dg"].array.memory for step in keys]
    assert own == [step.args["adds"] for step in keys]


@pytest.mark.parametrize("op", [GLA, RWKV6])
def test_tiles_share_their_scratch(op):
    """Four times as many take no more than their longer rows need."""
    one, many = (planned.plan_of(large(op, T=4096, K=K, V=K, H=64), EmulatedDevice(90)).scratch for K in (256, 512))
    assert many < 1.1 * one


@pytest.mark.parametrize("H, T, taken", [(64, 1024, True), (8, 1024, False), (8, 8192, True), (64, 30, False)])
def test_few_tokens_take_the_kernels_for_every_card(H, T, taken, monkeypatch):
    """Each tile has launches of its own, and one block a head goes through all tokens of a segment."""
    monkeypatch.undo()
    problem = large(GLA, K=256, V=256, T=T, H=H)
    assert (cuts.backward_way(problem, EmulatedDevice(90)) == cuts.TILED) == taken
    assert ("tiles" in planned.plan_of(problem, EmulatedDevice(90)).tiles) == taken


@pytest.mark.parametrize("capability, dtype", [(80, BFLOAT16), (90, np.float32)])
def test_other_cards_and_dtypes_have_no_tiles(capability, dtype):
    assert "tiles" not in planned.plan_of(large(GLA, dtype, K=256, V=256), EmulatedDevice(capability)).tiles


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("op", [RETENTION, LINEAR_ATTENTION, SIMPLE_GLA])
def test_tiles_under_a_shared_gate(op, dtype):
    """Its gradient is a sum over channels of what each tile of float16 would round: only what has none takes those."""
    taken = dtype == BFLOAT16 or op is not SIMPLE_GLA
    assert ("tiles" in planned.plan_of(large(op, dtype, K=256, V=256, T=2048, H=64), EmulatedDevice(90)).tiles) == taken


@pytest.mark.parametrize("op", [RETENTION, LINEAR_ATTENTION, SIMPLE_GLA])
def test_wide_uneven_rows_under_a_shared_gate_are_copied(op):
    """Tiles take copies of any number of channels; Hopper's forward kernels take 256 channels at most."""
    plan = planned.plan_of(large(op, K=301, V=140, T=2048, H=64), EmulatedDevice(90))
    assert plan.tiles["tiles"] == 6 and "scalar_decay_sm90_weighted_sums" in planned.names(plan)


@pytest.mark.parametrize("op, products", [(RETENTION, 1), (LINEAR_ATTENTION, 1), (SIMPLE_GLA, 3)])
def test_only_sums_over_channels_are_multiplied_in_float32(op, products):
    """On other cards the gate is spread over the channels, but no gradient of a gate without tokens is wanted."""
    plan = planned.plan_of(large(op, K=64, V=64, T=128, H=2), EmulatedDevice(80))
    kernels = [step.kernel for step in plan.launches if step.kernel.name.startswith("gated_backward")]
    assert len(kernels) == 3 and {kernel.products for kernel in kernels} == {products}


@pytest.mark.pairwise("gate", "gate_dtype")
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("gate, gate_dtype", [("logsigmoid", "bfloat16"), ("weak", "float32"), ("all-20", "bfloat16")])
def test_shared_gates_by_tiles(hopper, gate, gate_dtype, segments, rng, monkeypatch):
    """The gate's gradient with the digits of q . dq and k . dk, whose sums it is, as that of narrow heads has.

    Its error at a token is the sum of all later tokens': a random walk, whose mean square over the four heads is about
    a fourth of a chi-square of four degrees. That passes 8.3 times its mean once in a million draws; 2.9 times the root
    of the mean, 3.8e-3 in 36 draws of weak gates and less with the others, is 1.1e-2.
    """
    monkeypatch.setattr(cuts, "segments_that_fill", lambda *_: segments)
    sizes = {"B": 2, "H": 2, "T": 300, "K": 136, "V": 200, "N": 2}
    q, k, v, g = arrays = draw(SIMPLE_GLA, rng, sizes, "bfloat16", gate, gate_dtype)
    do = rng.standard_normal((2, 2, 300, 200)).astype(BFLOAT16)
    start, dht = (rng.standard_normal((2, 2, 136, 200)).astype(np.float32) for _ in range(2))
    _, _, wanted = exact_vjp(simple_gla, arrays, do, dht, initial_state=start)
    there = [hopper.upload(x) for x in arrays]
    problem = SIMPLE_GLA.bind(there, gradient=True, initial_state=hopper.upload(start))
    found, dh0 = planned.pull(problem, hopper, hopper.upload(do), (hopper.upload(dht),))
    dq, dk, dv, dg = map(host, found)
    assert planned.plan_of(problem, hopper).tiles["tiles"] == 4 and dg.dtype == g.dtype and dg.shape == g.shape
    for name, x, exact in zip(("dq", "dk", "dv", "dh0"), (dq, dk, dv, host(dh0[0])), (*wanted[:3], wanted[4])):
        assert_close(name, x, exact, "bfloat16", rows=Hopper.gradient_rows["bfloat16"])
    terms = (double(k) * wanted[1]).sum(-1)
    assert rms(double(dg) - wanted[3]) <= 1.2e-2 * max(rms(wanted[3]), rms(terms))  # what narrow heads may


def test_tokens_own_gates_take_tiles_of_segments():
    cut, whole = (planned.plan_of(large(SIMPLE_GLA, K=256, V=256, T=2048, H=H), EmulatedDevice(90)) for H in (16, 64))
    assert "tiles" in cut.tiles and cut.tiles["segments"] == 4
    assert "tiles" in whole.tiles and "segments" not in whole.tiles


@pytest.mark.pairwise(half="dtype")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fixed_decays_by_tiles(hopper, dtype, rng):
    q, k, v, do = (rng.standard_normal((1, 2, 150, D)).astype(dtype) for D in (136, 136, 264, 264))
    start, dht = (rng.standard_normal((1, 2, 136, 264)).astype(np.float32) for _ in range(2))
    options = {"gamma": (0.9, 0.99), "initial_state": start}
    _, _, wanted = exact_vjp(retention, [q, k, v], do, dht, **options)
    options["initial_state"] = hopper.upload(start)
    problem = RETENTION.bind([hopper.upload(x) for x in (q, k, v)], gradient=True, **options)
    plan = planned.plan_of(problem, hopper)
    sums = [name for name in planned.names(plan) if name == "scalar_decay_sm90_weighted_sums"]
    assert plan.tiles["tiles"] == 6 and len(sums) == (6 if dtype == "bfloat16" else 0)
    found, dh0 = planned.pull(problem, hopper, hopper.upload(do), (hopper.upload(dht),))
    for name, x, exact in zip(("dq", "dk", "dv", "dh0"), (*found, *dh0), wanted, strict=True):
        assert_close(name, host(x), exact, dtype, rows=Hopper.gradient_rows[dtype])


def test_grouped_heads_in_reverse(backend, rng):
    """Two heads of 72 columns share q, k and g: a state of 144."""
    q, k, g, v, do = (rng.standard_normal((1, heads, 45, D)) for heads, D in ((2, 136),) * 3 + ((4, 72),) * 2)
    arrays = [x.astype(BFLOAT16) for x in (q, k, v, -np.abs(g))]
    plan = planned.plan_of(GLA.bind(arrays, gradient=True, reverse=True), EmulatedDevice(90))
    assert plan.tiles["tiles"] == 4
    _, _, wanted = exact_vjp(gla, arrays, do, None, reverse=True)
    _, pull = backend.run(vjp, gla, *map(backend.asarray, arrays), reverse=True)
    found = map(backend.tohost, pull(backend.asarray(do.astype(BFLOAT16))))
    for name, x, exact in zip("qkvg", found, wanted, strict=True):
        assert_close(f"d{name}", x, exact, "bfloat16", rows=Hopper.gradient_rows["bfloat16"])
