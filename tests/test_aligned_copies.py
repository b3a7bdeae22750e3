"""Calls whose rows are not whole pieces of 16 bytes, on wider copies."""

import numpy as np
import planned
import pytest
from conftest import Kernels
from reference import assert_close, assert_results, draw, draw_states, exact_vjp, same_bits

from linattn_np import delta_rule, gated_delta_rule, gla, kda, rwkv6, rwkv7, simple_gla, vjp
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import aligned_copies, execute, segments
from linattn_np.backends.cupy.execute import describe_array
from linattn_np.backends.cupy.plan import Draft, as_array
from linattn_np.declarations import (
    DELTA_RULE,
    GATED_DELTA_RULE,
    GLA,
    GLA_VALUE_GATE,
    KDA,
    RWKV6,
    RWKV7,
    SIMPLE_GLA,
)
from linattn_np.layouts import swap_heads

SIZES = {"B": 1, "H": 2, "T": 75, "K": 12, "V": 9, "N": 1}
DELTA_RULES = {DELTA_RULE: delta_rule, GATED_DELTA_RULE: gated_delta_rule, KDA: kda, RWKV7: rwkv7}
OPERATORS = {GLA: gla, RWKV6: rwkv6, SIMPLE_GLA: simple_gla, GLA_VALUE_GATE: gla} | DELTA_RULES


@pytest.fixture
def kernels(backend):
    if not isinstance(backend, Kernels):
        pytest.skip("NumPy has no kernels")
    return backend


@pytest.mark.pairwise(half="op")
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_gradients(kernels, rng, op, dtype):
    sizes = SIZES if dtype.itemsize == 2 else {**SIZES, "K": 10}
    arrays, state = draw(op, rng, sizes, dtype), draw_states(op, rng, sizes, np.float32)[0]
    do, dht = rng.standard_normal((1, 2, 75, 9)).astype(dtype), draw_states(op, rng, sizes, np.float32)[0]
    there = list(map(kernels.asarray, arrays))
    _, pull = kernels.run(vjp, OPERATORS[op], *there, initial_state=kernels.asarray(state))
    found = pull(kernels.asarray(do), kernels.asarray(dht))
    *_, gradients = exact_vjp(OPERATORS[op], arrays, do, dht, initial_state=state)
    for name, x, wanted in zip([*op.arrays, "initial_state"], found, gradients, strict=True):
        x = kernels.tohost(x)
        assert x.shape == wanted.shape
        if name != "u":  # a sum over all tokens
            assert_close(f"d{name}", x, wanted, dtype, factor=2, rows=4)


@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.pairwise
@pytest.mark.parametrize("op", [GLA, RWKV6, *DELTA_RULES], ids=lambda op: op.name)
def test_forward(kernels, rng, op, layout, given):
    """Two packed sequences with states; o in the caller's memory or in new."""
    sizes = {**SIZES, "K": 18, "N": 2}  # heads of at most 16 channels have kernels that load smaller pieces
    arrays, state = draw(op, rng, sizes, BFLOAT16), draw_states(op, rng, sizes, np.float32)[0]
    packed = {"cu_seqlens": [0, 33, 75]}
    turned = [np.ascontiguousarray(swap_heads(x, axes, layout)) for x, axes in zip(arrays, op.arrays.values())]
    options = {"layout": layout, "initial_state": kernels.asarray(state), "output_final_state": True}
    if given:
        options["out"] = kernels.asarray(np.full_like(turned[list(op.arrays).index("v")], np.nan))
    o, final = kernels.run(OPERATORS[op], *map(kernels.asarray, turned), mode="chunk", **packed, **options)
    assert not given or o is options["out"]
    found = swap_heads(kernels.tohost(o), op.out, layout), kernels.tohost(final)
    assert_results(OPERATORS[op], arrays, found, BFLOAT16, initial_state=state, **packed)


