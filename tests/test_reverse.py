"""`reverse` and `state_v_first` are the same call on arrays turned round, whatever the backend: no number changes."""

import numpy as np
import pytest
from conftest import SINGLE
from reference import assert_close, draw, draw_states, exact, exact_vjp, parts, same_bits, stated, turned, whole

import linattn_np
from linattn_np import ContractError, explain, gla, linear_attention, vjp
from linattn_np.array_kinds import BFLOAT16
from linattn_np.ops import OPS

RECURRENT = {op.name: (op, function, {}) for op, function in OPS.items() if op.state}
RECURRENT["linear_attention-elu-normalized"] = (
    *RECURRENT["linear_attention"][:2],
    {"feature_map": "elu", "normalize": True},
)
SIZES = {"B": 2, "H": 2, "T": 70, "K": 16, "V": 8, "N": 2}
BOUNDS = [0, 40, 40, 70]
PACKED = {**SIZES, "B": 1, "N": 3}


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        listed = metafunc.config.backends
        cases = [
            (name, variant, mode)
            for name, backend in listed.items()
            for variant, (op, *_) in RECURRENT.items()
            for mode in backend.modes[op.name]
        ]
        if "mode" in metafunc.fixturenames:
            metafunc.parametrize("backend, variant, mode", cases, indirect=["backend"])
        else:
            metafunc.parametrize("backend", listed, indirect=True)


def flipped(x, axes, bounds):
    """`x` with every sequence's tokens in the other order."""
    if "T" not in axes.split():
        return x
    ranges = zip(bounds[:-1], bounds[1:])
    return np.concatenate([x[:, :, start:stop][:, :, ::-1] for start, stop in ranges], axis=2)


@pytest.mark.pairwise
@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_is_the_call_on_flipped_arrays(backend, variant, mode, packed, v_first, rng):
    op, function, options = RECURRENT[variant]
    sizes, bounds = (PACKED, BOUNDS) if packed else (SIZES, [0, 70])
    host, start = draw(op, rng, sizes, SINGLE), draw_states(stated(op, options), rng, sizes, SINGLE)
    options = {**options, "mode": mode, **({"cu_seqlens": bounds} if packed else {})}
    o, final = backend.run(
        function,
        *map(backend.asarray, host),
        **options,
        reverse=True,
        state_v_first=v_first,
        output_final_state=True,
        initial_state=whole(tuple(backend.asarray(turned(part) if v_first else part) for part in start)),
    )
    options.pop("mode")
    backwards = [flipped(x, axes, bounds) for x, axes in zip(host, op.arrays.values())]
    wanted, expected = exact(function, backwards, initial_state=whole(start), **options)
    assert_close("o", backend.tohost(o), flipped(wanted, op.out, bounds), SINGLE)
    for part, x in zip(parts(final), parts(expected), strict=True):
        part = backend.tohost(part)
        assert_close("state", turned(part) if v_first else part, x, SINGLE)
    assert all(stride > 0 for stride in o.strides)


@pytest.mark.pairwise
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_gradients(backend, variant, mode, packed, rng):
    """Against the exact gradients of flipped arrays, those of the initial state too."""
    if not backend.gradients:
        pytest.skip(f"{backend.name} has no gradients")
    op, function, options = RECURRENT[variant]
    sizes, bounds = (PACKED, BOUNDS) if packed else (SIZES, [0, 70])
    host, start = draw(op, rng, sizes, SINGLE), draw_states(stated(op, options), rng, sizes, SINGLE)
    do = rng.standard_normal([sizes[axis] for axis in op.out.split()]).astype(SINGLE)
    dht = tuple(rng.standard_normal(part.shape).astype(SINGLE) for part in start)
    options = {**options, **({"cu_seqlens": bounds} if packed else {})}

    def there(x):
        return tuple(map(there, x)) if isinstance(x, tuple) else backend.asarray(np.ascontiguousarray(x))

    _, pull = backend.run(
        vjp,
        function,
        *map(there, host),
        mode=mode,
        reverse=True,
        state_v_first=True,
        initial_state=there(whole(tuple(map(turned, start)))),
        **options,
    )
    *found, initial = pull(there(do), there(whole(tuple(map(turned, dht)))))
    backwards = [flipped(x, axes, bounds) for x, axes in zip(host, op.arrays.values())]
    *_, (*wanted, expected) = exact_vjp(
        function, backwards, flipped(do, op.out, bounds), whole(dht), initial_state=whole(start), **options
    )
    for (name, axes), x, y in zip(op.arrays.items(), found, wanted, strict=True):
        assert_close(f"d{name}", backend.tohost(x), flipped(y, axes, bounds), SINGLE, factor=10)
    for part, x in zip(parts(initial), parts(expected), strict=True):
        assert_close("dh0", turned(backend.tohost(part)), x, SINGLE, factor=10)


