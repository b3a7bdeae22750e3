"""The layers of Gated DeltaNet and Kimi Delta Attention: against their equations a token at a time, and gradients
against finite differences."""

import numpy as np
import pytest
from reference import assert_close, same_bits

from linattn_np import ContractError
from linattn_np.layers import GatedDeltaNet, KimiDeltaAttention

D, H, K = 12, 2, 6
VARIANTS = {
    "gdn": (GatedDeltaNet, {}, {"expand_v": 1.5}),
    "gdn-grouped": (GatedDeltaNet, {"num_v_heads": 4, "allow_neg_eigval": True}, {}),
    "kda": (KimiDeltaAttention, {}, {}),
    "kda-bounded": (KimiDeltaAttention, {"num_v_heads": 4, "lower_bound": -5.0}, {"expand_v": 0.5}),
}
BARE = "gdn-bare"  # neither convolutions nor an output gate


def layer_of(variant, rng, dtype=np.float64):
    cls, options, sizes = VARIANTS.get(variant, VARIANTS["gdn"])
    heads = options.get("num_v_heads", H)
    weights = cls.random_weights(rng, D, H, head_dim=K, num_v_heads=heads, **sizes)
    if variant == BARE:
        weights = {name: w for name, w in weights.items() if "conv1d" not in name and "g_proj" not in name}
    elif variant == "gdn":
        weights |= {f"{n}_conv1d.bias": rng.standard_normal(len(weights[f"{n}_conv1d.weight"])) for n in "qkv"}
    weights = {name: (w + 0.3 * rng.standard_normal(w.shape)).astype(dtype) for name, w in weights.items()}
    return cls(weights, H, **options), options


