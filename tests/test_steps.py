"""The decoding steps: one token, the state updated where it lies."""

import numpy as np
import pytest
from reference import GATES, LIMITS, assert_close, double, draw, exact, guarded, same_bits

import linattn_np
from linattn_np.array_kinds import BFLOAT16
from linattn_np.declarations import DELTA_RULES, GLA, RWKV6
from linattn_np.declarations import STEPS as STEP_OPS

STEPS = {
    op.name: (step, getattr(linattn_np, step.name), op, getattr(linattn_np, op.name))
    for step, op in zip(STEP_OPS, (GLA, RWKV6, *DELTA_RULES), strict=True)
}
DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": BFLOAT16}
SHAPES = {
    "B1": (1, 2, 16, 16),
    "B3": (3, 2, 16, 16),
    "uneven": (2, 1, 20, 9),
    "K1-V1": (3, 4, 1, 1),  # several, as one score alone may cancel
    "wide": (2, 2, 100, 60),
    "two-tiles": (1, 2, 70, 72),
    "few-channels": (2, 2, 3, 131),
    "D256": (1, 2, 256, 256),
}


@pytest.fixture(params=STEPS)
def op(request):
    return request.param


def sizes(B, H, K, V):
    return {"B": B, "H": H, "K": K, "V": V, "T": 1, "N": B}


def with_time(op, arrays):
    """A step's arrays as the operator's, T = 1."""
    return [x[:, :, None] if name != "u" else x for name, x in zip(STEPS[op][0].arrays, arrays)]


def exact_step(op, arrays, state, **arguments):
    """(o [B, H, V], state) in float64: the operator on one token."""
    o, final = exact(STEPS[op][3], with_time(op, arrays), initial_state=state, **arguments)
    return o[:, :, 0], final


def check(backend, op, shape, dtype, state_dtype, rng, gate="logsigmoid", gate_dtype=None, **arguments):
    declared, step, *_ = STEPS[op]
    B, H, K, V = shape
    arrays = draw(declared, rng, sizes(*shape), dtype, gate, gate_dtype)
    state = rng.standard_normal((B, H, K, V)).astype(state_dtype)
    wanted, after = exact_step(op, arrays, state, **arguments)
    memory, out = guarded(backend, (B, H, K, V), state_dtype), guarded(backend, (B, H, V), dtype)
    memory.view[...] = backend.asarray(state)
    there = [backend.asarray(x.copy()) for x in arrays]
    o = backend.run(step, *there, memory.view, out=out.view, **arguments)
    assert o is out.view
    assert_close("o", backend.tohost(o), wanted, dtype)
    coarser = max(np.dtype(dtype).name, np.dtype(state_dtype).name, key=list(LIMITS).index)
    assert_close("state", backend.tohost(memory.view), after, coarser)
    memory.assert_rest_untouched()
    out.assert_rest_untouched()
    for x, host in zip(there, arrays):
        assert same_bits(backend.tohost(x), host), "an input was changed"


@pytest.mark.pairwise
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", (8, 24, 136))  # delta rules have blocks of 16 columns, of 64, and of 128
def test_dtypes(backend, op, V, dtype, state_dtype, rng):
    check(backend, op, (1, 2, 16, V), DTYPES[dtype], DTYPES[state_dtype], rng)


@pytest.mark.pairwise
@pytest.mark.parametrize("state_dtype", ("float32", "float16"))
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(backend, op, shape, state_dtype, rng):
    if backend.sizes == ("tiny",) and np.prod(SHAPES[shape]) > 1000:
        pytest.skip("too large for a simulator")
    check(backend, op, SHAPES[shape], np.float32, DTYPES[state_dtype], rng, scale=1.0)


@pytest.mark.pairwise
@pytest.mark.parametrize("gate", GATES)
def test_gates(backend, op, gate, rng):
    check(backend, op, (2, 3, 16, 8), np.float32, np.float32, rng, gate)  # several, as one score alone may cancel


def test_float32_gate_beside_half_inputs(backend, op, rng):
    check(backend, op, (1, 2, 16, 8), BFLOAT16, np.float32, rng, "some-1e30", np.float32)


@pytest.mark.parametrize("op", [op.name for op in DELTA_RULES if op.strengths])
def test_fewer_heads_of_keys_of_length_one(backend, op, rng):
    declared, step, *_ = STEPS[op]
    arrays = draw(declared, rng, sizes(2, 4, 16, 8), np.float32)
    arrays[:2] = (x[:, :2] for x in arrays[:2])
    state = rng.standard_normal((2, 4, 16, 8)).astype(np.float32)
    wanted, after = exact_step(op, arrays, state, qk_l2norm=True)
    there = backend.asarray(state.copy())
    o = backend.run(step, *map(backend.asarray, arrays), there, qk_l2norm=True)
    assert_close("o", backend.tohost(o), wanted, np.float32)
    assert_close("state", backend.tohost(there), after, np.float32)


def test_slots_pick_from_a_pool(backend, op, rng):
    declared, step, *_ = STEPS[op]
    arrays = draw(declared, rng, sizes(3, 2, 8, 5), np.float32)
    pool = rng.standard_normal((6, 2, 8, 5)).astype(np.float32)
    slots = [4, 0, 5]
    wanted, after = exact_step(op, arrays, pool[slots])
    for given in (slots, np.array(slots, np.int32), backend.asarray(np.array(slots, np.int64))):
        there = backend.asarray(pool.copy())
        o = backend.run(step, *map(backend.asarray, arrays), there, slots=given)
        assert_close("o", backend.tohost(o), wanted, np.float32)
        assert_close("states", backend.tohost(there)[slots], after, np.float32)
        others = [1, 2, 3]
        assert same_bits(backend.tohost(there)[others], pool[others]), "a slot that nobody named was written"


