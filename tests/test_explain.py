"""explain says what a call would do, and does nothing."""

import numpy as np
import planned
import pytest
from reference import draw, same_bits

from linattn_np import ContractError, explain, gla, rwkv6, warm_up
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends import cupy
from linattn_np.backends.cupy import gated_kernels
from linattn_np.backends.cupy.elementwise_kernels import CopyRows
from linattn_np.backends.cupy.gated_kernels import GatedWideForward, GatedWideOperands
from linattn_np.declarations import DELTA_RULES, GLA
from linattn_np.kernel_choice import choose_kernels
from linattn_np.ops import OPS

SIZES = {"B": 1, "H": 2, "T": 40, "K": 8, "V": 6, "N": 1}


def bytes_of(*arrays):
    return sum(x.size * x.dtype.itemsize for x in arrays)


@pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
def test_host_arrays_run_on_numpy(op):
    arrays = draw(op, np.random.default_rng(0), SIZES, np.float32)
    before = [x.copy() for x in arrays]
    found = explain(OPS[op], *arrays)
    assert (found.op, found.backend) == (op.name, "numpy")
    assert found.mode in op.modes
    assert found.floor_ms is None
    assert found.bytes == bytes_of(*arrays) + 4 * 1 * 2 * 40 * 6
    assert set(found.reasons) == {"cupy", "numba"} and "host" in found.reasons["cupy"]
    text = str(found)
    assert text.startswith(f"{op.name}: numpy") and f"{found.bytes:,} bytes" in text and "not cupy: " in text
    assert all(same_bits(x, copy) for x, copy in zip(arrays, before))


def test_bytes_count_states_once_read_and_once_written():
    op = next(iter(OPS))
    arrays = draw(op, np.random.default_rng(0), SIZES, BFLOAT16)
    start = np.zeros((1, 2, 8, 6), np.float32)
    plain = explain(gla, *arrays).bytes
    assert plain == bytes_of(*arrays) + 2 * 1 * 2 * 40 * 6
    assert explain(gla, *arrays, initial_state=start).bytes == plain + bytes_of(start)
    assert explain(gla, *arrays, output_final_state=True).bytes == plain + bytes_of(start)
    assert explain(gla, *arrays, output_final_state=True, state_dtype=BFLOAT16).bytes == plain + bytes_of(start) // 2


def test_every_mode_is_named():
    op = next(iter(OPS))
    arrays = draw(op, np.random.default_rng(0), SIZES)
    for mode in op.modes:
        assert explain(gla, *arrays, mode=mode).mode == mode
    assert explain(gla, *arrays).mode in op.modes  # what "auto" became


def test_nothing_is_computed():
    """Shapes of 2**40 tokens cost nothing: the arrays are views of one number."""
    x = np.broadcast_to(np.float32(0), (1, 1, 2**20, 8))
    out = np.full((1, 1, 2**20, 8), np.nan, np.float32)
    explain(gla, x, x, x, x, out=out)
    assert np.isnan(out).all()


def test_a_named_backend_that_cannot_run():
    arrays = draw(next(iter(OPS)), np.random.default_rng(0), SIZES)
    found = explain(gla, *arrays, backend="cupy")
    assert found.backend is None and "host" in found.reasons["cupy"]
    assert "no backend" in str(found)
    with pytest.raises(ContractError, match="backend is 'torch'"):
        explain(gla, *arrays, backend="torch")


def test_errors_are_those_of_the_call():
    arrays = draw(next(iter(OPS)), np.random.default_rng(0), SIZES)
    with pytest.raises(ContractError, match="gla: mode is 'x'"):
        explain(gla, *arrays, mode="x")
    with pytest.raises(ContractError, match="gla: v has T=3"):
        explain(gla, arrays[0], arrays[1], arrays[2][:, :, :3], arrays[3])


FIVE = ["stages_chunk_cumsum", "stages_gated_qk", "stages_inter_chunk", "stages_intra_chunk", "stages_combine"]
LAUNCHES = {"recurrent": ["recurrent_forward"], "chunk": ["gated_forward"], "staged": FIVE}
SIXTEEN = {**SIZES, "K": 16, "V": 8}


