"""Gradients of sequences that are cut: what the forward pass leaves, and what is summarised by itself."""

import numpy as np
import planned
import pytest
from conftest import Hopper, Kernels
from emulator import EmulatedDevice
from reference import assert_close, same_bits
from test_gradient_kernels import BY_NAME, Call, Case

from linattn_np.backends.cupy import gated_kernels
from linattn_np.backends.cupy import segments as cuts

pytestmark = pytest.mark.parametrize("op", BY_NAME)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_forward_pass_leaves_the_states_of_segments(op, dtype, rng, monkeypatch):
    """Where both cut alike: then the pass that summarises segments has one direction alone."""
    for name in ("cheapest_forward_count", "cheapest_backward_count"):
        monkeypatch.setattr(cuts, name, lambda *_: 4)
    declared, device = BY_NAME[op][0], EmulatedDevice(90)
    call = Call(op, Case(T=600, K=16, V=16, H=1, dtype=dtype), rng)
    initial = call.options["initial_state"]
    problem = declared.bind(call.arrays, gradient=True, initial_state=initial).replace(memo=None)
    _, saved = planned.run_and_save(problem, device)
    plan = planned.plan_of_pullback(problem, device, call.do, (call.dht,), saved)
    summary = next(step for step in plan.launches if step.kernel.name.endswith("segments"))
    assert saved[0].shape == (plan.tiles["segments"], 1, 16, 16) and summary.args["only_backwards"] == 1
    call.rows = Hopper.gradient_rows
    pulled = [planned.pull(problem, device, call.do, (call.dht,), given) for given in (saved, ())]
    (found, start), (again, _) = pulled
    call.assert_close("saved", [*found, *start], call.exact[1])
    assert all(same_bits(x, y) for x, y in zip(found, again, strict=True))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gate_dtype", [None, "float32"])
@pytest.mark.parametrize("K, V", [(128, 128), (64, 64), (128, 64), (64, 128)])
@pytest.mark.parametrize("dht", [True, False])
def test_blocks_take_sequences_in_turn(op, dtype, gate_dtype, K, V, dht, rng, monkeypatch):
    """What a block had before leaves no trace: the bits are those of a block for each, where gates grow in one, too."""
    monkeypatch.setattr(cuts, "cheapest_backward_count", lambda *_: 1)
    declared, device = BY_NAME[op][0], EmulatedDevice(90)
    lengths, options = (40, 0, 33, 5, 70, 64), {"initial": "float32" if dht else None, "dht": dht}
    call = Call(op, Case(lengths=lengths, K=K, V=V, H=3, dtype=dtype, gate_dtype=gate_dtype, **options), rng)
    call.arrays[3][:, 1, 45:48, ::5] = 2
    given = {name: call.options[name] for name in ("initial_state", "cu_seqlens") if name in call.options}
    final, results = (call.dht,) if dht else None, {}
    for multiprocessors in (132, 2):
        monkeypatch.setattr(type(device), "multiprocessors", multiprocessors, raising=False)
        problem = declared.bind(call.arrays, gradient=True, **given)
        plan = planned.plan_of_pullback(problem, device, call.do, final)
        main = [step for step in plan.launches if "backward" in step.kernel.name]
        sequences = sum(dht or length > 0 for length in lengths)  # empty ones count if they have states
        many, held = sequences * call.case.H, multiprocessors * (2 if K + V == 128 else 1)
        schedule, blocks = (gated_kernels.IN_TURN, held) if many > held else (gated_kernels.ONE_EACH, many)
        assert [(step.kernel.schedule, step.blocks) for step in main] == [(schedule, blocks)] * 2
        found, start = planned.pull(problem, device, call.do, final)
        results[multiprocessors] = [*found, *(start or ())]
    assert all(map(same_bits, *results.values()))


