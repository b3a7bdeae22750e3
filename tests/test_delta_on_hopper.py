"""Hopper's kernels for the delta rule against the recurrence in float64."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from emulator import EmulatedDevice
from planned import host, names, plan_of, results
from reference import double, exact_vjp, rms
from test_delta_kernels import terms_of_columns, terms_of_later_tokens
from test_device_helpers import hopper  # noqa: F401, a fixture

import linattn_np
from linattn_np import checked_calls
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy.delta_hopper import (
    DeltaScalarBackwardStatesSm90,
    DeltaScalarBackwardTokensSm90,
    DeltaScalarForwardSm90,
    DeltaScalarSummarySm90,
    ScalarCut,
    inverse_lengths,
    launch_backward,
    launch_forward,
    launch_starts,
)
from linattn_np.backends.cupy.execute import CompiledPlan, describe_parts
from linattn_np.backends.cupy.plan import Draft
from linattn_np.bounded_cache import Cache
from linattn_np.declarations import DELTA_RULE, GATED_DELTA_RULE
from linattn_np.varlen import Spans

HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)
# Whole errors of o and of the state. X, W, Z, o, and S as it is read and as it was read before, are rounded once to so
# many bits, and none is larger than the result: six errors of 2^-9 / sqrt 3 (float16: 2^-12) each, whose squares add up
# to 2.8e-3 (3.5e-4). A state that forgets little gathers more of them: twice that.
LIMIT = {BFLOAT16: 6e-3, HALF: 8e-4}


def recurrence(q, k, v, g, beta, scale, state, bounds):
    """[o, the final states] in float64."""
    group = v.shape[1] // q.shape[1]
    q, k = (np.repeat(x.astype(float), group, 1) for x in (q, k))
    v, beta = v.astype(float), beta.astype(float)
    decay = np.exp(np.zeros(beta.shape) if g is None else g.astype(float))
    o, S = np.zeros(v.shape), state.astype(float)
    spans = [(0, *ends) for ends in zip(bounds, bounds[1:])] if bounds else [(b, 0, v.shape[2]) for b in range(len(v))]
    for n, (b, start, stop) in enumerate(spans):
        for t in range(start, stop):
            S[n] *= decay[b, :, t, None, None]
            new = v[b, :, t] - np.einsum("hkv,hk->hv", S[n], k[b, :, t])
            S[n] += np.einsum("h,hk,hv->hkv", beta[b, :, t], k[b, :, t], new)
            o[b, :, t] = scale * np.einsum("hkv,hk->hv", S[n], q[b, :, t])
    return o, S


def call(device, kernel, tokens, scale, state=None, bounds=None, P=1, normalized=False):
    """[o, the final states]. P: into how many segments sequences are cut."""
    q, v = tokens[0], tokens[2]
    B, H, T, K, V = (*v.shape[:3], q.shape[-1], v.shape[-1])
    arrays = dict(zip(("q", "k", "v", "g", "beta", "state"), (*tokens, state)))
    arrays = {name: None if array is None else device.upload(array) for name, array in arrays.items()}
    parts, given, memory = describe_parts(device, call=arrays)
    x, draft, spans = parts.call, Draft(), Spans(np.array(bounds or [0, T]))
    problem = SimpleNamespace(shape=lambda _: (B, H, T), varlen=bool(bounds), spans=spans, sizes={"K": K, "V": V})
    o, final = draft.like(x.v), draft.empty((spans.count * B, H, K, V), SINGLE)
    shape = draft.shape(problem, spans=spans.segments(P, 32) if P > 1 else None, chunk=32)
    inputs = x.q, x.k, x.v, x.g, x.beta
    how = {"lengths": inverse_lengths(draft, x.q, x.k) if normalized else None}
    if P > 1:
        cut = SimpleNamespace(segments=P, summary=DeltaScalarSummarySm90(kernel.dtype, kernel.BK, kernel.BV))
        how |= {"P": P, "starts": launch_starts(draft, cut, inputs, shape, x.state, how["lengths"])}
    launch_forward(draft, kernel, inputs, o, shape, scale, x.state, final, **how)
    return [host(y) for y in CompiledPlan(replace(draft.plan((o, final)), given=given), device)(memory)[0]]


def drawn(rng, B, H, HV, T, K, V, dtype, gates, keys, beta, length=1.0):
    """q, k, v, g and beta: q and k of one length; keys at random or near one direction; gates in float32 but for
    "logsigmoid".
    """
    q, k, v = (rng.standard_normal((B, *size)) for size in ((H, T, K), (H, T, K), (HV, T, V)))
    if keys == "alike":  # cosines of .9 on average
        k = 0.1**0.5 * k + 0.9**0.5 * rng.standard_normal((B, H, 1, K))
    q, k = (length * x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    trained = -np.exp(-3.3 + 2 * rng.standard_normal((B, HV, T)))
    some = rng.random((B, HV, T)) < 0.05
    g = {
        "none": None,
        "weak": 0.01 * trained,
        "trained": trained,
        "-20": np.full((B, HV, T), -20.0),
        "some -inf": np.where(some, -np.inf, trained),
        "some -1e30": np.where(some, -1e30, trained),
        "logsigmoid": -np.log1p(np.exp(rng.standard_normal((B, HV, T)))),
    }[gates]
    strength = 1 / (1 + np.exp(-rng.standard_normal((B, HV, T)))) if beta == "sigmoid" else float(beta)
    own = dtype if gates == "logsigmoid" else SINGLE
    return (
        *(x.astype(dtype) for x in (q, k, v)),
        None if g is None else g.astype(own),
        np.full((B, HV, T), strength).astype(own),
    )


def of_length_one(x):
    x = x.astype(float)
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def errors(found, wanted):
    """(of o as a whole, of its worst row, of the states), relative."""
    (o, state), (exact, end) = (tuple(x.astype(float) for x in pair) for pair in (found, wanted))
    rows = np.linalg.norm(o - exact, axis=-1)
    sizes = np.linalg.norm(exact, axis=-1)
    usual = np.sqrt(np.mean(sizes**2))
    whole = np.linalg.norm(rows) / np.linalg.norm(sizes)
    return whole, (rows / np.maximum(sizes, 0.1 * usual)).max(), np.linalg.norm(state - end) / np.linalg.norm(end)


CASES = (  # B, H, heads of v, T, K, V; gates; keys; beta; the ends of packed sequences
    ((1, 1, 2, 77, 128, 72), "trained", "random", "sigmoid", None),
    ((1, 1, 1, 133, 128, 128), "some -inf", "random", "1", [0, 5, 5, 70, 133]),
    ((1, 1, 1, 100, 128, 128), "weak", "alike", "1", None),
    ((1, 1, 1, 100, 128, 128), "none", "random", "sigmoid", None),
    ((1, 1, 1, 65, 128, 128), "-20", "alike", "1.99", None),
    ((1, 1, 1, 64, 128, 128), "some -1e30", "random", "1.99", None),
    ((2, 1, 1, 33, 104, 128), "logsigmoid", "alike", "sigmoid", None),
    ((1, 1, 1, 40, 128, 128), "trained", "random", "0", None),
    ((1, 1, 1, 70, 128, 128), "trained", "random", "-0.5", None),
)
WIDTHS = [(64, 64), (64, 128), (128, 64), (128, 128)]


def check(device, rng, kernel, sizes, gates, keys, beta, bounds=None, normalized=False, P=1):
    B, _, HV, _, K, V = sizes
    tokens = drawn(rng, *sizes, kernel.dtype, gates, keys, beta, 5.0 if normalized else 1.0)
    limit = LIMIT[kernel.dtype]
    state = rng.standard_normal((len(bounds) - 1 if bounds else B, HV, K, V)).astype(SINGLE)
    found = call(device, kernel, tokens, K**-0.5, state, bounds, P, normalized=normalized)
    if normalized:
        tokens = [*map(of_length_one, tokens[:2]), *tokens[2:]]
    wanted = recurrence(*tokens, K**-0.5, state, bounds)
    whole, row, end = errors(found, wanted)
    assert whole < limit and end < limit and row < 5 * limit, (whole, row, end)


@pytest.mark.pairwise
@pytest.mark.parametrize(("sizes", "gates", "keys", "beta", "bounds"), CASES)
def test_forward_is_the_recurrence(hopper, rng, sizes, gates, keys, beta, bounds):  # noqa: F811
    kernel = DeltaScalarForwardSm90(BFLOAT16, 128, 128)
    check(
        hopper,
        rng,
        kernel,
        sizes,
        gates,
        keys,
        beta,
        bounds,
        normalized=gates == "logsigmoid",
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("gates", "keys"), [("trained", "random"), ("weak", "alike"), ("some -inf", "alike")])
@pytest.mark.parametrize(("K", "V"), WIDTHS)
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("P", (1, 3))
def test_forward_of_every_instance(hopper, rng, P, dtype, K, V, gates, keys):  # noqa: F811
    """With more columns than a block has."""
    check(
        hopper,
        rng,
        DeltaScalarForwardSm90(dtype, K, V),
        (1, 1, 2, 230, K - 8, V + 64),
        gates,
        keys,
        "sigmoid",
        normalized=keys == "alike",
        P=P,
    )


# -- segments ----------------------------------------------------------------------------------------------------------
def forgetting(rng, kind, shape):
    """Gates [B, H, T] of which segments of 96 tokens and more forget all that was before: not at all, some segments of
    a head, or each in its last 50 tokens or so."""
    g = -0.01 * np.exp(rng.standard_normal(shape))
    if kind == "some":
        g[:, 0, shape[2] // 3 + 20] = -np.inf
        g[:, -1, shape[2] // 2 :] -= 0.6
    return g - (kind == "all")


SEGMENT_CASES = (  # B, H, heads of v, T, K, V; which segments forget; the ends of packed sequences
    ((1, 1, 2, 541, 128, 128), "none", None),
    ((2, 1, 1, 333, 104, 72), "some", None),
    ((1, 2, 2, 541, 128, 64), "some", [0, 530, 530, 541]),
    ((1, 1, 2, 541, 64, 128), "all", None),
    ((1, 1, 1, 400, 56, 40), "some", None),
)


@pytest.mark.pairwise
@pytest.mark.parametrize("options", ({}, {"qk_l2norm": True}), ids=lambda x: "".join(x))
@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize("P", (2, 3, 4))
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(("sizes", "forgets", "bounds"), SEGMENT_CASES)
def test_segments(hopper, rng, monkeypatch, sizes, forgets, bounds, dtype, P, gated, options):  # noqa: F811
    """As the recurrence."""
    monkeypatch.setattr(ScalarCut, "time", lambda cut, number: abs(number - P))
    monkeypatch.setattr(checked_calls, "MEMOS", Cache(1 << 20, 16))  # no plan of another cut of the same call is taken
    B, _, HV, T, K, V = sizes
    *arrays, _, beta = drawn(rng, *sizes, dtype, "none", "random", "sigmoid", 5.0 if options else 1.0)
    arrays += [forgetting(rng, forgets, (B, HV, T)).astype(SINGLE)] * gated + [beta]
    op = GATED_DELTA_RULE if gated else DELTA_RULE
    packed = {"cu_seqlens": bounds} if bounds else {}
    state = rng.standard_normal((len(bounds) - 1 if bounds else B, HV, K, V)).astype(SINGLE)
    found = results(op, arrays, hopper, state, final=True, **options, **packed)
    wanted = getattr(linattn_np, op.name)(
        *map(double, arrays), initial_state=double(state), output_final_state=True, **options, **packed
    )
    for what, x, y in zip(("o", "state"), found, wanted, strict=True):
        assert rms(double(x) - y) <= LIMIT[dtype] * rms(y), what


def growing(rng, before):
    """(tokens, the initial state): the second of three segments, from token 160 on, grows by 90 nats, after a gate
    `before` in the first."""
    q, k, v, _, beta = drawn(rng, 1, 1, 2, 480, 64, 72, BFLOAT16, "none", "random", "sigmoid")
    g = np.full(beta.shape, -0.01, SINGLE)
    g[:, :, 150:310], beta[:, :, 150:310] = 0, 0
    g[:, :, 150], g[:, :, 180:308] = before, 90 / 128
    return (q, k, v, g, beta), rng.standard_normal((1, 2, 64, 72)).astype(SINGLE)


# A decay is off by up to 2^-22, the more so in equal gates: 128 of them multiply what grows.
GROWN = LIMIT[BFLOAT16] + 128 * 2**-22


@pytest.mark.parametrize("before", [-np.inf, -76], ids=["from-zero", "from-little"])
def test_growth_within_a_segment_on_hopper(hopper, rng, before):  # noqa: F811
    """What a segment does to states may be out of range where no state is: results are those of whole sequences."""
    tokens, state = growing(rng, before)
    kernel = DeltaScalarForwardSm90(BFLOAT16, 64, 64)
    whole, _, end = errors(call(hopper, kernel, tokens, 1.0, state, P=3), recurrence(*tokens, 1.0, state, None))
    assert max(whole, end) < GROWN


def test_keys_may_keep_what_gates_alone_would_forget(hopper, rng):  # noqa: F811
    """Each token multiplies what is stored along its key by e^g (1 - beta |k|^2): here by about -1."""
    B, H, T, K, V = 1, 1, 300, 64, 64
    kernel = DeltaScalarForwardSm90(BFLOAT16, K, V)
    v = np.zeros((B, H, T, V), BFLOAT16)
    k = np.zeros((B, H, T, K), BFLOAT16)
    k[..., 5] = 1
    g, beta = np.full((B, H, T), -1, SINGLE), np.full((B, H, T), 1 + np.e, SINGLE)
    state = rng.standard_normal((B, H, K, V)).astype(SINGLE)
    tokens = k, k, v, g, beta
    wanted = recurrence(*tokens, 1.0, state, None)
    assert rms(wanted[1]) > 0.1 * rms(state[:, :, 5]) / 8  # the state that is left has one row of 64
    whole, _, end = errors(call(hopper, kernel, tokens, 1.0, state, P=3), wanted)
    assert max(whole, end) < 2 * LIMIT[BFLOAT16]  # a state that forgets nothing along k: as LIMIT says


def gradients(device, tokens, do, scale, state, dht, bounds=None, normalized=False, P=1, first_P=1):
    """Those of q, k, v, g, beta and the initial state; of g None where there is none. P: into how many segments the
    walk forwards in time is cut; first_P: the walk backwards."""
    (B, H, T, V), K = tokens[2].shape, tokens[0].shape[-1]
    names = "q", "k", "v", "g", "beta", "initial"
    arrays = dict(zip((*names, "do", "dht"), (*tokens, state, do, dht)))
    arrays = {name: None if array is None else device.upload(array) for name, array in arrays.items()}
    parts, given, memory = describe_parts(device, call=arrays)
    x, draft, spans = parts.call, Draft(), Spans(np.array(bounds or [0, T]))
    problem = SimpleNamespace(shape=lambda _: (B, H, T), varlen=bool(bounds), spans=spans, sizes={"K": K, "V": V})
    of = SimpleNamespace(**{name: None if y is None else draft.like(y) for name, y in vars(x).items()})
    of.h0, x.lengths = of.initial, inverse_lengths(draft, x.q, x.k) if normalized else None
    whole, segments = (
        draft.shape(problem, spans=s, chunk=32) for s in (None, spans.segments(P, 32) if P > 1 else None)
    )
    instance = tokens[0].dtype, *(64 if size <= 64 else 128 for size in (K, V))
    first = DeltaScalarBackwardStatesSm90(*instance)
    cut = SimpleNamespace(
        segments=P,
        first_segments=first_P,
        summary=DeltaScalarSummarySm90(*instance),
        first=first,
        first_summary=replace(first, outputs=False),
        second=DeltaScalarBackwardTokensSm90(*instance),
    )
    launch_backward(draft, cut, x, of, whole, segments, scale)
    wanted = [name for name in names if getattr(of, name) is not None]
    plan = replace(draft.plan(tuple(getattr(of, name) for name in wanted)), given=given)
    found = dict(zip(wanted, map(host, CompiledPlan(plan, device)(memory)[0])))
    return [found.get(name) for name in names]


# What a gradient, a sum over the 64 tokens of a chunk, loses where its factors are small: of h0, if the first gates
# are strong. Below float32's least normal number, factors become 0: after some -78 nats, as in one of 2,000 draws of
# trained gates. Below float16's, a factor is off by up to 2^-25: after some -5 nats, as the queries are 0.1 or less.
LOST = {BFLOAT16: 64 * 2.0**-126, HALF: 64 * 2.0**-25}


def check_gradients(device, rng, dtype, sizes, gates, keys, beta, bounds=None, normalized=False, P=1, first_P=1):
    """The roundings on the way to a gradient are those on the way to o, and one more if rows are normalized: LIMIT.
    Gradients of scalars are sums of terms that may cancel: they are compared with their terms, and have three times
    that. The largest error of 3,384 draws has .65 of its limit, and a case spreads by 1 to 8 %."""
    B, _, HV, T, K, V = sizes
    tokens = drawn(rng, *sizes, dtype, gates, keys, beta, 5.0 if normalized else 1.0)
    count = len(bounds) - 1 if bounds else B
    state, dht = rng.standard_normal((2, count, HV, K, V)).astype(SINGLE)
    do = rng.standard_normal((B, HV, T, V)).astype(dtype)
    found = gradients(device, tokens, do, K**-0.5, state, dht, bounds, normalized, P, first_P)
    op, given = (DELTA_RULE if gates == "none" else GATED_DELTA_RULE), [x for x in tokens if x is not None]
    alone = {"qk_l2norm": normalized, "scale": K**-0.5}
    packed = {"cu_seqlens": bounds} if bounds else {}
    *_, exact = exact_vjp(getattr(linattn_np, op.name), given, do, dht, initial_state=state, **alone, **packed)
    found = [x for x in found if x is not None]
    for name, x, y in zip((*op.arrays, "h0"), found, exact, strict=True):
        size = rms(y)
        if name in ("g", "beta"):
            terms = terms_of_columns(op, given, do, dht, state, name, alone, bounds)
            if name == "g":
                terms = np.hypot(
                    terms, terms_of_later_tokens(tokens, do, dht, state, normalized, bounds, scale=K**-0.5)
                )
            size = 3 * rms(terms)
        assert rms(double(x) - y) <= LIMIT[dtype] * size + LOST[dtype], name


@pytest.mark.pairwise
@pytest.mark.parametrize(("sizes", "gates", "keys", "beta", "bounds"), CASES)
def test_gradients_are_those_of_the_recurrence(hopper, rng, sizes, gates, keys, beta, bounds):  # noqa: F811
    check_gradients(hopper, rng, BFLOAT16, sizes, gates, keys, beta, bounds, normalized=gates == "logsigmoid")


@pytest.mark.pairwise
@pytest.mark.parametrize("normalized", (False, True))
@pytest.mark.parametrize("gates", ("trained", "none", "some -inf", "weak"))
@pytest.mark.parametrize(("P", "first_P"), [(2, 1), (2, 2), (3, 3), (4, 4)])
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(
    ("sizes", "bounds"),
    [
        ((2, 1, 2, 330, 128, 128), None),
        ((1, 2, 2, 541, 128, 64), [0, 5, 5, 530, 541]),
        ((1, 1, 1, 400, 56, 40), None),
        ((1, 1, 2, 235, 64, 128), [0, 201, 235]),
    ],
)
def test_gradients_of_segments(hopper, rng, sizes, bounds, dtype, P, first_P, gates, normalized):  # noqa: F811
    check_gradients(hopper, rng, dtype, sizes, gates, "random", "sigmoid", bounds, normalized, P, first_P)


@pytest.mark.parametrize("first_P", (1, 3))
@pytest.mark.parametrize("before", [-np.inf, -76], ids=["from-zero", "from-little"])
def test_gradients_of_growth_within_a_segment(hopper, rng, before, first_P):  # noqa: F811
    """As `test_growth_within_a_segment_on_hopper`: walks take sequences whole, and rows of chunks are whole
    sequences'."""
    tokens, state = growing(rng, before)
    do = (rng.standard_normal(tokens[2].shape) * 2.0**-17).astype(BFLOAT16)  # gradients of states grow backwards
    dht = rng.standard_normal(state.shape).astype(SINGLE) * SINGLE.type(2**-17)
    whole, cut = (gradients(hopper, tokens, do, 1.0, state, dht, **how) for how in ({}, {"P": 3, "first_P": first_P}))
    for name, x, y in zip((*GATED_DELTA_RULE.arrays, "h0"), cut, whole, strict=True):
        np.testing.assert_array_equal(double(x), double(y), err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("gates", "keys"), [("trained", "random"), ("weak", "alike"), ("some -inf", "alike")])
