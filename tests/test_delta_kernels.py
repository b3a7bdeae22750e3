"""Gradients of the delta rules on every backend, held to the recurrence's in float64, and what is special to them."""

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import planned
import pytest
from conftest import DOUBLE, HALF, SINGLE
from emulator import EmulatedDevice
from reference import LIMITS, assert_close, assert_results, double, draw, exact_vjp, rms, same_bits, unit

import linattn_np
from linattn_np import NotSupported, backends, checked_calls, vjp
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import delta, gated_backward
from linattn_np.backends.cupy.delta_kernels import DeltaBackwardStates, DeltaRecurrentBackward
from linattn_np.backends.cupy.delta_segments import CutOfSmallHeads, rule_of
from linattn_np.backends.cupy.plan import Draft, as_array, caller_array
from linattn_np.backends.cupy.rwkv6_model_kernels import recurrence
from linattn_np.bounded_cache import Cache
from linattn_np.declarations import DELTA_RULE, DELTA_RULES, GATED_DELTA_RULE, KDA, RWKV7
from linattn_np.varlen import Spans


@pytest.fixture
def backend(backend):
    if backend.name == "numba":
        pytest.skip("Numba goes token by token, and has no gradients")
    return backend


@dataclass(frozen=True)
class Case:
    op: object = GATED_DELTA_RULE
    B: int = 1
    H: int = 2
    groups: int = 1  # heads of values for each head of keys
    T: int = 36  # more than a chunk
    K: int = 36  # more than those of small heads
    V: int = 34
    dtype: np.dtype = SINGLE
    gate: str = "logsigmoid"
    gate_dtype: np.dtype | None = None
    mode: str = "auto"
    options: dict = field(default_factory=dict)

    @property
    def function(self):
        return getattr(linattn_np, self.op.name)

    def drawn(self, rng):
        """(arrays, the initial state, do, dht)."""
        N = len(self.options["cu_seqlens"]) - 1 if "cu_seqlens" in self.options else self.B
        sizes = {"B": self.B, "H": self.H * self.groups, "T": self.T, "K": self.K, "V": self.V}
        arrays = draw(self.op, rng, sizes, self.dtype, self.gate, self.gate_dtype)
        if self.groups > 1:
            arrays[:2] = (x[:, :: self.groups] for x in arrays[:2])
        start, dht = rng.standard_normal((2, N, sizes["H"], self.K, self.V))
        kept = DOUBLE if self.dtype == DOUBLE else SINGLE
        do = rng.standard_normal((self.B, sizes["H"], self.T, self.V)).astype(self.dtype)
        return arrays, start.astype(kept), do, dht.astype(kept)


PACKED = {"cu_seqlens": [0, 0, 2, 3, 36]}
CASES = {
    "delta_rule": Case(DELTA_RULE, B=2, dtype=BFLOAT16),
    "delta_rule-normalized": Case(DELTA_RULE, groups=2, options={"qk_l2norm": True} | PACKED),
    "gated": Case(gate="some-inf", B=2),
    "gated-recurrent": Case(gate="some-inf", B=2, mode="recurrent"),
    "delta_rule-recurrent": Case(DELTA_RULE, groups=2, mode="recurrent", options={"qk_l2norm": True} | PACKED),
    "gated-grouped": Case(groups=3, H=1, dtype=BFLOAT16, gate_dtype=SINGLE, options={"qk_l2norm": True}),
    "gated-float64": Case(dtype=DOUBLE, groups=2, options={"reverse": True} | PACKED),
    "gated-wide": Case(K=200, V=70, H=1, dtype=HALF, gate="spikes-40"),
    "gated-chunks": Case(
        groups=2,
        H=1,
        T=70,
        K=71,
        V=67,
        dtype=BFLOAT16,
        gate="some-inf",
        gate_dtype=SINGLE,
        options={"cu_seqlens": [0, 0, 33, 34, 70], "qk_l2norm": True, "reverse": True},
    ),
    "delta_rule-chunks": Case(DELTA_RULE, B=2, H=1, T=40, K=128, V=130, dtype=HALF),
    "T0": Case(T=0),
    "T1": Case(T=1, B=2),
    "B0": Case(KDA, B=0),
    "kda": Case(KDA, gate="some-1e30"),
    "kda-chunks": Case(
        KDA,
        groups=2,
        H=1,
        T=70,
        K=71,
        V=67,
        dtype=BFLOAT16,
        gate="some-inf",
        options={"cu_seqlens": [0, 0, 33, 34, 70], "qk_l2norm": True, "reverse": True},
    ),
    "gated-256-channels": Case(groups=2, H=1, T=70, K=193, V=130, dtype=BFLOAT16, options={"qk_l2norm": True}),
    # Of a state's four tiles of 64 channels the walks write three.
    "gated-three-tiles": Case(H=1, T=70, K=192, V=66, dtype=HALF, gate_dtype=SINGLE),
    "gated-three-tiles-float32": Case(groups=2, H=1, K=130),
    "delta_rule-three-tiles": Case(DELTA_RULE, H=1, K=150, dtype=BFLOAT16, options={"qk_l2norm": True}),
    "kda-256-channels": Case(KDA, groups=2, H=1, T=70, K=193, V=130, dtype=BFLOAT16, options={"qk_l2norm": True}),
    "kda-256-packed": Case(KDA, K=256, V=20, H=1, T=36, dtype=HALF, gate="some-inf", gate_dtype=SINGLE, options=PACKED),
    "kda-256-float32": Case(KDA, groups=2, H=1, T=70, K=193, V=66, gate="by_channel"),
    "kda-wide": Case(KDA, K=100, V=40, H=1, gate="by_channel"),
    "kda-recurrent": Case(KDA, K=100, V=40, H=1, gate="by_channel", mode="recurrent"),
    "kda-float64": Case(KDA, dtype=DOUBLE, gate="spikes-40"),
    "two-columns-a-lane": Case(
        KDA, B=11, H=6, T=5, V=40, mode="recurrent"
    ),  # forwards, on a card of 132 multiprocessors
    "rwkv7": Case(RWKV7, B=2),
    "rwkv7-recurrent": Case(RWKV7, B=2, mode="recurrent"),
    "rwkv7-wide": Case(RWKV7, K=130, V=66, H=1, dtype=BFLOAT16, gate_dtype=SINGLE, gate="some-inf"),
    "rwkv7-256-packed": Case(
        RWKV7, K=256, V=20, H=1, T=36, dtype=HALF, gate="some-inf", gate_dtype=SINGLE, options=PACKED
    ),
    "rwkv7-256-float32": Case(RWKV7, H=1, T=70, K=193, V=66, gate="by_channel"),
    "rwkv7-three-tiles-float32": Case(RWKV7, K=130, V=20, H=1, gate="some-inf", options=PACKED),
    "rwkv7-packed": Case(
        RWKV7,
        H=1,
        T=70,
        K=71,
        V=67,
        dtype=HALF,
        gate="some-inf",
        options={"cu_seqlens": [0, 0, 33, 34, 70], "reverse": True},
    ),
    "kda-kept": Case(KDA, T=96, K=64, V=64, dtype=BFLOAT16, gate_dtype=SINGLE),
    "rwkv7-kept": Case(RWKV7, T=96, K=64, V=64, dtype=BFLOAT16, gate_dtype=SINGLE),
    "rwkv7-float64": Case(RWKV7, dtype=DOUBLE, gate="weak"),
}


