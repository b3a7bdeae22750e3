"""A masked call is the call on the sequences with their padding cut out, whatever the backend and the padding holds."""

import numpy as np
import pytest
from conftest import SINGLE
from reference import assert_close, draw, draw_states, exact, parts, size_of_terms, stated, whole

from linattn_np import ContractError, ContractTypeError, explain, gla, linear_attention, retention, vjp
from linattn_np.array_kinds import BFLOAT16
from linattn_np.ops import OPS

VARIANTS = {op.name: (op, function, {}) for op, function in OPS.items() if op.state and op.name != "retention"}
LINEAR = VARIANTS["linear_attention"][:2]
VARIANTS |= {
    f"linear_attention-{phi}-normalized": (*LINEAR, {"feature_map": phi, "normalize": True})
    for phi in ("elu", "relu", "exp")
}
SIZES = {"B": 3, "H": 2, "T": 50, "K": 16, "V": 8, "N": 3}


def scattered_mask(rng):
    """Padding in front of the first row, behind the second and in the middle; all of the third."""
    mask = rng.random((3, 50)) < 0.7
    mask[0, :17], mask[1, 30:], mask[2] = False, False, False
    return mask


def soiled(x, axes, mask):
    """`x` with NaN wherever there is padding."""
    if "T" not in axes.split():
        return x
    x = x.copy()
    x.swapaxes(1, 2)[~mask] = np.nan
    return x


def row(x, axes, b, mask):
    """The tokens of a row alone."""
    names = axes.split()
    if names[0] not in "BN":
        return x
    return x[b : b + 1][:, :, mask[b]] if "T" in names else x[b : b + 1]


@pytest.mark.pairwise
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_is_the_call_without_padding(backend, variant, reverse, rng):
    op, function, options = VARIANTS[variant]
    state = stated(op, options)
    host, start, mask = draw(op, rng, SIZES, SINGLE), draw_states(state, rng, SIZES, SINGLE), scattered_mask(rng)
    options = {**options, "reverse": reverse}
    for mode in backend.modes[op.name]:
        there = [backend.asarray(soiled(x, axes, mask)) for x, axes in zip(host, op.arrays.values())]
        o, final = backend.run(
            function,
            *there,
            mode=mode,
            mask=backend.asarray(mask),
            output_final_state=True,
            initial_state=whole(tuple(map(backend.asarray, start))),
            **options,
        )
        o = backend.tohost(o)
        assert not o.swapaxes(1, 2)[~mask].any()
        for b in range(3):
            wanted, expected = exact(
                function,
                [row(x, axes, b, mask) for x, axes in zip(host, op.arrays.values())],
                initial_state=whole(tuple(part[b : b + 1] for part in start)),
                **options,
            )
            assert_close(f"o, {mode}", row(o, op.out, b, mask), wanted, SINGLE)
            for part, x in zip(parts(final), parts(expected), strict=True):
                assert_close("state", backend.tohost(part)[b : b + 1], x, SINGLE)


@pytest.mark.pairwise
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_gradients(backend, variant, reverse, rng):
    """Those of the sequences alone in float64, and 0 at padding; a bonus's are the sum over the sequences."""
    if not backend.gradients:
        pytest.skip(f"{backend.name} has no gradients")
    op, function, options = VARIANTS[variant]
    state = stated(op, options)
    host, start, mask = draw(op, rng, SIZES, SINGLE), draw_states(state, rng, SIZES, SINGLE), scattered_mask(rng)
    do, dht = rng.standard_normal((3, 2, 50, 8)).astype(SINGLE), draw_states(state, rng, SIZES, SINGLE)
    options = {**options, "reverse": reverse}
    there = [backend.asarray(soiled(x, axes, mask)) for x, axes in zip(host, op.arrays.values())]
    _, pull = backend.run(
        vjp,
        function,
        *there,
        mask=backend.asarray(mask),
        **options,
        initial_state=whole(tuple(map(backend.asarray, start))),
    )
    *found, initial = pull(backend.asarray(soiled(do, op.out, mask)), whole(tuple(map(backend.asarray, dht))))
    sums = {}
    for b in range(3):
        double = [row(x, axes, b, mask).astype(np.float64) for x, axes in zip(host, op.arrays.values())]
        before, after = (whole(tuple(x[b : b + 1].astype(np.float64) for x in states)) for states in (start, dht))
        *wanted, expected = vjp(function, *double, **options, initial_state=before)[1](
            row(do, op.out, b, mask).astype(np.float64), after
        )
        for (name, axes), x, y in zip(op.arrays.items(), found, wanted, strict=True):
            x = backend.tohost(x)
            if "T" not in axes.split():
                sums[name] = x, sums.get(name, (x, 0))[1] + y
                continue
            assert not x.swapaxes(1, 2)[~mask].any()
            assert_close(f"d{name}", row(x, axes, b, mask), y, SINGLE, factor=10)
        for part, x in zip(parts(initial), parts(expected), strict=True):
            assert_close("dh0", backend.tohost(part)[b : b + 1], x, SINGLE, factor=10)
    for name, (x, y) in sums.items():
        assert_close(f"d{name}", x, y, SINGLE, factor=10)