def test_a_state_that_is_a_slice(backend, op, rng):
    """A layer's part of a state of all layers, and heads out of order: updated in place, the rest untouched."""
    declared, step, *_ = STEPS[op]
    arrays = draw(declared, rng, sizes(2, 2, 8, 5), np.float32)
    layers = rng.standard_normal((2, 3, 2, 8, 5)).astype(np.float32)
    _, after = exact_step(op, arrays, layers[:, 1])
    there = backend.asarray(layers.copy())
    backend.run(step, *map(backend.asarray, arrays), there[:, 1])
    assert_close("state", backend.tohost(there)[:, 1], after, np.float32)
    assert same_bits(backend.tohost(there)[:, [0, 2]], layers[:, [0, 2]])


@pytest.mark.parametrize("state_dtype", ("float32", "float16"))
def test_a_state_that_starts_anywhere(backend, op, state_dtype, rng):
    """One number behind where memory begins."""
    declared, step, *_ = STEPS[op]
    arrays = draw(declared, rng, sizes(2, 2, 8, 8), np.float32)
    memory = rng.standard_normal(1 + 2 * 2 * 8 * 8).astype(DTYPES[state_dtype])
    wanted, after = exact_step(op, arrays, double(memory[1:].reshape(2, 2, 8, 8)))
    there = backend.asarray(memory.copy())
    o = backend.run(step, *map(backend.asarray, arrays), there[1:].reshape(2, 2, 8, 8))
    assert_close("o", backend.tohost(o), wanted, np.float32)
    assert_close("state", backend.tohost(there)[1:].reshape(2, 2, 8, 8), after, DTYPES[state_dtype])
    assert same_bits(backend.tohost(there)[0], memory[0])


def test_arrays_that_are_slices(backend, op, rng):
    """One row of a fused projection, [B, H, 3D], and a token out of [B, T, H, D]."""
    declared, step, *_ = STEPS[op]
    arrays = draw(declared, rng, sizes(2, 2, 8, 8), np.float32)
    state = rng.standard_normal((2, 2, 8, 8)).astype(np.float32)
    wanted, after = exact_step(op, arrays, state)
    fused = backend.asarray(np.concatenate(arrays[:3], axis=-1))
    tokens = backend.asarray(np.repeat(arrays[3][:, None], 4, axis=1))
    there = [fused[..., :8], fused[..., 8:16], fused[..., 16:], tokens[:, 2], *map(backend.asarray, arrays[4:])]
    memory = backend.asarray(state.copy())
    assert_close("o", backend.tohost(backend.run(step, *there, memory)), wanted, np.float32)
    assert_close("state", backend.tohost(memory), after, np.float32)


def test_no_sequences(backend, op, rng):
    declared, step, *_ = STEPS[op]
    arrays = [backend.asarray(x) for x in draw(declared, rng, sizes(0, 2, 8, 5), np.float32)]
    assert backend.run(step, *arrays, backend.asarray(np.zeros((0, 2, 8, 5), np.float32))).shape == (0, 2, 5)
    pool = np.ones((3, 2, 8, 5), np.float32)
    there = backend.asarray(pool.copy())
    assert backend.run(step, *arrays, there, slots=[]).shape == (0, 2, 5)
    assert same_bits(backend.tohost(there), pool)


def test_a_decode_loop_equals_one_call(backend, op, rng):
    """Prefill through the operator, then token by token; everything as in one call."""
    declared, step, whole, function = STEPS[op]
    T = 5 if backend.sizes == ("tiny",) else 70
    arrays = draw(whole, rng, {"B": 1, "H": 2, "T": T, "K": 8, "V": 8}, np.float32)
    there = [backend.asarray(x) for x in arrays]
    o, final = backend.run(function, *there, output_final_state=True)
    start = T - 4
    _, state = backend.run(function, *(x[:, :, :start] if x.ndim > 2 else x for x in there), output_final_state=True)
    for t in range(start, T):
        token = [x[:, :, t] if x.ndim > 2 else x for x in there]
        o_t = backend.run(step, *token, state)
        assert_close(f"token {t}", backend.tohost(o_t), backend.tohost(o)[:, :, t], np.float32)
    assert_close("state", backend.tohost(state), backend.tohost(final), np.float32)


def test_same_step_twice_same_bits(backend, op, rng):
    declared, step, *_ = STEPS[op]
    arrays = [backend.asarray(x) for x in draw(declared, rng, sizes(2, 2, 16, 8), np.float32)]
    state = rng.standard_normal((2, 2, 16, 8)).astype(np.float32)
    results = []
    for _ in range(2):
        memory = backend.asarray(state.copy())
        results.append((backend.tohost(backend.run(step, *arrays, memory)), backend.tohost(memory)))
    assert all(same_bits(x, y) for x, y in zip(*results))


def test_float16_state_keeps_double_inputs_exact_enough(backend, op, rng):
    """The state is what is rounded, not the arithmetic: o is as good as its inputs and the state that came in."""
    dtype = np.float64 if np.dtype(np.float64) in backend.dtypes else np.float32
    declared, step, *_ = STEPS[op]
    arrays = draw(declared, rng, sizes(1, 2, 16, 8), dtype)
    state = rng.standard_normal((1, 2, 16, 8)).astype(np.float16)
    wanted, _ = exact_step(op, arrays, double(state))
    o = backend.run(step, *map(backend.asarray, arrays), backend.asarray(state.copy()))
    assert_close("o", backend.tohost(o), wanted, dtype)