def literal(layer, options, x, S=None, before=None):
    """(y, (final state, the last projections)) of one sequence x [T, D] in float64, token by token and head by head."""
    W = {name: np.asarray(w, np.float64) for name, w in layer.weights.items()}
    HV, V, lower = options.get("num_v_heads", H), W["o_norm.weight"].shape[0], options.get("lower_bound")
    sigmoid, softplus = lambda z: 1 / (1 + np.exp(-z)), lambda z: np.log1p(np.exp(z))
    bounded = isinstance(layer, KimiDeltaAttention)
    projected = np.concatenate([x @ W[f"{n}_proj.weight"].T for n in "qkv"], 1)
    size = W["q_conv1d.weight"].shape[-1] if "q_conv1d.weight" in W else 1
    before = np.zeros((size - 1, projected.shape[1])) if before is None else before
    met, S, y = np.concatenate([before, projected]), np.zeros((HV, K, V)) if S is None else S.copy(), []
    for t, x_t in enumerate(x):
        z = met[t : t + size]
        if size > 1:
            taps = np.concatenate([W[f"{n}_conv1d.weight"][:, 0] for n in "qkv"])
            z = (taps.T * z).sum(0) + np.concatenate(
                [W.get(f"{n}_conv1d.bias", np.zeros(m)) for n, m in zip("qkv", (H * K, H * K, HV * V))]
            )
        q, k, v = np.split(np.ravel(z * sigmoid(z)), [H * K, 2 * H * K])
        beta = sigmoid(W["b_proj.weight"] @ x_t) * (2 if options.get("allow_neg_eigval") else 1)
        if bounded:
            raw = (W["f_proj.1.weight"] @ (W["f_proj.0.weight"] @ x_t) + W["dt_bias"]).reshape(HV, K)
            rate = np.exp(W["A_log"])[:, None]
            g = -rate * softplus(raw) if lower is None else lower * sigmoid(rate * raw)
            gate = sigmoid(W["g_proj.1.weight"] @ (W["g_proj.0.weight"] @ x_t) + W["g_proj.1.bias"])
        else:
            g = (-np.exp(W["A_log"]) * softplus(W["a_proj.weight"] @ x_t + W["dt_bias"]))[:, None]
            raw = W["g_proj.weight"] @ x_t if "g_proj.weight" in W else None
            gate = 1 if raw is None else raw * sigmoid(raw)
        o = []
        for h in range(HV):
            key, query = (u.reshape(H, K)[h * H // HV] for u in (k, q))
            key, query = (u / np.sqrt(u @ u + 1e-6) for u in (key, query))
            S[h] = np.exp(g[h])[:, None] * S[h]
            S[h] += beta[h] * np.outer(key, v.reshape(HV, V)[h] - key @ S[h])
            o_h = K**-0.5 * query @ S[h]
            o.append(o_h / np.sqrt(np.mean(o_h**2) + 1e-5) * W["o_norm.weight"])
        y.append(W["o_proj.weight"] @ (np.concatenate(o) * gate))
    return np.array(y), (S, met[len(x) :])


@pytest.mark.parametrize("variant", [*VARIANTS, BARE])
def test_matches_the_equations(variant, rng):
    layer, options = layer_of(variant, rng)
    x = rng.standard_normal((2, 11, D))
    y, states = layer(x[:, :8])
    for n in range(2):
        wanted, (S, met) = literal(layer, options, x[n, :8])
        assert_close("y", y[n], wanted, np.float64, factor=10)
        assert_close("state", states[0][n], S, np.float64, factor=10)
        np.testing.assert_allclose(states[1][n], met, rtol=1e-12, atol=1e-12)
    then = [layer.step(x[:, t], states) for t in range(8, 11)]
    for n in range(2):
        assert_close("steps", np.stack(then, 1)[n], literal(layer, options, x[n])[0][8:], np.float64, factor=10)


def test_packed_sequences_go_on_from_their_states(rng):
    layer, options = layer_of("kda", rng)
    x = rng.standard_normal((1, 12, D))
    _, states = layer(x, cu_seqlens=[0, 2, 2, 12])
    y, (state, met) = layer(x, states, cu_seqlens=[0, 1, 9, 12])
    for n, tokens in enumerate((slice(0, 1), slice(1, 9), slice(9, 12))):
        wanted, (S, last) = literal(layer, options, x[0, tokens], states[0][n], states[1][n])
        assert_close("y", y[0, tokens], wanted, np.float64, factor=10)
        assert_close("state", state[n], S, np.float64, factor=10)
        np.testing.assert_allclose(met[n], last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", [*VARIANTS, BARE])
def test_gradients_match_finite_differences(variant, rng):
    """Of every array in a direction of its own, states in and out, sequences packed."""
    layer, _ = layer_of(variant, rng)
    x, cuts = rng.standard_normal((1, 13, D)), {"cu_seqlens": [0, 5, 13]}
    states = tuple(rng.standard_normal(part.shape) for part in layer(x, **cuts)[1])
    (y, after), pull = layer.vjp(x, states, **cuts)
    again = layer(x, states, **cuts)
    assert same_bits(y, again[0]) and all(map(same_bits, after, again[1]))
    dy, dafter = rng.standard_normal(y.shape), tuple(rng.standard_normal(part.shape) for part in after)
    dx, gradients, dstates = pull(dy, dafter)
    assert list(gradients) == list(layer.weights)
    pairs = [("x", x, dx), *zip(("state", "convolutions"), states, dstates)]
    pairs += [(name, layer.weights[name], gradient) for name, gradient in gradients.items()]

    def loss():
        y, after = layer(x, states, **cuts)
        return sum((a * b).sum() for a, b in zip((y, *after), (dy, *dafter)))

    for name, array, gradient in pairs:
        assert gradient.shape == array.shape, name
        direction, values, before = rng.standard_normal(array.shape), [], array.copy()
        for side in (1e-6, -1e-6):
            array[...] = before + side * direction
            values.append(loss())
        array[...] = before
        wanted, found = (values[0] - values[1]) / 2e-6, (gradient * direction).sum()
        assert abs(found - wanted) <= 1e-6 * (abs(wanted) + np.linalg.norm(gradient) + 1), f"d{name}"


def test_single_precision(rng):
    layer, options = layer_of("kda", rng, np.float32)
    x = rng.standard_normal((1, 9, D)).astype(np.float32)
    y, (state, met) = layer(x)
    assert {y.dtype, state.dtype, met.dtype} == {np.dtype(np.float32)}
    assert_close("y", y[0], literal(layer, options, x[0])[0], np.float32, factor=10)


def without(weights, name):
    return {n: w for n, w in weights.items() if n != name}


def test_refusals(rng):
    layer, _ = layer_of("kda", rng)
    weights, x, states = layer.weights, rng.standard_normal((2, 3, D)), layer(rng.standard_normal((2, 3, D)))[1]
    for call, message in [
        (
            lambda: KimiDeltaAttention(without(weights, "f_proj.0.weight"), H),
            "f_proj.0.weight missing from the weights",
        ),
        (lambda: KimiDeltaAttention(without(weights, "k_conv1d.weight"), H), "q_conv1d, v_conv1d without the others"),
        (lambda: KimiDeltaAttention(weights | {"k_conv1d.bias": x}, H), "k_conv1d.bias without the others"),
        (lambda: KimiDeltaAttention(weights | {"q_conv1d.weight": x[:0]}, H), r"q_conv1d.weight is \(0, 3, 12\)"),
        (lambda: KimiDeltaAttention(weights | {"f_proj.0.weight": x[0, 0, 0, ...]}, H), r"f_proj.0.weight is \(\)"),
        (lambda: KimiDeltaAttention(weights | {"k_proj.bias": x}, H), "k_proj.bias is none of this layer's weights"),
        (lambda: KimiDeltaAttention(weights | {"A_log": x}, H), r"A_log is \(2, 3, 12\), expected \(2,\)"),
        (lambda: KimiDeltaAttention(weights, 5), "q_proj.weight is .12, 12., with 12 channels for 5 heads to share"),
        (
            lambda: KimiDeltaAttention(weights, H, num_v_heads=3),
            "num_v_heads is 3, expected num_heads, 2, or a multiple",
        ),
        (lambda: KimiDeltaAttention(weights, H, lower_bound=1), "lower_bound is 1, expected a number below 0"),
        (lambda: KimiDeltaAttention(weights, H, allow_neg_eigval=1), "allow_neg_eigval is 1, expected True or False"),
        (lambda: layer(x[0]), r"x is \(3, 12\), expected \[B, T, D\] with D=12"),
        (lambda: layer(x, states[0]), "state is a ndarray, expected a pair"),
        (lambda: layer(x, (states[0], states[1][:, :1])), r"state\[1\] is \(2, 1, 36\), expected \[N, W - 1, C\]"),
        (lambda: layer.step(x[:, 0], (states[0][:1], states[1])), "kda_step: state is"),
        (lambda: layer(x[:1], cu_seqlens=[0, 7]), "cu_seqlens"),
        (lambda: layer.vjp(x)[1](x, states[0]), "dstate is a ndarray, expected a pair"),
    ]:
        with pytest.raises(ContractError, match=message):
            call()