@pytest.mark.pairwise("dht", "gate")
@pytest.mark.parametrize("dht, gate", [(True, "weak"), (False, "growth")])
def test_each_pass_begins_with_a_short_segment(op, dht, gate, rng, monkeypatch):
    """Where two heads leave a third of the card idle: only what the passes begin with is summarised."""
    declared, device = BY_NAME[op][0], EmulatedDevice(90)
    monkeypatch.setattr(type(device), "multiprocessors", 3, raising=False)
    # else as many as the forward pass has, which it saves
    monkeypatch.setattr(cuts, "cheapest_backward_count", lambda *_: 1)
    call = Call(op, Case(T=3072, K=16, V=16, H=1, B=2, dtype="bfloat16", gate="weak", dht=dht), rng)
    if gate == "growth":  # in a chunk of each segment, from which the second pass is told
        call.arrays[3][:, :, 40::1024, ::5] = 2
        call.arrays[3][:, :, 41::1024, ::5] = -3
    call.rows, initial = Hopper.gradient_rows, call.options["initial_state"]
    problem = declared.bind(call.arrays, gradient=True, initial_state=initial)
    final = (call.dht,) if dht else None
    plan = planned.plan_of_pullback(problem, device, call.do, final)
    kernels = [step for step in plan.launches if "backward" in step.kernel.name]
    assert [step.args.get("joined") for step in kernels] == [None, 1, 1] and kernels[0].args["only_first"] == 1
    found, start = planned.pull(problem, device, call.do, final)
    call.assert_close(gate, [*found, *start], call.exact[1])


@pytest.mark.pairwise("split", "P")
@pytest.mark.parametrize("lengths", [(), (450, 450)])
@pytest.mark.parametrize("split, P", [(False, 1), (False, 2), (True, 1)])
def test_the_forward_pass_leaves_states_on_its_way(op, split, P, lengths, rng, monkeypatch):
    """Where its own segments, or uncut sequences, are as many whole ones of the gradients' each."""
    for name, given in (("cheapest_forward_count", P), ("cheapest_backward_count", 4), ("split_columns", split)):
        monkeypatch.setattr(cuts, name, lambda *_, given=given: given)
    call = Call(op, Case(T=450, lengths=lengths, K=16, V=128, H=1, dtype="bfloat16"), rng)
    options = {name: call.options[name] for name in ("initial_state", "cu_seqlens") if name in call.options}
    problem = BY_NAME[op][0].bind(call.arrays, gradient=True, **options).replace(memo=None)
    (_, saved), do, dht = planned.run_and_save(problem, EmulatedDevice(90)), call.do, (call.dht,)
    plan = planned.plan_of_pullback(problem, EmulatedDevice(90), do, dht, saved)
    assert next(step for step in plan.launches if step.kernel.name.endswith("segments")).args["only_backwards"] == 1
    call.rows = Hopper.gradient_rows
    pulled = [planned.pull(problem, EmulatedDevice(90), do, dht, given) for given in (saved, ())]
    (found, start), (again, _) = pulled
    call.assert_close("saved", [*found, *start], call.exact[1])
    assert all(same_bits(x, y) for x, y in zip(found, again, strict=True))


def summarised_both_ways(call, device, segments, monkeypatch):
    """A call's gradients in so many segments whose states the forward pass does not leave."""
    monkeypatch.setattr(cuts, "cheapest_backward_count", lambda *_: segments)
    monkeypatch.setattr(cuts.ForwardCut, "gives_starts", False)
    options = {
        name: x if name == "cu_seqlens" else device.upload(x) for name, x in call.options.items() if x is not None
    }
    problem = BY_NAME[call.op.name][0].bind([device.upload(x) for x in call.arrays], gradient=True, **options)
    found, start = planned.pull(problem, device, device.upload(call.do), (device.upload(call.dht),))
    return [planned.host(x) for x in (*found, *(start or ()))]


@pytest.mark.pairwise("dtype", "K", "V", "alone")
@pytest.mark.parametrize("gate_dtype", [None, "float32"], ids=["", "float32"])
@pytest.mark.parametrize(
    "dtype, K, V, alone", [("bfloat16", 72, 64, True), ("bfloat16", 72, 64, False), ("float16", 64, 128, True)]
)
def test_what_a_border_has_forgotten_is_not_summarised(op, hopper, dtype, K, V, alone, gate_dtype, rng, monkeypatch):
    """NaN far from the cut stays in its own segment, in both directions; where a channel keeps, nothing is left out. By
    a block alone or by two that have some channels each."""
    if alone:
        monkeypatch.setattr(cuts, "summary_channels", lambda K, *_: K)
    call = Call(op, Case(T=634, K=K, V=V, dtype=dtype, gate="weak", gate_dtype=gate_dtype), rng)
    call.rows, gates = Hopper.gradient_rows, call.arrays[3]
    gates[:, 0] = rng.uniform(-1.2, -0.8, gates[:, 0].shape)
    gates[:, 1, :, 1:] -= 0.5
    wanted = call.exact[1]
    call.assert_close("forgotten", summarised_both_ways(call, hopper, 2, monkeypatch), wanted)
    call.arrays[1][:, :, 10] = call.arrays[0][:, :, 624] = np.nan
    dq, dk, dv, *_ = summarised_both_ways(call, hopper, 2, monkeypatch)
    for name, x, exact, tokens in (("dq", dq, wanted[0], np.s_[320:624]), ("dv", dv, wanted[2], np.s_[11:320])):
        assert_close(name, x[:, :1, tokens], exact[:, :1, tokens], dtype, rows=call.rows[dtype])
        assert np.isnan(x[:, 1, tokens].astype(np.float32)).any(), name


