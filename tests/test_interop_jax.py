"""The operators as JAX functions: results and gradients against JAX's own autodiff of the literal equations.

With `--backends=numpy` JAX computes on the CPU, with `--backends=cupy` on the card that it finds.
"""

import os
from functools import partial

import numpy as np
import pytest
from literal_operators import SIZES, VARIANTS, Call, literal, pytest_generate_tests  # noqa: F401  (its cases)
from reference import assert_close, draw, same_bits

import linattn_np
from linattn_np import ContractError, ContractTypeError, NotSupported
from linattn_np.array_kinds import BFLOAT16
from linattn_np.declarations import GLA, RETENTION

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the other tests on a card need its memory
jax = pytest.importorskip("jax", reason="jax is not installed")
interop = pytest.importorskip("linattn_np.interop.jax")
jnp = jax.numpy

HALVES = [np.dtype(np.float16), BFLOAT16]


@pytest.fixture(autouse=True)
def on_cpu():
    """Where tests without a `home` compute, whatever JAX finds."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def home(request, on_cpu):
    """A device of JAX's, float64 allowed; `home.dtype` is the finest that it computes."""
    try:
        device = jax.devices({"numpy": "cpu", "cupy": "gpu"}[request.param])[0]
    except RuntimeError:
        pytest.skip("jax sees no card")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    with jax.default_device(device):
        yield Home(device, np.dtype(np.float64 if device.platform == "cpu" else np.float32))
    jax.config.update("jax_enable_x64", before)


class Home:
    def __init__(self, device, dtype):
        self.device, self.dtype = device, dtype

    def put(self, arrays, dtype=None):
        return tuple(jax.device_put(x.astype(dtype or self.dtype), self.device) for x in arrays)


class Case(Call):
    def ours(self, *inputs, **more):
        """[o, *final state's parts] of the JAX function."""
        return jax.tree.leaves(self.of(interop, *inputs, **more))

    def literal(self, *inputs):
        return self.equation(jnp, jax.lax.scan, *inputs)

    def loss(self, compute, *inputs):
        weighed = zip(compute(*inputs), self.weights, strict=True)
        return sum((x.astype(np.float64) * weights).sum() for x, weights in weighed)

    def gradients(self, compute, inputs):
        return jax.jit(jax.grad(partial(self.loss, compute), argnums=tuple(range(len(inputs)))))(*inputs)