def computed(backend, case, arrays, start, do, dht):
    """((o, the final state), all gradients) on the host; without states where none is given."""
    states = {} if start is None else {"initial_state": backend.asarray(start), "output_final_state": True}
    there = map(backend.asarray, arrays)
    found, pull = backend.run(vjp, case.function, *there, mode=case.mode, **case.options, **states)
    gradients = pull(*(backend.asarray(x) for x in (do, dht) if x is not None))
    return [list(map(backend.tohost, of)) for of in (found if states else [found], gradients)]


def assert_gradients(backend, case, arrays, start, do, dht):
    """Whether o, the final state and all gradients are the recurrence's."""
    o, final, wanted = exact_vjp(case.function, arrays, do, dht, initial_state=start, **case.options)
    (found, end), gradients = computed(backend, case, arrays, start, do, dht)
    assert_close("o", found, o, case.dtype)
    assert_close("state", end, final, case.dtype)
    for name, given, x, exact in zip((*case.op.arrays, "h0"), (*arrays, start), gradients, wanted, strict=True):
        assert x.dtype == given.dtype and x.shape == given.shape
        if name in case.op.decays:  # all of it may be far below what its sums are made of
            size = max(rms(exact), rms(double(arrays[0]) * wanted[0]))
            assert rms(double(x) - exact) <= 10 * LIMITS[case.dtype.name][0] * size, name
        else:
            assert_close(f"d{name}", x, exact, case.dtype, factor=10)


@pytest.mark.pairwise(half="case")
@pytest.mark.parametrize("case", CASES)
def test_gradients(backend, case, rng):
    assert_gradients(backend, CASES[case], *CASES[case].drawn(rng))


@pytest.mark.pairwise(half="case")
@pytest.mark.parametrize("tiles", [2, 3])
@pytest.mark.parametrize("case", ["delta_rule", "gated", "kda", "rwkv7"])
def test_blocks_of_several_tiles(backend, case, tiles, rng, monkeypatch):
    """Of columns, token by token backwards, and more than there are."""
    monkeypatch.setattr(DeltaRecurrentBackward, "tiles_of_block", lambda *_: tiles)
    case = replace(CASES[f"{case}-recurrent"], V=81)
    assert_gradients(backend, case, *case.drawn(rng))


@pytest.mark.pairwise("op", "dtype")
@pytest.mark.parametrize(
    "op, dtype",
    [(GATED_DELTA_RULE, DOUBLE), (GATED_DELTA_RULE, SINGLE), (GATED_DELTA_RULE, HALF), (KDA, HALF), (RWKV7, HALF)],
)
def test_gradients_of_heads_in_turns(backend, op, dtype, rng, monkeypatch):
    """Where what is kept for them is larger than the inputs: the same bits."""
    if backend.device is None:
        pytest.skip("NumPy keeps less")
    case = Case(op, B=2, H=3, groups=1 if op is RWKV7 else 2, dtype=dtype)
    arrays, start, do, dht = case.drawn(rng)

    def gradients():
        _, pull = backend.run(vjp, case.function, *map(backend.asarray, arrays), initial_state=backend.asarray(start))
        return [backend.tohost(x) for x in pull(backend.asarray(do), backend.asarray(dht))]

    once = gradients()
    monkeypatch.setattr(gated_backward, "STATE_BYTES", 1)
    monkeypatch.setattr(delta, "FREE_BYTES", 1)
    assert all(same_bits(x, y) for x, y in zip(once, gradients(), strict=True))


KEPT = ("kda", "kda-chunks", "kda-kept", "rwkv7", "rwkv7-packed", "rwkv7-kept")


@pytest.mark.pairwise
@pytest.mark.parametrize("case", KEPT)
def test_gradients_from_what_a_call_keeps(backend, case, rng, monkeypatch):
    """The same bits as those of a pullback that computes it again; o and the final state, which another walk then
    writes, are as close to the recurrence's."""
    if backend.device is None:
        pytest.skip("NumPy keeps other arrays")
    case = CASES[case]
    arrays, start, do, dht = case.drawn(rng)
    o, final, _ = exact_vjp(case.function, arrays, do, dht, initial_state=start, **case.options)

    def gradients(most):
        monkeypatch.setattr(delta, "KEPT", most)
        (found, end), gradients = computed(backend, case, arrays, start, do, dht)
        assert_close("o", found, o, case.dtype)
        assert_close("state", end, final, case.dtype)
        return gradients

    assert all(same_bits(x, y) for x, y in zip(gradients(0), gradients(np.inf), strict=True))


@pytest.mark.parametrize("op", DELTA_RULES, ids=lambda op: op.name)
def test_a_pullback_without_its_call_needs_nothing_kept(op, rng):
    """As torch and JAX ask for it: to run the call once more would take longer than what the pullback then spares."""
    arrays, *_ = Case(op, T=96, K=64, V=64, dtype=BFLOAT16, gate_dtype=SINGLE).drawn(rng)
    assert backends.cupy.pullback(op.bind(arrays, gradient=True)).saved == ()


@pytest.mark.parametrize("mode", ["chunk", "recurrent"])
def test_strided_arrays(backend, mode, rng):
    """Heads, tokens and rows that lie apart, and rows that do not start on 16 bytes."""
    case = Case(KDA, T=9)
    arrays, start, do, _ = case.drawn(rng)
    wanted, _, exact = exact_vjp(case.function, arrays, do, initial_state=start)
    there = []
    for x in arrays:
        wide = np.full((x.shape[0], 2 * x.shape[1], *x.shape[2:-1], x.shape[-1] + 3), np.nan, x.dtype)
        wide[:, ::2, ..., 3:] = x
        there.append(backend.asarray(wide)[:, ::2, ..., 3:])
    o, pull = backend.run(vjp, case.function, *there, mode=mode, initial_state=backend.asarray(start))
    assert_close("o", backend.tohost(o), wanted, SINGLE)
    for x, y in zip(pull(backend.asarray(do)), exact, strict=True):
        assert_close("gradient", backend.tohost(x), y, SINGLE, factor=10)


@pytest.mark.pairwise
@pytest.mark.parametrize("K, V, off", [(64, 132, 0), (128, 96, 0), (256, 64, 1), (100, 64, 0), (64, 70, 0)])
@pytest.mark.parametrize("op", DELTA_RULES, ids=lambda op: op.name)
def test_states_by_16_bytes(kernel_backend, op, K, V, off, rng, monkeypatch):
    """Where rows allow it, initial ones where all channels exist; others number by number, at any address."""
    monkeypatch.setattr(EmulatedDevice, "multiprocessors", 1)
    case = Case(op, T=3, K=K, V=V)
    arrays, start, do, _ = case.drawn(rng)
    there = kernel_backend.asarray(np.append(np.zeros(off, SINGLE), start))[off:].reshape(start.shape)
    given = [kernel_backend.asarray(x) for x in arrays]
    o, final = kernel_backend.run(case.function, *given, mode="recurrent", initial_state=there, output_final_state=True)
    wanted, expected, _ = exact_vjp(case.function, arrays, do, initial_state=start)
    assert_close("o", kernel_backend.tohost(o), wanted, SINGLE)
    assert_close("state", kernel_backend.tohost(final), expected, SINGLE)


