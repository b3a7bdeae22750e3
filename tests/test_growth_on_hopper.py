"""Gates above 0 on Hopper's one-pass kernel: what the recurrence holds in float32 is right, beside any decay."""

import numpy as np
import pytest
from growth import magnitudes
from planned import results
from reference import double, draw, exact, limits, rms, same_bits
from test_segments import BOUNDS, cut, split_columns

from linattn_np import OPS
from linattn_np.array_kinds import BFLOAT16
from linattn_np.declarations import GLA, RWKV6, SIMPLE_GLA

HALF = np.dtype(np.float16)
NEVER = -1e30
MIXES = {  # gates of some tokens, by chance
    "+50": (50.0, -60.0, -np.inf, 0.0),
    "+1..30": (1.0, 2.0, 8.0, 30.0, -25.0, NEVER, -0.1),
    "+16": (16.0, -0.1),
}
LARGEST = {BFLOAT16: 55, HALF: 5}  # nats that a state may grow and results still fit


def growing(rng, shape, mix, dtype, every=4):
    """Gates of a mix at one token in `every`, weak ones elsewhere; how much the state of a channel has grown by then.
    Where it would grow too much, it is reset or decays by 60 nats."""
    g = -rng.exponential(0.1, shape)
    chosen = rng.random(shape) < 1 / every
    g[chosen] = rng.choice(MIXES[mix], int(chosen.sum()))
    grown, total = np.zeros(shape), np.zeros(shape[:2] + shape[3:])
    for t in range(shape[2]):
        now = np.asarray(g[:, :, t]).astype(dtype).astype(np.float64)
        g[:, :, t] = np.where(total + now > 55, rng.choice([-60.0, -np.inf], total.shape), now)
        total = np.maximum(total + g[:, :, t], 0)
        grown[:, :, t] = total
    return g, grown


def problem(op, rng, sizes, mix, dtype, gate_dtype=None):
    """Queries are 0 where results would leave the dtype."""
    arrays = draw(op, rng, sizes, dtype, "weak", gate_dtype)
    g, grown = growing(rng, arrays[3].shape, mix, arrays[3].dtype)
    with np.errstate(over="ignore"):  # -1e30 is -inf in float16
        arrays[3] = g.astype(arrays[3].dtype)
    after = grown if op is not RWKV6 else np.concatenate([grown[:, :, :1], grown[:, :, :-1]], 2)
    if op is SIMPLE_GLA:
        after = after[..., None]
    arrays[0] = np.where(after > LARGEST[dtype], 0, arrays[0]).astype(dtype)
    return arrays


def assert_right(what, x, wanted, size, dtype):
    """Row by row, each against the size of what adds up in it, however small beside others."""
    x, wanted, size = map(double, (x, wanted, size))
    assert np.isfinite(x[np.isfinite(wanted)]).all(), f"{what} is not finite where it could be"
    off, size = rms(x - wanted, axis=-1), rms(size, axis=-1)
    bad = np.argwhere(off > limits(dtype)[0] * size)
    assert not bad.size, f"{what}: {len(bad)} of {size.size} rows are off, the first {bad[0]}"


def check(device, op, arrays, start=None, **arguments):
    found = results(op, arrays, device, start, True, **arguments)
    wanted = exact(OPS[op], arrays, initial_state=start, **arguments)
    size = exact(OPS[op], magnitudes(arrays), initial_state=None if start is None else abs(start), **arguments)
    for what, *compared in zip(("o", "state"), found, wanted, size):
        assert_right(what, *compared, arrays[0].dtype)


def scheduled(schedule, monkeypatch, K, V):
    """Sizes of a call that takes this schedule, and the arguments that make it."""
    if schedule == "columns":
        split_columns(monkeypatch)
    if schedule == "segments":
        cut(monkeypatch, 2, 2)
    sizes = {"B": 1, "H": 1, "T": 140, "K": K, "V": V, "N": 1}
    if schedule == "packed":
        return sizes | {"T": BOUNDS[-1], "N": len(BOUNDS) - 1}, {"cu_seqlens": BOUNDS}
    return sizes, {}


