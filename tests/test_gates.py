"""The gates of trained models, on arrays, torch and JAX."""

import numpy as np
import pytest
from reference import same_bits

import linattn_np
from linattn_np import ContractError, gdn_gate, kda_gate, rwkv7_gate
from linattn_np.errors import ContractTypeError

H, K = 3, 4
CALLS = {
    "gdn": ("gdn_gate", (H,), {}),
    "kda": ("kda_gate", (H, K), {}),
    "kda-bounded": ("kda_gate", (H, K), {"lower_bound": -5.0}),
    "rwkv7": ("rwkv7_gate", (K,), {}),
}
# A bounded gate is exp of down to -88, which multiplies four roundings of its exponent: 2.1e-5. What is below float32's
# least normal number has fewer digits, or none: one draw of a thousand.
CLOSE = {"rtol": 3e-5, "atol": 5 * np.finfo(np.float32).tiny}


def drawn(name, rng, scale=1.0):
    """(function's name, its arrays in float32, its options)."""
    function, axes, options = CALLS[name]
    x = (scale * rng.standard_normal((2, 5, *axes))).astype(np.float32)
    more = rng.standard_normal(H), rng.standard_normal(axes)
    return function, [x, *(y.astype(np.float32) for y in more if "rwkv7" not in name)], options


def literal(name, x, A_log=None, dt_bias=None):
    x, sigmoid = x.astype(np.float64), lambda x: 1 / (1 + np.exp(-x))
    if name == "rwkv7":  # as the model has it: decay = exp(-exp(-softplus(-x) - 1 / 2))
        return -np.exp(-np.log1p(np.exp(-x)) - 0.5)
    rate = np.exp(A_log.astype(np.float64)).reshape(H, *(1,) * (dt_bias.ndim - 1))
    return -5 * sigmoid(rate * (x + dt_bias)) if name == "kda-bounded" else -rate * np.log1p(np.exp(x + dt_bias))


@pytest.mark.parametrize("name", CALLS)
def test_is_the_equation(name, rng):
    function, arrays, options = drawn(name, rng)
    found = getattr(linattn_np, function)(*arrays, **options)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, literal(name, *arrays), **CLOSE)
    half = getattr(linattn_np, function)(arrays[0].astype(np.float16), *arrays[1:], **options)
    assert half.dtype == np.float32


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("name", CALLS)
def test_other_libraries_differentiate_it(name, library, rng):
    function, arrays, options = drawn(name, rng)
    wanted = getattr(linattn_np, function)(*arrays, **options)
    doubles = [x.astype(np.float64) for x in arrays]
    steps = []
    for number, x in enumerate(doubles):
        moved = [[*doubles[:number], x + e, *doubles[number + 1 :]] for e in (1e-6, -1e-6)]
        ends = [getattr(linattn_np, function)(*given, **options) for given in moved]
        steps.append((ends[0] - ends[1]).sum() / 2e-6)
    if library == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        from linattn_np.interop import torch as there

        tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
        found = getattr(there, function)(*tensors, **options)
        found.sum().backward()
        found, gradients = found.detach().numpy(), [x.grad.sum().item() for x in tensors]
    else:
        jax = pytest.importorskip("jax", reason="jax is not installed")
        from linattn_np.interop import jax as there

        def summed(*given):
            return getattr(there, function)(*given, **options).sum()

        found = np.asarray(getattr(there, function)(*map(jax.numpy.asarray, arrays), **options))
        gradients = [float(x.sum()) for x in jax.grad(summed, range(len(arrays)))(*map(jax.numpy.asarray, arrays))]
    np.testing.assert_allclose(found, wanted, **CLOSE)
    np.testing.assert_allclose(gradients, steps, rtol=1e-3, atol=1e-3)


def test_far_from_zero():
    x = np.array([-1e4, -100, 100, 1e4], np.float32)
    with np.errstate(all="raise", under="ignore"):
        assert np.isfinite(gdn_gate(x[:, None], np.zeros(1, np.float32))).all()
        assert np.isfinite(kda_gate(x[:, None, None], np.ones(1, np.float32), lower_bound=-5)).all()
        assert rwkv7_gate(x)[[0, 3]].round(4).tolist() == [0, np.float32(-0.6065)]


def test_biases_side_by_side(rng):
    _, (x, A_log, dt_bias), _ = drawn("kda", rng)
    assert same_bits(kda_gate(x, A_log, dt_bias.ravel()), kda_gate(x, A_log, dt_bias))


def test_refusals():
    x, A_log = np.zeros((2, 3, 4)), np.zeros(3)
    with pytest.raises(ContractError, match=r"kda_gate: A_log is \(3,\), expected \[H\] = \(5,\)"):
        kda_gate(np.zeros((5, 4)), A_log)
    with pytest.raises(ContractError, match=r"kda_gate: dt_bias is \(4,\), expected \[H, K\] = \(3, 4\)"):
        kda_gate(x, A_log, np.zeros(4))
    with pytest.raises(ContractError, match=r"kda_gate: x is \(3,\), expected \[..., H, K\]"):
        kda_gate(np.zeros(3), A_log)
    with pytest.raises(ContractError, match="kda_gate: lower_bound is 5.0, expected a number below 0, or None"):
        kda_gate(x, A_log, lower_bound=5.0)
    with pytest.raises(ContractTypeError, match="gdn_gate: x is a builtins.list, expected an array of numpy or cupy"):
        gdn_gate([1.0], A_log)