def test_in_half_precision(backend, rng):
    """Where the kernels for the latest cards step in, or step aside."""
    host = draw(RECURRENT["gla"][0], rng, {**SIZES, "K": 64, "V": 64}, BFLOAT16)
    o = backend.run(gla, *map(backend.asarray, host), reverse=True)
    wanted, _ = exact(gla, [x[:, :, ::-1] for x in host])
    assert_close("o", backend.tohost(o), wanted[:, :, ::-1], BFLOAT16)


def test_calls_alike_and_out(backend, rng):
    """The second call of a kind takes a shorter way; `out` and the layout are the caller's."""
    op = RECURRENT["gla"][0]
    for _ in range(3):
        host = draw(op, rng, SIZES, SINGLE)
        start = draw_states(op, rng, SIZES, SINGLE)[0]
        wanted, expected = exact(gla, [x[:, :, ::-1] for x in host], initial_state=start)
        there = [backend.asarray(np.ascontiguousarray(x.swapaxes(1, 2))) for x in host]
        out = backend.asarray(np.full((2, 70, 2, 8), np.nan, SINGLE))
        o, final = backend.run(
            gla,
            *there,
            layout="bthd",
            reverse=True,
            state_v_first=True,
            out=out,
            initial_state=backend.asarray(turned(start)),
            output_final_state=True,
        )
        assert o is out
        assert_close("o", backend.tohost(out).swapaxes(1, 2), wanted[:, :, ::-1], SINGLE)
        assert_close("state", turned(backend.tohost(final)), expected, SINGLE)


def test_both_directions_meet(backend, rng):
    """o forwards + o backwards - the present's own part is attention to every token, for a gate of 0."""
    q, k, v, _ = draw(RECURRENT["gla"][0], rng, SIZES, SINGLE)
    g = np.zeros_like(q)
    there = [backend.asarray(x) for x in (q, k, v, g)]
    both = sum(backend.tohost(backend.run(gla, *there, reverse=direction, scale=1.0)) for direction in (False, True))
    full = q @ k.swapaxes(2, 3)
    present = np.diagonal(full, axis1=2, axis2=3)[..., None] * v
    assert_close("o", both - present, full @ v, SINGLE, factor=10)


# -- on the host alone -------------------------------------------------------------------------------------------------
def test_results_of_other_libraries(rng):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays = draw(RECURRENT["gla"][0], rng, SIZES)
    wanted = gla(*arrays, reverse=True)
    tensors = [torch.tensor(x) for x in arrays]
    assert same_bits(gla(*tensors, reverse=True).numpy(), wanted)
    _, pull = vjp(gla, *tensors, reverse=True)
    for x, y in zip(pull(torch.tensor(wanted)), vjp(gla, *arrays, reverse=True)[1](wanted), strict=True):
        assert same_bits(x.numpy(), y)


def test_states_of_the_wrong_order_are_refused(rng):
    arrays, start = draw(RECURRENT["gla"][0], rng, SIZES), np.zeros((2, 2, 16, 8))
    with pytest.raises(
        ContractError, match=r"initial_state is \(2, 2, 16, 8\), expected \[N, H, V, K\] = \(2, 2, 8, 16\)"
    ):
        gla(*arrays, initial_state=start, state_v_first=True)
    with pytest.raises(ContractError, match=r"dht is \(2, 2, 16, 8\), expected \[N, H, V, K\]"):
        vjp(gla, *arrays, state_v_first=True)[1](np.zeros((2, 2, 70, 8)), start)


def test_a_normaliser_has_one_order(rng):
    q, k, v = draw(RECURRENT["linear_attention"][0], rng, SIZES)
    _, (S, z) = linear_attention(
        q, k, v, feature_map="exp", normalize=True, state_v_first=True, output_final_state=True
    )
    assert S.shape == (2, 2, 8, 16) and z.shape == (2, 2, 16)


def test_explained(rng):
    assert explain(gla, *draw(RECURRENT["gla"][0], rng, SIZES), reverse=True).backend == "numpy"


def test_attention_has_no_direction(rng):
    arrays = draw(next(op for op in OPS if op.name == "softmax_attention"), rng, SIZES)
    with pytest.raises(TypeError, match="reverse"):
        linattn_np.softmax_attention(*arrays, reverse=True)