def exactly(function, arrays):
    """JAX's answer in float64 on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        return function([jnp.asarray(np.asarray(x, np.float64)) for x in arrays])


def compare(found, wanted, dtype, factor=10):
    """A row has few numbers, which may cancel to far below their terms."""
    for place, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert_close(f"number {place}", np.asarray(x), np.asarray(y), dtype, factor=factor, rows=4)


def test_forward(home, variant, rng):
    case = Case(variant, rng)
    inputs = home.put(case.arrays)
    wanted = exactly(lambda x: case.literal(*x), inputs)
    for found in (case.ours(*inputs), jax.jit(case.ours)(*inputs)):
        assert all(isinstance(x, jax.Array) and x.devices() == {home.device} for x in found)
        compare(found, wanted, home.dtype)


@pytest.mark.pairwise(half="variant")
def test_gradients(home, variant, rng):
    case = Case(variant, rng)
    inputs = home.put(case.arrays)
    found = case.gradients(case.ours, inputs)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in inputs]
    compare(found, exactly(lambda x: case.gradients(case.literal, x), inputs), home.dtype)


@pytest.mark.pairwise(half="variant")
def test_gradients_without_states(home, variant, rng):
    case = Case(variant, rng, stateful=False)
    case.final, case.weights = False, case.weights[:1]
    inputs = home.put(case.arrays)
    found = case.gradients(case.ours, inputs)
    compare(found, exactly(lambda x: case.gradients(lambda *a: case.literal(*a)[:1], x), inputs), home.dtype)


@pytest.mark.parametrize("name", ["gla", "rwkv6"])
def test_steps(home, name, rng):
    """The scan of a step has the results and gradients of the whole sequence."""
    case = Case(name, rng, {**SIZES, "T": 4})
    case.final = True
    inputs = home.put(case.arrays)
    step = getattr(interop, f"{name}_step")

    def by_steps(*inputs):
        *arrays, state = inputs
        fixed, tokens = arrays[4:], [jnp.moveaxis(x, 2, 0) for x in arrays[:4]]
        state, o = jax.lax.scan(lambda state, token: step(*token, *fixed, state)[::-1], state, tokens)
        return [jnp.moveaxis(o, 0, 2), state]

    compare(by_steps(*inputs), case.ours(*inputs), home.dtype)
    compare(case.gradients(by_steps, inputs), case.gradients(case.ours, inputs), home.dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["gla", "rwkv6"])
def test_half_precision_gradients(home, name, dtype, rng):
    """Gates and states in float32 beside half-precision inputs; every gradient in the dtype of its array."""
    case = Case(name, rng)
    gated = [*(name in case.op.gates for name in case.op.arrays), True]
    inputs = [home.put([x], np.float32 if gate else dtype)[0] for x, gate in zip(case.arrays, gated)]
    found = case.gradients(case.ours, inputs)
    assert [x.dtype for x in found] == [x.dtype for x in inputs]
    compare(found, exactly(lambda x: case.gradients(case.literal, x), inputs), dtype, factor=3)


def test_packed_sequences_and_layout_gradients(home, rng):
    """[B, T, H, ...] with cu_seqlens, one of the sequences empty, backwards, against linattn_np.vjp on the host."""
    sizes = {**SIZES, "B": 1, "N": 3}
    case = Case("gla", rng, sizes)
    *arrays, start = case.arrays
    arrays = [x.swapaxes(1, 2) for x in arrays]
    case.weights[0] = case.weights[0].swapaxes(1, 2)
    given = {"layout": "bthd", "cu_seqlens": np.array([0, 9, 9, 21]), "reverse": True, "state_v_first": True}
    start, case.weights[1] = (x.swapaxes(2, 3) for x in (start, case.weights[1]))
    found = case.gradients(partial(case.ours, **given), home.put([*arrays, start]))
    _, pull = linattn_np.vjp(linattn_np.gla, *arrays, initial_state=start, **given)
    compare(found, pull(*case.weights), home.dtype)


def test_vmap_gradients(home, rng):
    """Mapped over some arguments and not over others, forwards and backwards."""
    case = Case("rwkv6", rng)
    *arrays, start = home.put(case.arrays)
    others = [x + 1 for x in arrays[:3]]
    mapped = [jnp.stack([x, y]) for x, y in zip(arrays, others)]

    def gradients(r, k, v):
        return case.gradients(case.ours, (r, k, v, *arrays[3:], start))

    found = jax.vmap(gradients)(*mapped)
    for place, x in enumerate((arrays[:3], others)):
        assert all(same_bits(f[place], y) for f, y in zip(found, gradients(*x), strict=True))


def test_scan_and_checkpoint_gradients(home, rng):
    """Layers one after the other, as a model has them."""
    case = Case("simple_gla", rng, {**SIZES, "V": SIZES["K"]}, stateful=False)
    q, k, v, g = home.put(case.arrays)

    @jax.checkpoint
    def layer(x, scale):
        return jnp.tanh(interop.gla(x * scale, k, x, jnp.broadcast_to(g[..., None], q.shape))), None

    def loss(x, scales):
        return (jax.lax.scan(layer, x, scales)[0] ** 2).sum()

    def unrolled(x, scales):
        for scale in scales:
            o, *_ = literal(jnp, jax.lax.scan, "simple_gla", (x * scale, k, x, g))
            x = jnp.tanh(o)
        return (x**2).sum()

    scales = jnp.asarray([0.5, 1.0, 1.5], home.dtype)
    compare(jax.jit(jax.grad(loss, (0, 1)))(q, scales), jax.grad(unrolled, (0, 1))(q, scales), home.dtype, factor=100)


@pytest.mark.parametrize("shape", [(1, 2, 0, 8), (0, 2, 5, 8)], ids=["no tokens", "no batch"])
def test_nothing_to_compute_forward(home, shape):
    x = jnp.zeros(shape, home.dtype)
    start = jnp.ones((shape[0], 2, 8, 8), home.dtype)
    o, final = interop.gla(x, x, x, x, initial_state=start, output_final_state=True)
    assert o.shape == shape and np.array_equal(final, start)


def test_the_same_bits_as_numpy(rng):
    arrays = draw(GLA, rng, SIZES, np.float32)
    given = {"mode": "chunk", "chunk_size": 16, "state_dtype": BFLOAT16, "output_final_state": True}
    found, wanted = interop.gla(*arrays, **given), linattn_np.gla(*arrays, **given)
    assert all(same_bits(np.asarray(x), y) for x, y in zip(found, wanted, strict=True))


def test_calls_alike_are_compiled_once(rng):
    arrays = draw(RETENTION, rng, SIZES, np.float32)
    before = len(interop.FUNCTIONS.kept)
    for gamma in ([0.5, 0.6], (0.5, 0.6), np.array([0.5, 0.6])):
        interop.retention(*arrays, gamma=gamma)
    assert len(interop.FUNCTIONS.kept) == before + 1
    found = [interop.retention(*arrays, gamma=[0.5, 0.6], scale=scale) for scale in (0.0, -0.0)]
    assert [bool(np.signbit(np.asarray(o)).any()) for o in found] == [True, True]
    assert len(interop.FUNCTIONS.kept) == before + 3  # 0.0 equals -0.0 and is another scale


def test_one_decay_for_all_heads_may_be_an_array(rng):
    """Of no axis: JAX's functions took numbers and lists, and arrays of one axis."""
    arrays = draw(RETENTION, rng, SIZES, np.float32)
    assert same_bits(
        np.asarray(interop.retention(*arrays, gamma=np.array(0.5))), linattn_np.retention(*arrays, gamma=0.5)
    )


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_misfits_are_refused_while_tracing(rng):
    q, k, v, g = draw(GLA, rng, SIZES, np.float32)
    with pytest.raises(ContractError, match="gla: v has T=3, but T=21 elsewhere"):
        jax.jit(interop.gla)(q, k, v[:, :, :3], g)
    with pytest.raises(ContractError, match="gla: initial_state is .1, 2, 8, 6., expected .N, H, K, V. = .2, 2, 8, 6."):
        interop.gla(q, k, v, g, initial_state=np.zeros((1, 2, 8, 6), np.float32))
    with pytest.raises(ContractTypeError, match="gla: g has dtype int32"):
        interop.gla(q, k, v, g.astype(np.int32))
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        interop.gla(q, k, v, g, out=v)
    with pytest.raises(TypeError, match="unexpected keyword argument 'axis_name'"):
        interop.softmax_attention(q, k, v, axis_name="devices")


