"""Sizes that only a card holds: addresses beyond 2**31 elements, more rows than a grid's y axis has blocks."""

import numpy as np
import pytest
from conftest import Numba
from reference import GATES, assert_close, draw, exact, same_bits

from linattn_np import OPS, gla, gla_step
from linattn_np.array_kinds import BFLOAT16
from linattn_np.declarations import GLA, GLA_STEP, RWKV6

pytestmark = pytest.mark.xdist_group("large")  # one at a time: workers share the card's memory


@pytest.fixture(autouse=True)
def memory(card):
    """Given back around every test: they take up to 60 GB."""
    pool = card.cupy.get_default_memory_pool()
    pool.free_all_blocks()
    yield
    pool.free_all_blocks()


def repeated(card, values, shape):
    """An array on the card that repeats the host's `values`, whose odd count makes every row another."""
    piece, x = card.asarray(values), card.cupy.empty(shape, values.dtype)
    flat = x.reshape(-1)
    for start in range(0, flat.size, piece.size):
        part = flat[start : start + piece.size]
        part[...] = piece[: part.size]
    return x


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_arrays_beyond_2_to_the_31_elements(card, mode, layout, rng):
    """The last head (bhtd), or the last tokens (bthd), lie beyond 2**31 elements; first and last head are checked.

    q, k and g are 4.3 GB each in bfloat16; the float32 stages between them take four times 8.7 GB.
    """
    if mode == "staged" and isinstance(card, Numba) and card.cupy.cuda.runtime.memGetInfo()[1] < 100e9:
        pytest.skip("Numba's stages take 86 GB of these arrays")
    H, T, K, V = 4096, 2064, 256, 16
    count = 2**22 + 1
    arrays = []
    for draw_values, D in (
        (rng.standard_normal, K),
        (rng.standard_normal, K),
        (rng.standard_normal, V),
        (lambda n: GATES["logsigmoid"](rng, n), K),
    ):
        arrays.append(
            repeated(card, draw_values(count).astype(BFLOAT16), (1, H, T, D) if layout == "bhtd" else (1, T, H, D))
        )
    assert arrays[0].size > 2**31
    o, final = card.run(gla, *arrays, mode=mode, layout=layout, output_final_state=True)
    ends = [0, H - 1]

    def of_ends(x):
        return np.stack([card.tohost((x[:, h] if layout == "bhtd" else x[:, :, h]).copy()) for h in ends], axis=1)

    wanted, state = exact(gla, [of_ends(x) for x in arrays])
    assert_close("o", of_ends(o), wanted, BFLOAT16)
    assert_close("state", card.tohost(final[:, ends]), state, BFLOAT16)


@pytest.fixture
def wide(card, rng):
    """Host arrays, and the same on the card in a buffer [2, 2**31 + 65536] of NaN: the batch's stride is the
    buffer's.
    """
    host = draw(GLA, rng, {"B": 2, "H": 1, "T": 100, "K": 64, "V": 64, "N": 2}, BFLOAT16)
    buffer, there, at = card.cupy.empty((2, 2**31 + 2**16), BFLOAT16), [], 0
    for x in host:
        size = x[0].size
        view = buffer[:, at : at + size].reshape(x.shape)
        view[...] = card.asarray(x)
        assert view.base is not None and view.strides[0] == buffer.strides[0]
        there.append(view)
        at += size
    return host, there


def test_a_batch_stride_beyond_2_to_the_31_elements(card, mode, wide):
    host, there = wide
    o, final = card.run(gla, *there, mode=mode, output_final_state=True)
    wanted, state = exact(gla, host)
    assert_close("o", card.tohost(o), wanted, BFLOAT16)
    assert_close("state", card.tohost(final), state, BFLOAT16)


