"""Steps of a few tokens, of which the state takes those that are accepted: what speculative decoding calls."""

import numpy as np
import pytest
from reference import LIMITS, assert_close, draw, exact, same_bits
from test_steps import STEPS

import linattn_np
from linattn_np.array_kinds import BFLOAT16
from linattn_np.errors import ContractError, NotSupported

B, H, M, SLOTS = 3, 2, 4, [4, 0, 2]
SINGLE, HALF, DOUBLE = np.float32, np.float16, np.float64
CASES = {  # K, V, the dtype of data and of the state, the gates
    "small": (5, 3, SINGLE, SINGLE, "some-inf"),
    "two tiles": (60, 72, BFLOAT16, SINGLE, "trained"),
    "half": (128, 100, HALF, HALF, "spikes-40"),
    "wide": (200, 130, SINGLE, BFLOAT16, "logsigmoid"),
    "double": (20, 70, SINGLE, DOUBLE, "weak"),
}


@pytest.fixture(params=STEPS)
def op(request):
    return request.param


@pytest.fixture
def several(backend):
    if backend.name in ("numba", "hopper"):
        pytest.skip("it has no steps of several tokens, or those of every card")
    return backend


def memory(declared, K, V, dtype=np.float32, rows=5):
    """Of pending tokens, which nobody has written."""
    return np.full((rows, H, M, sum(declared.numbers(K, V))), np.nan, dtype)


def check(backend, op, K, V, rng, dtype=np.float32, state_dtype=np.float32, gate="logsigmoid", gate_dtype=None, **how):
    """Calls of several tokens, some of which are accepted, equal the operator on those alone, sequence by sequence."""
    declared, step, whole, function = STEPS[op]
    arrays = draw(whole, rng, {"B": B, "H": H, "T": 12, "K": K, "V": V}, dtype, gate, gate_dtype)
    pool = rng.standard_normal((5, H, K, V)).astype(state_dtype)
    double = np.float64 in (np.dtype(dtype), np.dtype(state_dtype))
    numbers = memory(declared, K, V, np.float64 if double else np.float32)
    state, pending = backend.asarray(pool.copy()), backend.asarray(numbers)
    coarser = max(np.dtype(dtype).name, np.dtype(state_dtype).name, key=list(LIMITS).index)
    starts, accepted = np.zeros(B, int), None
    for T, taken in ((3, (3, 0, 1)), (M, (2, 4, 0)), (1, (0, 1, 1)), (2, (1, 0, 2)), (0, (0, 0, 0))):
        tokens = [
            np.stack([x[b, :, start : start + T] for b, start in enumerate(starts)]) if x.ndim > 2 else x
            for x in arrays
        ]
        given = None if accepted is None else backend.asarray(accepted)
        o = backend.run(step, *map(backend.asarray, tokens), state, slots=SLOTS, pending=pending, accepted=given, **how)
        for b, start in enumerate(starts):
            seen = [x[b : b + 1, :, : start + T] if x.ndim > 2 else x for x in arrays]
            initial = pool[SLOTS[b]][None]
            wanted, _ = exact(function, seen, initial_state=initial, **how)
            assert_close(f"o of {b}", backend.tohost(o)[b], wanted[0, :, start:], coarser)
            confirmed = [x[:, :, :start] if x.ndim > 2 else x for x in seen]
            _, final = exact(function, confirmed, initial_state=initial, **how)
            assert_close(f"state of {b}", backend.tohost(state)[SLOTS[b]], final[0], coarser)
        accepted = np.array(taken, np.int64)
        starts += accepted
    assert same_bits(backend.tohost(state)[[1, 3]], pool[[1, 3]]), "a slot that nobody named was written"
    assert np.isnan(backend.tohost(pending)[[1, 3]]).all()


@pytest.mark.pairwise
@pytest.mark.parametrize("case", CASES)
def test_accepted_tokens(several, op, case, rng):
    K, V, *how = CASES[case]
    check(several, op, K, V, rng, *how)


def test_options(several, rng):
    """Lengths of one, and float32 gates beside half-precision arrays."""
    check(several, "kda", 16, 8, rng, qk_l2norm=True)
    check(several, "gated_delta_rule", 16, 8, rng, BFLOAT16, np.float32, gate_dtype=np.float32)