@pytest.mark.parametrize("op", DELTA_RULES, ids=lambda op: op.name)
def test_results_at_odd_addresses(backend, op, rng):
    """`out` and do have rows that do not start on 16 bytes, though the inputs' do."""
    case = Case(op, T=40, K=20, V=20)
    arrays, start, do, _ = case.drawn(rng)
    wanted, _, exact = exact_vjp(case.function, arrays, do, initial_state=start)

    def at_odd_addresses(x):
        wide = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, x.dtype)
        wide[..., 3:] = x
        return backend.asarray(wide)[..., 3:]

    given, options = [backend.asarray(x) for x in arrays], {"mode": "chunk", "initial_state": backend.asarray(start)}
    o = backend.run(case.function, *given, out=at_odd_addresses(np.full_like(do, np.nan)), **options)
    assert_close("o", backend.tohost(o), wanted, SINGLE)
    _, pull = backend.run(vjp, case.function, *given, **options)
    for x, y in zip(pull(at_odd_addresses(do)), exact, strict=True):
        assert_close("gradient", backend.tohost(x), y, SINGLE, factor=10)


def test_wide_keys_are_refused(backend):
    if backend.device is None:
        pytest.skip("NumPy takes all")
    x, beta = backend.asarray(np.zeros((1, 1, 3, 257), SINGLE)), backend.asarray(np.zeros((1, 1, 3), SINGLE))
    with pytest.raises(NotSupported, match="delta_rule: .*K=257 is over 256"):
        backend.run(linattn_np.delta_rule, x, x, x, beta)


HARD = {  # gates, the cosine of keys, strengths
    "alike": ("weak", 0.9, 1.0),
    "resets": ("some-inf", 0.9, 1.0),
    "reflections": ("spikes-40", 0.0, 1.99),
    "nothing-written": ("weak", 0.5, 0.0),
    "no-gates": ("zero", 0.5, 0.5),
    "growth": ("weak", 0.0, 0.5),
    "strengthened": ("weak", 0.0, -0.5),  # a key adds to what it has read
}
# 2.3 roundings: of bfloat16 2^-9, of float16 2^-12. Of float32 what a product over 128 channels loses: tensor cores add
# 8 channels at a time, three times, and cut each of these 48 sums toward zero, by up to 2^-23 of it.
HARD_LIMITS = {BFLOAT16: 4.5e-3, HALF: 4.5e-3 / 8, SINGLE: 2.3 * 48 * 2**-23}
# Where states grow, the few tokens that are large by then make up the errors: of some hundred draws o has 0.72 +- 0.055
# of the limit above and dk 0.82 +- 0.034.
FEW_TOKENS = 1.4


def hard_call(hard, qk_l2norm, dtype, rng, op=GATED_DELTA_RULE, K=128):
    """(arrays, the initial state, do, dht) of chunks whose keys resemble each other, or that forget, or erase more than
    there is, or let a state grow: beyond float16 where the data's dtype holds it."""
    gate, cosine, strength = HARD[hard]
    H, groups = (2, 1) if op is RWKV7 else (1, 2)
    case = Case(op, groups=groups, H=H, T=100, K=K, V=72, dtype=dtype, gate=gate, gate_dtype=SINGLE)
    arrays, *rest = case.drawn(rng)
    arrays, shared = dict(zip(op.arrays, arrays, strict=True)), rng.standard_normal((1, 1, 1, K))
    k = (1 - cosine) ** 0.5 * unit(double(arrays["k"])) + cosine**0.5 * unit(shared)
    k = unit(k)
    if op is RWKV7:
        arrays |= {"a": -k.astype(dtype), "b": (strength * k).astype(dtype)}
    else:
        arrays["beta"] = np.full_like(arrays["beta"], strength)
    if hard == "growth":
        (gate,), nats = (arrays[name] for name in op.decays), 4 if dtype == HALF else 20
        gate[:, :, 32:48] += nats / 16
        gate[:, :, 48:64] -= nats / 16
        gate[:, :, 64:96] += nats / 32
    if qk_l2norm:
        arrays["q"], k = (3 * double(arrays["q"])).astype(dtype), 0.2 * k
    arrays["k"] = k.astype(dtype)
    return tuple(arrays.values()), *rest


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "op, qk_l2norm, K",
    [
        (GATED_DELTA_RULE, False, 128),
        (GATED_DELTA_RULE, True, 128),
        (KDA, False, 128),
        (KDA, True, 128),
        (KDA, False, 256),
        (KDA, True, 256),
        (RWKV7, False, 128),
        (RWKV7, False, 256),
    ],
)
@pytest.mark.parametrize("dtype", [BFLOAT16, HALF, SINGLE], ids=str)
@pytest.mark.parametrize("hard", HARD)
def test_chunks_with_hard_keys(backend, hard, op, qk_l2norm, K, dtype, rng):
    """What a chunk's products round is no larger than what is read and written, whatever the keys: whole errors are
    those of five numbers of their dtype in a row, of bfloat16 5^.5 2^-9 / 3^.5, and the output's. Where channels have
    gates, decayed tokens are rounded, too: four numbers more. In float32 what a product loses takes the place of a
    rounding (HARD_LIMITS), and there are as many.
    """
    arrays, start, *_ = hard_call(hard, qk_l2norm, dtype, rng, op, K)
    function = getattr(linattn_np, op.name)
    options = {"initial_state": start, "output_final_state": True} | ({"qk_l2norm": True} if qk_l2norm else {})
    wanted = function(*map(double, arrays), mode="recurrent", **options | {"initial_state": double(start)})
    options["initial_state"] = backend.asarray(start)
    found = backend.run(function, *map(backend.asarray, arrays), mode="chunk", **options)
    limit = HARD_LIMITS[dtype] * (1 if op is GATED_DELTA_RULE else 1.3) * (FEW_TOKENS if hard == "growth" else 1)
    for what, x, y in zip(("o", "state"), found, wanted, strict=True):
        assert rms(double(backend.tohost(x)) - y) < limit * rms(y), what


@pytest.mark.parametrize("dtype", [BFLOAT16, SINGLE], ids=str)
def test_chunks_of_little_keys(backend, dtype, rng):
    """The squares of their lengths are below float32's normal numbers."""
    q, k, v, g, beta = Case(KDA, H=1, groups=1, T=70, K=64, V=20, dtype=dtype, gate="weak").drawn(rng)[0]
    arrays = q, (double(k) * 2.0**-74).astype(dtype), (double(v) * 2.0**74).astype(dtype), g, beta
    wanted = linattn_np.kda(*map(double, arrays), mode="recurrent")
    found = double(backend.tohost(backend.run(linattn_np.kda, *map(backend.asarray, arrays), mode="chunk")))
    assert rms(found - wanted) < 1.3 * HARD_LIMITS[dtype] * rms(wanted)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [BFLOAT16, HALF, SINGLE], ids=str)
