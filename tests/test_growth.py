"""Gates above 0 beside strong decays and resets: results of the recurrence, forward and backward, on every kernel.

What grows hides all else, so each number is held to the size of what it is a sum of: the same recurrence of |q|, |k|,
|v| and |do|.
"""

import numpy as np
import planned
import pytest
from reference import assert_close, double, exact

from linattn_np import OPS
from linattn_np.arrays import BFLOAT16
from linattn_np.backends.cupy import tuning
from linattn_np.declarations import GLA, RWKV6

SINGLE, HALF = np.dtype(np.float32), np.dtype(np.float16)
# (how far off, of what a number is a sum of; the least number that counts). A gate of 60 is off by 5e-6 as float32's
# exponent, and some stand in a row.
LIMITS = {SINGLE: (3e-4, 1e-33), HALF: (4e-3, 3e-7), BFLOAT16: (3e-2, 1e-33)}
MOST = {SINGLE: 80.0, HALF: 40.0, BFLOAT16: 80.0}  # nats that any run of tokens may grow by
LARGEST = {SINGLE: np.inf, HALF: 6e4, BFLOAT16: np.inf}  # what is larger may overflow
BOUNDS = (0, 0, 5, 77, 110)
KINDS = {
    "bursts": lambda rng, shape: rng.choice([50.0, -60, -np.inf, 0, -0.1], shape, p=[0.1, 0.1, 0.05, 0.5, 0.25]),
    "ramps": lambda rng, shape: np.where(
        rng.random(shape) < 0.3, rng.uniform(1, 30, shape), rng.choice([-25, -0.5, -1e30], shape, p=[0.3, 0.65, 0.05])
    ),
}


def bounded(gates, most):
    """No run of tokens grows by more than `most`: gates that would do so are 0. One that decays by more than 80 nats
    ends in a reset: float32 knows nothing of what is left, and it would show if that grew again.
    """
    grown, decayed = np.zeros_like(gates[:, :, 0]), np.zeros_like(gates[:, :, 0])
    for t in range(gates.shape[2]):
        gate = gates[:, :, t]
        gate[grown + gate > most] = 0
        gate[decayed + gate < -80] = -np.inf
        grown, decayed = np.maximum(grown + gate, 0), np.where(np.isinf(gate), 0, np.minimum(decayed + gate, 0))
    return gates


