"""What the delta rules have of their own: transitions of rank one, strengths, keys of length 1, shared keys."""

import numpy as np
import pytest
from reference import assert_close, double, draw, draw_states, errors, exact, exact_vjp, rms, same_bits, unit
from test_delta_kernels import terms_of_later_tokens

import linattn_np
from linattn_np import ContractError, NotSupported, delta_rule, gated_delta_rule, kda, kda_step, rwkv7, vjp
from linattn_np.backends.numpy import delta_chunked
from linattn_np.declarations import DELTA_RULE_STEPS, DELTA_RULES, GATED_DELTA_RULE
from linattn_np.ops import OPS

VARIANTS = {op.name: (op, OPS[op]) for op in DELTA_RULES}
STRENGTHS = [name for name in VARIANTS if name != "rwkv7"]
SIZES = {"B": 2, "H": 2, "T": 40, "K": 8, "V": 6, "N": 2}
SMALL = {"B": 1, "H": 1, "T": 6, "K": 3, "V": 2, "N": 1}
LONG = {"B": 1, "H": 1, "T": 70, "K": 16, "V": 12, "N": 1}
variants = pytest.mark.parametrize("name", VARIANTS)


# -- gradients against complex steps -----------------------------------------------------------------------------------
def value(op, arrays, state, do, dht, normed):
    """<o, do> + <S_T, dht> of one head, of complex numbers too."""
    given = {name: x[0, 0] for name, x in zip(op.arrays, arrays)}
    S, total = state[0, 0], 0
    unit_of = (lambda x: x / np.sqrt((x * x).sum() + 1e-6)) if normed else lambda x: x
    for t in range(SMALL["T"]):
        token = {name: x[t] for name, x in given.items()}
        decay = np.exp(token.get("g", token.get("w", 0.0))) * np.ones(SMALL["K"])
        if op.name == "rwkv7":
            S = decay[:, None] * S + np.outer(token["b"], token["a"] @ S) + np.outer(token["k"], token["v"])
        else:
            k, S = unit_of(token["k"]), decay[:, None] * S
            S = S + np.outer(k, token["beta"] * (token["v"] - k @ S))
        total = total + do[0, 0, t] @ (SMALL["K"] ** -0.5 * unit_of(token["r" if op.name == "rwkv7" else "q"]) @ S)
    return total + (S * dht[0, 0]).sum()


@pytest.mark.parametrize("mode", ["recurrent", "chunk"])
@pytest.mark.parametrize("normed", [False, True], ids=["", "l2norm"])
@variants
def test_gradients_are_complex_steps(name, normed, mode, rng):
    op, function = VARIANTS[name]
    if normed and name == "rwkv7":
        pytest.skip("keys of rwkv7 are not normalised")
    arrays, (state,), (dht,) = draw(op, rng, SMALL), draw_states(op, rng, SMALL), draw_states(op, rng, SMALL)
    do = rng.standard_normal((1, 1, SMALL["T"], SMALL["V"]))
    _, pull = vjp(function, *arrays, initial_state=state, mode=mode, **({"qk_l2norm": True} if normed else {}))
    given = [*arrays, state]
    for number, found in enumerate(pull(do, dht)):
        wanted = np.empty(found.shape)
        for at in np.ndindex(found.shape):
            moved = given[number].astype(complex)
            moved[at] += 1e-30j
            inputs = [*given[:number], moved, *given[number + 1 :]]
            wanted[at] = value(op, inputs[:-1], inputs[-1], do, dht, normed).imag / 1e-30
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-13)


# -- hard cases --------------------------------------------------------------------------------------------------------
def alike(rng, shape, cosine):
    """Keys of length 1 that resemble each other."""
    common, own = unit(rng.standard_normal((*shape[:2], 1, shape[3]))), unit(rng.standard_normal(shape))
    return unit(np.sqrt(cosine) * common + np.sqrt(1 - cosine) * own)


def of_keys(op, arrays, keys, strength):
    """The call with these keys and strengths."""
    given = dict(zip(op.arrays, arrays))
    if op.name == "rwkv7":
        given |= {"a": -keys, "b": strength[..., None] * keys}
        given["w"] = np.maximum(given["w"], -0.5)  # of strong decays removal would enlarge the state: a reads before
    else:
        given |= {"k": keys, "beta": strength}
    return list(given.values())


HARD = {  # the keys' cosine, strengths, and how many times the limits of float32 results may be off
    "alike": (0.9, (0.0, 1.0), 1),
    "one key": (1.0, (0.0, 1.0), 1),
    "one key, turned around": (1.0, (1.9, 2.0), 2),
    "of strength 0 or 2": (0.0, (0.0, 2.0), 1),
}