@pytest.mark.parametrize("of", [lambda f: f, jax.vmap, lambda f: jax.grad(lambda *a: f(*a).sum())])
def test_an_export_is_refused(of):
    export = pytest.importorskip("jax.export").export
    arrays = [jnp.full((1, 1, 2, 4, 3), -0.5)] * 4
    call = of(interop.gla) if of is jax.vmap else of(lambda *a: interop.gla(*(x[0] for x in a)))
    assert np.isfinite(jax.jit(call)(*arrays)).all()
    with pytest.raises(NotSupported, match="gla: jax.export cannot take it"):
        export(jax.jit(call))(*arrays)


def test_masked_arrays_are_refused(rng):
    q, k, v, g = draw(GLA, rng, SIZES, np.float32)
    with pytest.raises(ContractTypeError, match="gla: k is a numpy.ma.MaskedArray, whose mask would be ignored"):
        interop.gla(q, np.ma.masked_array(k, k > 0), v, g)


def test_what_has_no_floats_is_refused(rng):
    q, k, v, g = draw(GLA, rng, SIZES, np.float32)
    keys = jax.random.split(jax.random.key(0), q.shape)
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    for x in (keys, shape, q.astype(object), q.astype(str), "q", object(), None):
        with pytest.raises(ContractTypeError, match="gla: q "):
            interop.gla(x, k, v, g)
        with pytest.raises(ContractTypeError, match="gla: q "):
            linattn_np.gla(x, k, v, g)
    with pytest.raises(ContractTypeError, match="gla: q "):
        jax.jit(lambda q: interop.gla(q, k, v, g))(keys)


def test_what_must_be_static(rng):
    q, k, v, g = draw(GLA, rng, SIZES, np.float32)
    with pytest.raises(ContractTypeError, match="gla: scale is .*, expected a finite number"):
        jax.jit(lambda scale: interop.gla(q, k, v, g, scale=scale))(0.5)


def test_double_precision_needs_x64(rng):
    arrays = draw(GLA, rng, SIZES, np.float32)
    with pytest.raises(ContractError, match="gla: state_dtype is float64, which JAX has with jax_enable_x64 alone"):
        interop.gla(*arrays, state_dtype=np.float64, output_final_state=True)


def test_backends_refuse_by_name(rng):
    arrays = draw(GLA, rng, SIZES, np.float32)
    with pytest.raises(RuntimeError, match="cupy: the arrays are on the host"):
        interop.gla(*arrays, backend="cupy")


def test_only_first_order_and_reverse(rng):
    q, k, v, g = draw(GLA, rng, SIZES, np.float32)
    gradient = jax.grad(lambda q: interop.gla(q, k, v, g).sum())
    for derivative in (
        lambda: jax.grad(lambda q: gradient(q).sum())(q),
        lambda: jax.jit(jax.grad(lambda q: jax.jit(gradient)(q).sum()))(q),
        lambda: jax.jvp(lambda q: interop.gla(q, k, v, g), (q,), (q,)),
        lambda: jax.hessian(lambda q: interop.gla(q, k, v, g).sum())(q),
    ):
        with pytest.raises(NotSupported, match="gla: gradients are first-order and reverse-mode"):
            derivative()