def recurrence(op, q, k, v, g, u, do, start, dht, scale, bounds):
    """o, the final states, and the gradients of q, k, v, g, u and the initial states, token by token."""
    o, dq, dk, dv, dg = (np.zeros_like(x) for x in (v, q, k, v, g))
    ends, dstart, du = np.zeros_like(start), np.zeros_like(start), np.zeros(q.shape[1::2])
    before = op is RWKV6
    a, bonus = np.exp(g), u[:, None, :] if before else np.zeros((q.shape[1], 1, q.shape[3]))
    for n, (first, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
        states = [start[n]]
        for t in range(first, stop):
            states.append(a[0, :, t, :, None] * states[-1] + k[0, :, t, :, None] * v[0, :, t, None])
        ends[n], C = states[-1], dht[n]
        for t in reversed(range(first, stop)):
            S, read = states[t - first], states[t - first + (not before)]
            gain = scale * do[0, :, t]
            weight = (gain * v[0, :, t]).sum(-1)[:, None] * (bonus[:, 0] if before else 0)
            own = (q[0, :, t] * bonus[:, 0] * k[0, :, t]).sum(-1)[:, None]
            o[0, :, t] = scale * (np.einsum("hk,hkv->hv", q[0, :, t], read) + own * v[0, :, t])
            dq[0, :, t] = np.einsum("hkv,hv->hk", read, gain) + weight * k[0, :, t]
            reads = q[0, :, t, :, None] * gain[:, None]
            C = C if before else C + reads
            dk[0, :, t] = np.einsum("hkv,hv->hk", C, v[0, :, t]) + weight * q[0, :, t]
            dv[0, :, t] = np.einsum("hk,hkv->hv", k[0, :, t], C) + own * gain
            du += q[0, :, t] * k[0, :, t] * (gain * v[0, :, t]).sum(-1)[:, None]
            C = a[0, :, t, :, None] * C
            dg[0, :, t] = (S * C).sum(-1)
            C = C + reads if before else C
        dstart[n] = C
    return [o, ends, dq, dk, dv, dg, *([du] if before else []), dstart]


def computed(device, op, arrays, do, start, dht, scale, bounds):
    options = {"scale": scale, "initial_state": device.upload(start), "output_final_state": True}
    if len(bounds) > 2:
        options["cu_seqlens"] = bounds
    problem = op.bind([device.upload(x) for x in arrays], **options)
    o, final = planned.run(problem, device)
    gradients, dstart = planned.pull(problem, device, device.upload(do), (device.upload(dht),))
    return [double(x.get() if hasattr(x, "get") else x) for x in (o, *final, *gradients, *dstart)]


def call(op, rng, K, V, dtype, kind, gate_dtype=None, bounds=(0, 70)):
    N, T, H = len(bounds) - 1, bounds[-1], 2
    q, k, v = (rng.standard_normal((1, H, T, last)).astype(dtype) for last in (K, K, V))
    g = bounded(KINDS[kind](rng, (1, H, T, K)), MOST[dtype]).astype(gate_dtype or dtype)
    u = [rng.standard_normal((H, K)).astype(dtype)] if op is RWKV6 else []
    do = rng.standard_normal((1, H, T, V)).astype(dtype)
    start, dht = rng.standard_normal((2, N, H, K, V)).astype(np.float32)
    scale = float(np.exp(-32)) if dtype == HALF else K**-0.5
    dht *= scale if dtype == HALF else 1
    return [q, k, v, g, *u], do, start, dht, scale, bounds


def assert_right(device, op, found, arrays, do, start, dht, scale, bounds, dtype):
    (q, k, v, g), u = map(double, arrays[:4]), double(arrays[4]) if op is RWKV6 else None
    given = [q, k, v, g, u, double(do), double(start), double(dht)]
    wanted = recurrence(op, *given, scale, bounds)
    sizes = recurrence(op, *(x if x is None or x is g else abs(x) for x in given), scale, bounds)
    names = ["o", "final", "dq", "dk", "dv", "dg", *(["du"] if op is RWKV6 else []), "dh0"]
    far, least = LIMITS[dtype]
    # Where no gate of a chunk grows, pairs that do not pass a gate cancel in float32.
    if device.capability == 90 and dtype.itemsize == 2:
        # A difference of sums over all later tokens is as exact as the largest of the channel's: docs/numerics.md.
        sizes[5] = np.broadcast_to(sizes[5].max(2, keepdims=True), sizes[5].shape).copy()
    sizes[5] += 3e-6 / far * (abs(given[0]) * sizes[2] + abs(given[1]) * sizes[3])
    wrong = {}
    for name, x, y, size in zip(names, found, wanted, sizes, strict=True):
        off = np.where(abs(y) > LARGEST[dtype], 0, abs(x - y)) / (far * size + least)
        if not off.max(initial=0) <= 1:
            at = tuple(map(int, np.unravel_index(np.argmax(np.where(np.isnan(off), np.inf, off)), off.shape)))
            wrong[name] = f"{np.mean(~(off <= 1)):.1%}, worst {x[at]:.3g} for {y[at]:.3g} of {size[at]:.3g} at {at}"
    assert not wrong, wrong


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (SINGLE, HALF, BFLOAT16), ids=str)
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_growth_beside_resets(device, rng, op, dtype, kind):
    given = call(op, rng, 64, 40, dtype, kind)
    assert_right(device, op, computed(device, op, *given), *given, dtype)


