"""Calls that compute what they say and are hardly meant: one warning a place, which filters silence."""

import warnings

import numpy as np
import pytest
from reference import draw

import linattn_np
from linattn_np import LinattnWarning, explain, gla, gla_step, rwkv6, simple_gla, softmax_attention, vjp
from linattn_np.ops.gla import GLA
from linattn_np.ops.rwkv6 import RWKV6

SIZES = {"B": 2, "H": 4, "T": 500, "K": 8, "V": 8, "N": 2}


@pytest.fixture
def arrays(rng):
    return draw(GLA, rng, SIZES, np.float32)


def told(call):
    """The messages of a call, each with the file it points at."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    assert all(warning.category is LinattnWarning and warning.filename == __file__ for warning in found)
    return [str(warning.message) for warning in found]


def test_time_where_heads_should_be(arrays):
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    (message,) = told(lambda: gla(*turned))
    assert message.startswith("gla: q is (2, 500, 4, 8), read as [B, H, T, ...]: H=500 heads of T=4 tokens.")
    assert 'layout="bthd"' in message
    for call in (
        lambda: gla(*turned),
        lambda: vjp(gla, *turned),
        lambda: explain(gla, *turned),
        lambda: softmax_attention(*turned[:3]),
        lambda: gla(*turned, output_final_state=True),
    ):
        assert len(told(call)) == 1  # those alike an earlier one too
    assert not told(lambda: gla(*turned, layout="bthd")) and not told(lambda: gla(*arrays))


@pytest.mark.parametrize("H, T, expected", [(2, 1, 1), (8, 5, 1), (64, 63, 1), (64, 64, 0), (1, 1, 0), (8, 0, 0)])
def test_fewer_tokens_than_heads(H, T, expected):
    x = np.zeros((1, H, T, 2), np.float32)
    assert len(told(lambda: gla(x, x, x, x))) == expected
    assert not told(lambda: gla(x, x, x, x, layout="bthd"))


def test_what_else_speaks_for_the_layout():
    """An argument whose shape has H or T alone, and fits."""
    x = np.zeros((1, 8, 5, 2), np.float32)
    for given in (
        {"initial_state": np.zeros((1, 8, 2, 2), np.float32)},
        {"mask": np.ones((1, 5), bool)},
        {"cu_seqlens": [0, 2, 5]},
    ):
        assert not told(lambda: gla(x, x, x, x, **given))
    assert not told(lambda: rwkv6(x, x, x, x, x[0, :, 0]))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_decays_where_their_logs_should_be(dtype, rng):
    q, k, v, _ = draw(GLA, rng, SIZES, np.dtype(dtype))
    decay = np.full(q.shape, 0.875).astype(dtype)
    (message,) = told(lambda: gla(q, k, v, decay))
    assert message.startswith("gla: g is above 0 at every token looked at, 0.875 on average") and "np.log(g)" in message
    assert "T=500" in message
    assert not told(lambda: gla(q, k, v, np.log(decay.astype("f4")).astype(dtype)))
    assert len(told(lambda: simple_gla(q, k, v, decay[..., 0]))) == 1
    assert len(told(lambda: gla(q, k, v, -decay, decay))) == 1


def test_gates_above_0_that_do_not_overflow(arrays):
    q, k, v, g = arrays
    above = g.copy()
    above[:, :, ::2] = 3.0
    for gates in (np.full_like(g, 0.1), above, np.full_like(g, np.nan), np.full_like(g, -np.inf)):
        assert not told(lambda: gla(q, k, v, gates))
    assert not told(lambda: gla(*(x[:, :, :80] for x in (q, k, v, np.full_like(g, 0.9)))))  # 72 nats at most
    assert told(lambda: gla(*(x[:, :, :20] for x in (q, k, v, np.full_like(g, 5.0)))))


def test_the_bonus_is_no_gate(rng):
    r, k, v, w, u = draw(RWKV6, rng, SIZES, np.float32)
    assert not told(lambda: rwkv6(r, k, v, w, np.abs(u) + 5))
    assert told(lambda: rwkv6(r, k, v, np.exp(w), u))
    state = np.zeros((2, 4, 8, 8), np.float32)
    assert not told(lambda: gla_step(r[:, :, 0], k[:, :, 0], v[:, :, 0], np.exp(w[:, :, 0]), state))


def test_once_a_place(arrays):
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            gla(*turned)
        gla(*turned)
    assert len(found) == 2


def test_filters(arrays):
    q, k, v, g = arrays
    decays = np.exp(g * 0 - 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", linattn_np.LinattnWarning)
        gla(q, k, v, decays)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LinattnWarning)
        with pytest.raises(LinattnWarning, match="gla: g is above 0"):
            gla(q, k, v, decays)


def test_a_device_is_not_waited_for():
    """Of its arrays shapes alone are looked at: these have no numbers to read."""
    cupy = pytest.importorskip("cupy")

    def array(shape):
        memory = cupy.cuda.UnownedMemory(1 << 20, 1 << 30, None, 0)
        return cupy.ndarray(shape, np.float32, cupy.cuda.MemoryPointer(memory, 0))

    for _ in range(2):
        assert not told(lambda: GLA.bind([array((1, 2, 500, 4))] * 4))
        assert len(told(lambda: GLA.bind([array((1, 500, 2, 4))] * 4))) == 1