@pytest.mark.parametrize("op", [KDA, RWKV7], ids=lambda op: op.name)
def test_zeros_among_tokens(backend, op, dtype, rng):
    """Their gradients are others' than zeros."""
    case = Case(op, H=1, groups=1, T=70, K=64, V=20, dtype=dtype, gate="weak")
    arrays, *rest = case.drawn(rng)
    for x, first in zip(arrays, (0, 1, 2, 3, 4, 5)):
        if x.ndim == 4:
            x[:, :, first::6] = 0
    assert_gradients(backend, case, arrays, *rest)


def changed_by_rounding(arrays, start, exact, rng):
    """What changes in (o, the last state) of RWKV-7, root mean squares over four draws, if the state of every token is
    off by 2^-9 of each number."""
    r, w, k, v, a, b = (double(x)[0, 0] for x in arrays)
    changes = []
    for _ in range(4):
        state, o = double(start)[0, 0], np.empty_like(v)
        for t in range(len(r)):
            state = np.exp(w[t])[:, None] * state + np.outer(b[t], a[t] @ state) + np.outer(k[t], v[t])
            state *= 1 + 2**-9 * rng.standard_normal(state.shape)
            o[t] = r[t] @ state / np.sqrt(r.shape[-1])
        changes.append([rms(x - y[0, 0]) for x, y in zip((o, state), exact, strict=True)])
    return np.sqrt(np.mean(np.square(changes), 0))


def test_chunks_that_enlarge_a_state(backend, rng):
    """Transitions of a chunk beyond float16. Each of 32 tokens enlarges what was rounded before. Of 6,300 draws the
    largest error was 0.37 of what such roundings change, the logarithm's standard deviation 0.7: 2 is 4.7 of them above
    its mean."""
    arrays, start, *_ = Case(RWKV7, H=1, T=32, K=64, dtype=BFLOAT16, gate="weak", gate_dtype=SINGLE).drawn(rng)
    a, b = ((8 * double(x)).astype(BFLOAT16) for x in arrays[4:])
    arrays = (*arrays[:4], a, b)
    exact = linattn_np.rwkv7(*map(double, arrays), initial_state=double(start), output_final_state=True)
    options = {"initial_state": backend.asarray(start), "output_final_state": True, "mode": "chunk"}
    found = [backend.tohost(x) for x in backend.run(linattn_np.rwkv7, *map(backend.asarray, arrays), **options)]
    assert rms(exact[1]) > 1e7
    for x, y, change in zip(found, exact, changed_by_rounding(arrays, start, exact, rng), strict=True):
        assert rms(double(x) - y) < 2 * change


def of_columns(op, arrays, do, dht, start, name, options):
    """What each column of v adds to a gradient, [V, H, T]; B = 1. Columns of a state have nothing to do with others."""

    def columns(x):
        return np.moveaxis(x[0], -1, 0)[..., None]

    at, V = list(op.arrays).index(name), do.shape[-1]
    own = [columns(x) if other == "v" else np.repeat(x, V, 0) for other, x in zip(op.arrays, arrays, strict=True)]
    function = getattr(linattn_np, op.name)
    *_, gradients = exact_vjp(function, own, columns(do), columns(dht), initial_state=columns(start), **options)
    return gradients[at]


def spans_of(B, T, bounds=None):
    """(which of the batch, first token, end) of every sequence."""
    return [(0, *ends) for ends in zip(bounds, bounds[1:])] if bounds else [(b, 0, T) for b in range(B)]


def terms_of_columns(op, arrays, do, dht, start, name, options, bounds=None):
    """What a rounding error of dg or dbeta is a multiple of, [B, HV, T]: the terms of v's columns, whose errors add up
    in quadrature."""
    terms = np.zeros(do.shape[:3])
    for n, (b, first, end) in enumerate(spans_of(*terms.shape[::2], bounds)):
        if end > first:
            own, mine = ([x[b : b + 1, :, first:end] for x in given] for given in (arrays, [do]))
            of = of_columns(op, own, *mine, dht[n : n + 1], start[n : n + 1], name, options)
            terms[b, :, first:end] = np.sum(of**2, 0) ** 0.5
    return terms


