"""Gates above 0 beside strong decays and resets: results of the recurrence, forward and backward, on every kernel."""

from functools import partial

import growth
import numpy as np
import planned
import pytest
from growth import Call, assert_near, magnitude
from reference import assert_close, exact

from linattn_np import OPS
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import segments as cuts
from linattn_np.declarations import GLA, RWKV6

SINGLE, HALF = np.dtype(np.float32), np.dtype(np.float16)
# (how far off, of what a number is a sum of; the least number that counts). A gate of 60 is off by 5e-6 as float32's
# exponent, and some stand in a row.
LIMITS = {SINGLE: (3e-4, 1e-33), HALF: (4e-3, 3e-7), BFLOAT16: (3e-2, 1e-33)}
MOST = {SINGLE: 80.0, HALF: 40.0, BFLOAT16: 80.0}  # nats that any run of tokens may grow by
LARGEST = {SINGLE: np.inf, HALF: 6e4, BFLOAT16: np.inf}  # what is larger may overflow
LENGTHS = (0, 5, 72, 33)
KINDS = {"anywhere": growth.anywhere, "ramps": growth.ramps}


def drawn(op, rng, dtype, kind="anywhere", K=64, V=64, **sizes):
    scale = float(np.exp(-32)) if dtype == HALF else None
    call = Call(op, rng, partial(KINDS[kind], most=MOST[dtype]), dtype, H=2, K=K, V=V, scale=scale, **sizes)
    call.dht *= np.float32(scale or 1)
    return call