@pytest.mark.parametrize("mode", LAUNCHES)
@pytest.mark.parametrize("capability, dtype", [(80, np.float32), (80, BFLOAT16), (90, np.float32)])
def test_the_kernels_of_a_mode_are_launched(capability, mode, dtype):
    """What was asked for runs, in the order that explain says."""
    for op in OPS:
        own = op.derived or op in DELTA_RULES  # GLA's calls, and those that choose between tokens and chunks themselves
        if op in cupy.PLANNERS and mode in op.modes and "recurrent" in op.modes and not own:
            device = planned.Noting(capability)
            problem = op.bind(draw(op, np.random.default_rng(0), SIXTEEN, dtype), mode=mode)
            plan, before = planned.plan_of(problem, device), len(LAUNCHES[mode])
            planned.run(problem, device)
            assert planned.names(plan)[-before:] == LAUNCHES[mode]
            assert {*planned.names(plan)[:-before]} <= {"elementwise_feature_map"}
            assert tuple(device.launched) == plan.kernels
            assert plan.mode == mode


@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32, np.float64])
@pytest.mark.parametrize("T, chunk_size, mode", [(64, None, "chunk"), (65, None, "staged"), (20, 16, "staged")])
def test_states_are_materialized_for_several_chunks(T, chunk_size, mode, dtype):
    """With one chunk there are none between chunks, and all chunks are computed side by side."""
    arrays = draw(GLA, np.random.default_rng(0), SIXTEEN | {"T": T}, dtype)
    problem = GLA.bind(arrays, materialize=True, chunk_size=chunk_size)
    assert cupy.PLANNERS[GLA].unsupported(problem) is None
    double = dtype == np.float64 and mode == "chunk"  # float64 goes token by token
    assert planned.plan_of(problem, planned.Noting()).mode == ("recurrent" if double else mode)


def test_hopper_has_a_kernel_of_its_own(device):
    """For half data whose rows are whole pieces of 16 bytes; the other one takes what is left. Rows of few tokens are
    not copied if they are whole pieces of 4 bytes."""
    every, wide = {gated_kernels.GatedForward}, {GatedWideOperands, GatedWideForward}
    hopper = {gated_kernels.GatedForwardSm90} if device.capability == 90 else None
    for sizes, dtype, classes in (
        (SIXTEEN, BFLOAT16, hopper or every),
        (SIXTEEN, np.float16, hopper or every),
        (SIXTEEN, np.float32, every),
        ({**SIXTEEN, "V": 12}, BFLOAT16, every),
        ({**SIXTEEN, "V": 12, "T": 65}, BFLOAT16, {CopyRows, *hopper} if hopper else every),
        ({**SIXTEEN, "K": 136}, BFLOAT16, hopper or wide),
        ({**SIXTEEN, "K": 264}, BFLOAT16, wide),
        ({**SIXTEEN, "K": 264}, np.float16, every),
        ({**SIXTEEN, "K": 600}, BFLOAT16, every),
    ):
        arrays = [device.upload(x) for x in draw(next(iter(OPS)), np.random.default_rng(0), sizes, dtype)]
        plan = planned.plan_of(next(iter(OPS)).bind(arrays), device)
        kernel = [found for found in plan.kernels if type(found) is not CopyRows][-1]
        assert {type(found) for found in plan.kernels} == classes and "segments" not in plan.tiles
        assert plan.tiles["BV"] == kernel.BV


def test_hopper_copies_what_does_not_lie_on_16_bytes(rng):
    """Rather than take the slower kernels: inputs before, out behind; a gradient's too."""
    op, device = next(iter(OPS)), planned.Noting(90)
    arrays = draw(op, rng, SIXTEEN, BFLOAT16)
    usual = planned.plan_of(op.bind(arrays), device)
    wide = np.zeros((*arrays[0].shape[:-1], arrays[0].shape[-1] + 2), BFLOAT16)
    q, out = wide[..., 1:-1], np.zeros((*arrays[2].shape[:-1], arrays[2].shape[-1] + 1), BFLOAT16)[..., 1:]
    plan = planned.plan_of(op.bind([q, *arrays[1:]], out=out), device)
    assert plan.kernels == usual.kernels
    assert [copy.partition(":")[0] for copy in plan.copies] == ["q", "out"] and usual.copies == ()
    for given, copies in (arrays, ()), ([q, *arrays[1:]], ("q",)):
        plan = planned.plan_of(op.bind(given, gradient=True), device)
        assert {kernel.arch for kernel in plan.kernels} == {"sm_90a"}
        assert tuple(copy.partition(":")[0] for copy in plan.copies) == copies