def terms_of_later_tokens(arrays, do, dht, start, qk_l2norm, bounds=None, **options):
    """What a rounding error of dg is a multiple of, [B, HV, T], in gated_delta_rule: dg_t sums q dq and k dk of all
    tokens from t to the next gate of -inf and of all channels, whose errors add up in quadrature."""
    q, k, v, g, beta = map(double, arrays)
    if qk_l2norm:
        q, k = unit(q), unit(k)
    options |= {"cu_seqlens": bounds} if bounds else {}
    *_, (dq, dk, *_) = exact_vjp(
        linattn_np.gated_delta_rule, (q, k, v, g, beta), do, dht, initial_state=start, **options
    )
    squares = np.sum((q * dq) ** 2 + (k * dk) ** 2, -1)
    sums = np.repeat(squares, do.shape[1] // q.shape[1], 1)
    for b, first, end in spans_of(*sums.shape[::2], bounds):
        later = 0.0
        for t in reversed(range(first, end)):
            sums[b, :, t] += later
            later = np.where(g[b, :, t] == -np.inf, 0, sums[b, :, t])
    return sums**0.5


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "op, qk_l2norm, K",
    [
        (GATED_DELTA_RULE, False, 128),
        (GATED_DELTA_RULE, True, 128),
        (GATED_DELTA_RULE, True, 256),
        (KDA, True, 128),
        (KDA, True, 256),
        (RWKV7, False, 128),
        (RWKV7, False, 256),
    ],
    ids=["", "normalized", "normalized-wide", "kda", "kda-wide", "rwkv7", "rwkv7-wide"],
)
@pytest.mark.parametrize("dtype", [BFLOAT16, HALF, SINGLE], ids=str)
@pytest.mark.parametrize("hard", HARD)
def test_gradients_of_chunks_with_hard_keys(backend, hard, op, qk_l2norm, K, dtype, rng):
    """As exact as o: five numbers in a row and the gradient's own. Where rows are normalized, the unit rows, their
    gradients and these times the rows' lengths are rounded, too: three numbers more. Where channels have gates, decayed
    tokens are rounded on the way forwards and backwards: eight numbers more. A token's sums are compared with their
    terms, which may cancel."""
    arrays, start, do, dht = hard_call(hard, qk_l2norm, dtype, rng, op, K)
    function, alone = getattr(linattn_np, op.name), {"qk_l2norm": True} if qk_l2norm else {}
    *_, wanted = exact_vjp(function, arrays, do, dht, initial_state=start, **alone)
    options = alone | {"initial_state": backend.asarray(start), "output_final_state": True}
    _, pull = backend.run(vjp, function, *map(backend.asarray, arrays), **options)
    gradients = [double(backend.tohost(x)) for x in pull(backend.asarray(do), backend.asarray(dht))]
    limit = HARD_LIMITS[dtype] * ((1.22 if qk_l2norm else 1) if op is GATED_DELTA_RULE else 1.6)
    limit *= FEW_TOKENS if hard == "growth" else 1
    for name, given, x, y in zip((*op.arrays, "h0"), (*arrays, start), gradients, wanted, strict=True):
        size = rms(y)
        if name in op.decays:  # sums of what may cancel
            terms = np.abs(double(arrays[0]) * wanted[0])
            size = max(size, rms(terms if given.ndim == 4 else np.sum(terms, -1)))
            if hard in ("no-gates", "growth") and given.ndim == 3:  # no gate forgets
                size = max(size, rms(terms_of_later_tokens(arrays, do, dht, start, qk_l2norm)))
        if name == "beta":
            size = rms(terms_of_columns(op, arrays, do, dht, start, name, alone))
        assert rms(x - y) <= limit * (3 if y.ndim == 3 else 1) * size, name


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [BFLOAT16, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("op", [DELTA_RULE, GATED_DELTA_RULE, KDA], ids=lambda op: op.name)
def test_negative_strengths_token_by_token(backend, op, dtype, rng):
    """A token then adds to what its key has read. In chunks: HARD["strengthened"]."""
    case = Case(op, groups=2, H=1, T=40, dtype=dtype, gate="weak", mode="recurrent")
    arrays, start, do, dht = case.drawn(rng)
    at = list(op.arrays).index("beta")
    arrays[at] = -arrays[at]
    *wanted, gradients = exact_vjp(case.function, arrays, do, dht, initial_state=start)
    found = sum(computed(backend, case, arrays, start, do, dht), [])
    for what, x, y in zip(("o", "state", *op.arrays, "h0"), found, (*wanted, *gradients), strict=True):
        assert_close(what, x, y, dtype, rows=4)


PREPARE = {KDA: "delta_channel_prepare", RWKV7: "delta_dplr_prepare"}


@pytest.mark.parametrize("op", DELTA_RULES, ids=lambda op: op.name)
def test_explained(op, rng):
    """A gate beside a write strength of another dtype is copied; gradients take what is stated."""
    arrays, *_ = Case(op, K=40, V=40, dtype=BFLOAT16, gate_dtype=SINGLE).drawn(rng)
    if op is KDA:
        arrays[4] = arrays[4].astype(BFLOAT16)
    on = planned.Noting()
    plan = planned.plan_of(op.bind(arrays, mode="chunk"), on)
    prepare = PREPARE.get(op, "delta_prepare")
    assert planned.names(plan) == [prepare, "delta_scan"] and plan.mode == "chunk"
    assert planned.names(planned.plan_of(op.bind(arrays, mode="recurrent"), on)) == ["delta_recurrent_forward"]
    assert plan.copies == (("beta: in float32, as other gates",) if op is KDA else ())
    back = planned.plan_of(op.bind(arrays, gradient=True), on)
    rule = {KDA: "kda_", RWKV7: "dplr_"}.get(op, "")
    assert planned.names(back)[:3] == [prepare, "delta_backward_states", f"delta_{rule}backward_chunks"]
    assert back.tiles["chunk"] == 32
    # Calls in chunks keep what they prepare, if it takes little beside the inputs.
    arrays, *_ = Case(op, T=96, K=64, V=64, dtype=BFLOAT16, gate_dtype=SINGLE).drawn(rng)
    kept = planned.plan_of(op.bind(arrays, gradient=True), on)
    keeps = op in (KDA, RWKV7)
    assert planned.names(kept) == [prepare] * (not keeps) + ["delta_backward_states", f"delta_{rule}backward_chunks"]
    assert list(plan.reasons) == ["small heads", "by Hopper's own kernel"]
    assert list(back.reasons) == ["small heads", "by Hopper's own kernels"]


@pytest.mark.parametrize("op", DELTA_RULES, ids=lambda op: op.name)
def test_few_heads_are_cut(op):
    """Into segments that fill the card, where their number times a head's is small; their gradients likewise."""
    for H, T, *both in ((2, 4096, 16, 16), (2, 100, 1, 1), (300, 4096, 1, 1), (64, 16384, 4, 1), (16, 16384, 16, 4)):
        arrays = [np.broadcast_to(HALF.type(0), (1, H, T, 36)[: len(axes.split())]) for axes in op.arrays.values()]
        for gradient, segments in enumerate(both):
            plan = planned.plan_of(op.bind(arrays, gradient=bool(gradient)), planned.Noting())
            assert plan.tiles.get("segments", 1) == segments
            assert ("delta_join_segments" in planned.names(plan)) == (segments > 1)


@pytest.mark.pairwise
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("D", [8, 36])
@pytest.mark.parametrize("op", DELTA_RULES, ids=lambda op: op.name)
def test_a_long_sequence_among_others_is_cut(op, D, capability, gradient):
    """Its heads alone leave most of the card idle; many sequences that are all as long do not."""
    for lengths, cut in (((20000, *[600] * 59), True), ((20000,) * 2000, False)):
        bounds = np.cumsum([0, *lengths])
        shape = 1, 3, bounds[-1], D
        arrays = [np.broadcast_to(HALF.type(0), shape[: len(axes.split())]) for axes in op.arrays.values()]
        problem = op.bind(arrays, cu_seqlens=bounds, gradient=gradient)
        assert (planned.plan_of(problem, planned.Noting(capability)).tiles.get("segments", 1) > 1) == cut


@pytest.mark.parametrize("op", [KDA, RWKV7], ids=lambda op: op.name)
def test_calls_that_are_cut_keep_what_they_prepare(op):
    """And F: their pullbacks prepare nothing, and walk in one direction."""
    arrays = [np.zeros((1, 2, 4096, 64)[: len(axes.split())], HALF) for axes in op.arrays.values()]
    plan = planned.plan_of(op.bind(arrays, gradient=True), planned.Noting())
    walk, last = "delta_backward_states", f"delta_{'kda' if op is KDA else 'dplr'}_backward_chunks"
    assert planned.names(plan) == [walk, "delta_join_segments", walk, last] and plan.tiles["segments"] > 1
    assert [kernel.of for kernel in plan.kernels if kernel.name == walk] == ["ONLY_BACKWARDS"] * 2


@pytest.mark.parametrize("op", DELTA_RULES, ids=lambda op: op.name)
def test_few_heads_are_cut_token_by_token(op):
    """Where many heads leave nothing idle, or the call asks to go token by token, they are whole."""
    for H, T, mode, cut in ((2, 4096, "auto", True), (2000, 2000, "auto", False), (2, 4096, "recurrent", False)):
        arrays = [np.broadcast_to(DOUBLE.type(0), (1, H, T, 130)[: len(axes.split())]) for axes in op.arrays.values()]
        for gradient in (False, True):
            plan = planned.plan_of(op.bind(arrays, mode=mode, gradient=gradient), planned.Noting())
            assert ("delta_join_segments" in planned.names(plan)) == cut == (plan.tiles.get("segments", 1) > 1)


@pytest.mark.parametrize(
    "dtype, H, K, V, BV",
    [
        (SINGLE, 256, 64, 65, 128),  # four columns a lane
        (SINGLE, 256, 64, 64, 64),  # two: of four, half would be idle
        (SINGLE, 66, 64, 64, 64),
        (SINGLE, 65, 64, 64, 32),  # one: 65 blocks are less than half of the card's 132 multiprocessors
        (SINGLE, 33, 128, 128, 64),
        (SINGLE, 32, 128, 128, 32),
        (SINGLE, 16, 128, 128, 16),
        (DOUBLE, 256, 64, 64, 32),
    ],
)
def test_columns_of_a_block(dtype, H, K, V, BV):
    """The most that fill half of the card, and more than half of their lanes."""
    q, v, gate = (np.broadcast_to(dtype.type(0), shape) for shape in ((1, H, 512, K), (1, H, 512, V), (1, H, 512)))
    plan = planned.plan_of(GATED_DELTA_RULE.bind([q, q, v, gate, gate], mode="recurrent"), planned.Noting())
    assert plan.tiles["BV"] == BV


@pytest.mark.parametrize("kib", [99, 163, 227])
@pytest.mark.parametrize("op", DELTA_RULES, ids=lambda op: op.name)
def test_every_card_has_its_kernels(op, kib):
    """Kernels that no list has would raise LookupError where they are planned."""
    card = planned.Noting()
    card.shared_per_block = kib << 10
    for dtype, K, V, H, T in itertools.product((HALF, SINGLE), (64, 128, 256), (64, 128), (2, 300), (32, 4096)):
        sizes = {"B": 1, "H": H, "T": T, "K": K, "V": V}
        # With memory of their own, since a call whose arrays are copied keeps nothing for its pullback.
        arrays = [np.empty([sizes[axis] for axis in axes.split()], dtype) for axes in op.arrays.values()]
        for gradient in (False, True):
            problem = op.bind(arrays, mode="chunk", gradient=gradient)
            plans = [planned.plan_of_call(problem, card)]
            if gradient:
                plans.append(planned.plan_of_pullback(problem, card, problem["v"], None))
            assert all(kernel.shared_bytes <= card.shared_per_block for plan in plans for kernel in plan.kernels)


@pytest.mark.parametrize("kib", [99, 163, 227])
@pytest.mark.parametrize("bounds", [[0, 1], [0, 5, 45], [0, 20000]], ids=str)
def test_keys_of_prompts_are_made_on_every_card(kib, bounds):
    """Whatever the prompts' lengths: no other way than that in chunks makes them."""
    card, draft, spans = planned.Noting(), Draft(), Spans(np.array(bounds))
    card.shared_per_block = kib << 10
    array = lambda name, *shape, dtype=SINGLE: as_array(caller_array(name, shape, dtype))
    arrays = {name: array(name, 1, 32, bounds[-1], 64, dtype=HALF) for name in "rwkvab"}
    states = (array(name, spans.count, 32, 64, 64) for name in ("before", "after"))
    rows = {name: array(name, count, 32, 1, 64) for name, count in dict(bases=3, removal=1, replacement=1).items()}
    logits = {"key": arrays["k"], "first_v": arrays["v"]} | rows
    recurrence(draft, card, RWKV7, arrays, arrays["w"], (*states,), spans, 1.0, logits=logits)
    first = next(step.kernel for step in draft.steps if hasattr(step, "kernel"))
    assert first.name == "delta_dplr_prepare" and first.logits


@pytest.mark.parametrize("H, T, V, tokens", [(7, 756, 137, 8), (378, 1, 122, 4)], ids=["few-blocks", "many-blocks"])
def test_wide_gradients_leave_no_multiprocessor_idle(H, T, V, tokens):
    """All heads in one launch; a block of shared memory of its own for as many tokens as fit, or one of several."""
    k, v = (np.broadcast_to(SINGLE.type(0), (1, H, T, D)) for D in (256, V))
    plan = planned.plan_of(RWKV7.bind([k, k, k, v, k, k], mode="recurrent", gradient=True), planned.Noting())
    assert planned.names(plan).count("delta_recurrent_backward") == 1 and plan.tiles["chunk"] == tokens


@pytest.mark.parametrize("dtype, K", [(BFLOAT16, 128), (DOUBLE, 64)], ids=["in-chunks", "by-token"])
@pytest.mark.parametrize("op", DELTA_RULES, ids=lambda op: op.name)
def test_gradients_take_all_heads_at_once(op, dtype, K, monkeypatch, rng):
    """Groups of heads, one after the other, would each leave more of a card idle."""
    monkeypatch.setattr(gated_backward, "STATE_BYTES", 0)
    monkeypatch.setattr(delta, "FREE_BYTES", 0)
    arrays, *_ = Case(op, H=4, T=64, K=K, V=K, dtype=dtype, gate_dtype=dtype).drawn(rng)
    names = planned.names(planned.plan_of(op.bind(arrays, gradient=True), planned.Noting()))
    assert len([name for name in names if name in ("delta_backward_states", "delta_recurrent_backward")]) == 1


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("op", DELTA_RULES, ids=lambda op: op.name)
def test_narrow_heads_are_taken_at_once(op, gradient):
    """Chunks take 30 times as much memory as such rows, but little of a card's."""
    arrays = [np.broadcast_to(HALF.type(0), (1, 4, 100000, 36)[: len(axes.split())]) for axes in op.arrays.values()]
    names = planned.names(planned.plan_of(op.bind(arrays, gradient=gradient), planned.Noting()))
    assert len([name for name in names if name.endswith("prepare")]) == 1


@pytest.mark.parametrize(
    "changed, mode, reason",
    [
        ({"dtype": DOUBLE}, "auto", "the data are float64"),
        ({"op": RWKV7, "dtype": SINGLE, "K": 130}, "auto", "the card has no shared memory for 130 channels of float32"),
        ({}, "recurrent", "mode='recurrent' is token by token"),
        ({"T": 3}, "auto", "sequences of at most 3 tokens"),
    ],
    ids=["data", "channels", "mode", "few-tokens"],
)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_reasons_against_chunks(changed, mode, reason, gradient, rng):
    arrays, *_ = Case(**{"dtype": HALF} | changed).drawn(rng)
    op = changed.get("op", GATED_DELTA_RULE)
    card = planned.Noting()
    card.shared_per_block = 99 << 10
    plan = planned.plan_of(op.bind(arrays, mode=mode, gradient=gradient), card)
    assert plan.reasons["in chunks"].startswith(reason)


BY_TOKEN = {  # operator, K, V, dtype, gate, options
    "rwkv7": (RWKV7, 130, 3, SINGLE, "some-inf", {}),
    "narrow": (RWKV7, 2, 3, DOUBLE, "some-inf", {}),
    "odd": (KDA, 69, 33, SINGLE, "logsigmoid", {"qk_l2norm": True}),
    "packed": (KDA, 134, 20, SINGLE, "weak", {"cu_seqlens": [0, 414, 414, 425]}),
    "wide": (DELTA_RULE, 130, 20, DOUBLE, "weak", {}),
    "wide-gates": (KDA, 140, 9, SINGLE, "some-inf", {"reverse": True}),
    "float64": (RWKV7, 20, 35, DOUBLE, "weak", {"cu_seqlens": [0, 3, 425]}),
    "float64-gated": (GATED_DELTA_RULE, 66, 17, DOUBLE, "spikes-40", {"reverse": True}),
}


@pytest.mark.pairwise(half="case")
@pytest.mark.parametrize("segments", [3, 6])
@pytest.mark.parametrize("states", [False, True], ids=["no-states", "states"])
@pytest.mark.parametrize("case", BY_TOKEN)
def test_segments_by_token(monkeypatch, kernel_backend, case, states, segments, rng):
    """As exact as token by token in one piece, forwards and backwards."""
    monkeypatch.setattr(delta, "why_no_chunks", lambda problem: "they are tested elsewhere")
    monkeypatch.setattr(delta.CutByToken, "time", lambda cut, number: abs(number - min(segments, 425 // max(32, K))))
    monkeypatch.setattr(checked_calls, "MEMOS", Cache(1 << 20, 16))
    op, K, V, dtype, gate, options = BY_TOKEN[case]
    groups, B = 1 if op is RWKV7 else 2, 1 if "cu_seqlens" in options else 2
    case = Case(op, B, 2 // groups, groups, T=425, K=K, V=V, dtype=dtype, gate=gate, options=options)
    arrays, start, do, dht = case.drawn(rng)
    start, dht = (x if states else None for x in (start, dht))
    *wanted, gradients = exact_vjp(case.function, arrays, do, dht, initial_state=start, **options)
    found, back = computed(kernel_backend, case, arrays, start, do, dht)
    for what, x, y in zip(("o", "state"), found, wanted):
        assert_close(what, x, y, dtype)
    for name, x, y in zip((*op.arrays, "h0"), back, gradients, strict=states):
        size = rms(y)
        if name in op.decays:  # all of it may be far below what its sums are made of
            size = max(size, rms(double(arrays[0]) * gradients[0]))
        assert rms(double(x) - y) <= 10 * LIMITS[dtype.name][0] * size, name


@pytest.mark.pairwise
@pytest.mark.parametrize("states", [False, True], ids=["no-states", "states"])
@pytest.mark.parametrize("before", [-np.inf, -76], ids=["from-zero", "from-little"])
@pytest.mark.parametrize(
    "op, dtype, K",
    [
        (op, dtype, K)
        for op in DELTA_RULES
        for dtype, K in ((SINGLE, 130), (SINGLE, 36), (BFLOAT16, 36), (SINGLE, 15), (BFLOAT16, 15))
        if op.decays
    ],
)
def test_growth_within_a_segment(monkeypatch, kernel_backend, op, dtype, K, before, states, rng):
    """What a segment does to states may be out of range where no state is: results are those of whole sequences."""
    in_chunks = K <= 128
    if not in_chunks:
        monkeypatch.setattr(delta, "why_no_chunks", lambda problem: "130 channels are tested token by token")
    for cut_class in (CutOfSmallHeads, delta.CutInChunks if in_chunks else delta.CutByToken):
        monkeypatch.setattr(cut_class, "time", lambda cut, number: abs(number - 3))
    monkeypatch.setattr(checked_calls, "MEMOS", Cache(1 << 20, 16))
    case = Case(op, H=1, T=1504, K=K, V=min(K, 18), dtype=dtype, gate="weak")
    arrays, start, do, dht = case.drawn(rng)
    own = dict(zip(op.arrays, arrays, strict=True))
    for name in op.strengths or ("k", "a"):
        own[name][:, :, 480:1024] = 0
    (gate,) = (own[name] for name in op.decays)  # the second segment, from token 502 or 512 on, grows by 90 nats
    gate[:, :, 480:1024] = 0
    gate[:, :, 480], gate[:, :, 544:992] = before, 90 / 448
    do, dht = (do * 2.0**-17).astype(dtype), dht * SINGLE.type(2**-17)  # their gradients grow backwards
    start, dht = (x if states else None for x in (start, dht))
    *wanted, gradients = exact_vjp(case.function, arrays, do, dht, initial_state=start)
    found, back = computed(kernel_backend, case, arrays, start, do, dht)
    # A decay is off by up to 2^-22, the more so in equal gates: 448 of them multiply what grows.
    limit = 2 * HARD_LIMITS[dtype] + 448 * 2**-22 if in_chunks else 10 * LIMITS[dtype.name][0]
    for what, x, y in zip(("o", "state"), found, wanted):
        assert rms(double(x) - y) < limit * rms(y), what
    for name, x, y in zip((*op.arrays, "h0"), back, gradients, strict=states):
        size = rms(y)
        if name in op.decays and y.ndim == 3:  # it sums over channels, where kda's may cancel
            q, k, v, g, beta = map(double, arrays)
            g = np.repeat(g[..., None], q.shape[-1], -1)
            *_, (_, _, _, dg, *_) = exact_vjp(linattn_np.kda, (q, k, v, g, beta), do, dht, initial_state=start)
            size = rms(np.sum(dg**2, -1) ** 0.5)
        assert rms(double(x) - y) <= 3 * limit * size, name


@pytest.mark.pairwise
@pytest.mark.parametrize("K, V, segments", [(39, 70, 3), (39, 70, 4), (101, 40, 4), (64, 64, 4), (130, 20, 3)])
@pytest.mark.parametrize("states", [False, True], ids=["no-states", "states"])
@pytest.mark.parametrize(
    "options", [{}, {"cu_seqlens": [0, 530, 530, 541]}, {"reverse": True}], ids=lambda x: "".join(x)
)
@pytest.mark.parametrize("dtype", [BFLOAT16, HALF, SINGLE], ids=str)
@pytest.mark.parametrize("op", DELTA_RULES, ids=lambda op: op.name)
def test_segments(monkeypatch, kernel_backend, op, dtype, options, states, K, V, segments, rng):
    """Segments, unequal and empty ones too, are joined to what a walk over whole sequences finds: as exact as those,
    forwards and backwards."""
    monkeypatch.setattr(delta.CutInChunks, "time", lambda cut, number: abs(number - segments))
    monkeypatch.setattr(checked_calls, "MEMOS", Cache(1 << 20, 16))  # no plan of another cut of the same call is taken
    groups, B = 1 if op is RWKV7 else 2, 1 if "cu_seqlens" in options else 2
    case = Case(op, B, 2 // groups, groups, T=541, K=K, V=V, dtype=dtype, gate="weak", mode="chunk", options=options)
    arrays, start, do, dht = case.drawn(rng)
    start, dht = (x if states else None for x in (start, dht))
    *wanted, gradients = exact_vjp(case.function, arrays, do, dht, initial_state=start, **options)
    found, back = computed(kernel_backend, case, arrays, start, do, dht)
    for what, x, y in zip(("o", "state"), found, wanted):
        assert rms(double(x) - y) < 1.3 * HARD_LIMITS[dtype] * rms(y), what
    for name, given, x, y in zip((*op.arrays, "h0"), (*arrays, start), back, gradients, strict=states):
        size = rms(y)
        if name in op.decays:  # sums of what may cancel
            terms = np.abs(double(arrays[0]) * gradients[0])
            size = max(size, rms(terms if given.ndim == 4 else np.sum(terms, -1)))
        assert rms(double(x) - y) <= 1.6 * HARD_LIMITS[dtype] * (3 if y.ndim == 3 else 1) * size, name


# -- small heads -------------------------------------------------------------------------------------------------------
SMALL_HEADS = {
    "delta_rule": Case(DELTA_RULE, B=2, H=3, T=21, K=5, V=8, dtype=BFLOAT16),
    "delta_rule-packed": Case(DELTA_RULE, H=5, groups=2, K=6, V=16, dtype=HALF, options={"qk_l2norm": True} | PACKED),
    "gated": Case(B=2, H=5, K=16, V=16, dtype=BFLOAT16, gate="some-inf", gate_dtype=SINGLE),
    "gated-one": Case(B=3, H=11, T=19, K=1, V=1),
    "kda": Case(KDA, B=2, H=3, groups=3, T=40, K=8, V=7, dtype=HALF, gate="spikes-40"),
    "kda-packed": Case(KDA, H=7, K=12, V=16, gate="some-inf", options={"qk_l2norm": True} | PACKED),
    "rwkv7": Case(RWKV7, B=2, H=6, T=25, K=16, V=10, dtype=BFLOAT16, gate_dtype=SINGLE),
    "rwkv7-packed": Case(RWKV7, H=9, K=5, V=5, options=PACKED),
    "three-steps": Case(B=2, H=3, T=48, K=4, V=12, dtype=BFLOAT16, gate="some-inf", options={"qk_l2norm": True}),
    "four-steps": Case(KDA, B=2, H=1, T=49, K=15, V=3, dtype=HALF, gate="some-inf", options={"reverse": True}),
    "steps-packed": Case(RWKV7, H=3, T=70, K=1, V=1, options={"cu_seqlens": [0, 1, 1, 33, 70], "reverse": True}),
    "T1": Case(DELTA_RULE, B=3, H=1, T=1, K=6, V=2, dtype=HALF),
}


@pytest.fixture
def assert_small_heads(rng, monkeypatch):
    """A function of (case, kernels): whether a call takes these kernels, and is as the recurrence, from and to states.
    Rows of an odd number of halves are copied before."""
    monkeypatch.setattr(delta, "WORTH_OF_SMALL", dict.fromkeys(delta.WORTH_OF_SMALL, np.inf))

    def check(case, kernels, segments=1):
        monkeypatch.setattr(CutOfSmallHeads, "SHORTEST", 1)
        monkeypatch.setattr(CutOfSmallHeads, "time", lambda cut, n: abs(n - segments))
        arrays, state, *_ = case.drawn(rng)
        on = planned.Noting()
        plan = planned.plan_of(case.op.bind(arrays, **case.options), on)
        copied = case.dtype != SINGLE and (case.K % 2 or case.V % 2)
        launched = [name for name in planned.names(plan) if name != "elementwise_copy_rows"]
        assert launched == kernels and bool(plan.copies) == bool(copied)
        o, final = planned.results(case.op, arrays, EmulatedDevice(80), state, final=True, **case.options)
        back = -1 if "reverse" in case.options else 1  # results have the recurrence's order of tokens and sequences
        found = o[:, :, ::back], final[:: back if "cu_seqlens" in case.options else 1]
        options = {"initial_state": state, "output_final_state": True} | case.options
        assert_results(case.function, arrays, found, case.dtype, **options)

    return check


@pytest.mark.pairwise
@pytest.mark.parametrize("case", SMALL_HEADS.values(), ids=SMALL_HEADS)
@pytest.mark.parametrize("segments", [1, 3])
def test_gradients_of_small_heads(kernel_backend, case, segments, rng, monkeypatch):
    """In segments, too, unequal and empty ones."""
    monkeypatch.setattr(delta, "WORTH_OF_SMALL", dict.fromkeys(delta.WORTH_OF_SMALL, np.inf))
    monkeypatch.setattr(CutOfSmallHeads, "SHORTEST", 1)
    monkeypatch.setattr(CutOfSmallHeads, "time", lambda cut, n: abs(n - segments))
    monkeypatch.setattr(checked_calls, "MEMOS", Cache(1 << 20, 16))  # no plan of another cut of the same call is taken
    arrays, start, do, dht = case.drawn(rng)
    plan = planned.plan_of_pullback(case.op.bind(arrays, **case.options), EmulatedDevice(80), do, (dht,))
    assert "delta_small_backward" in planned.names(plan)
    assert_gradients(kernel_backend, case, arrays, start, do, dht)


@pytest.mark.pairwise
@pytest.mark.parametrize("case", SMALL_HEADS.values(), ids=SMALL_HEADS)
def test_small_heads(case, assert_small_heads):
    """Of rows that are no whole pieces of 16 bytes, too."""
    assert_small_heads(case, ["delta_small_forward"])


@pytest.mark.pairwise
@pytest.mark.parametrize("case", SMALL_HEADS.values(), ids=SMALL_HEADS)
@pytest.mark.parametrize("segments", [3, 7])
def test_small_heads_in_segments(case, segments, assert_small_heads):
    longest = np.diff(case.options["cu_seqlens"]).max() if "cu_seqlens" in case.options else case.T
    walks = ["delta_small_forward", "delta_join_segments", "delta_small_forward"]
    assert_small_heads(case, walks[2 * (longest < segments) :], segments)


@pytest.mark.parametrize(
    ("sizes", "mode", "kernel"),
    [
        ((21, 38, 2000, 6, 16), "auto", "delta_small_forward"),  # 6.6 floors for 103 in chunks, as estimated
        ((21, 38, 2000, 6, 16), "chunk", "delta_small_forward"),
        ((21, 38, 2000, 6, 17), "auto", "delta_prepare"),
        ((1, 1, 20000, 6, 16), "auto", "delta_prepare"),
        ((64, 40, 5, 7, 16), "auto", "delta_small_forward"),  # few tokens; rows of 7 halves are copied
        ((1, 40, 5, 7, 16), "auto", "delta_recurrent_forward"),  # few heads, too
    ],
)
def test_which_calls_are_of_small_heads(sizes, mode, kernel):
    B, H, T, K, V = sizes
    q, v, g = (np.zeros(shape, HALF) for shape in ((B, H, T, K), (B, H, T, V), (B, H, T)))
    plan = planned.plan_of(GATED_DELTA_RULE.bind((q, q, v, g, g), mode=mode), EmulatedDevice(80))
    assert [name for name in planned.names(plan) if name != "elementwise_copy_rows"][0] == kernel


@pytest.mark.pairwise
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("op", [KDA, RWKV7])
def test_walks_of_32_columns(backend, op, segments, rng, monkeypatch):
    """Where three of them share a multiprocessor, and two of 64 columns would leave one with one walk."""
    monkeypatch.setattr(EmulatedDevice, "multiprocessors", 2)
    monkeypatch.setattr(delta.CutInChunks, "time", lambda cut, number: abs(number - segments))
    monkeypatch.setattr(checked_calls, "MEMOS", Cache(1 << 20, 16))
    case = Case(op, H=3 // segments, T=400, K=64, V=62, dtype=BFLOAT16)
    walk = DeltaBackwardStates.fitting(BFLOAT16, 64, 62, rule_of(op), 3, EmulatedDevice())
    assert (walk.BV, walk.stages) == (32, 2)
    assert_gradients(backend, case, *case.drawn(rng))