@pytest.mark.pairwise(half="dtype")
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("op", [GLA, RWKV6], ids=lambda op: op.name)
def test_five_stages(kernels, rng, op, dtype):
    """Stages load numbers of rows one by one where no copy has whole pieces."""
    sizes = {**SIZES, "K": 19}
    arrays, state = draw(op, rng, sizes, dtype), draw_states(op, rng, sizes, np.float32)[0]
    options = {"initial_state": kernels.asarray(state), "output_final_state": True, "mode": "staged"}
    found = kernels.run(OPERATORS[op], *map(kernels.asarray, arrays), **options)
    assert_results(OPERATORS[op], arrays, list(map(kernels.tohost, found)), dtype, initial_state=state)
    for K, copies in ((19, 1), (20, 0)):
        names = planned.names(planned.plan_of(large_rows(op, K, dtype), planned.Noting()))
        assert names.count("elementwise_copy_rows") == copies and names.count("stages_combine") == 1


def large_rows(op, K, dtype):
    """A call by stages of rows [K] and [16] that is only planned."""
    sizes = {"B": 1, "H": 2, "T": 500, "K": K, "V": 16}
    arrays = [np.zeros([sizes[axis] for axis in axes.split()], dtype) for axes in op.arrays.values()]
    return op.bind(arrays, mode="staged")


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_time_backwards(kernels, rng, layout, monkeypatch):
    """The same bits as of arrays that were turned round before, without a copy."""
    for method in ("copy", "contiguous_copy"):
        monkeypatch.setattr(Draft, method, lambda *_, **__: pytest.fail("copies"))
    arrays = draw(GLA, rng, SIZES | {"K": 16, "V": 8}, BFLOAT16)
    do = rng.standard_normal((1, 2, 75, 8)).astype(BFLOAT16)
    if layout == "bthd":
        *arrays, do = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (*arrays, do))
    time = (slice(None),) * (1 + (layout == "bhtd"))

    def results(turned, **options):
        o, pull = kernels.run(vjp, gla, *(kernels.asarray(turned(x)) for x in arrays), layout=layout, **options)
        return [turned(kernels.tohost(x)) for x in (o, *pull(kernels.asarray(turned(do))))]

    found, wanted = (
        results(lambda x: x, reverse=True),
        results(lambda x: np.ascontiguousarray(x[(*time, slice(None, None, -1))])),
    )
    assert all(map(same_bits, found, wanted))


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("K, V, T, copied", [(64, 64, 4096, False), (64, 65, 4096, True), (64, 65, 64, True)])
def test_which_calls_are_copied(device, K, V, T, copied, gradient, monkeypatch):
    """Those with uneven rows; the kernels are then those of the wider rows, Hopper's own on Hopper."""
    monkeypatch.setattr(
        segments, "cheapest_backward_count", lambda *_: 1
    )  # states of segments are saved for plain rows alone

    def plan(V):
        shapes = ((1, 2, T, K), (1, 2, T, K), (1, 2, T, V), (1, 2, T, K))
        return planned.plan_of(
            GLA.bind([device.upload(np.zeros(shape, BFLOAT16)) for shape in shapes], gradient=gradient), device
        )

    found = plan(V)
    assert any("whole pieces of 16 bytes" in reason for reason in found.copies) == copied
    if copied:
        first, *names, last = planned.names(found)
        assert first == last == "elementwise_copy_rows" and names == planned.names(plan(72))


def laid(rng, device, shape, dtype, order, steps, off):
    """An array whose axes lie in memory in this order, every `steps`-th number of each axis, so many numbers into it;
    negative steps run backwards."""
    room = [size * abs(step) for size, step in zip(shape, steps)]
    memory = rng.integers(0, 255, off + int(np.prod(room)) * dtype.itemsize, np.uint8)
    memory = np.resize(memory, (off + int(np.prod(room))) * dtype.itemsize).view(dtype)
    there = device.upload(memory)[off:].reshape([room[axis] for axis in order])
    back = there.transpose([order.index(axis) for axis in range(len(shape))])
    return back[tuple(slice(None, None, step) for step in steps)]