@pytest.mark.parametrize(("K", "V"), WIDTHS)
@pytest.mark.parametrize("dtype", LIMIT)
def test_gradients_of_every_instance(hopper, rng, dtype, K, V, gates, keys):  # noqa: F811
    sizes = (1, 1, 2 if gates == "weak" else 1, 230, K - 8, V - 8)
    check_gradients(hopper, rng, dtype, sizes, gates, keys, "sigmoid", normalized=keys == "alike")


CHUNKS, ON_EVERY_CARD, TOKENS = (
    ["delta_sm90_scalar_forward"],
    ["delta_prepare", "delta_scan"],
    ["delta_recurrent_forward"],
)
SEGMENTS = ["delta_sm90_scalar_summary", "delta_join_segments", *CHUNKS]  # of few heads of long sequences


@pytest.mark.parametrize(
    ("sizes", "dtype", "capability", "how", "kernels"),
    [
        ((1, 2, 40, 128, 64), BFLOAT16, 90, {}, CHUNKS),
        ((1, 2, 40, 64, 200), HALF, 90, {"qk_l2norm": True}, ["delta_inverse_lengths", *CHUNKS]),
        ((1, 2, 40, 64, 64), BFLOAT16, 90, {"mode": "recurrent"}, TOKENS),
        ((1, 2, 40, 64, 64), BFLOAT16, 80, {}, ON_EVERY_CARD),
        ((1, 2, 40, 64, 64), SINGLE, 90, {}, ON_EVERY_CARD),
        ((1, 2, 40, 136, 64), BFLOAT16, 90, {}, ON_EVERY_CARD),  # Hopper's own have at most 128 channels
        ((1, 2, 40, 60, 64), BFLOAT16, 90, {}, ["elementwise_copy_rows", *CHUNKS]),  # rows are no whole 16 bytes
        ((1, 2, 0, 64, 64), BFLOAT16, 90, {}, TOKENS),
        ((1, 2, 4096, 64, 64), BFLOAT16, 90, {}, SEGMENTS),
        ((1, 140, 4096, 64, 64), BFLOAT16, 90, {}, CHUNKS),
    ],
)
def test_which_calls_go_by_it(sizes, dtype, capability, how, kernels):
    B, H, T, K, V = sizes
    q, v, g = (np.zeros(shape, dtype) for shape in ((B, H, T, K), (B, H, T, V), (B, H, T)))
    device = EmulatedDevice(capability)
    for problem in (GATED_DELTA_RULE.bind((q, q, v, g, g), **how), DELTA_RULE.bind((q, q, v, g), **how)):
        plan = plan_of(problem, device)
        assert names(plan) == kernels and plan.mode == ("recurrent" if kernels == TOKENS else "chunk")