def assert_right(call, device, dtype):
    found, wanted, sizes = call.results(device) | call.gradients(device), call.exact(), call.sizes()
    far, least = LIMITS[dtype]
    dg = f"d{[*call.op.arrays][growth.GATE]}"
    if device.capability == 90 and dtype.itemsize == 2:
        # A difference of sums over all later tokens is as exact as the largest of the channel's: docs/numerics.md.
        sizes[dg] = np.broadcast_to(sizes[dg].max(2, keepdims=True), sizes[dg].shape).copy()
    # Where no gate of a chunk grows, pairs that do not pass a gate cancel in float32.
    (dq, q), (dk, k) = ((sizes[f"d{name}"], magnitude(x)) for name, x in zip([*call.op.arrays][:2], call.arrays))
    sizes[dg] += 3e-6 / far * (q * dq + k * dk)
    off = {
        name: np.where(abs(wanted[name]) > LARGEST[dtype], np.inf, far * size + least) for name, size in sizes.items()
    }
    assert_near(found, wanted, off)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (SINGLE, HALF, BFLOAT16), ids=str)
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_growth_beside_resets(device, rng, op, dtype, kind):
    assert_right(drawn(op, rng, dtype, kind, V=40), device, dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "op, K, V, dtype, gate_dtype, lengths",
    [
        (GLA, 128, 128, BFLOAT16, None, (200,)),
        (RWKV6, 128, 72, BFLOAT16, SINGLE, LENGTHS),
        (GLA, 72, 136, SINGLE, None, LENGTHS),
        (RWKV6, 136, 64, SINGLE, None, (70,)),
        (RWKV6, 200, 64, BFLOAT16, None, (70,)),
        (GLA, 264, 64, HALF, SINGLE, (70,)),
        (GLA, 7, 5, BFLOAT16, None, LENGTHS),
    ],
)
def test_growth_of_many_sizes(device, rng, op, K, V, dtype, gate_dtype, lengths):
    assert_right(drawn(op, rng, dtype, K=K, V=V, gate_dtype=gate_dtype, lengths=lengths), device, dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_growth_in_segments(device, rng, monkeypatch, op):
    monkeypatch.setattr(cuts, "segments_that_fill", lambda *sizes: 3)
    monkeypatch.setattr(cuts, "cheapest_forward_count", lambda *sizes: 3)
    monkeypatch.setattr(cuts, "summarised_segments", lambda *sizes: 3)
    monkeypatch.setattr(cuts, "cheapest_backward_count", lambda *sizes: 3)
    assert_right(drawn(op, rng, BFLOAT16, "ramps", lengths=(300,)), device, BFLOAT16)


@pytest.mark.pairwise
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_little_growth_over_chunks_of_a_segment(device, rng, monkeypatch, op):
    """From a border of segments on, 64 queries of size 4 grow by e^10 together, which float16 does not hold."""
    monkeypatch.setattr(cuts, "cheapest_backward_count", lambda *sizes: 3)
    call = drawn(op, rng, HALF, lengths=(300,))
    call.arrays[growth.GATE][...] = -0.05
    call.arrays[growth.GATE][:, :, 128:192] = 0.15
    for x, by in zip((*call.arrays[:3], call.do), (4, 0.01, 0.01, 0.01)):
        x *= np.float16(by)
    call.scale, call.dht[...] = 1.0, 0
    assert_right(call, device, HALF)


@pytest.mark.pairwise
@pytest.mark.parametrize("beside", (0.0, 2.0), ids=("", "in a chunk that grows"))
@pytest.mark.parametrize("segments", (1, 3))
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_what_grows_on_both_sides_of_a_strong_decay(device, rng, monkeypatch, op, segments, beside):
    """Tokens that meet across e^-24 outweigh all that lie between, so the gates between have their gradient."""
    monkeypatch.setattr(cuts, "cheapest_backward_count", lambda *sizes: segments)
    call = drawn(op, rng, BFLOAT16, lengths=(190,))
    g, dg = call.arrays[growth.GATE], f"d{[*op.arrays][growth.GATE]}"
    g[...] = -0.01
    g[:, :, [20, 150]] = 40
    g[:, :, 100:104] = -6
    g[:, :, 110, ::2] = beside
    found, wanted = call.gradients(device)[dg], call.exact()[dg]
    for first in range(0, 190, 10):
        assert_close("dg", found[:, :, first : first + 10], wanted[:, :, first : first + 10], BFLOAT16)


@pytest.mark.pairwise
@pytest.mark.parametrize("K, parts", ((64, 1), (64, 3), (136, 1)))
@pytest.mark.parametrize("before", ((), (90,)), ids=("dense", "packed"))
@pytest.mark.parametrize("dtype", (SINGLE, HALF, BFLOAT16), ids=str)
@pytest.mark.parametrize("backwards", (False, True), ids=("states", "gradients"))
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_what_one_column_forgets_another_remembers(device, rng, monkeypatch, op, backwards, dtype, before, K, parts):
    """In the walk's direction the second of three segments ends with 64 nats of decay, and the third begins with as
    much growth. Both write to the first 128 columns alone: only these hide what came before."""
    for name in ("segments_that_fill", "cheapest_forward_count", "summarised_segments", "cheapest_backward_count"):
        monkeypatch.setattr(cuts, name, lambda *sizes: 3)
    monkeypatch.setattr(cuts, "parts_per_segment", lambda *sizes: parts)
    call = Call(op, rng, lambda rng, shape: np.zeros(shape), dtype, K=K, V=200, lengths=(*before, 768))

    def walked(x):
        return x[:, :, sum(before) :][:, :, :: -1 if backwards else 1]

    v, do, g = map(walked, (call.arrays[2], call.do, call.arrays[growth.GATE]))
    g[:, :, 448:512], g[:, :, 512:576] = -1, 1
    (do if backwards else v)[:, :, 256:, 128:] = 0
    if not backwards:
        do[:, :, :576], do[..., :128] = 0, 0
    found, wanted = call.results(device) | call.gradients(device), call.exact()
    for name in ("dv",) if backwards else ("o", f"d{[*op.arrays][0]}"):
        x, y = (walked(results[name])[:, :, 576:, -64:] for results in (found, wanted))
        assert_close(name, x, y, dtype)


@pytest.mark.parametrize("gate", (0.0, 0.5))
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_a_part_of_dg_that_float16_would_not_hold(device, rng, op, gate):
    """A chunk's queries give dg 1e5, and those behind it take half of that away again."""
    call = drawn(op, rng, HALF, lengths=(64,))
    q, k, v, g, call.scale = *call.arrays[:4], 1.0
    q[...], call.do[...] = rng.uniform(0.9, 1.1, (2, *q.shape))
    call.do[:, :, 32:] *= -0.5
    g[...], k[...], v[...] = 0, 0.01 * k, 0.01 * v
    g[:, :, 8] = gate
    call.initial[...], call.dht[...] = 50 * np.exp(-gate), 0
    off = {f"d{[*op.arrays][growth.GATE]}": 4e-3 * 1.5e5}
    found, wanted = call.gradients(device), call.exact()
    assert_near({name: found[name] for name in off}, wanted, off)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", (SINGLE, HALF, BFLOAT16), ids=str)
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_few_gates_that_grow(device, rng, op, dtype):
    """Most blocks of 16 tokens have none of them."""
    assert_right(Call(op, rng, growth.scattered, dtype, lengths=(100,)), device, dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_growth_with_one_product(device, rng, monkeypatch, op):
    monkeypatch.setattr(cuts, "tf32_products", lambda problem: 1)
    monkeypatch.setitem(LIMITS, SINGLE, (4e-3, 1e-33))
    assert_right(drawn(op, rng, SINGLE), device, SINGLE)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", (SINGLE, BFLOAT16), ids=str)
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_a_scale_of_zero_under_growth(device, rng, op, dtype):
    call = drawn(op, rng, dtype)
    call.scale = 0.0
    found = call.results(device) | call.gradients(device)
    assert all(np.isfinite(x).all() for x in found.values())
    if device.capability != 90 or dtype == SINGLE:  # Hopper's dg loses what a state below float32 had grown from
        assert_right(call, device, dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", (SINGLE, HALF, BFLOAT16), ids=str)
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_what_overflows_leaves_the_past_alone(device, rng, op, dtype):
    """120 nats within two tokens, which no float32 holds."""
    arrays, at = drawn(op, rng, dtype, V=40).arrays, 43
    arrays[growth.GATE][...] = -0.1
    arrays[growth.GATE][:, :, at : at + 2] = 60
    o, *_ = planned.results(op, arrays, device)
    wanted = exact(OPS[op], [x[:, :, :at] if x.ndim == 4 else x for x in arrays])[0]
    assert_close("o", o[:, :, :at], wanted, dtype)
