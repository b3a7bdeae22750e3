"""What is not finite goes where the recurrence takes it and nowhere else; what overflows on the way to a finite result
does not become so; and a gate's gradient is right to its own size. NumPy's modes against mode "recurrent"."""

import numpy as np
import pytest
from reference import double, draw, draw_states, exact, exact_vjp, flat, stated

from linattn_np import gla, linear_attention, retention, rwkv6, simple_gla, softmax_attention, stages, vjp
from linattn_np.declarations import GLA_VALUE_GATE
from linattn_np.ops import declaration

OPERATORS = {
    "gla": (gla, {}),
    "rwkv6": (rwkv6, {}),
    "simple_gla": (simple_gla, {}),
    "retention": (retention, {}),
    "linear_attention": (linear_attention, {}),
    "normalized": (linear_attention, {"feature_map": "elu", "normalize": True}),
    "gv": (gla, {}),
}
POISONS = (np.nan, np.inf, -np.inf)
SIZES = {"B": 2, "H": 3, "T": 101, "K": 7, "V": 5}
EVERY_MODE = [
    (name, mode)
    for name, (function, _) in OPERATORS.items()
    for mode in (GLA_VALUE_GATE if name == "gv" else declaration(function, "test")).modes
    if mode != "recurrent"
]


class Call:
    """Random arguments of an operator, some value of some array not finite."""

    def __init__(self, name, rng, gate="logsigmoid", dtype=np.float32, packed=False, **sizes):
        self.function, self.options = OPERATORS[name]
        self.op = GLA_VALUE_GATE if name == "gv" else declaration(self.function, "test")
        self.sizes = {**SIZES, **sizes, **({"B": 1} if packed else {})}
        self.options = {**self.options, "output_final_state": True}
        if packed:
            self.options["cu_seqlens"] = [0, 0, 3, 40, 77, 77, 78, self.sizes["T"]]
        self.sizes["N"] = len(self.options["cu_seqlens"]) - 1 if packed else self.sizes["B"]
        self.arrays = draw(self.op, rng, self.sizes, dtype, gate)
        state = draw_states(stated(self.op, self.options), rng, self.sizes, np.float32)
        self.options["initial_state"] = state if len(state) > 1 else state[0]

    def poison(self, rng, which, poison, count=1):
        x = self.arrays[which]
        for _ in range(count):
            x[tuple(rng.integers(n) for n in x.shape)] = poison
        return self

    def results(self, mode):
        return flat(self.function(*self.arrays, mode=mode, **self.options))

    def gradients(self, mode, do, dht):
        _, pull = vjp(self.function, *self.arrays, mode=mode, **self.options)
        return flat(pull(do, tuple(dht) if len(dht) > 1 else dht[0]))


def assert_same(what, found, wanted, tolerance=2e-4):
    """Finite in the same places, and there close."""
    for n, (x, y) in enumerate(zip(found, wanted, strict=True)):
        finite = np.isfinite(y)
        wrong = np.argwhere(np.isfinite(x) != finite)
        assert not len(wrong), f"{what}, result {n}: {len(wrong)} places are finite in one only, first {wrong[0]}"
        x, y = np.where(finite, x, 0), np.where(finite, y, 0)
        assert np.abs(x - y).max(initial=0) <= tolerance * max(1, np.abs(y).max(initial=0)), f"{what}, result {n}"


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name, mode", EVERY_MODE)
def test_no_value_that_is_not_finite_goes_where_the_recurrence_does_not_take_it(name, mode, packed, rng):
    for which, argument in enumerate(Call(name, rng).op.arrays):
        for poison in POISONS:
            if argument in ("g", "w", "gv") and poison == -np.inf:
                continue  # an ordinary gate: test_laws and test_gradients
            gate = rng.choice(["weak", "logsigmoid", "some-inf"])
            call = Call(name, rng, gate, packed=packed).poison(rng, which, poison)
            assert_same(f"{poison} in {argument}, {gate}", call.results(mode), call.results("recurrent"))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", OPERATORS)
def test_nor_does_it_in_the_backward_pass(name, packed, rng):
    arguments = list(Call(name, rng).op.arrays)
    for which, argument in enumerate([*arguments, "do", "dht"]):
        for poison in (np.nan, np.inf):
            gate = rng.choice(["weak", "logsigmoid", "some-inf"])
            call = Call(name, rng, gate, packed=packed)
            do, *dht = (rng.standard_normal(x.shape, dtype=np.float32) for x in call.results("recurrent"))
            if which < len(arguments):
                call.poison(rng, which, poison)
            else:
                x = do if argument == "do" else dht[0]
                x[tuple(rng.integers(n) for n in x.shape)] = poison
            assert_same(
                f"{poison} in {argument}, {gate}",
                call.gradients("chunk", do, dht),
                call.gradients("recurrent", do, dht),
                1e-3,
            )


