"""The GLA layer: against its equations a token at a time, its gradients against finite differences, and its refusals.

With `--backends=cupy` the same layer runs on a card, in float32.
"""

import numpy as np
import pytest
from conftest import made
from reference import assert_close, errors, limits, logsigmoid, same_bits

from linattn_np import ContractError, ContractTypeError
from linattn_np.array_kinds import BFLOAT16
from linattn_np.layers import GatedLinearAttention, random_weights
from linattn_np.layers.gated_linear_attention import NORMS

D, H = 24, 4
VARIANTS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "one-kv-head": {"num_kv_heads": 1},
    "relu-features": {"feature_map": "relu"},
    "swish-features": {"feature_map": "silu"},
    "sigmoid-gate": {"gate_fn": "sigmoid"},
    "clamped": {"clamp_min": -0.05, "gate_logit_normalizer": 4},
}


def pytest_generate_tests(metafunc):
    """`place` is the backend whose arrays the layer gets: NumPy's, or CuPy's on a card."""
    if "place" in metafunc.fixturenames:
        listed = metafunc.config.backends
        names = [name for name in ("numpy", "cupy") if name in listed]
        if "gradients" in metafunc.function.__name__:
            names = [name for name in names if listed[name].gradients]
        metafunc.parametrize("place", names, indirect=True)


@pytest.fixture
def place(request, backends):
    return made(request.param, backends)


def finest(place):
    return np.float64 if place.name == "numpy" else np.float32


def weights_of(rng, options, dtype=np.float64):
    weights = random_weights(rng, D, H, num_kv_heads=options.get("num_kv_heads"), expand_k=2, gate_low_rank_dim=5)
    weights = {name: 2 * x.astype(dtype) for name, x in weights.items()}
    weights[NORMS[0]] = rng.uniform(0.5, 1.5, weights[NORMS[0]].shape).astype(dtype)
    return weights


def placed(place, weights, options):
    weights = {name: place.asarray(x.astype(finest(place))) for name, x in weights.items()}
    return GatedLinearAttention(weights, H, **options)


# -- the equations -----------------------------------------------------------------------------------------------------
def literal(
    weights,
    x,
    S=None,
    *,
    num_kv_heads=H,
    feature_map=None,
    gate_fn="swish",
    gate_logit_normalizer=16,
    clamp_min=-np.inf,
    norm_eps=1e-5,
):
    """(y, final state) of one sequence x [T, D] in float64, a token and a head at a time."""
    W = {name: np.asarray(w, np.float64) for name, w in weights.items()}
    K, V = W["q_proj.weight"].shape[0] // H, W["o_proj.weight"].shape[1] // H
    functions = {None: lambda x: x, "relu": lambda x: np.where(x > 0, x, 0), "sigmoid": lambda x: 1 / (1 + np.exp(-x))}
    functions["swish"] = functions["silu"] = lambda x: x / (1 + np.exp(-x))
    phi, act = functions[feature_map], functions[gate_fn]
    norm = W.get("g_norm_swish_gate.weight", W.get("g_norm.weight", np.ones(V)))
    S = np.zeros((H, K, V)) if S is None else S.copy()
    y = []
    for x_t in x:
        q, k, v = (W[f"{name}_proj.weight"] @ x_t for name in "qkv")
        logits = W["gk_proj.1.weight"] @ (W["gk_proj.0.weight"] @ x_t) + W["gk_proj.1.bias"]
        g = logsigmoid(logits) / gate_logit_normalizer
        o = []
        for h in range(H):
            shared = h * num_kv_heads // H
            keys, values, own = (slice(at * size, at * size + size) for at, size in ((shared, K), (shared, V), (h, K)))
            S[h] = np.exp(np.maximum(g[keys], clamp_min))[:, None] * S[h] + np.outer(phi(k[keys]), v[values])
            o_h = K**-0.5 * phi(q[own]) @ S[h]
            o.append(o_h / np.sqrt(np.mean(o_h**2) + norm_eps) * norm)
        o = np.concatenate(o)
        if "g_proj.weight" in W:
            o = o * act(W["g_proj.weight"] @ x_t)
        y.append(W["o_proj.weight"] @ o)
    return np.array(y), S