GATES = ("trained", "all-20", "some-inf", "spikes-40", "zero", "positive", "by_channel", "growth")


@pytest.mark.pairwise
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_segments_of_any_gates(op, hopper, dtype, gate, rng, monkeypatch):
    """Packed, with a partial chunk and an empty sequence. float16 has no small numbers; and gates that let a state grow
    a little do so for many tokens."""
    drawn = "weak" if gate == "growth" else gate
    call = Call(op, Case(lengths=(300, 0, 450), K=64, V=72, H=1, dtype=dtype, gate=drawn), rng)
    call.rows = Hopper.gradient_rows
    if gate == "growth":  # in some chunks
        call.arrays[3][:, :, 40::150, ::5] = 2
        call.arrays[3][:, :, 41::150, ::5] = -3
    call.assert_close(gate, summarised_both_ways(call, hopper, 3, monkeypatch), call.exact[1])


@pytest.mark.parametrize("segments, first", [(2, 180), (3, 340)])
def test_nothing_may_grow(op, hopper, segments, first, rng, monkeypatch):
    """Gates of 0.9 nats until the first key, over segments: 0 times what leaves float32's range is 0."""
    call = Call(op, Case(T=450, K=64, V=64, H=1, dtype="bfloat16", initial=None), rng)
    call.arrays[1][:, :, :first], call.arrays[3][:, :, :first] = 0, 0.9
    found, wanted = summarised_both_ways(call, hopper, segments, monkeypatch), call.exact[1]
    for name, x, exact in zip(call.names[:3], found, wanted):
        assert_close(f"d{name}", x[:, :, first:], exact[:, :, first:], "bfloat16", rows=4)