@pytest.mark.parametrize("name, mode", [("gla", "chunk"), ("rwkv6", "chunk"), ("gla", "staged"), ("gla", "parallel")])
@pytest.mark.parametrize("count", [0, 5])
def test_grouped_heads_and_long_sequences(name, mode, count, rng, monkeypatch):
    """Many values that are not finite, value heads in groups, in every way of cutting a call."""
    call = Call(name, rng, T=300).poison(rng, 2, np.nan, count)
    q, k, v, *rest = call.arrays
    v = np.concatenate([v, v[::-1]], axis=1)
    state = np.repeat(call.options["initial_state"], 2, axis=1)
    wanted = call.function(q, k, v, *rest, mode="recurrent", **{**call.options, "initial_state": state})
    for materialize in (True, False):
        found = call.function(
            q,
            k,
            v,
            *rest,
            mode=mode,
            **{**call.options, "initial_state": state},
            **({"materialize": materialize} if mode == "chunk" else {}),
        )
        assert_same(f"materialize={materialize}", flat(found), flat(wanted))


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("which", range(4))
def test_causal_softmax_keeps_it_from_the_past(which, poison, rng):
    q, k, v, do = rng.standard_normal((4, 1, 2, 50, 6))
    at = 23
    wanted, pull = vjp(softmax_attention, *(x[:, :, :at] for x in (q, k, v)))
    for chunk_size in (16, 256):
        arrays = [x.copy() for x in (q, k, v, do)]
        arrays[which][0, 0, at, 2] = poison
        o, pull = vjp(softmax_attention, *arrays[:3], chunk_size=chunk_size)
        clean, clean_pull = vjp(softmax_attention, q, k, v, chunk_size=chunk_size)
        np.testing.assert_allclose(o[:, :, :at], wanted, rtol=0, atol=1e-13)
        np.testing.assert_allclose(o[:, 1], clean[:, 1], rtol=0, atol=1e-13)
        if which == 2:
            assert not np.isfinite(o[0, 0, at:, 2]).any() and np.isfinite(np.delete(o[0, 0], 2, axis=-1)).all()
        elif which < 2 and np.isnan(poison):
            assert np.isnan(o[0, 0, at]).all()
        dq, dk, dv = pull(arrays[3])
        dq_clean, dk_clean, dv_clean = clean_pull(do)
        np.testing.assert_allclose(dq[:, :, :at], dq_clean[:, :, :at], rtol=1e-10, atol=1e-13)
        if which in (0, 3):  # of one query: its own gradient, and those of the keys it sees
            for x, y in ((dk, dk_clean), (dv, dv_clean)):
                np.testing.assert_allclose(x[:, :, at + 1 :], y[:, :, at + 1 :], rtol=1e-10, atol=1e-13)
            np.testing.assert_allclose(dq[:, :, at + 1 :], dq_clean[:, :, at + 1 :], rtol=1e-10, atol=1e-13)


def test_the_stage_that_combines_is_causal(rng):
    q, k, v, g = rng.standard_normal((4, 1, 2, 40, 6))
    g = -np.abs(g)
    b, e = stages.chunk_cumsum(g, chunk_size=16)
    qg, kg = stages.gated_qk(q, k, b, e, chunk_size=16)
    A = stages.intra_chunk(q, k, g, chunk_size=16)
    v[0, 1, 20, 3] = np.nan
    h = stages.inter_chunk(kg, v, b, chunk_size=16)
    wanted = gla(q, k, v, g, mode="recurrent")
    assert_same("combine", [stages.combine(qg, h, A, v, chunk_size=16)], [wanted])


# -- overflow on the way to a finite result ----------------------------------------------------------------------------
def ones(T, *gates, K=1):
    g = np.zeros((1, 1, T, K), np.float32)
    g[0, 0, : len(gates)] = np.array(gates, np.float32)[:, None]
    one = np.ones((1, 1, T, K), np.float32)
    return one, one, one, g


@pytest.mark.parametrize("mode", ["chunk", "staged", "parallel"])
@pytest.mark.parametrize(
    "gates",
    [
        (50, 50),
        (86, 0),
        (0, 88),
        (60, -60, 60, -60),
        (80, -100, 80),
        (1,) * 60,
        (40, 40, -80, 40, 40),
        (-80, 85, 85, -80),
        (-np.inf, 80, 80),
    ],
)
def test_growing_gates_overflow_where_the_recurrence_does(mode, gates):
    for function in (gla, rwkv6):
        for size in (1, 20, 1e-20, 1e20):
            q, k, v, g = ones(64 if len(gates) > 33 else 40, *gates, K=3)
            rest = () if function is gla else (np.ones((1, 3), np.float32),)
            with np.errstate(all="ignore"):
                arrays = size * q, k, v / np.float32(size), g, *rest
                wanted = function(*arrays, mode="recurrent", output_final_state=True)
                found = function(*arrays, mode=mode, output_final_state=True)
            for x, y in zip(found, wanted):
                finite = np.isfinite(y)
                assert np.isfinite(x[finite]).all(), (function.__name__, size)
                np.testing.assert_allclose(x[finite], y[finite], rtol=2e-4)