def test_fewer_heads_of_keys(several, rng):
    declared, step, whole, function = STEPS["gated_delta_rule"]
    arrays = draw(whole, rng, {"B": 1, "H": 4, "HK": 2, "T": M, "K": 8, "V": 5}, np.float32)
    state, pending = np.zeros((1, 4, 8, 5), np.float32), np.zeros((1, 4, M, 14), np.float32)
    there = [several.asarray(x) for x in (*arrays, state)]
    o = several.run(step, *there, pending=several.asarray(pending))
    assert_close("o", several.tohost(o), exact(function, arrays)[0], np.float32)


ARRAYS = dict(zip("qkvg", np.zeros((4, 1, 2, 3, 4), np.float32)))
STATE = np.zeros((1, 2, 4, 4), np.float32)
REFUSED = {
    "a room too small": (
        {"pending": np.zeros((1, 2, 2, 12), np.float32)},
        "pending has room for 2 tokens, .* have T=3",
    ),
    "a room too large": (
        {"pending": np.zeros((1, 2, 9, 12), np.float32)},
        "pending has room for 9 tokens, expected 1 to 8",
    ),
    "other numbers": (
        {"pending": np.zeros((1, 2, 4, 9), np.float32)},
        r"pending is \(1, 2, 4, 9\), expected \[N, H, M, W\] = \(1, 2, 4, 12\)",
    ),
    "half memory": ({"pending": np.zeros((1, 2, 4, 12), np.float16)}, "pending has dtype float16, expected float32"),
    "too many": ({"accepted": np.array([5])}, "accepted runs from 5 to 5, expected 0 to 4 pending tokens"),
    "none of them": ({"accepted": np.array([-1])}, "accepted runs from -1 to -1"),
    "a list": ({"accepted": [1]}, "accepted is a builtins.list, expected an array"),
    "int32": ({"accepted": np.array([1], np.int32)}, "accepted has dtype int32, expected int64"),
    "no memory": ({"pending": None, "accepted": np.array([0])}, "q has 4 axes"),
    "one memory": ({"pending": STATE}, "pending is"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(case):
    given, message = REFUSED[case]
    state, pending = STATE.copy(), np.full((1, 2, 4, 12), 7, np.float32)
    with pytest.raises(ContractError, match=f"gla_step: {message}"):
        linattn_np.gla_step(*ARRAYS.values(), state, **{"pending": pending, **given})
    assert not state.any() and (pending == 7).all()


def test_accepted_asks_for_pending():
    token = [x[:, :, 0] for x in ARRAYS.values()]
    with pytest.raises(ContractError, match="accepted is given without pending"):
        linattn_np.gla_step(*token, STATE.copy(), accepted=np.array([0]))


def test_no_sequences(op):
    declared, step, *_ = STEPS[op]
    sizes = {"B": 0, "H": H, "HK": H, "T": 3, "K": 4, "V": 3}
    arrays = [np.zeros([sizes[axis] for axis in axes.split()]) for axes in declared.of_several.arrays.values()]
    assert step(*arrays, np.zeros((0, H, 4, 3)), pending=memory(declared, 4, 3, DOUBLE, 0)).shape == (0, H, 3, 3)


def test_memory_of_its_own():
    both = np.zeros((1, 2, 4, 16), np.float32)
    with pytest.raises(ContractError, match="pending shares memory with state"):
        linattn_np.gla_step(*ARRAYS.values(), both[..., :4], pending=both[..., :12])


def test_kernels_say_what_they_have_not(several):
    """Two keys of 256 numbers in float64 have no room on every card."""
    if several.device is None:
        return
    shapes = *6 * [(1, 1, 1, 200)], (1, 1, 200, 200), (1, 1, 1, sum(STEPS["rwkv7"][0].numbers(200, 200)))
    *arrays, pending = (several.asarray(np.zeros(shape)) for shape in shapes)
    with pytest.raises(NotSupported, match="K=200 is over 128, for several tokens"):
        several.run(linattn_np.rwkv7_step, *arrays, pending=pending)