@pytest.mark.parametrize("dtype", [SINGLE, BFLOAT16], ids=["float32", "bfloat16"])
def test_calls_alike_grouped_and_out(backend, dtype, rng):
    """The second call of a kind takes a shorter way, with a mask of its own; value heads may be grouped."""
    op = VARIANTS["gla"][0]
    for _ in range(3):
        q, k, v, g = draw(op, rng, {**SIZES, "K": 64, "V": 32}, dtype)
        v, mask = np.concatenate([v, -2 * v], axis=1), scattered_mask(rng)
        there = [backend.asarray(np.ascontiguousarray(soiled(x, op.out, mask).swapaxes(1, 2))) for x in (q, k, v, g)]
        out = backend.asarray(np.full(there[2].shape, np.nan, dtype))
        assert backend.run(gla, *there, layout="bthd", mask=backend.asarray(mask), out=out) is out
        o = backend.tohost(out).swapaxes(1, 2)
        assert not o.swapaxes(1, 2)[~mask].any()
        for b in range(2):
            q1, k1, v1, g1 = (row(x, op.out, b, mask) for x in (q, k, v, g))
            arrays = [np.repeat(q1, 2, 1), np.repeat(k1, 2, 1), v1, np.repeat(g1, 2, 1)]
            wanted, terms = exact(gla, arrays)[0], size_of_terms(gla, arrays)
            assert_close("o", row(o, op.out, b, mask), wanted, dtype, terms=terms)


# -- on the host alone -------------------------------------------------------------------------------------------------
def test_arrays_are_read_only_read(rng):
    """The caller's arrays stay as they are, and all tokens masked in is the plain call to the last bit."""
    arrays = draw(VARIANTS["gla"][0], rng, SIZES)
    before = [x.copy() for x in arrays]
    mask = scattered_mask(rng)
    gla(*arrays, mask=mask)
    assert all(np.array_equal(x, y) for x, y in zip(arrays, before))
    assert np.array_equal(gla(*arrays, mask=np.ones((3, 50), bool)), gla(*arrays))


@pytest.mark.parametrize("function", [gla, linear_attention])
def test_a_pullback_keeps_the_mask(function, rng):
    """What the caller does to it after the call changes nothing; of the same kind of call each has its own."""
    (op,) = (op for op, public in OPS.items() if public is function)
    arrays, masks = draw(op, rng, SIZES), [scattered_mask(rng) for _ in range(2)]
    do = rng.standard_normal((3, 2, 50, 8))
    wanted = [vjp(function, *arrays, mask=mask.copy())[1](do) for mask in masks]
    pulls = [vjp(function, *arrays, mask=mask)[1] for mask in masks]
    for mask in masks:
        mask[...] = ~mask
    for pull, gradients in zip(pulls, wanted):
        assert all(np.array_equal(x, y) for x, y in zip(pull(do), gradients, strict=True))


def test_explained(rng):
    found = explain(gla, *draw(VARIANTS["gla"][0], rng, SIZES), mask=scattered_mask(rng))
    assert found.backend == "numpy" and found.copies == ("q, k, v, g: without padding",)


def test_of_torch(rng):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays, mask = draw(VARIANTS["gla"][0], rng, SIZES), scattered_mask(rng)
    o = gla(*map(torch.tensor, arrays), mask=torch.tensor(mask))
    assert np.array_equal(o.numpy(), gla(*arrays, mask=mask))


def test_wrong_masks_are_refused(rng):
    arrays = draw(VARIANTS["gla"][0], rng, SIZES)
    with pytest.raises(ContractError, match=r"gla: mask is \(50,\), expected \[B, T\] = \(3, 50\)"):
        gla(*arrays, mask=np.ones(50, bool))
    with pytest.raises(ContractTypeError, match="gla: mask has dtype float64, expected bool"):
        gla(*arrays, mask=np.ones((3, 50)))
    with pytest.raises(ContractTypeError, match="gla: mask is a builtins.list, expected an array"):
        gla(*arrays, mask=[True])
    with pytest.raises(ContractError, match="gla: mask cannot be combined with cu_seqlens"):
        gla(*(x[:1] for x in arrays), mask=np.ones((1, 50), bool), cu_seqlens=[0, 50])
    with pytest.raises(TypeError, match="mask"):
        retention(*arrays[:3], mask=np.ones((3, 50), bool))