def test_values_that_the_gates_of_values_would_lift_out_of_range():
    q = np.ones((1, 1, 32, 1), np.float32)
    arrays = q, q, 1e22 * q, 0 * q, np.full_like(q, -1.25)
    np.testing.assert_allclose(gla(*arrays), gla(*arrays, mode="recurrent"), rtol=1e-5)
    for x, y in zip(*(vjp(gla, *arrays, mode=mode)[1](1e10 * q) for mode in ("chunk", "recurrent"))):
        assert np.abs(x - y).max() <= 1e-4 * np.abs(y).max()


@pytest.mark.parametrize("mode", ["chunk", "staged", "parallel"])
@pytest.mark.parametrize("function", [gla, rwkv6])
def test_small_and_large_values_under_gates_that_sum_up(function, mode, rng):
    """Factors about the middle of a chunk leave float32 what it can hold."""
    op = declaration(function, "test")
    for small in (1e-24, 1e-18, 1e18, 1e24):
        q, k, v, g, *u = draw(op, rng, {"B": 1, "H": 2, "T": 64, "K": 8, "V": 4}, np.float32)
        g = np.full_like(g, -0.9)
        arrays = q * np.float32(small), k / np.float32(small), v, g, *u
        wanted = exact(function, arrays)[0]
        assert np.abs(function(*arrays, mode=mode) - wanted).max() <= 2e-5 * np.abs(wanted).max(), small


# -- a gate's gradient, to its own size --------------------------------------------------------------------------------
GATES = {
    "one of -20": lambda rng, shape: np.where(np.arange(shape[2])[:, None] % 13 == 5, -20, -0.01 + np.zeros(shape)),
    "spikes": lambda rng, shape: np.where(rng.random(shape) < 0.03, -rng.uniform(3, 60, shape), -0.01),
    "all -20": lambda rng, shape: np.full(shape, -20.0),
    "trained": lambda rng, shape: -np.exp(np.linspace(-4.2, -2.5, shape[-1]) + 2 * rng.standard_normal(shape)),
    "logsigmoid": lambda rng, shape: -np.logaddexp(0, -rng.standard_normal(shape)),
    "weak": lambda rng, shape: -np.logaddexp(0, -rng.standard_normal(shape)) / 16,
    "strong": lambda rng, shape: -20 * np.logaddexp(0, -rng.standard_normal(shape)),
}
HALVED = ("one of -20", "all -20", "strong")  # in every chunk


def gate_gradient_and_size(function, q, k, v, g, do):
    """dg in float64, and the sum of what it is made of without signs."""
    u = (np.zeros((q.shape[1], q.shape[3])),) if function is rwkv6 else ()

    def dg(of):
        return exact_vjp(function, (of(q), of(k), of(v), g, *u), of(do))[2][3]

    return dg(double), dg(abs)


@pytest.mark.pairwise
@pytest.mark.parametrize("chunk_size", [None, 16, 48, 64])
@pytest.mark.parametrize("function", [gla, rwkv6, simple_gla])
@pytest.mark.parametrize("kind", GATES)
def test_gate_gradients_are_right_to_their_own_size(kind, function, chunk_size, rng):
    # What makes a gradient small is to be its gates, not a query near 0, which leaves a pair's rounding as it is.
    q, k, v, do = (rng.choice([-1, 1], (4, 1, 2, 150, 8)) * rng.uniform(0.5, 2, (4, 1, 2, 150, 8))).astype(np.float32)
    g = GATES[kind](rng, q.shape).astype(np.float32)
    g = np.ascontiguousarray(g[..., 0]) if function is simple_gla else g
    wanted, size = gate_gradient_and_size(function, q, k, v, g, do)
    u = (np.zeros((2, 8), np.float32),) if function is rwkv6 else ()
    dg = vjp(function, q, k, v, g, *u, chunk_size=chunk_size)[1](do)[3]
    off = (np.abs(dg - wanted) / np.where(size == 0, 1, size))[size > 1e-30].max()
    assert off <= (2e-6 if kind in HALVED else 1e-4), f"off by {off:.1e} of what it is made of"
    assert not dg[:, :, 0].any(), "no gate comes to anything before there is a state"
    assert np.abs(dg[size == 0]).max() <= 1e-6 * np.abs(wanted).max()  # RWKV-6 reads nothing behind its last gate


@pytest.mark.parametrize("side", ["g", "gv"])
@pytest.mark.parametrize("kind", ["one of -20", "spikes", "logsigmoid"])
def test_gate_gradients_of_either_side_are_right_to_their_own_size(kind, side, rng):
    q, k, v, do = (rng.choice([-1, 1], (4, 1, 1, 150, 8)) * rng.uniform(0.5, 2, (4, 1, 1, 150, 8))).astype(np.float32)
    gates = [GATES[kind](rng, q.shape).astype(np.float32), GATES["weak"](rng, q.shape).astype(np.float32)]
    arrays = q, k, v, *(gates if side == "g" else gates[::-1])
    wanted, sizes = (exact_vjp(gla, [of(x) for x in arrays[:3]] + list(arrays[3:]), of(do))[2] for of in (double, abs))
    found = vjp(gla, *arrays)[1](do)
    for dg, right, size in zip(found[3:], wanted[3:], sizes[3:]):
        assert (np.abs(dg - right) / np.where(size == 0, 1, size))[size > 1e-30].max() <= 1e-4
