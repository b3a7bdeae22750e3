"""Decays that leave a dtype's range within a chunk, where what they meet is so large that the result does not."""

import numpy as np
import pytest
from conftest import SINGLE
from reference import assert_close, double, draw

from linattn_np import gla, rwkv6, simple_gla, vjp
from linattn_np.array_kinds import BFLOAT16
from linattn_np.declarations import GLA_VALUE_GATE

OPERATORS = {"gla": gla, "rwkv6": rwkv6, "simple_gla": simple_gla, "gla with gv": gla}
LIMIT = 1e-5  # of float32's own recurrence: 63 products, each within 2^-23 and with an exponent within 3.4 * 2^-23


def called(name, g, q, k, gv=None, **arguments):
    """(o, pull) of one key and one query among tokens whose values are 1; T tokens, one channel."""
    g = np.float32(g).reshape(1, 1, -1) if name == "simple_gla" else np.float32(g).reshape(1, 1, -1, 1)
    q, k, v = (np.float32(x).reshape(1, 1, -1, 1) for x in (q, k, np.ones(q.size)))
    more = {"rwkv6": [np.zeros((1, 1), np.float32)], "gla with gv": [np.zeros_like(v) if gv is None else gv]}
    return vjp(OPERATORS[name], q, k, v, g, *more.get(name, []), scale=1.0, **arguments)


def only(token, tokens):
    return (np.arange(tokens) == token).astype(np.float32)


MODES = {name: ["auto", "chunk", "staged", "parallel"] for name in OPERATORS} | {"gla with gv": ["auto"]}


@pytest.mark.parametrize("name, mode", [(name, mode) for name, modes in MODES.items() for mode in modes])
@pytest.mark.parametrize("cut", [32, 33, 40])  # on a border of chunks, and within one
def test_decays_behind_growth(name, mode, cut):
    g = np.where(np.arange(63) < cut, 80 / cut, -3.4)
    if name == "rwkv6":  # a token reads before its own gate
        g = np.roll(g, -1)
    g[0] = 0
    o, _ = called(name, g, np.ones(63), only(0, 63), mode=mode)
    exact = np.exp(np.cumsum(double(np.float32(g))))
    exact = np.concatenate([[0], exact[:-1]]) if name == "rwkv6" else exact
    assert exact.max() > 1e30
    np.testing.assert_allclose(o.ravel(), exact, rtol=10 * LIMIT)


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_decays_before_growth(name):
    """A gradient goes backwards in time: first through what grows, then through what decays."""
    g = np.where(np.arange(63) < 32, -3.4, 2.7)
    q, k = only(62, 63), np.ones(63)
    found = called(name, g, q, k)[1](np.ones((1, 1, 63, 1), np.float32))
    gates = double(np.float32(g))
    between = gates[::-1].cumsum()[::-1] - gates  # from behind a token to the end
    exact = np.exp(between - (gates[-1] if name == "rwkv6" else 0))
    if name == "rwkv6":  # its bonus is 0
        exact[-1] = 0
    np.testing.assert_allclose(found[1].ravel(), exact, rtol=10 * LIMIT)


def test_a_state_out_of_range_that_no_output_needs():
    """k v is 1e40; q . k is 1e10, and o 1e30 a token."""
    for tokens in (1, 5):
        o, _ = called("gla", np.zeros(tokens), np.full(tokens, 1e-10), np.full(tokens, 1e20))
        p = gla(*(np.full((1, 1, tokens, 1), x, np.float32) for x in (1e-10, 1e20, 1e20, 0)), scale=1.0)
        np.testing.assert_allclose(o.ravel(), 1e10 * np.arange(1, tokens + 1), rtol=LIMIT)
        np.testing.assert_allclose(p.ravel(), 1e30 * np.arange(1, tokens + 1), rtol=LIMIT)


@pytest.mark.pairwise
@pytest.mark.filterwarnings("ignore::linattn_np.LinattnWarning")
@pytest.mark.parametrize("dtype", (SINGLE, BFLOAT16), ids=str)
def test_growth_on_one_side_and_decay_on_the_other(backend, dtype, rng):
    """The state only sees their sum, which is 0: each side alone leaves float32's range within two tokens."""
    sizes = {"B": 1, "H": 2, "T": 100, "K": 20, "V": 40, "N": 1}
    q, k, v, g, gv = draw(GLA_VALUE_GATE, rng, sizes, dtype, "zero")
    start, dht = rng.standard_normal((2, 1, 2, 20, 40)).astype(SINGLE)
    do = rng.standard_normal(v.shape).astype(dtype)
    flat = [x.copy() for x in (g, gv)]
    g[:], gv[:] = np.reshape([60, -60], (1, 2, 1, 1)), np.reshape([-60, 60], (1, 2, 1, 1))
    for mode in backend.modes[GLA_VALUE_GATE.name]:
        (o, final), pull = backend.run(
            vjp,
            gla,
            *map(backend.asarray, (q, k, v, g, gv)),
            initial_state=backend.asarray(start),
            output_final_state=True,
            mode=mode,
        )
        found = [o, final, *pull(backend.asarray(do), backend.asarray(dht))]
        (o, final), pull = vjp(
            gla,
            *map(double, (q, k, v, *flat)),
            initial_state=double(start),
            output_final_state=True,
            mode="recurrent",
        )
        wanted = [o, final, *pull(double(do), double(dht))]
        for name, x, y in zip(("o", "final", "dq", "dk", "dv", "dg", "dgv", "dh0"), found, wanted, strict=True):
            assert_close(f"{name}, {mode}", backend.tohost(x), y, dtype)


@pytest.mark.filterwarnings("ignore::linattn_np.LinattnWarning")
def test_growth_on_one_side_of_segments(backend, rng):
    """Where few heads have their sequences cut, the decays of a segment leave the range likewise."""
    if backend.name == "numba":
        pytest.skip("Numba has no gates of values")
    ones = np.ones((1, 2, 500, 1), SINGLE)
    up = np.float32([60, -60]).reshape(1, 2, 1, 1) * ones
    arrays = [backend.asarray(x) for x in (ones, ones, ones, -up, up)]
    start = backend.asarray(np.full((1, 2, 1, 1), 3, SINGLE))
    o, (final,) = backend.run(gla, *arrays, scale=1.0, initial_state=start, output_final_state=True)
    wanted = np.broadcast_to(3.0 + np.arange(1, 501), (2, 500))
    np.testing.assert_allclose(backend.tohost(o)[0, :, :, 0], wanted, rtol=LIMIT)
    np.testing.assert_allclose(backend.tohost(final).ravel(), 503.0, rtol=LIMIT)