@pytest.mark.parametrize("op", [GLA, RWKV6], ids=["gla", "rwkv6"])
def test_more_rows_than_65535(card, op, mode, rng):
    """B H = 70,000: every block has to be on grid x."""
    host, function = draw(op, rng, {"B": 1000, "H": 70, "T": 18, "K": 16, "V": 16, "N": 1000}, np.float32), OPS[op]
    o, final = card.run(function, *map(card.asarray, host), mode=mode, output_final_state=True)
    wanted, state = exact(function, host)
    assert_close("o", card.tohost(o), wanted, np.float32)
    assert_close("state", card.tohost(final), state, np.float32)


def test_more_sequences_than_65535(card, rng):
    """70,000 packed sequences of 0 to 3 tokens."""
    lengths = rng.integers(0, 4, 70_000)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    host = draw(GLA, rng, {"B": 1, "H": 1, "T": int(bounds[-1]), "K": 16, "V": 16, "N": 70_000}, np.float32)
    first = np.flatnonzero(lengths)[-1000]
    a = bounds[first]
    wanted, state = exact(gla, [x[:, :, a:] for x in host], cu_seqlens=bounds[first:] - a)
    for mode in card.modes["gla"]:
        o, final = card.run(gla, *map(card.asarray, host), cu_seqlens=bounds, mode=mode, output_final_state=True)
        assert_close(f"o, {mode}", card.tohost(o)[:, :, a:], wanted, np.float32)
        assert_close(f"state, {mode}", card.tohost(final)[first:], state, np.float32)


def test_a_step_of_more_rows_than_65535(card, rng):
    sizes = {"B": 70_000, "H": 1, "K": 16, "V": 16, "N": 70_000}
    host = draw(GLA_STEP, rng, sizes, np.float32)
    state = rng.standard_normal((70_000, 1, 16, 16)).astype(np.float32)
    wanted, after = exact(gla, [x[:, :, None] for x in host], initial_state=state)
    memory = card.asarray(state)
    o = card.run(gla_step, *map(card.asarray, host), memory)
    assert_close("o", card.tohost(o), wanted[:, :, 0], np.float32)
    assert_close("state", card.tohost(memory), after, np.float32)


def test_a_state_pool_beyond_2_to_the_31_elements(card, rng):
    """The last slot of a pool of 2**31 numbers and more."""
    slots = 2**31 // (256 * 256) + 2
    pool = card.cupy.zeros((slots, 1, 256, 256), np.float32)
    host = draw(GLA_STEP, rng, {"B": 1, "H": 1, "K": 256, "V": 256, "N": 1}, np.float32)
    state = rng.standard_normal((1, 1, 256, 256)).astype(np.float32)
    pool[-1] = card.asarray(state[0])
    wanted, after = exact(gla, [x[:, :, None] for x in host], initial_state=state)
    o = card.run(gla_step, *map(card.asarray, host), pool, slots=[slots - 1])
    assert_close("o", card.tohost(o), wanted[:, :, 0], np.float32)
    assert_close("state", card.tohost(pool[-1:]), after, np.float32)
    assert not card.tohost(pool[-3:-1]).any() and not card.tohost(pool[:2]).any()


def test_work_is_on_the_current_stream_and_can_be_captured(card, rng):
    """A step with its state and out given: captured once, replayed thrice, the state three tokens on."""
    if card.name != "cupy":
        pytest.skip("Numba's launches are not captured")
    host = draw(GLA_STEP, rng, {"B": 2, "H": 2, "K": 64, "V": 64, "N": 2}, np.float32)
    there = [card.asarray(x) for x in host]
    state, out = card.asarray(np.zeros((2, 2, 64, 64), np.float32)), card.cupy.empty((2, 2, 64), np.float32)
    card.run(gla_step, *there, state, out=out)  # compiled and loaded
    state[...] = 0
    stream = card.cupy.cuda.Stream(non_blocking=True)
    card.cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        card.run(gla_step, *there, state, out=out)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    expected = card.asarray(np.zeros((2, 2, 64, 64), np.float32))
    for _ in range(3):
        o = card.run(gla_step, *there, expected)
    assert same_bits(card.tohost(state), card.tohost(expected)) and same_bits(card.tohost(out), card.tohost(o))