def batch(weights, x, state=None, **options):
    found = [literal(weights, row, None if state is None else state[n], **options) for n, row in enumerate(x)]
    return [np.stack(part) for part in zip(*found)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_the_equations(place, variant, rng):
    options = VARIANTS[variant]
    weights, x = weights_of(rng, options), rng.standard_normal((2, 37, D))
    layer = placed(place, weights, options)
    K, V = weights["q_proj.weight"].shape[0] // H, D // H
    start = rng.standard_normal((2, H, K, V))
    for given in (None, start):
        state = None if given is None else place.asarray(given.astype(finest(place)))
        found = layer(place.asarray(x.astype(finest(place))), state)
        for name, a, b in zip(("y", "state"), found, batch(weights, x, given, **options), strict=True):
            assert_close(name, place.tohost(a), b, finest(place), factor=10)
        if given is not None:
            assert same_bits(place.tohost(state), given.astype(finest(place)))


@pytest.mark.parametrize("names", [("g_proj.weight",), (NORMS[0],), ("g_proj.weight", NORMS[0])], ids=" ".join)
def test_without_optional_weights(place, names, rng):
    weights, x = weights_of(rng, {}), rng.standard_normal((1, 20, D))
    for name in names:
        del weights[name]
    y, _ = placed(place, weights, {})(place.asarray(x.astype(finest(place))))
    assert_close("y", place.tohost(y), batch(weights, x)[0], finest(place), factor=10)


def test_both_names_of_the_norm(rng):
    weights, x = weights_of(rng, {}), rng.standard_normal((1, 5, D))
    other = {name.replace(*NORMS): w for name, w in weights.items()}
    assert NORMS[1] in other
    assert same_bits(GatedLinearAttention(weights, H)(x)[0], GatedLinearAttention(other, H)(x)[0])


# -- the state ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", ["plain", "grouped"])
def test_prompt_then_steps(place, variant, rng):
    layer = placed(place, weights_of(rng, VARIANTS[variant]), VARIANTS[variant])
    x = place.asarray(rng.standard_normal((2, 30, D)).astype(finest(place)))
    whole, final = layer(x)
    _, state = layer(x[:, :21])
    y = [layer.step(x[:, t], state) for t in range(21, 30)]
    for t, found in zip(range(21, 30), y):
        assert_close(f"y at {t}", place.tohost(found), place.tohost(whole[:, t]), finest(place), factor=10)
    assert_close("state", place.tohost(state), place.tohost(final), finest(place), factor=10)


def test_packed_sequences(place, rng):
    layer = placed(place, weights_of(rng, {}), {})
    x = place.asarray(rng.standard_normal((1, 30, D)).astype(finest(place)))
    y, states = layer(x, cu_seqlens=[0, 12, 12, 30])
    assert states.shape[0] == 3 and not place.tohost(states[1]).any()
    for n, tokens in ((0, slice(0, 12)), (2, slice(12, 30))):
        alone, state = layer(x[:, tokens])
        assert_close("y", place.tohost(y[:, tokens]), place.tohost(alone), finest(place), factor=10)
        assert_close("state", place.tohost(states[n : n + 1]), place.tohost(state), finest(place), factor=10)


# -- gradients ---------------------------------------------------------------------------------------------------------
def assert_gradients(layer, rng, x, state=None, places=20, **given):
    """All that `vjp` returns against central differences of the layer itself."""
    (y, final), pull = layer.vjp(x, state, **given)
    again = layer(x, state, **given)
    assert same_bits(y, again[0]) and same_bits(final, again[1])
    dy, dstate = rng.standard_normal(y.shape), rng.standard_normal(final.shape)
    dx, gradients, *rest = pull(dy, dstate)
    assert list(gradients) == list(layer.weights) and len(rest) == (state is not None)
    pairs = [("x", x, dx), *((name, layer.weights[name], d) for name, d in gradients.items())]
    pairs += [("state", state, d) for d in rest]

    def loss():
        y, final = layer(x, state, **given)
        return (y * dy).sum() + (final * dstate).sum()

    for name, array, gradient in pairs:
        assert gradient.shape == array.shape and gradient.dtype == array.dtype, name
        size = np.sqrt(np.mean(gradient**2)) + 1e-3
        for place in rng.choice(array.size, min(places, array.size), replace=False):
            at, step, values = np.unravel_index(place, array.shape), 1e-6, []
            before = array[at]
            for side in (step, -step):
                array[at] = before + side
                values.append(loss())
            array[at] = before
            wanted = (values[0] - values[1]) / (2 * step)
            assert abs(gradient[at] - wanted) <= 2e-6 * max(size, 1), f"d{name}{at}: {gradient[at]}, expected {wanted}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_gradient_matches_finite_differences(variant, rng):
    options = VARIANTS[variant]
    weights = weights_of(rng, options)
    layer = GatedLinearAttention(weights, H, **options)
    assert_gradients(layer, rng, rng.standard_normal((2, 19, D)), rng.standard_normal((2, H, 2 * D // H, D // H)))


@pytest.mark.parametrize("names", [("g_proj.weight",), (NORMS[0],)], ids=" ".join)
def test_gradients_without_optional_weights(names, rng):
    weights = weights_of(rng, {})
    for name in names:
        del weights[name]
    assert_gradients(GatedLinearAttention(weights, H), rng, rng.standard_normal((1, 9, D)))


def test_gradients_of_packed_sequences(rng):
    layer = GatedLinearAttention(weights_of(rng, {}), H)
    assert_gradients(layer, rng, rng.standard_normal((1, 20, D)), cu_seqlens=[0, 7, 7, 20])


@pytest.mark.parametrize("variant", ["plain", "grouped"])
def test_gradients_in_single_precision(place, variant, rng):
    """Wherever the layer runs, against the same layer in float64 on the host.

    The norm divides by outputs that may be small, and so enlarges what was rounded before. By how much, four changes of
    x by a float32 rounding say: of 120,000 gradients the worst was off by 6.5 times as much, or as the limits.
    """
    options, x = VARIANTS[variant], rng.standard_normal((2, 70, D))
    weights, dy = weights_of(rng, options, np.float32), rng.standard_normal((2, 70, D))
    layer = GatedLinearAttention({name: place.asarray(w) for name, w in weights.items()}, H, **options)
    (_, final), pull = layer.vjp(place.asarray(x.astype(np.float32)))
    dstate = rng.standard_normal(final.shape)
    dx, gradients = pull(place.asarray(dy.astype(np.float32)), place.asarray(dstate.astype(np.float32)))
    exact = GatedLinearAttention({name: w.astype(np.float64) for name, w in weights.items()}, H, **options)

    def rows(dx, gradients):
        return {"dx": dx} | {name: gradient.reshape(1, -1) for name, gradient in gradients.items()}

    found = rows(place.tohost(dx), {name: place.tohost(gradient) for name, gradient in gradients.items()})
    wanted = rows(*exact.vjp(x)[1](dy, dstate))
    nudged = [x * (1 + 2**-24 * rng.standard_normal(x.shape)) for _ in range(4)]
    changed = [rows(*exact.vjp(near)[1](dy, dstate)) for near in nudged]
    for name, gradient in wanted.items():
        change = np.max([errors(other[name], gradient) for other in changed], axis=0)
        for error, moved, limit in zip(errors(found[name], gradient), change, limits(np.float32), strict=True):
            assert error <= max(10 * limit, 20 * moved), f"{name}: {error:.1e}, where a nudge changes {moved:.1e}"


def test_gradients_where_gates_forget_almost_nothing(place, rng):
    """The slope of a gate near 1 is small, and has all digits: of 2,000 draws the worst was off by 5e-6."""
    weights, x = weights_of(rng, {}, np.float32), rng.standard_normal((1, 30, D)).astype(np.float32)
    weights["gk_proj.1.bias"] += 14
    found, wanted = (
        GatedLinearAttention({name: home(w) for name, w in weights.items()}, H).vjp(home(x))[1](home(x))[1]
        for home in (place.asarray, np.float64)
    )
    name = "gk_proj.1.bias"
    assert errors(place.tohost(found[name])[None], wanted[name][None])[0] < 5e-5


def test_training_with_gradients(place, rng):
    """Weights are written in place, and the next call sees them: a small step lowers the loss by what gradients say.

    Longer steps may raise it: the norm of a head whose outputs are small bends the loss. Of a step that lowers it by a
    share, the bend changes what is lowered by 320 times this share at most in 2,937 draws, and one in 12 of them as
    much by a tenth.
    """
    layer = placed(place, random_weights(rng, D, H), {})
    x = place.asarray(rng.standard_normal((2, 40, D)).astype(finest(place)))
    target, share = layer(x)[0] * 0.5, 1e-6 if finest(place) is np.float64 else 1e-4
    for _ in range(3):
        (y, _), pull = layer.vjp(x)
        loss = float(((y - target) ** 2).mean())
        _, gradients = pull(2 * (y - target) / y.size)
        rate = share * loss / sum(float((gradient**2).sum()) for gradient in gradients.values())
        for name, gradient in gradients.items():
            layer.weights[name] -= rate * gradient
        lowered = loss - float(((layer(x)[0] - target) ** 2).mean())
        assert abs(lowered - share * loss) < 0.5 * share * loss


# -- dtypes and other libraries ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=["float16", "bfloat16"])
def test_half_precision_is_computed_in_float32(place, dtype, rng):
    weights = {name: w.astype(dtype) for name, w in weights_of(rng, {}).items()}
    x = rng.standard_normal((1, 12, D)).astype(dtype)
    layer = GatedLinearAttention({name: place.asarray(w) for name, w in weights.items()}, H)
    assert all(w.dtype == np.float32 for w in layer.weights.values())
    y, state = layer(place.asarray(x))
    assert y.dtype == dtype and state.dtype == np.float32
    wanted = batch(weights, x.astype(np.float64))[0]
    assert_close("y", place.tohost(y), wanted, dtype)
    assert layer.step(place.asarray(x[:, 0]), state).dtype == dtype


def test_float64_needs_all_weights_in_it(rng):
    weights = weights_of(rng, {})
    assert GatedLinearAttention(weights, H).dtype == np.float64
    weights["o_proj.weight"] = weights["o_proj.weight"].astype(np.float32)
    assert GatedLinearAttention(weights, H).dtype == np.float32


def test_weights_are_the_layers_own(rng):
    weights = weights_of(rng, {})
    layer = GatedLinearAttention(weights, H)
    layer.weights["q_proj.weight"][:] = 0
    assert weights["q_proj.weight"].all()


def test_weights_of_torch(rng):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weights, x = weights_of(rng, {}), rng.standard_normal((1, 5, D))
    layer = GatedLinearAttention({name: torch.nn.Parameter(torch.tensor(w)) for name, w in weights.items()}, H)
    assert same_bits(layer(x)[0], GatedLinearAttention(weights, H)(x)[0])


# -- refusals ----------------------------------------------------------------------------------------------------------
def changed(weights, name, w):
    return {**weights, name: w}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: {n: x for n, x in w.items() if n != "k_proj.weight"}, "k_proj.weight missing from the weights"),
        (lambda w: {}, "q_proj.weight, o_proj.weight, gk_proj.0.weight, .* missing"),
        (
            lambda w: changed(w, "q_conv1d.weight", w["q_proj.weight"]),
            "q_conv1d.weight is none of .* convolutions are not",
        ),
        (lambda w: changed(w, "g_proj.bias", w["gk_proj.1.bias"]), "g_proj.bias is none of this layer's weights"),
        (lambda w: changed(w, NORMS[1], w[NORMS[0]]), "two names of one weight"),
        (
            lambda w: changed(w, "v_proj.weight", w["v_proj.weight"][:-1]),
            "v_proj.weight is .23, 24., expected .24, 24.",
        ),
        (lambda w: changed(w, "gk_proj.1.weight", w["gk_proj.1.weight"].T), "1.weight is .5, 48., expected .48, 5."),
        (lambda w: changed(w, "gk_proj.1.bias", w["gk_proj.1.bias"][:, None]), "1.bias is .48, 1., expected .48,."),
        (
            lambda w: changed(w, "o_proj.weight", w["o_proj.weight"][:12]),
            "o_proj.weight is .12, 24., expected .24, 24.",
        ),
        (lambda w: changed(w, "o_proj.weight", w["o_proj.weight"][0]), r"o_proj.weight is \(24,\), expected two axes"),
        (
            lambda w: changed(w, "q_proj.weight", w["q_proj.weight"][:46]),
            "q_proj.weight is .46, 24., with 46 channels for num_heads=4",
        ),
        (lambda w: changed(w, "q_proj.weight", w["q_proj.weight"][:0]), "with 0 channels for num_heads=4"),
    ],
)
def test_weights_of_the_wrong_kind_are_refused(change, message, rng):
    with pytest.raises(ContractError, match=f"GatedLinearAttention: .*{message}"):
        GatedLinearAttention(change(weights_of(rng, {})), H)


@pytest.mark.parametrize(
    "w, message",
    [
        ([[1.0]], "is a builtins.list, expected an array"),
        (None, "is a builtins.NoneType, expected an array"),
        (np.zeros((48, 24), int), "has dtype int64, expected floats"),
        (np.zeros((48, 24), object), "has dtype object, expected floats"),
    ],
)
def test_weights_of_the_wrong_type_are_refused(w, message, rng):
    with pytest.raises(ContractTypeError, match=f"q_proj.weight {message}"):
        GatedLinearAttention(changed(weights_of(rng, {}), "q_proj.weight", w), H)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_heads": 0}, "num_heads is 0, expected a positive integer"),
        ({"num_heads": 5}, "with 48 channels for num_heads=5"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads is 3, expected a divisor of num_heads, 4"),
        ({"num_heads": 4, "num_kv_heads": 2}, "k_proj.weight is .48, 24., expected .24, 24."),
        ({"num_heads": 4, "feature_map": "elu"}, "feature_map is 'elu', expected one of 'relu', 'sigmoid', 'swish'"),
        ({"num_heads": 4, "gate_fn": None}, "gate_fn is None, expected one of"),
        ({"num_heads": 4, "gate_logit_normalizer": 0}, "gate_logit_normalizer is 0, expected a positive number"),
        ({"num_heads": 4, "clamp_min": "low"}, "clamp_min is 'low', expected a number or None"),
        ({"num_heads": 4, "norm_eps": float("nan")}, "norm_eps is nan, expected a positive number"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, rng):
    with pytest.raises(ContractError, match=f"GatedLinearAttention: .*{message}"):
        GatedLinearAttention(weights_of(rng, {}), **options)


def test_arrays_that_do_not_fit_are_refused(rng):
    layer = GatedLinearAttention(weights_of(rng, {}), H)
    x = rng.standard_normal((2, 7, D))
    for call, message in [
        (lambda: layer(x[0]), r"x is \(7, 24\), expected \[B, T, D\] with D=24"),
        (lambda: layer(x[..., :5]), r"x is \(2, 7, 5\), expected"),
        (lambda: layer.step(x, None), r"x is \(2, 7, 24\), expected \[B, D\]"),
        (lambda: layer(x.astype(int)), "x has dtype int64"),
        (lambda: layer(x.tolist()), "x is a builtins.list, expected a NumPy or CuPy array"),
        (lambda: layer(x, np.zeros((1, H, 12, 6))), r"gla: initial_state is \(1, 4, 12, 6\), expected"),
        (lambda: layer.vjp(x)[1](x[:1]), r"dy is \(1, 7, 24\), expected \(2, 7, 24\) like y"),
        (lambda: layer(x, cu_seqlens=[0, 7]), "gla: cu_seqlens"),
    ]:
        with pytest.raises(ContractError, match=message):
            call()


def test_weights_and_arrays_share_one_device(card, rng):
    weights = weights_of(rng, {}, np.float32)
    layer = GatedLinearAttention(weights, H)
    with pytest.raises(ContractTypeError, match="x lives on cuda:0, but the weights on host"):
        layer(card.asarray(np.zeros((1, 3, D), np.float32)))
    with pytest.raises(ContractTypeError, match="the weights live on cuda:0 and host, expected one place"):
        GatedLinearAttention(changed(weights, "q_proj.weight", card.asarray(weights["q_proj.weight"])), H)


def test_an_array_that_carries_more_is_refused(rng):
    layer, x = GatedLinearAttention(random_weights(rng, D, H), H), rng.standard_normal((1, 5, D))
    with pytest.raises(ContractTypeError, match="x is a numpy.ma.MaskedArray, whose mask would be ignored"):
        layer(np.ma.masked_array(x, mask=True))


@pytest.mark.parametrize("rows, tokens", [(0, 5), (1, 0)])
def test_no_tokens(rows, tokens, rng):
    """Heads of keys that several heads share, too."""
    layer = GatedLinearAttention(random_weights(rng, 32, 4, num_kv_heads=2), 4, num_kv_heads=2)
    (y, _), pull = layer.vjp(np.empty((rows, tokens, 32), np.float32))
    dx, gradients = pull(y)
    assert dx.shape == y.shape == (rows, tokens, 32) and not any(gradient.any() for gradient in gradients.values())