@pytest.mark.parametrize("gate", ["zero", "some-inf"])
@pytest.mark.parametrize("case", HARD)
@variants
def test_hard_cases_in_chunks(name, case, gate, rng):
    """As exact as the limits of float32 ask, results and gradients. dg of a gate of all channels is a long sum that may
    cancel: it is compared with its terms, of whose rounding 1 / 4 of the limit was seen in 2,000 draws."""
    op, function = VARIANTS[name]
    cosine, strengths, factor = HARD[case]
    arrays = draw(op, rng, LONG, np.float64, gate)
    shape = tuple(LONG[axis] for axis in "BHT")
    strength = rng.choice(strengths, shape) if case.startswith("of") else rng.uniform(*strengths, shape)
    arrays = of_keys(op, arrays, alike(rng, (*shape, LONG["K"]), cosine), strength)
    arrays = [x.astype(np.float32) for x in arrays]
    do = rng.standard_normal((*shape, LONG["V"])).astype(np.float32)
    o, pull = vjp(function, *arrays, mode="chunk")
    wanted, _, gradients = exact_vjp(function, arrays, do)
    if not np.isfinite(wanted).all() or abs(wanted).max() > 1e6:
        pytest.skip("the state grows without bound")
    assert_close("o", o, wanted, np.float32, factor=factor)
    for what, x, y in zip(op.arrays, pull(do), gradients, strict=True):
        if what == "g" and op is GATED_DELTA_RULE:
            terms = terms_of_later_tokens(arrays, do, None, None, qk_l2norm=False)
            assert rms(double(x) - y) < factor * 2**-20 * rms(terms)
        else:
            assert errors(x, y)[0] < factor * 2e-5, what


@pytest.mark.parametrize("name", [name for name, (op, _) in VARIANTS.items() if op.decays])
def test_growth_that_later_tokens_take_back(name, rng):
    """With K = 1 and strengths of 1 each token removes the state, which gates have made e^30: o is q k v alone."""
    op, function = VARIANTS[name]
    sizes = {"B": 1, "H": 2, "T": 40, "K": 1, "V": 6, "N": 1}
    given = dict(zip(op.arrays, draw(op, rng, sizes, np.float64, "zero")))
    for gate in op.decays:
        steps = np.where(np.arange(sizes["T"]) < 20, 1.5, -1.5).reshape(-1, *[1] * (given[gate].ndim - 3))
        given[gate] = np.broadcast_to(steps, given[gate].shape)
    keys = rng.choice([-1.0, 1.0], given["v"][..., :1].shape)
    if name == "rwkv7":
        given |= {"a": -keys, "b": np.exp(given["w"]) * keys}
    else:
        given |= {"k": keys, "beta": np.ones(keys.shape[:3])}
    arrays = [x.astype(np.float32) for x in given.values()]
    state, do = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 2, 1, 6), given["v"].shape))
    o, pull = vjp(function, *arrays, mode="chunk", initial_state=state)
    wanted, _, gradients = exact_vjp(function, arrays, do, initial_state=state)
    dv, wanted_dv = (dict(zip(op.arrays, x))["v"] for x in (pull(do), gradients))
    for what, x, y in (("o", o, wanted), ("dv", dv, wanted_dv)):
        assert_close(what, x, y, np.float32, terms=abs(y).max(-1, keepdims=True) + np.zeros(y.shape))


@pytest.mark.parametrize("name", STRENGTHS)
def test_what_is_not_written_changes_no_bit(name, rng):
    """Strength 0, or a key of zeros, without a gate."""
    op, function = VARIANTS[name]
    arrays = dict(zip(op.arrays, draw(op, rng, SIZES, np.float32, "zero")))
    state = rng.standard_normal((2, 2, 8, 6)).astype(np.float32)
    for nothing in ("beta", "k"):
        given = arrays | {nothing: np.zeros_like(arrays[nothing])}
        for mode in op.modes:
            final = function(*given.values(), initial_state=state, output_final_state=True, mode=mode)[1]
            assert same_bits(final, state), (nothing, mode)


@variants
def test_nan_does_not_go_back_in_time(name, rng):
    """Where products give NaN for tokens before one, they go token by token; gradients likewise."""
    op, function = VARIANTS[name]
    arrays = draw(op, rng, SIZES, np.float32)
    do = rng.standard_normal((2, 2, 40, 6)).astype(np.float32)
    broken = dict(zip(op.arrays, arrays))
    broken["v"] = broken["v"].copy()
    broken["v"][1, 0, 20, 3] = np.nan
    (wanted, pull), (found, pull_broken) = (vjp(function, *x, mode="chunk") for x in (arrays, broken.values()))
    assert np.isnan(found[1, 0, 20:, 3]).any() and np.isfinite(np.delete(found, 3, axis=-1)).all()
    assert_close("o before", found[:, :, :20], wanted[:, :, :20], np.float32)
    assert_close("o of others", found[0], wanted[0], np.float32)
    for x, y in zip(pull_broken(do), pull(do), strict=True):
        assert_close("gradients of others", x[0], y[0], np.float32)


