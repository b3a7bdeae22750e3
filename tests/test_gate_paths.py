"""A gate changes neither the way through a one-pass kernel nor the class of its error."""

import numpy as np
import planned
import pytest
from reference import assert_close, double, draw, errors, exact, exact_vjp, limits, rms, size_of_terms

import linattn_np
from linattn_np.array_kinds import BFLOAT16
from linattn_np.declarations import GLA, RWKV6
from linattn_np.ops import OPS

CHUNK, SUB_CHUNK = 32, 8  # tokens of Hopper's kernel: within the smaller ones scores meet in the middle
GATES = ("trained", "weak", "logsigmoid", "all-20", "spikes-40", "some-inf", "some-1e30", "positive")
WAYS = {"one token resets": -np.inf, "one is beyond float32's exponents": -200.0, "one grows": 30.0}


def problem(op, rng, K, T=6 * CHUNK, V=64):
    """Arrays whose first channel holds nothing: its gates never change the answer."""
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


@pytest.mark.pairwise
@pytest.mark.parametrize("gate", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("K", (64, 128))
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_gates_that_nobody_sees_change_nothing(backend, rng, op, K, gate):
    """A strong gate in chunks 1 and 4 of six, where no query or key can see it."""
    needs_half_data(backend, op)
    arrays = problem(op, rng, K)
    weak = run(backend, op, arrays)
    wanted, _ = exact(OPS[op], list(arrays.values()))
    terms = size_of_terms(OPS[op], list(arrays.values()))
    gates = arrays[list(arrays)[3]]
    gates[..., [CHUNK + 5, 4 * CHUNK + 31], 0] = gate
    strong = run(backend, op, arrays)
    for what, o in ("weak", weak), ("strong", strong):
        assert_close(what, o, wanted, BFLOAT16, terms=terms)
    if backend.gates_choose_the_route:
        return
    same = CHUNK if gate > 0 else None  # a chunk whose gates grow is computed another way
    assert (bits(weak)[:, :, :same] == bits(strong)[:, :, :same]).all()


@pytest.mark.pairwise
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("K", (64, 128))
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_errors_are_of_one_class(backend, rng, op, K, gate):
    """Whole and row by row, whatever the gates; the whole to less than other tests allow."""
    needs_half_data(backend, op)
    arrays = draw(op, rng, {"B": 1, "H": 2, "T": 6 * CHUNK, "K": K, "V": 64}, BFLOAT16, gate)
    found = errors(run(backend, op, dict(zip(op.arrays, arrays))), exact(OPS[op], arrays)[0])
    assert found[0] <= 4e-3 and found[1] <= limits(BFLOAT16)[1]


@pytest.mark.pairwise
@pytest.mark.parametrize("gate, most", [("trained", 2.5e-3), ("weak", 2.6e-3), ("logsigmoid", 2.2e-3)])
@pytest.mark.parametrize("K", (64, 128))
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_hopper_has_the_digits_of_tf32_at_borders(hopper, rng, op, K, gate, most):
    """1.7e-3 is what rounding the result alone gives."""
    arrays = draw(op, rng, {"B": 1, "H": 2, "T": 16 * CHUNK, "K": K, "V": 64}, BFLOAT16, gate)
    o = planned.host(planned.run(op.bind([hopper.upload(x) for x in arrays]), hopper)[0])
    assert errors(o, exact(OPS[op], arrays)[0])[0] <= most


@pytest.mark.pairwise
@pytest.mark.parametrize("gate, most", [("trained", 2.4e-3), ("weak", 2.6e-3)])
@pytest.mark.parametrize("K", (64, 128))
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_hopper_keeps_digits_of_gradients_between_its_kernels(hopper, rng, op, K, gate, most):
    """bfloat16 there would give dg 2.6e-3 and 2.8e-3."""
    sizes = {"B": 1, "H": 2, "T": 16 * CHUNK, "K": K, "V": 64}
    arrays, do = draw(op, rng, sizes, BFLOAT16, gate), rng.standard_normal((1, 2, 16 * CHUNK, 64)).astype(BFLOAT16)
    problem = op.bind([hopper.upload(x) for x in arrays], gradient=True)
    found, _ = planned.pull(problem, hopper, hopper.upload(do), (None,))
    assert errors(planned.host(found[3]), exact_vjp(OPS[op], arrays, do)[2][3])[0] <= most


@pytest.mark.pairwise
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("op", [op for op in OPS if op.gates], ids=lambda op: op.name)
def test_no_backend_has_a_gate_of_its_own_class(backend, rng, op, gate):
    """The same limits in float32, whole and row by row, in every mode of every backend."""
    tiny = backend.sizes == ("tiny",)
    sizes = {"B": 1, "H": 1, "T": 18, "K": 4, "V": 3} if tiny else {"B": 1, "H": 2, "T": 150, "K": 20, "V": 12}
    arrays = draw(op, rng, sizes, np.float32, gate)
    wanted = exact(OPS[op], arrays)
    for mode in backend.modes[op.name]:
        given = {"chunk_size": 16} if tiny and mode == "staged" else {}
        found = backend.run(OPS[op], *map(backend.asarray, arrays), mode=mode, output_final_state=True, **given)
        for what, x, y in zip(("o", "state"), found, wanted, strict=True):
            assert_close(f"{what} in mode {mode}", backend.tohost(x), y, np.float32)


@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_a_last_bit_depends_on_gates_of_its_own_sub_chunk_alone(device, rng, op):
    """Tokens before the middle of 8 meet there, with gates that are still to come; nothing later moves a bit."""
    if device.capability != 90:
        pytest.skip("only Hopper's kernel has sub-chunks of 8")
    sizes = {"B": 1, "H": 1, "T": 2 * CHUNK, "K": 64, "V": 64}
    arrays, other = (draw(op, rng, sizes, BFLOAT16, gate) for gate in ("weak", "some-inf"))

    def computed(host):
        o = planned.run(op.bind([device.upload(x) for x in host]), device)[0]
        return bits(planned.host(o))

    before = computed(arrays)
    for at in (5, 8, 17, 28, 44):
        mixed = [
            np.concatenate([x[:, :, :at], y[:, :, at:]], axis=2) if x.ndim == 4 else x for x, y in zip(arrays, other)
        ]
        after = computed(mixed)
        same = at // SUB_CHUNK * SUB_CHUNK if at % SUB_CHUNK < SUB_CHUNK // 2 else at
        assert (before[:, :, :same] == after[:, :, :same]).all()


@pytest.mark.parametrize("size", (1e9, 1e30))
def test_large_keys_overflow_nothing(backend, rng, size):
    """Keys that a factor from a chunk's end back to its start would push over float32's end."""
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
    """Arrays that NumPy's factors of weak gates would push over float32's end, forward or backward."""
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
        assert_close(
            name, got, wanted, np.dtype(np.float32), rows=2 if op is linattn_np.rwkv6 and name == "dg" else 1
        )  # a sum that cancels


@pytest.mark.parametrize("gate", (-1.0, -30.0))
def test_scores_may_cancel_between_the_channels(backend, rng, gate):
    """K > 128 takes two launches on Hopper, whose scores of a token with itself are large here and nearly opposite."""
    needs_half_data(backend, GLA)
    q, k, v, g = draw(GLA, rng, {"B": 1, "H": 2, "T": 4 * CHUNK, "K": 256, "V": 64}, BFLOAT16)
    q[..., 128:], k[..., 128:], g[...] = q[..., :128], -k[..., :128], gate
    k[..., 128:] += (rng.standard_normal(k[..., 128:].shape) / 16).astype(BFLOAT16)
    arrays = {"q": q, "k": k, "v": v, "g": g}
    wanted, _ = exact(linattn_np.gla, list(arrays.values()))
    apart, _ = exact(linattn_np.gla, [q[..., :128], k[..., :128], v, g[..., :128]], scale=256**-0.5)
    o = run(backend, GLA, arrays)
    whole, row = limits(BFLOAT16)
    assert errors(o, wanted)[0] <= whole
    assert (rms(double(o) - wanted, axis=-1) <= row * np.maximum(rms(wanted, axis=-1), rms(apart, axis=-1))).all()
