"""Calls whose rows are not whole pieces of 16 bytes: by wider copies where these are worth it, or number by number."""

import numpy as np
import planned
import pytest
from conftest import Kernels
from reference import assert_close, draw, draw_states, exact

from linattn_np import gla, rwkv6, simple_gla, vjp
from linattn_np.arrays import BFLOAT16
from linattn_np.backends.cupy import pieces
from linattn_np.declarations import GLA, RWKV6, SIMPLE_GLA

SIZES = {"B": 1, "H": 2, "T": 75, "K": 12, "V": 9, "N": 1}
OPERATORS = {GLA: gla, RWKV6: rwkv6, SIMPLE_GLA: simple_gla}


@pytest.fixture
def kernels(backend, monkeypatch):
    """A backend of kernels, which thinks copies worth it whatever the size."""
    if not isinstance(backend, Kernels):
        pytest.skip("NumPy has no kernels")
    monkeypatch.setattr(pieces, "WORTH_COPIES", 1)
    return backend


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_gradients(kernels, rng, op, dtype):
    sizes = SIZES if dtype.itemsize == 2 else {**SIZES, "K": 10}
    arrays, state = draw(op, rng, sizes, dtype), draw_states(op, rng, sizes, np.float32)[0]
    do, dht = rng.standard_normal((1, 2, 75, 9)).astype(dtype), draw_states(op, rng, sizes, np.float32)[0]
    there = list(map(kernels.asarray, arrays))
    _, pull = kernels.run(vjp, OPERATORS[op], *there, initial_state=kernels.asarray(state))
    found = pull(kernels.asarray(do), kernels.asarray(dht))
    given = [np.asarray(x, np.float64) for x in (*arrays, state, do, dht)]
    *exactly, state, do, dht = given
    _, pull = vjp(OPERATORS[op], *exactly, initial_state=state, backend="numpy", mode="recurrent")
    for name, x, wanted in zip([*op.arrays, "initial_state"], found, pull(do, dht), strict=True):
        x = kernels.tohost(x)
        assert x.shape == wanted.shape
        if name != "u":  # a sum over all tokens
            assert_close(f"d{name}", x, wanted, dtype, factor=2, rows=4)


@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("op", [GLA, RWKV6], ids=lambda op: op.name)
def test_forward(kernels, rng, op, layout, given):
    """Two packed sequences with states; o in the caller's memory or in new."""
    sizes = {**SIZES, "N": 2}
    arrays, state = draw(op, rng, sizes, BFLOAT16), draw_states(op, rng, sizes, np.float32)[0]
    packed = {"cu_seqlens": [0, 33, 75]}
    wanted, end = exact(OPERATORS[op], arrays, initial_state=state, **packed)
    if layout == "bthd":
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) if x.ndim > 2 else x for x in arrays]
        wanted = wanted.swapaxes(1, 2)
    options = {"layout": layout, "initial_state": kernels.asarray(state), "output_final_state": True}
    if given:
        options["out"] = kernels.asarray(np.full(wanted.shape, np.nan, BFLOAT16))
    there = list(map(kernels.asarray, arrays))
    o, final = kernels.run(OPERATORS[op], *there, mode="chunk", **packed, **options)
    assert not given or o is options["out"]
    assert_close("o", kernels.tohost(o), wanted, BFLOAT16)
    assert_close("final", kernels.tohost(final), end, BFLOAT16)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("K, V, T, copied", [(64, 64, 4096, False), (64, 65, 4096, True), (64, 65, 64, False)])
def test_which_calls_are_copied(device, K, V, T, copied, gradient):
    """Large ones with uneven rows; the kernels are then those of the wider rows, Hopper's own on Hopper."""

    def plan(V):
        shapes = ((1, 2, T, K), (1, 2, T, K), (1, 2, T, V), (1, 2, T, K))
        return planned.plan_of(
            GLA.bind([device.upload(np.zeros(shape, BFLOAT16)) for shape in shapes], gradient=gradient), device
        )

    found = plan(V)
    assert any("whole pieces of 16 bytes" in reason for reason in found.copies) == copied
    if copied:
        assert planned.names(found) == planned.names(plan(72))