# -- arguments ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["recurrent", "chunk"])
@pytest.mark.parametrize("name", STRENGTHS)
def test_qk_l2norm(name, mode, rng):
    """The call on normalised arrays, whose heads may be fewer; in half precision nothing is rounded in between."""
    op, function = VARIANTS[name]
    arrays = draw(op, rng, {**SIZES, "H": 4}, np.float16)
    q, k = 3 * arrays[0][:, :2], 5 * arrays[1][:, :2]
    normed = [double(x) / np.sqrt((double(x) ** 2).sum(-1, keepdims=True) + 1e-6) for x in (q, k)]
    wanted, state = exact(function, [*(np.repeat(x, 2, axis=1) for x in normed), *arrays[2:]])
    found, final = function(q, k, *arrays[2:], qk_l2norm=True, output_final_state=True, mode=mode)
    assert_close("o", found, wanted, np.float16)
    assert_close("state", final, state, np.float32)


def test_few_tokens_go_one_by_one(rng):
    op, function = VARIANTS["kda"]
    for T, mode in ((delta_chunked.FEW, "recurrent"), (delta_chunked.FEW + 1, "chunk")):
        arrays = draw(op, rng, {**SIZES, "T": T}, np.float32)
        assert linattn_np.explain(function, *arrays).mode == mode
        assert same_bits(function(*arrays), function(*arrays, mode=mode))


@pytest.mark.parametrize("op", DELTA_RULE_STEPS, ids=lambda op: op.name)
def test_steps(op, rng):
    """Tokens one by one are the operator's: with shared keys, a pool of states, and normalised keys."""
    name, step = op.name.removesuffix("_step"), getattr(linattn_np, op.name)
    whole, function = VARIANTS[name]
    arrays, options = dict(zip(whole.arrays, draw(whole, rng, {**SIZES, "H": 4, "T": 5}))), {}
    if name != "rwkv7":
        arrays |= {"q": arrays["q"][:, :2], "k": arrays["k"][:, :2]}
        options = {"qk_l2norm": True}
    pool = rng.standard_normal((3, 4, 8, 6))
    wanted, final = function(*arrays.values(), initial_state=pool[[2, 0]], output_final_state=True, **options)
    untouched = pool[1].copy()
    for t in range(5):
        out = np.full((2, 4, 6), np.nan)
        assert step(*(x[:, :, t] for x in arrays.values()), pool, slots=[2, 0], out=out, **options) is out
        assert_close("o", out, wanted[:, :, t], np.float64)
    assert_close("state", pool[[2, 0]], final, np.float64)
    assert same_bits(pool[1], untouched)


def test_one_is_another(rng):
    """A gate a channel of one number, no gate, and the delta rule as rwkv7, whose a reads before the decay."""
    q, k, v, g, beta = draw(VARIANTS["gated_delta_rule"][0], rng, SIZES)
    channels = np.broadcast_to(g[..., None], q.shape)
    wanted = gated_delta_rule(q, k, v, g, beta)
    assert_close("kda", kda(q, k, v, channels, beta), wanted, np.float64)
    strong = beta[..., None] * k
    assert_close("rwkv7", rwkv7(q, channels, strong, v, -np.exp(channels) * k, strong), wanted, np.float64)
    assert_close("delta_rule", delta_rule(q, k, v, beta), gated_delta_rule(q, k, v, 0 * g, beta), np.float64)


def test_refusals(rng):
    q, k, v, g, beta = draw(VARIANTS["kda"][0], rng, SIZES)
    with pytest.raises(ContractError, match="kda: v has 2 heads, expected as many as q and k, 4, or a multiple"):
        kda(np.repeat(q, 2, axis=1), np.repeat(k, 2, axis=1), v, g, beta)
    with pytest.raises(ContractError, match=r"kda: k has HK=1, but HK=2 elsewhere|q has HK=2, but HK=1 elsewhere"):
        kda(q, k[:, :1], v, g, beta)
    with pytest.raises(ContractError, match=r"kda: beta has H=1, but H=2 elsewhere; beta is .* expected \[B, H, T\]"):
        kda(q, k, v, g, beta[:, :1])
    with pytest.raises(ContractError, match=r"kda: g has 3 axes, .* expected \[B, H, T, K\]"):
        kda(q, k, v, beta, beta)
    with pytest.raises(ContractError, match="kda: qk_l2norm is 1, expected True or False"):
        kda(q, k, v, g, beta, qk_l2norm=1)
    for backend in ("cupy", "numba"):
        with pytest.raises(NotSupported, match=f"kda: {backend}: "):
            kda(q, k, v, g, beta, backend=backend)
        with pytest.raises(NotSupported, match=f"kda_step: {backend}: "):
            kda_step(*(x[:, :, 0] for x in (q, k, v, g, beta)), np.zeros((2, 2, 8, 6)), backend=backend)
