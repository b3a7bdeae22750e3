"""Mild and strong gates take two ways through the one-pass kernel; what comes out may not tell which."""

import numpy as np
import pytest
from reference import LIMITS, assert_close, double, draw, errors, exact, rms

import linattn_np
from linattn_np.arrays import BFLOAT16
from linattn_np.ops import GLA, OPS, RWKV6

CHUNK = 32      # tokens for which the Hopper kernel chooses its way
WAYS = {"one token resets": -np.inf, "one is beyond float32's exponents": -200., "one grows": 30.}


def problem(op, rng, K, T=6 * CHUNK, V=64):
    """Arrays whose first channel holds nothing: its gates change the way, never the answer."""
    arrays = dict(zip(op.arrays, draw(op, rng, {"B": 1, "H": 2, "T": T, "K": K, "V": V}, BFLOAT16), strict=True))
    q, k = list(arrays)[:2]
    arrays[q][..., 0] = arrays[k][..., 0] = 0
    return arrays


def run(backend, op, arrays):
    o = backend.run(OPS[op], *map(backend.asarray, arrays.values()), mode="chunk")
    return backend.tohost(o)


def needs_half_data(backend, op):
    if not backend.takes(op, "chunk", BFLOAT16):
        pytest.skip("no one-pass kernel for half data here")


def bits(x):
    return np.asarray(x).view(np.uint16)


@pytest.mark.parametrize("gate", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("K", (64, 128))
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_ways_switch_within_a_sequence(backend, rng, op, K, gate):
    """A strong gate in chunks 1 and 4 of six, where no query or key can see it."""
    needs_half_data(backend, op)
    arrays = problem(op, rng, K)
    mild = run(backend, op, arrays)
    wanted, _ = exact(OPS[op], list(arrays.values()))
    gates = arrays[list(arrays)[3]]
    gates[..., [CHUNK + 5, 4 * CHUNK + 31], 0] = gate
    strong = run(backend, op, arrays)
    for what, o in ("mild", mild), ("strong", strong):
        assert_close(what, o, wanted, BFLOAT16)
    if backend.gates_choose_the_route:
        return
    same = (bits(mild) == bits(strong)).reshape(2, 6, -1).all((0, 2))
    assert same[0]
    if backend.name == "hopper":
        assert not same[1]                  # rounded on another way


@pytest.mark.parametrize("size", (1e9, 1e30))
def test_large_keys_overflow_nothing(backend, rng, size):
    """Keys that a factor of mild gates would push over float32's end."""
    needs_half_data(backend, GLA)
    arrays = problem(GLA, rng, 64)
    arrays["g"][...] = -2
    arrays["k"][..., 70:90, :] *= size
    arrays["q"] /= size
    o = run(backend, GLA, arrays)
    assert_close("o", o, exact(OPS[GLA], list(arrays.values()))[0], BFLOAT16)


@pytest.mark.parametrize("op", (linattn_np.gla, linattn_np.rwkv6), ids=lambda op: op.__name__)
@pytest.mark.parametrize("large", range(3), ids="qkv")
def test_large_arrays_overflow_no_gradient(rng, op, large):
    """Arrays that NumPy's factors of mild gates would push over float32's end, forward or backward."""
    arrays = list(rng.standard_normal((4, 1, 2, 3 * CHUNK, 16)))
    arrays[3] = np.full_like(arrays[3], -1.8)
    arrays[3][..., CHUNK + 5, :] = -np.inf
    arrays[large][..., 5:, :] *= 1e20
    if op is linattn_np.rwkv6:
        arrays.append(rng.standard_normal((2, 16)))
    results = []
    for dtype, mode in (np.float32, "chunk"), (np.float64, "recurrent"):
        o, pull = linattn_np.vjp(op, *(x.astype(dtype) for x in arrays), mode=mode, backend="numpy")
        results.append((o, *pull(np.ones_like(o))))
    for name, got, wanted in zip(("o", "dq", "dk", "dv", "dg", "du"), *results, strict=False):
        assert_close(name, got, wanted, np.dtype(np.float32), rows=2 if op is linattn_np.rwkv6 and name == "dg" else 1)    # a sum that cancels


@pytest.mark.parametrize("gate", (-1., -30.))
def test_scores_may_cancel_between_the_channels(backend, rng, gate):
    """K > 128 takes two launches on Hopper, whose scores of a token with itself are large here and nearly opposite."""
    needs_half_data(backend, GLA)
    q, k, v, g = draw(GLA, rng, {"B": 1, "H": 2, "T": 4 * CHUNK, "K": 256, "V": 64}, BFLOAT16)
    q[..., 128:], k[..., 128:], g[...] = q[..., :128], -k[..., :128], gate
    k[..., 128:] += (rng.standard_normal(k[..., 128:].shape) / 16).astype(BFLOAT16)
    arrays = {"q": q, "k": k, "v": v, "g": g}
    wanted, _ = exact(linattn_np.gla, list(arrays.values()))
    apart, _ = exact(linattn_np.gla, [q[..., :128], k[..., :128], v, g[..., :128]], scale=256 ** -0.5)
    o = run(backend, GLA, arrays)
    whole, row = LIMITS["bfloat16"]
    assert errors(o, wanted)[0] <= whole
    assert (rms(double(o) - wanted, axis=-1) <= row * np.maximum(rms(wanted, axis=-1), rms(apart, axis=-1))).all()