@pytest.mark.parametrize(
    "shape, to, order, steps, off",
    [
        ((2, 3, 5, 65), (2, 3, 5, 72), (0, 1, 2, 3), (1, 1, 1, 1), 0),
        ((2, 3, 5, 60), (2, 3, 5, 64), (0, 2, 1, 3), (1, 1, 1, 1), 4),
        ((2, 3, 50, 96), (2, 3, 50, 65), (1, 0, 2, 3), (1, 2, -1, 1), 0),
        ((1, 2, 301, 72), (1, 2, 301, 60), (0, 1, 2, 3), (1, 1, 1, 1), 0),
        ((2, 2, 9, 33), (2, 2, 16, 40), (0, 1, 2, 3), (1, 1, 3, 2), 1),
        ((2, 1, 7, 3), (2, 1, 7, 8), (3, 2, 1, 0), (-1, 1, 1, 1), 3),
        ((2, 5, 7, 8), (2, 5, 7, 3), (0, 1, 2, 3), (1, 1, 1, 1), 0),
        ((3, 8), (3, 5), (0, 1), (1, 1), 8),
        ((2, 2, 3, 16), (2, 2, 3, 16), (0, 1, 2, 3), (1, 1, 1, 1), 8),
        ((2, 3, 1500, 9), (2, 3, 1500, 1), (0, 2, 1, 3), (1, 1, 1, 1), 1),  # several rows in 16 bytes, two blocks
    ],
)
def test_copies_of_rows(device, rng, shape, to, order, steps, off):
    """Longer and shorter rows of any strides; numbers as they were, and zeros behind them, as NumPy moves them."""
    dtypes = [BFLOAT16, np.dtype(np.float32)]
    given = [laid(rng, device, shape, dtype, order, steps, off) for dtype in dtypes] * 5  # two launches
    draft, described = Draft(), [describe_array(f"x{n}", x, device) for n, x in enumerate(given)]
    found = [draft.like(as_array(x), shape=to) for x in described]
    aligned_copies.copy_rows(draft, zip(map(as_array, described), found), "for a test")
    plan = draft.plan(tuple(found), given=tuple(described))
    assert len(plan.launches) == 2 and plan.copies == ("for a test",) * 2
    results, _ = execute.CompiledPlan(plan, device)(given)
    for x, y in zip(given, results):
        x, y = (np.ascontiguousarray(planned.host(z)) for z in (x, y))
        wanted = np.zeros(to, x.dtype)
        inside = tuple(map(slice, np.minimum(shape, to)))
        wanted[inside] = x[inside]
        assert same_bits(y, wanted)


def test_memory_with_gaps_is_copied_to_as_it_lies(device):
    """As a caller's `out` may lie."""
    draft, given = Draft(), np.zeros((1, 2, 5, 16), BFLOAT16)
    x, out = (describe_array(name, device.upload(given), device) for name in ("x", "out"))
    aligned_copies.copy_rows(draft, [(as_array(x), as_array(out)[..., :9])])
    assert [type(step).__name__ for step in draft.steps] == ["Copy"]


@pytest.mark.parametrize("off, steps", [(0, ["Copy"]), (1, ["Launch"])], ids=["aligned", "odd"])
def test_contiguous_arrays_at_odd_addresses_are_copied_by_rows(device, off, steps, monkeypatch):
    """Others by the driver, whose copies from such addresses are slow."""
    monkeypatch.setattr(aligned_copies, "LARGE_BYTES", 0)
    x = describe_array("x", device.upload(np.zeros(off + 160, BFLOAT16))[off:].reshape(1, 2, 5, 16), device)
    draft = Draft()
    draft.contiguous_copy(as_array(x))
    plan = aligned_copies.with_fast_copies(draft.plan(()))
    assert [type(step).__name__ for step in plan.steps] == steps