@pytest.mark.parametrize(
    "op, K, V, dtype, gate_dtype, bounds",
    [
        (GLA, 128, 128, BFLOAT16, None, (0, 200)),
        (RWKV6, 128, 72, BFLOAT16, SINGLE, BOUNDS),
        (GLA, 72, 136, SINGLE, None, BOUNDS),
        (RWKV6, 136, 64, SINGLE, None, (0, 70)),
        (RWKV6, 200, 64, BFLOAT16, None, (0, 70)),
        (GLA, 264, 64, HALF, SINGLE, (0, 70)),
        (GLA, 7, 5, BFLOAT16, None, BOUNDS),
    ],
)
def test_growth_of_many_sizes(device, rng, op, K, V, dtype, gate_dtype, bounds):
    given = call(op, rng, K, V, dtype, "bursts", gate_dtype, bounds)
    assert_right(device, op, computed(device, op, *given), *given, dtype)


@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_growth_in_segments(device, rng, monkeypatch, op):
    monkeypatch.setattr(tuning, "segments", lambda *sizes: 3)
    monkeypatch.setattr(tuning, "summarised_segments", lambda *sizes: 3)
    monkeypatch.setattr(tuning, "backward_segments", lambda *sizes: 3)
    given = call(op, rng, 64, 64, BFLOAT16, "ramps", None, (0, 300))
    assert_right(device, op, computed(device, op, *given), *given, BFLOAT16)


@pytest.mark.pairwise
@pytest.mark.parametrize("beside", (0.0, 2.0), ids=("", "in a chunk that grows"))
@pytest.mark.parametrize("segments", (1, 3))
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_what_grows_on_both_sides_of_a_strong_decay(device, rng, monkeypatch, op, segments, beside):
    """Tokens that meet across e^-24 outweigh all that lie between, so the gates between have their gradient."""
    monkeypatch.setattr(tuning, "backward_segments", lambda *sizes: segments)
    arrays, *rest = call(op, rng, 64, 64, BFLOAT16, "bursts", None, (0, 190))
    g = arrays[3]
    g[...] = -0.01
    g[:, :, [20, 150]] = 40
    g[:, :, 100:104] = -6
    g[:, :, 110, ::2] = beside
    do, start, dht, scale, bounds = rest
    found = computed(device, op, arrays, *rest)[5]
    given = [*map(double, arrays[:4]), double(arrays[4]) if op is RWKV6 else None]
    wanted = recurrence(op, *given, double(do), double(start), double(dht), scale, bounds)[5]
    for first in range(0, 190, 10):
        assert_close("dg", found[:, :, first : first + 10], wanted[:, :, first : first + 10], BFLOAT16)


@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_growth_with_one_product(device, rng, monkeypatch, op):
    monkeypatch.setattr(tuning, "tf32_products", lambda problem: 1)
    monkeypatch.setitem(LIMITS, SINGLE, (4e-3, 1e-33))
    given = call(op, rng, 64, 64, SINGLE, "bursts")
    assert_right(device, op, computed(device, op, *given), *given, SINGLE)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", (SINGLE, BFLOAT16), ids=str)
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_a_scale_of_zero_under_growth(device, rng, op, dtype):
    arrays, do, start, dht, _, bounds = call(op, rng, 64, 64, dtype, "bursts")
    given = arrays, do, start, dht, 0.0, bounds
    found = computed(device, op, *given)
    assert all(np.isfinite(x).all() for x in found)
    if device.capability != 90 or dtype == SINGLE:  # Hopper's dg loses what a state below float32 had grown from
        assert_right(device, op, found, *given, dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", (SINGLE, HALF, BFLOAT16), ids=str)
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_what_overflows_leaves_the_past_alone(device, rng, op, dtype):
    """120 nats within two tokens, which no float32 holds."""
    arrays, *_, bounds = call(op, rng, 64, 40, dtype, "bursts")
    g, at = arrays[3], 43
    g[...] = -0.1
    g[:, :, at : at + 2] = 60
    o, _ = planned.run(op.bind([device.upload(x) for x in arrays]), device)
    wanted = exact(OPS[op], [x[:, :, :at] if x.ndim == 4 else x for x in arrays])[0]
    assert_close("o", (o.get() if hasattr(o, "get") else o)[:, :, :at], wanted, dtype)