def test_the_portable_kernels_are_chosen_for_a_while(monkeypatch):
    """And a pullback keeps those of its forward pass."""
    hopper = planned.Noting(90)
    monkeypatch.setattr(cupy, "DEVICE", hopper)
    with choose_kernels("portable"):
        assert cupy.chosen_device().capability == 80
        pull = cupy.Pullback(next(iter(OPS)).bind(draw(next(iter(OPS)), np.random.default_rng(0), SIZES)), ())
    assert cupy.chosen_device() is hopper
    assert pull.device is cupy.PORTABLE


def test_kernels_that_nobody_has():
    arrays = draw(next(iter(OPS)), np.random.default_rng(0), SIZES)
    assert explain(gla, *arrays, kernels="portable").backend == "numpy"
    with pytest.raises(ContractError, match="gla: kernels is 'hopper', expected one of 'auto', 'portable'"):
        explain(gla, *arrays, kernels="hopper")
    with pytest.raises(ValueError, match="kernels is 'hopper'"), choose_kernels("hopper"):
        pass


def test_portable_kernels_on_the_card(card):
    """Not one that is the card's own."""
    if card.name == "cupy":
        arrays = [card.asarray(x) for x in draw(next(iter(OPS)), np.random.default_rng(0), SIXTEEN, BFLOAT16)]
        for gradient in (False, True):
            found = card.run(explain, gla, *arrays, gradient=gradient, kernels="portable")
            assert not any("sm90" in kernel for kernel in found.kernels)


def test_on_the_card(card):
    """Kernels, tiles, copies and the floor; only this backend's own reasons are missing."""
    arrays = [card.asarray(x) for x in draw(next(iter(OPS)), np.random.default_rng(0), SIZES, np.float32)]
    found = card.run(explain, gla, *arrays)
    assert found.backend == card.name and found.mode in card.modes["gla"]
    assert found.kernels and found.tiles and found.copies == ()
    assert 0 < found.floor_ms < 1e-3
    assert "cuda:0" in found.reasons["numpy"] and card.name not in found.reasons
    for mode in card.modes["gla"]:
        assert card.run(explain, gla, *arrays, mode=mode).mode == mode
    columns = card.cupy.asfortranarray(arrays[0])
    if card.name == "cupy":
        (copy,) = card.run(explain, gla, columns, *arrays[1:]).copies
        assert copy.startswith("q: ")


def test_device_arrays_go_to_cupy_first(card):
    arrays = [
        card.asarray(x)
        for x in draw(next(op for op in OPS if op.name == "rwkv6"), np.random.default_rng(0), SIZES, np.float32)
    ]
    assert explain(rwkv6, *arrays).backend == "cupy"
    quadratic = explain(rwkv6, *arrays, mode="parallel")
    assert quadratic.backend is None and set(quadratic.reasons) == {"numpy", "cupy", "numba"}


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("op", [op for op in OPS if op.name in ("gla", "rwkv6", "simple_gla")], ids=lambda op: op.name)
def test_what_is_warmed_up_is_what_runs(op, dtype):
    device, arrays = planned.Noting(90), draw(op, np.random.default_rng(0), SIZES | {"K": 16, "V": 16}, dtype)
    problem = op.bind(arrays, gradient=True)
    found = cupy.kernels_of(problem, device)
    assert not device.launched and not device.made
    result, saved = planned.run_and_save(problem.replace(memo=None), device)
    planned.pull(problem, device, np.ones_like(result[0]), None, saved)
    assert set(found) == set(device.launched)


def test_warming_up_checks_the_call_and_changes_nothing():
    arrays = draw(next(iter(OPS)), np.random.default_rng(0), SIZES, np.float32)
    before = [x.copy() for x in arrays]
    assert warm_up(gla, *arrays, gradient=True) is None
    assert all(same_bits(x, copy) for x, copy in zip(arrays, before))
    with pytest.raises(ContractError, match="gla: k has T=39"):
        warm_up(gla, arrays[0], arrays[1][:, :, 1:], *arrays[2:])
    with pytest.raises(TypeError, match="warm_up"):
        warm_up(print, *arrays)


def test_a_first_gradient_compiles_both_ways_at_once(monkeypatch):
    device, compiled = planned.Noting(90), []
    monkeypatch.setattr(device, "compile", compiled.append)
    for _ in range(2):
        arrays = draw(next(iter(OPS)), np.random.default_rng(0), SIZES, np.float32)
        problem = next(iter(OPS)).bind(arrays, gradient=True)
        cupy.compile_pullback(problem, device)
    assert len(compiled) == 1 and {kernel.name for kernel in compiled[0]} >= {"gated_backward_values"}
    assert not device.launched and not device.made