@pytest.mark.pairwise
@pytest.mark.parametrize("started", [False, True], ids=["", "started"])
@pytest.mark.parametrize("schedule", ["whole", "segments", "columns", "packed"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [BFLOAT16, HALF], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    "op, K, V",
    [(GLA, 64, 64), (RWKV6, 72, 72), (GLA, 136, 136), (RWKV6, 136, 64), (SIMPLE_GLA, 64, 64), (SIMPLE_GLA, 200, 72)],
    ids=["gla", "rwkv6", "wide-gla", "wide-rwkv6", "simple_gla", "wide-simple_gla"],
)
def test_growth_beside_strong_decay(hopper, rng, monkeypatch, op, K, V, dtype, mix, schedule, started):
    sizes, arguments = scheduled(schedule, monkeypatch, K, V)
    arrays = problem(op, rng, sizes, mix, dtype)
    start = rng.standard_normal((sizes["N"], 1, K, V)).astype(np.float32) * 1e-3 if started else None
    check(hopper, op, arrays, start, **arguments)


def few_tokens(op, q, gates, dtype=BFLOAT16):
    """Arrays of ones, but for queries and gates: 64 channels and columns."""
    ones = np.ones((1, 1, len(gates), 64), dtype)
    g = np.broadcast_to(np.asarray(gates, dtype)[:, None], ones.shape).copy()
    return [ones * dtype.type(q), ones, ones, g, *([np.ones((1, 64), dtype)] if op is RWKV6 else ())]


@pytest.mark.parametrize("q, gates", [(1, (50, 50)), (20, (86, 0)), (1, (0, 30, 30, 20, -60, 0)), (1, 4 * (-1e30, 60))])
@pytest.mark.parametrize("op", [GLA, RWKV6], ids=lambda op: op.name)
def test_few_tokens(hopper, op, q, gates):
    """Growth over 88 nats of what is nothing yet, beside large queries, and between resets."""
    check(hopper, op, few_tokens(op, q, gates))


@pytest.mark.pairwise
@pytest.mark.parametrize("schedule", ["whole", "segments", "columns"])
@pytest.mark.parametrize("K", [64, 128, 192])
def test_nothing_may_grow(hopper, rng, monkeypatch, K, schedule):
    """Gates of 6 nats until the first key, in the second segment: 0 times what leaves float32's range is 0."""
    if schedule == "columns":
        split_columns(monkeypatch)
    if schedule == "segments":
        cut(monkeypatch, 2, 2)
    arrays = draw(GLA, rng, {"B": 1, "H": 1, "T": 256, "K": K, "V": 128}, BFLOAT16)
    arrays[1][:, :, :150] = 0
    arrays[3][:, :, :150] = 6
    check(hopper, GLA, arrays)


@pytest.mark.parametrize("op", [GLA, RWKV6], ids=lambda op: op.name)
def test_overflow_stays_behind(hopper, rng, op):
    """Tokens before gates that take a state out of float32's range are what they are without these."""
    arrays = draw(op, rng, {"B": 1, "H": 1, "T": 96, "K": 64, "V": 64}, BFLOAT16)
    arrays[3][:, :, 42:50, 5] = 40
    o, _ = results(op, arrays, hopper, None, True)
    assert not np.isfinite(double(o[:, :, 45:])).any()
    before = [x[:, :, :42] if x.ndim == 4 else x for x in arrays]
    assert_right("o", o[:, :, :42], *(exact(OPS[op], x)[0] for x in (before, magnitudes(before))), BFLOAT16)


def test_growth_that_factors_hold_goes_by_chunks(hopper, rng):
    """Up to one nat a token, beside resets: right as well, and the same bits whatever the gates of later chunks."""
    arrays = draw(GLA, rng, {"B": 1, "H": 1, "T": 64, "K": 64, "V": 64}, BFLOAT16, "some-inf")
    arrays[3] = np.where(rng.random(arrays[3].shape) < 0.3, 1, arrays[3]).astype(BFLOAT16)
    check(hopper, GLA, arrays)
    o, _ = results(GLA, arrays, hopper, None, True)
    arrays[3][:, :, 40] = 2
    assert same_bits(o[:, :, :32], results(GLA, arrays, hopper, None, True)[0][:, :, :32])


@pytest.mark.parametrize("gate_dtype", [None, np.float32], ids=["", "float32"])
@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("q, k", [(1e-6, 1), (1, 1e-7), (1e6, 1), (1e-3, 1e5), (1e-30, 1e20)])
@pytest.mark.parametrize("schedule", ["whole", "segments", "columns", "packed"])
@pytest.mark.parametrize(
    "op, K, V",
    [(GLA, 64, 64), (RWKV6, 64, 128), (GLA, 128, 72), (RWKV6, 128, 64), (GLA, 136, 64), (SIMPLE_GLA, 64, 64)],
    ids=["gla", "rwkv6", "gla-128", "rwkv6-128", "wide-gla", "simple_gla"],
)
@pytest.mark.pairwise
def test_rows_of_any_size(hopper, rng, monkeypatch, op, K, V, schedule, q, k, every, gate_dtype):
    """Queries and keys, all of them or some, that float16 does not hold, in which bfloat16's meet at borders."""
    sizes, arguments = scheduled(schedule, monkeypatch, K, V)
    arrays = draw(op, rng, sizes, BFLOAT16, "weak", gate_dtype)
    for x, by in zip(arrays, (q, k)):
        x[:, :, 3::every] = (double(x[:, :, 3::every]) * by).astype(BFLOAT16)
    check(hopper, op, arrays, **arguments)


@pytest.mark.parametrize("schedule", ["whole", "columns"])
@pytest.mark.parametrize("op", [GLA, RWKV6], ids=lambda op: op.name)
def test_rows_of_any_size_leave_others_alone(hopper, rng, monkeypatch, op, schedule):
    """A query that float16 does not hold changes no bit of other tokens' outputs, a key none before it, though the
    chunk is made once more, and those behind it another way."""
    sizes, _ = scheduled(schedule, monkeypatch, 64, 64)
    arrays = draw(op, rng, sizes, BFLOAT16, "trained")
    o, _ = results(op, arrays, hopper, None, True)
    others = np.arange(sizes["T"]) != 45
    for i, same in ((0, others), (1, np.arange(sizes["T"]) < 45)):
        scaled = list(arrays)
        scaled[i] = arrays[i].copy()
        scaled[i][:, :, 45] = (double(arrays[i][:, :, 45]) * 1e-7).astype(BFLOAT16)
        found, _ = results(op, scaled, hopper, None, True)
        assert same_bits(found[:, :, same], o[:, :, same])
        assert not same_bits(found, o)


@pytest.mark.parametrize("op", [GLA, RWKV6], ids=lambda op: op.name)
def test_zeros_are_in_range(hopper, rng, op):
    """Rows of zeros between others, whose squares look like those of rows that are too short."""
    arrays = draw(op, rng, {"B": 1, "H": 1, "T": 100, "K": 64, "V": 64}, BFLOAT16, "trained")
    for x in arrays[:2]:
        x[:, :, rng.random(100) < 0.3] = 0
    check(hopper, op, arrays)
