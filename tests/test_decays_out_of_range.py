"""Decays that leave a dtype's range within a chunk, where what they meet is so large that the result does not."""

import numpy as np
import pytest
from reference import double

from linattn_np import gla, rwkv6, simple_gla, vjp

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


@pytest.mark.filterwarnings("ignore::linattn_np.LinattnWarning")
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_growth_on_one_side_and_decay_on_the_other(tokens):
    """gv of +60 beside g of -60, and turned over: the state only sees their sum."""
    for up in (60.0, -60.0, 120.0, -120.0):
        ones, gv = np.ones(tokens), np.full((1, 1, tokens, 1), up, np.float32)
        o, pull = called("gla with gv", np.full(tokens, -up), ones, ones, gv)
        np.testing.assert_allclose(o.ravel(), np.arange(1, tokens + 1), rtol=LIMIT)
        dq, dk, dv, dg, dgv = (x.ravel() for x in pull(np.ones((1, 1, tokens, 1), np.float32)))
        np.testing.assert_allclose(dq, np.arange(1, tokens + 1), rtol=LIMIT)
        np.testing.assert_allclose(dk, np.arange(tokens, 0, -1), rtol=LIMIT)
        np.testing.assert_allclose(dv, dk, rtol=LIMIT)
        np.testing.assert_allclose(dg, np.arange(tokens) * np.arange(tokens, 0, -1), rtol=LIMIT)
        np.testing.assert_allclose(dgv, dg, rtol=LIMIT)
