"""Packed calls in which one sequence has most of the tokens: it is planned by itself."""

import numpy as np
import planned
import pytest
from conftest import Kernels
from reference import assert_close, assert_results, draw, draw_states, exact_vjp

from linattn_np import gla, kda, linear_attention, rwkv7, simple_gla, vjp
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import long_sequence
from linattn_np.declarations import GLA, KDA, RWKV7, SIMPLE_GLA
from linattn_np.layouts import swap_heads

OPERATORS = {GLA: gla, SIMPLE_GLA: simple_gla, KDA: kda, RWKV7: rwkv7}
LENGTHS = [2, 0, 1, *[1] * 20, 70, *[1, 0] * 6]
BOUNDS = np.cumsum([0, *LENGTHS]).tolist()
SIZES = {"B": 1, "H": 2, "T": BOUNDS[-1], "K": 16, "V": 24, "N": len(LENGTHS)}


@pytest.fixture
def kernels(backend, monkeypatch):
    """A backend of kernels that plans sequences of few tokens apart, too."""
    if not isinstance(backend, Kernels):
        pytest.skip("NumPy has no kernels")
    monkeypatch.setattr(long_sequence, "LEAST", 64)
    return backend


@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_forward(kernels, rng, op, layout, given):
    arrays, state = draw(op, rng, SIZES, BFLOAT16), draw_states(op, rng, SIZES, np.float32)[0]
    turned = [np.ascontiguousarray(swap_heads(x, axes, layout)) for x, axes in zip(arrays, op.arrays.values())]
    options = {"layout": layout, "initial_state": kernels.asarray(state), "output_final_state": True}
    if given:
        options["out"] = kernels.asarray(np.full_like(turned[list(op.arrays).index("v")], np.nan))
    o, final = kernels.run(OPERATORS[op], *map(kernels.asarray, turned), cu_seqlens=BOUNDS, **options)
    assert not given or o is options["out"]
    found = swap_heads(kernels.tohost(o), op.out, layout), kernels.tohost(final)
    assert_results(OPERATORS[op], arrays, found, BFLOAT16, initial_state=state, cu_seqlens=BOUNDS)


@pytest.mark.pairwise
@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_gradients(kernels, rng, op, reverse):
    arrays, state = draw(op, rng, SIZES, np.float32), draw_states(op, rng, SIZES, np.float32)[0]
    dht = draw_states(op, rng, SIZES, np.float32)[0]
    do = rng.standard_normal((1, 2, BOUNDS[-1], 24)).astype(np.float32)
    options = {"cu_seqlens": BOUNDS, "reverse": reverse}
    there = list(map(kernels.asarray, arrays))
    _, pull = kernels.run(vjp, OPERATORS[op], *there, initial_state=kernels.asarray(state), **options)
    found = pull(kernels.asarray(do), kernels.asarray(dht))
    *_, gradients = exact_vjp(OPERATORS[op], arrays, do, dht, initial_state=state, **options)
    for name, x, wanted in zip([*op.arrays, "initial_state"], found, gradients, strict=True):
        assert_close(f"d{name}", kernels.tohost(x), wanted, np.float32, factor=2, rows=4)


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_without_states_no_block_has_an_empty_sequence(kernels, device, rng, op):
    lengths = (0, 3, 0, 0, 17, 0)
    bounds, sizes = np.cumsum([0, *lengths]).tolist(), SIZES | {"T": 20, "N": 6}
    arrays, do = draw(op, rng, sizes, np.float32), rng.standard_normal((1, 2, 20, 24)).astype(np.float32)
    o, pull = kernels.run(vjp, OPERATORS[op], *map(kernels.asarray, arrays), cu_seqlens=bounds)
    found, (exact, _, gradients) = pull(kernels.asarray(do)), exact_vjp(OPERATORS[op], arrays, do, cu_seqlens=bounds)
    for name, x, wanted in zip(["o", *op.arrays], [o, *found], [exact, *gradients], strict=True):
        assert_close(name, kernels.tohost(x), wanted, np.float32, factor=2, rows=4)
    for final, count in ((False, 2), (True, 6)):
        problem = op.bind([device.upload(x) for x in arrays], cu_seqlens=bounds, output_final_state=final)
        launches = planned.plan_of(problem, device).launches
        assert count in {x.args["shape"].row_sequences for x in launches if "shape" in x.args}


def test_two_parts_of_a_state(kernels, rng):
    """With its normaliser linear_attention has two arrays for a state."""
    arrays = [rng.standard_normal((1, 2, BOUNDS[-1], D)).astype(np.float32) for D in (16, 16, 24)]
    options = {"feature_map": "elu", "normalize": True, "output_final_state": True, "cu_seqlens": BOUNDS}
    o, final = kernels.run(linear_attention, *map(kernels.asarray, arrays), **options)
    wanted, wanted_final = linear_attention(*(x.astype(np.float64) for x in arrays), backend="numpy", **options)
    for what, x, y in zip(("o", "S", "z"), (o, *final), (wanted, *wanted_final), strict=True):
        assert_close(what, kernels.tohost(x), y, np.float32, factor=2, rows=4)


@pytest.mark.parametrize(
    "lengths, H, apart",
    [
        ([1] * 70 + [4000], 1, True),
        ([1] * 70 + [2000], 1, False),  # more launches take as long as it does
        ([1] * 20 + [4000], 1, False),  # all are cut
        ([1] * 70 + [4000], 64, False),  # it would not be cut
        ([100] * 70 + [4000], 1, False),  # others have more
    ],
)
def test_which_calls(device, lengths, H, apart):
    bounds = np.cumsum([0, *lengths]).tolist()
    for op in (GLA, KDA):
        shapes = [(1, H, bounds[-1], 16)[: len(axes.split())] for axes in op.arrays.values()]
        arrays = [device.upload(np.broadcast_to(BFLOAT16.type(0), shape)) for shape in shapes]
        problem = op.bind(arrays, cu_seqlens=bounds, gradient=True)
        assert bool(long_sequence.parts(problem, device)) == apart
        for asked in (False, True):
            plan = planned.plan_of(problem.replace(gradient=asked), device)
            assert ("segments" in plan.tiles) >= apart