PORTABLE = ["delta_prepare", "delta_backward_states", "delta_backward_chunks"]
OWN = ["delta_sm90_scalar_backward_states", "delta_sm90_scalar_backward_tokens"]
OWN_CUT = [*SEGMENTS[:2], *OWN]  # the second walk alone
BOTH_CUT = [SEGMENTS[0], OWN[0], SEGMENTS[1], *OWN]


@pytest.mark.parametrize(
    ("sizes", "capability", "kernels"),
    [
        ((1, 2, 2, 40, 128, 64), 90, OWN),
        ((1, 2, 2, 40, 128, 64), 80, PORTABLE),
        ((1, 2, 2, 40, 64, 136), 90, PORTABLE),  # more columns than a block has
        # Each the faster way of an H200. Milliseconds: 2.09 for 4.01, 1.34 for 1.98
        ((4, 64, 64, 4096, 128, 128), 90, OWN),
        ((8, 32, 32, 4096, 64, 64), 90, OWN),
        # The second walk in two and four segments: 0.35 for 0.48 without and 0.58; 1.71 for 1.96 and 3.31
        ((4, 16, 16, 2048, 128, 128), 90, [SEGMENTS[0], *OWN]),
        ((1, 96, 96, 8192, 128, 128), 90, OWN_CUT),
        # Both in four and eight, as estimated: 0.71 for 0.82 of the second alone and 1.04; 1.35 for 2.37 and 2.34
        ((1, 16, 32, 8192, 128, 128), 90, BOTH_CUT),
        ((1, 16, 16, 32768, 128, 128), 90, BOTH_CUT),
        # Small heads token by token, where that is faster. Microseconds: 89 for 130; 47 by Hopper's kernels for 56
        ((1, 32, 32, 16, 8, 8), 90, ["delta_small_backward"]),
        ((1, 400, 400, 256, 8, 8), 90, ["delta_small_forward", "delta_small_backward"]),
        ((1, 400, 400, 61, 8, 8), 90, OWN),
    ],
)
def test_which_gradients_go_by_it(sizes, capability, kernels):
    B, H, HV, T, K, V = sizes
    q, v, g = (np.zeros(shape, BFLOAT16) for shape in ((B, H, T, K), (B, HV, T, V), (B, HV, T)))
    problem = GATED_DELTA_RULE.bind((q, q, v, g, g), gradient=True)
    assert names(plan_of(problem, EmulatedDevice(capability)))[: len(kernels)] == kernels