@pytest.mark.pairwise
@pytest.mark.parametrize("gate_dtype", [None, "float32"], ids=["", "gate32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_walk_forgets_is_not_summarised(op, dtype, gate_dtype, rng, monkeypatch):
    """By the kernels of every card: a NaN that a segment's end has forgotten, or its start, stays in the segment; where
    one channel keeps, nothing is left out."""
    monkeypatch.setattr(cuts, "summarised_segments", lambda *_: 2)
    declared, device = BY_NAME[op][0], EmulatedDevice()
    call = Call(op, Case(T=1210, K=72, V=16, H=2, dtype=dtype, gate="weak", gate_dtype=gate_dtype, dht=False), rng)
    _, keys, _, gates, *_ = call.arrays
    gates[:, 0] = rng.uniform(-1.2, -0.8, gates[:, 0].shape)
    call.rows = Kernels.gradient_rows
    problem = declared.bind(call.arrays, gradient=True, initial_state=call.options["initial_state"])
    call.assert_close("cut", sum(planned.pull(problem, device, call.do, None), ()), call.exact[1])
    clean = planned.pull(problem, device, call.do, None)[0]
    keys[:, :, 10], call.do[:, :, 1200] = np.nan, np.nan
    dq, dk, *_ = planned.pull(problem, device, call.do, None)[0]
    assert same_bits(dq[:, :1, 640:1152], clean[0][:, :1, 640:1152])
    assert same_bits(dk[:, :1, 64:640], clean[1][:, :1, 64:640])
    assert np.isnan(dq[:, 1, 640:].astype(np.float32)).any() and np.isnan(dk[:, 1, 64:640].astype(np.float32)).any()


@pytest.mark.pairwise
@pytest.mark.parametrize("backwards", [False, True], ids=["states", "gradients"])
def test_what_grew_before_it_decayed_is_summarised(op, backwards, rng, monkeypatch):
    """By the kernels of every card: 64 nats, and 51 nats of decay from there to the cut at 640. One gate that grows on
    the way, however little, tells of it. What comes over the cut is all that the other segment is compared by."""
    monkeypatch.setattr(cuts, "summarised_segments", lambda *_: 2)
    declared, device = BY_NAME[op][0], EmulatedDevice()
    call = Call(op, Case(T=1280, K=16, V=16, H=1, gate="weak", dht=False, initial=None), rng)
    decay, growth, told = (np.s_[640:768], np.s_[768:832], 650) if backwards else (np.s_[512:640], np.s_[448:512], 630)
    gates, over = call.arrays[3], np.s_[:, :, :640] if backwards else np.s_[:, :, 640:]
    gates[...] = -0.01
    gates[:, :, decay], gates[:, :, growth], gates[:, :, told] = -0.4, 1, 0.01
    found, _ = planned.pull(declared.bind(call.arrays, gradient=True), device, call.do, None)
    for name, x, exact in zip(call.names[:3], found, call.exact[1]):
        assert_close(f"d{name}", x[over], exact[over], "float32", rows=4)


@pytest.mark.pairwise("every_card", "dtype")
@pytest.mark.parametrize("gate_dtype", [None, "float32"], ids=["", "gate32"])
@pytest.mark.parametrize("backwards", [False, True], ids=["states", "gradients"])
@pytest.mark.parametrize(
    "every_card, dtype", [(False, "bfloat16"), (False, "float16"), (True, "bfloat16"), (True, "float32")]
)
def test_what_grows_again_is_summarised(op, hopper, every_card, dtype, backwards, gate_dtype, rng, monkeypatch):
    """60 nats of decay before a cut, in the walk's direction, and about 62 of growth behind it. Nothing is written or
    read in between. The gates are random, since equal ones would all be rounded alike. Their gradients are not
    compared: in uncut sequences, too, they are no more than rounding beside such a decay."""
    monkeypatch.setattr(cuts, "summarised_segments", lambda *_: 2)
    options = {"gate": "weak", "gate_dtype": gate_dtype, "initial": None}
    call = Call(op, Case(T=1280, K=16, V=16, H=1, dtype=dtype, **options), rng)
    call.rows = (Kernels if every_card else Hopper).gradient_rows
    cut = 640 if every_card else 768 if backwards else 512
    at = cut + np.array([[-100, -8, 16, 576, 600], [100, 8, -16, -576, -600]][backwards])
    between, growth = (slice(*sorted(ends)) for ends in ((at[0], at[4]), (at[2], at[3])))
    *rows, gates = call.arrays[:4]
    for x in (*rows, call.do):
        x[:, :, between] = 0
    gates[...], gates[:, :, at[1]] = -0.01, -60
    gates[:, :, growth] = rng.uniform(0.1, 0.12, gates[:, :, growth].shape)
    if every_card:
        problem = BY_NAME[op][0].bind(call.arrays, gradient=True)
        found, _ = planned.pull(problem, EmulatedDevice(), call.do, (call.dht,))
    else:
        found = summarised_both_ways(call, hopper, 5, monkeypatch)
    for name, x, exact in zip(call.names[:3], found, call.exact[1]):
        assert_close(f"d{name}", x, exact, dtype, rows=call.rows.get(dtype, 1))


@pytest.mark.pairwise
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("V", [72, 128, 200])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_wide_walks_leave_the_same_states(op, dtype, V, segments, rng, monkeypatch):
    """By the kernels of every card: of 64 columns a block, and of 128, as calls of many heads have them."""
    monkeypatch.setattr(cuts, "summarised_segments", lambda *_: segments)
    declared, device = BY_NAME[op][0], EmulatedDevice()
    call = Call(op, Case(T=150, K=20, V=V, H=1, dtype=dtype), rng)
    call.rows, found = Kernels.gradient_rows, []
    problem = declared.bind(call.arrays, gradient=True, initial_state=call.options["initial_state"])
    for width in range(2):
        monkeypatch.setattr(cuts, "widest_that_fills", lambda kernels, *_, width=width: kernels[width])
        found.append(sum(planned.pull(problem, device, call.do, (call.dht,)), ()))
    call.assert_close(f"{V} columns", found[1], call.exact[1])
    assert all(same_bits(x, y) for x, y in zip(*found, strict=True))
