"""Gradients of Hopper's own kernels where gates above 0 let the state grow, beside decays of any strength in the same
tokens.
"""

import growth
import numpy as np
import pytest
from growth import Call, assert_near, magnitude
from reference import double

from linattn_np.array_kinds import BFLOAT16
from linattn_np.declarations import GLA, RWKV6

CHUNK = 32
HALF = np.dtype("float16")
CLOSE = {BFLOAT16: 2**-6, HALF: 2**-8}
LEAST = {BFLOAT16: 1e-6, HALF: 1e-5}  # what is left of the smallest terms, of size 1
DELIVERED = {BFLOAT16: 1e37, HALF: 3e4}

GATES = {
    "bursts": growth.bursts,
    "gentle": growth.gentle,
    "moderate": growth.moderate,
    "scattered": growth.scattered,
    "one channel": growth.one_channel,
    "-25, then +24": growth.pairs(-25, 24),
    "-60, then +50": growth.pairs(-60, 50, at=5),
    "-inf, then +50": growth.pairs(-np.inf, 50, at=2),
    "+50, then -60": growth.pairs(50, -60, at=3),
    "+50, a chunk later -60": growth.pairs(50, -60, at=6, apart=9),
}


def check(op, device, rng, gates, dtype, *more, **sizes):
    call = Call(op, rng, gates, dtype, *more, **sizes)
    wanted, sums = call.exact(), call.sizes()
    dq, dk, dg = (f"d{name}" for name in ([*op.arrays][n] for n in (0, 1, growth.GATE)))
    # A gate's gradient is a sum over all later tokens: it carries what is left of the largest one's rounding.
    terms = magnitude(call.arrays[0]) * sums[dq] + magnitude(call.arrays[1]) * sums[dk] + sums[dg]
    behind = np.maximum.accumulate(terms[:, :, ::-1], axis=2)[:, :, ::-1]
    noise = behind[:, :, [max(0, t - CHUNK) for t in range(terms.shape[2])]]
    sums[dg] = sums[dg] + np.where(noise < DELIVERED[dtype], noise * 2**-4, np.inf)
    off = {}
    for name, size in sums.items():
        delivered = size < DELIVERED[BFLOAT16 if name == "dh0" else dtype]
        off[name] = np.where(delivered, CLOSE[dtype] * size + LEAST[dtype], np.inf)
    assert_near(call.gradients(device), wanted, off)


def judged_by_terms(op, call, device):
    """A gate's gradient by those of all later tokens."""
    wanted, found, sums = call.exact(), call.gradients(device), call.sizes()
    dq, dk, dg = (f"d{name}" for name in ([*op.arrays][n] for n in (0, 1, growth.GATE)))
    terms = magnitude(call.arrays[0]) * sums[dq] + magnitude(call.arrays[1]) * sums[dk] + sums[dg]
    sums[dg] = np.maximum.accumulate(terms[:, :, ::-1], axis=2)[:, :, ::-1]
    assert_near(found, wanted, {name: CLOSE[BFLOAT16] * size + 1e-37 for name, size in sums.items()})


@pytest.mark.pairwise
@pytest.mark.parametrize("gates", GATES.values(), ids=GATES)
@pytest.mark.parametrize("gate_dtype", (None, "float32"))
@pytest.mark.parametrize("K, V", ((64, 64), (40, 128), (128, 72)))
@pytest.mark.parametrize("dtype", (BFLOAT16, HALF), ids=str)
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_growth_beside_decay(op, hopper, rng, gates, dtype, K, V, gate_dtype):
    check(op, hopper, rng, gates, dtype, gate_dtype, K=K, V=V)


@pytest.mark.parametrize("gate_dtype", (None, "float32"))
@pytest.mark.parametrize("every", (1, 21))
@pytest.mark.parametrize("q, k", ((1e-6, 1), (1, 1e-7), (1e6, 1), (1e-3, 1e5), (1e-30, 1e20), (1e-10, 1e-10), (0, 0)))
@pytest.mark.parametrize("K, V", ((64, 64), (40, 128), (128, 72)))
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
@pytest.mark.pairwise
def test_rows_of_any_size(op, hopper, rng, K, V, q, k, every, gate_dtype):
    """Queries and keys, all of them or some, and so of what the first kernel leaves in float16."""
    call = Call(op, rng, lambda rng, shape: -0.2 * rng.random(shape), BFLOAT16, gate_dtype, K=K, V=V)
    for x, by in zip(call.arrays, (q, k)):
        x[:, :, 3::every] = (double(x[:, :, 3::every]) * by).astype(BFLOAT16)
    judged_by_terms(op, call, hopper)


@pytest.mark.pairwise
@pytest.mark.parametrize("gates", (growth.bursts, growth.gentle), ids=("bursts", "gentle"))
@pytest.mark.parametrize("dtype", (BFLOAT16, HALF), ids=str)
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_growth_in_segments(op, hopper, rng, dtype, gates):
    """Of packed sequences, some of which end within a chunk."""
    check(op, hopper, rng, gates, dtype, lengths=(7, 520, 40))


@pytest.mark.parametrize("dtype", (BFLOAT16, HALF), ids=str)
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_what_overflows_leaves_other_tokens_alone(op, hopper, rng, dtype):
    """100 nats in two tokens: what comes before them gets its queries' gradient, what comes behind all others."""
    call = Call(op, rng, growth.pairs(0, 0), dtype)
    at = 3 * CHUNK // 2 + 4
    call.arrays[growth.GATE][:, :, at : at + 2] = 50
    wanted, off = call.exact(), {name: CLOSE[dtype] * size + LEAST[dtype] for name, size in call.sizes().items()}
    dq, dk, dv = (f"d{name}" for name in [*op.arrays][:3])
    found, judged = call.gradients(hopper), {dq: slice(at), dk: slice(at + 2, None), dv: slice(at + 2, None)}
    assert_near(*({name: x[name][:, :, tokens] for name, tokens in judged.items()} for x in (found, wanted, off)))
