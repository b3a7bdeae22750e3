"""gla with a gate on the value side as well, held to its equation in float64 whatever else is asked for."""

from dataclasses import dataclass, field

import numpy as np
import planned
import pytest
from conftest import DOUBLE, HALF, SINGLE
from reference import GATES, assert_close, double, draw, flat, guarded, literal, same_bits
from test_growth import KINDS, LIMITS

from linattn_np import ContractError, ContractTypeError, NotSupported, explain, gla, simple_gla, vjp
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import gated_backward, segments
from linattn_np.declarations import GLA_VALUE_GATE
from linattn_np.layouts import swap_heads


@dataclass(frozen=True)
class Case:
    B: int = 1
    H: int = 2
    T: int = 70
    K: int = 20
    V: int = 9
    groups: int = 1
    dtype: np.dtype = SINGLE
    gates: tuple = (None, None)  # dtypes
    regimes: tuple = ("logsigmoid", "logsigmoid")
    bounds: tuple = None
    masked: bool = False
    layout: str = "bhtd"
    strided: bool = False
    scale: float = None
    options: dict = field(default_factory=dict)

    @property
    def sizes(self):
        N = len(self.bounds) - 1 if self.bounds else self.B
        return {"B": self.B, "H": self.H, "T": self.T, "K": self.K, "V": self.V, "N": N}

    def drawn(self, rng):
        """q, k, v, g, gv [B, H or HV, T, ...] and two states [N, HV, K, V]."""
        many = {**self.sizes, "H": self.H * self.groups}
        q, k, _, g, _ = draw(GLA_VALUE_GATE, rng, self.sizes, self.dtype, self.regimes[0], self.gates[0])
        _, _, v, _, gv = draw(GLA_VALUE_GATE, rng, many, self.dtype, self.regimes[1], self.gates[1])
        states = rng.standard_normal((2, *(many[axis] for axis in "NHKV")))
        return [q, k, v, g, gv], states if self.dtype == DOUBLE else states.astype(SINGLE)

    def mask(self, rng):
        """Padding in front, behind, in the middle, and, of a second row, everywhere."""
        mask = rng.random((self.B, self.T)) < 0.8
        mask[0, :9], mask[0, -5:], mask[1:] = False, False, False
        return mask


CASES = {
    "plain": Case(B=2),
    "T1": Case(T=1),
    "T0": Case(T=0),
    "B0": Case(B=0),
    "K1-V1": Case(B=3, H=4, K=1, V=1, T=20),
    "wide": Case(T=20, K=100, V=70),
    "wider": Case(T=20, H=1, K=200, V=256),
    "wider-bfloat16": Case(T=40, H=1, K=200, V=70, dtype=BFLOAT16, gates=(SINGLE, SINGLE)),
    "segments": Case(T=530, H=1),
    "segments-packed": Case(T=530, H=1, K=130, V=20, bounds=(0, 0, 130, 530), options={"reverse": True}),
    "segments-bfloat16": Case(T=530, H=2, K=64, V=70, dtype=BFLOAT16, regimes=("trained", "some-inf"), groups=2),
    "scale": Case(scale=-2.0),
    "scale0": Case(scale=0.0, T=20),
    "packed": Case(bounds=(0, 0, 7, 8, 50, 50, 70)),
    "packed-reverse": Case(bounds=(0, 0, 7, 8, 50, 50, 70), options={"reverse": True, "state_v_first": True}),
    "packed-empty": Case(bounds=(0, 0, 0), T=0),
    "reverse": Case(B=2, options={"reverse": True}),
    "state_v_first": Case(options={"state_v_first": True}),
    "bthd": Case(B=2, layout="bthd"),
    "strided": Case(B=2, layout="bthd", strided=True),
    "masked": Case(B=2, masked=True),
    "masked-reverse-grouped": Case(B=2, masked=True, groups=2, options={"reverse": True}),
    "grouped": Case(B=2, groups=3),
    "grouped-bthd": Case(B=2, groups=2, layout="bthd", options={"state_v_first": True}),
    "grouped-wide": Case(T=20, H=1, V=100, groups=3, bounds=(0, 4, 20)),
    "float16": Case(dtype=HALF),
    "bfloat16": Case(dtype=BFLOAT16, K=64, V=64),
    "bfloat16-float32": Case(dtype=BFLOAT16, gates=(SINGLE, SINGLE), bounds=(0, 30, 70)),
    "bfloat16-mixed": Case(dtype=BFLOAT16, gates=(SINGLE, None), groups=2),
    "float16-mixed": Case(dtype=HALF, gates=(None, SINGLE), layout="bthd"),
    "bfloat16-hard": Case(dtype=BFLOAT16, regimes=("some-inf", "spikes-40"), bounds=(0, 33, 70)),
    "float16-hard": Case(dtype=HALF, regimes=("spikes-40", "some-1e30")),
    "state_dtype": Case(options={"state_dtype": HALF}),
    "float64": Case(dtype=DOUBLE, B=2),
    "float64-wide": Case(dtype=DOUBLE, T=8, H=1, K=515, V=520),
    "float64-packed-grouped": Case(dtype=DOUBLE, bounds=(0, 3, 3, 70), groups=2, options={"reverse": True}),
}
COARSER = ["float64", "float32", "float16", "bfloat16"]
HARD = [pair for gate in GATES for pair in ((gate, "logsigmoid"), ("logsigmoid", gate), (gate, gate))]


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        listed = {
            name: backend for name, backend in metafunc.config.backends.items() if backend.modes[GLA_VALUE_GATE.name]
        }
        if "case" in metafunc.fixturenames:
            cases = [
                (name, case)
                for name, backend in listed.items()
                for case, x in CASES.items()
                if x.dtype in backend.dtypes
            ]
            metafunc.parametrize("backend, case", cases, indirect=["backend"])
        else:
            metafunc.parametrize("backend", listed, indirect=True)


def sequences(case, mask):
    """(n, the row, its tokens in the order they go)."""
    if case.bounds:
        spans = [(n, 0, np.arange(*span)) for n, span in enumerate(zip(case.bounds, case.bounds[1:]))]
    else:
        spans = [(b, b, np.arange(case.T) if mask is None else np.flatnonzero(mask[b])) for b in range(case.B)]
    return [(n, b, tokens[::-1] if case.options.get("reverse") else tokens) for n, b, tokens in spans]


def heads(case, name):
    """The heads of an array that go with the value heads."""
    return slice(None) if name in ("v", "gv") else np.repeat(np.arange(case.H), case.groups)


def computed(case, arrays, start, mask):
    """(o, final states) by the equation, a sequence and value head at a time."""
    o, final = np.zeros(arrays[2].shape), double(start).copy()
    for n, b, tokens in sequences(case, mask):
        alone = [
            double(x)[b : b + 1, heads(case, name)][:, :, tokens] for name, x in zip(GLA_VALUE_GATE.arrays, arrays)
        ]
        o[b : b + 1][:, :, tokens], final[n : n + 1] = literal(
            GLA_VALUE_GATE, alone, scale=case.scale, initial_state=final[n : n + 1]
        )
    return o, final


def pulled_back(case, arrays, start, mask, do, dht):
    """The gradients, those of a token's step one after the other."""
    found, initial = [np.zeros(x.shape) for x in arrays], double(dht).copy()
    for n, b, tokens in sequences(case, mask):
        alone = [
            double(x)[b : b + 1, heads(case, name)][:, :, tokens] for name, x in zip(GLA_VALUE_GATE.arrays, arrays)
        ]
        _, pull = vjp(gla, *alone, scale=case.scale, initial_state=double(start)[n : n + 1], mode="recurrent")
        *gradients, initial[n : n + 1] = pull(double(do)[b : b + 1][:, :, tokens], double(dht)[n : n + 1])
        for x, (name, dx) in zip(found, zip(GLA_VALUE_GATE.arrays, gradients)):
            if name not in ("v", "gv"):
                dx = dx.reshape(1, case.H, case.groups, *dx.shape[2:]).sum(2)
            x[b : b + 1][:, :, tokens] = dx
    return found, initial


def there(backend, case, x, soiled=None):
    """An array [B, H, T, ...] as the case's caller has it; padding holds NaN, and if `strided` so do rows between."""
    x = x.copy()
    if soiled is not None:
        x.swapaxes(1, 2)[~soiled] = np.nan
    x = np.ascontiguousarray(swap_heads(x, "B H T D", case.layout))
    if not case.strided:
        return backend.asarray(x)
    wide = np.full((x.shape[0], 2 * x.shape[1], x.shape[2], x.shape[3] + 3), np.nan).astype(x.dtype)
    wide[:, ::2, :, 3:] = x
    return backend.asarray(wide)[:, ::2, :, 3:]


def states_there(backend, case, x):
    return backend.asarray(np.ascontiguousarray(x.swapaxes(2, 3) if case.options.get("state_v_first") else x))


def states_back(backend, case, x):
    return backend.tohost(x).swapaxes(2, 3) if case.options.get("state_v_first") else backend.tohost(x)


def arguments(backend, case, mask):
    found = {"layout": case.layout, "scale": case.scale, **case.options}
    found |= {"cu_seqlens": list(case.bounds)} if case.bounds else {}
    return found | ({} if mask is None else {"mask": backend.asarray(mask)})


@pytest.mark.pairwise(half="case")
def test_is_the_equation(backend, case, rng):
    case = CASES[case]
    arrays, (start, _) = case.drawn(rng)
    mask = case.mask(rng) if case.masked else None
    wanted, expected = computed(case, arrays, start, mask)
    for mode in ("auto", *backend.modes[GLA_VALUE_GATE.name]):
        inputs = [there(backend, case, x, mask) for x in arrays]
        before = [backend.tohost(x).copy() for x in inputs]
        for out in (None, guarded(backend, swap_heads(wanted, "B H T D", case.layout).shape, case.dtype)):
            o, final = backend.run(
                gla,
                *inputs,
                mode=mode,
                initial_state=states_there(backend, case, start),
                out=out and out.view,
                output_final_state=True,
                **arguments(backend, case, mask),
            )
            assert out is None or o is out.view
            assert o.dtype == case.dtype
            assert_close(f"o, {mode}", swap_heads(backend.tohost(o), "B H T D", case.layout), wanted, case.dtype)
            found = states_back(backend, case, final)
            assert_close("state", found, expected, max((found.dtype.name, case.dtype.name), key=COARSER.index))
        out.assert_rest_untouched()
        assert all(same_bits(backend.tohost(x), copy) for x, copy in zip(inputs, before))


@pytest.mark.pairwise(half="case")
def test_gradients(backend, case, rng):
    case = CASES[case]
    arrays, (start, dht) = case.drawn(rng)
    mask = case.mask(rng) if case.masked else None
    do = rng.standard_normal(arrays[2].shape).astype(case.dtype)
    wanted, expected = pulled_back(case, arrays, start, mask, do, dht)
    inputs = [there(backend, case, x, mask) for x in arrays]
    _, pull = backend.run(
        vjp, gla, *inputs, initial_state=states_there(backend, case, start), **arguments(backend, case, mask)
    )
    *found, initial = pull(there(backend, case, do, mask), states_there(backend, case, dht))
    for (name, given), x, y in zip(zip(GLA_VALUE_GATE.arrays, arrays), found, wanted, strict=True):
        assert x.dtype == given.dtype
        assert_close(f"d{name}", swap_heads(backend.tohost(x), "B H T D", case.layout), y, case.dtype, factor=10)
    assert_close("dh0", states_back(backend, case, initial), expected, case.dtype, factor=10)


def test_every_gate_on_either_side(backend, rng):
    """With gradients, of the final state too, and of every number of tokens around a piece of 16 and two chunks."""
    for n, regimes in enumerate(HARD):
        dtype = DOUBLE if DOUBLE in backend.dtypes and n % 2 else SINGLE
        case = Case(H=1, T=15 + n, K=8, V=12, regimes=regimes, dtype=dtype)
        arrays, (start, dht) = case.drawn(rng)
        wanted, expected = computed(case, arrays, start, None)
        do = rng.standard_normal(wanted.shape).astype(case.dtype)
        gradients, dh0 = pulled_back(case, arrays, start, None, do, dht)
        given = [backend.asarray(x) for x in arrays]
        (o, final), pull = backend.run(vjp, gla, *given, initial_state=backend.asarray(start), output_final_state=True)
        found = pull(backend.asarray(do), backend.asarray(dht))
        assert_close(f"o, {regimes}", backend.tohost(o), wanted, case.dtype)
        assert_close(f"state, {regimes}", backend.tohost(final), expected, case.dtype)
        for name, x, y in zip((*GLA_VALUE_GATE.arrays, "h0"), found, (*gradients, dh0), strict=True):
            assert_close(f"d{name}, {regimes}", backend.tohost(x), y, case.dtype, factor=10)


@pytest.mark.parametrize("strong", (-10, -20))
def test_gradients_of_strong_gates_among_weak_ones(backend, strong, rng):
    """In float32, on either side or on both: what passes them, e^-40 of a pair at least, is summed by itself. Sums of
    2 x 72 x 8 terms of eight factors each are right to (2 x 72 x 8 + 8) 2^-24, 7e-5, of what their terms come to.
    """
    for sides in (("g",), ("gv",), ("g", "gv")):
        case = Case(B=1, H=1, T=72, K=8, V=8, regimes=("weak", "weak"))
        arrays, _ = case.drawn(rng)
        at = np.r_[16:72:16, 19:72:16]  # on a border of sub-chunks, and within one
        for side in sides:
            arrays[list(GLA_VALUE_GATE.arrays).index(side)][:, :, at] = strong
        do = rng.standard_normal(arrays[2].shape).astype(SINGLE)
        _, pull = backend.run(vjp, gla, *map(backend.asarray, arrays))
        _, exact = vjp(gla, *map(double, arrays), mode="recurrent")
        for x, y in zip(pull(backend.asarray(do))[3:], exact(double(do))[3:], strict=True):
            x, y = backend.tohost(x)[:, :, at], y[:, :, at]
            assert np.linalg.norm(x - y) <= 1e-4 * np.linalg.norm(y), (sides, strong)


def cancelling(q, k, v, g, gv, do):
    """Of dg and dgv of data in half precision, the sum of the absolute terms that cancel in float32. Where no gate of a
    side grows, its pairs of tokens in a sub-chunk of 8 count as queries less keys from t on, so that all pairs behind t
    cancel. Growth on the other side is in their scores: they may be larger than what passes gate t by any factor.
    """
    q, k, v, do = (abs(double(x)) for x in (q, k, v, do))
    g, (B, H, T, K), V = double(g).copy(), q.shape, v.shape[-1]
    g[:, :, ::8] = -np.inf  # no pair but those of a sub-chunk
    nothing = np.zeros((B, H, K, V))
    o, pull = vjp(gla, q, k, v, g, double(gv), initial_state=nothing, mode="recurrent")
    dq, dk, dv, *_ = pull(do, nothing)
    terms = [q * dq + k * dk, do * o + v * dv]
    return [
        np.concatenate([x[:, :, n : n + 8][:, :, ::-1].cumsum(2)[:, :, ::-1] for n in range(0, T, 8)], 2) for x in terms
    ]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", (SINGLE, BFLOAT16), ids=str)
@pytest.mark.parametrize("side", ("g", "gv"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [70, 13])
@pytest.mark.parametrize("K, V, P", [(20, 24, 0), (5, 12, 1), (8, 4, 3)])
def test_growth_on_either_side(device, rng, monkeypatch, K, V, P, T, dtype, side, kind):
    """Beside resets: each number is held to the size of what it is a sum of, as in test_growth. P: the segments of
    sequences of small heads."""
    monkeypatch.setattr(segments, "SMALL_TOKENS", 0)
    monkeypatch.setattr(segments, "segments_of_small_heads", lambda *sizes: P)
    case = Case(T=T, K=K, V=V, dtype=dtype, regimes=("weak", "weak"))
    arrays, (start, dht) = case.drawn(rng)
    grown = list(GLA_VALUE_GATE.arrays).index(side)
    arrays[grown] = KINDS[kind](rng, arrays[grown].shape, 60.0).astype(dtype)
    do = rng.standard_normal(arrays[2].shape).astype(dtype)
    problem = GLA_VALUE_GATE.bind(
        [device.upload(x) for x in arrays], initial_state=device.upload(start), output_final_state=True
    )
    o, final = planned.run(problem, device)
    found = planned.pull(problem, device, device.upload(do), (device.upload(dht),))
    found = [double(planned.host(x)) for x in (o, *final, *found[0], *found[1])]

    def both(q, k, v, g, gv, start, do, dht):
        given = [q, k, v, g, gv]
        gradients, dh0 = pulled_back(case, given, start, None, do, dht)
        return [*computed(case, given, start, None), *gradients, dh0]

    given = [*map(double, (*arrays, start, do, dht))]
    wanted = both(*given)
    sizes = both(*(x if n in (3, 4) else abs(x) for n, x in enumerate(given)))
    far, least = LIMITS[dtype]
    if dtype == BFLOAT16:
        for place, size in zip((5, 6), cancelling(*arrays, do)):
            sizes[place] += 3e-6 / far * size
    for name, x, y, size in zip(("o", "final", "dq", "dk", "dv", "dg", "dgv", "dh0"), found, wanted, sizes):
        off = abs(x - y) / (far * size + least)
        assert off.max() <= 1, (name, np.mean(~(off <= 1)), np.nanmax(off))


def test_without_states_and_one_of_them(backend, rng):
    """No initial state is one of zeros, no gradient of the final state likewise."""
    case = Case(T=40)
    arrays, (start, dht) = case.drawn(rng)
    given, do = [backend.asarray(x) for x in arrays], rng.standard_normal(arrays[2].shape).astype(SINGLE)
    zeros = np.zeros_like(start)
    assert_close("o", backend.tohost(backend.run(gla, *given)), computed(case, arrays, zeros, None)[0], SINGLE)
    for before, after in ((None, None), (None, dht), (start, None)):
        state, end = (None if x is None else backend.asarray(x) for x in (before, after))
        found = backend.run(vjp, gla, *given, initial_state=state)[1](backend.asarray(do), end)
        before, after = (zeros if x is None else x for x in (before, after))
        wanted, dh0 = pulled_back(case, arrays, before, None, do, after)
        for x, y in zip(found, [*wanted, *([] if state is None else [dh0])], strict=True):
            assert_close("gradient", backend.tohost(x), y, SINGLE, factor=10)


def test_a_gate_of_zero_is_none(backend, rng):
    arrays, (start, dht) = Case(B=2).drawn(rng)
    arrays[4][...] = 0
    do = backend.asarray(rng.standard_normal(arrays[2].shape).astype(SINGLE))
    given, start, dht = [backend.asarray(x) for x in arrays], *map(backend.asarray, (start, dht))
    (o, final), pull = backend.run(vjp, gla, *given, initial_state=start, output_final_state=True)
    (plain, last), plain_pull = backend.run(vjp, gla, *given[:4], initial_state=start, output_final_state=True)
    dq, dk, dv, dg, _, dh0 = pull(do, dht)
    for x, y in zip((o, final, dq, dk, dv, dg, dh0), (plain, last, *plain_pull(do, dht)), strict=True):
        assert_close("without gv", backend.tohost(x), backend.tohost(y), SINGLE, factor=10)


def test_split_anywhere_is_one_pass(backend, rng):
    arrays, (start, _) = Case(T=60, regimes=("weak", "some-inf")).drawn(rng)
    given, state = [backend.asarray(x) for x in arrays], backend.asarray(start)
    whole, last = backend.run(gla, *given, initial_state=state, output_final_state=True)
    for at in (1, 17, 59):
        found, final = [], state
        for tokens in (slice(0, at), slice(at, None)):
            o, final = backend.run(gla, *(x[:, :, tokens] for x in given), initial_state=final, output_final_state=True)
            found.append(backend.tohost(o))
        assert_close("o", np.concatenate(found, axis=2), backend.tohost(whole), SINGLE)
        assert_close("state", backend.tohost(final), backend.tohost(last), SINGLE)


def test_turned_over_it_is_itself(backend, rng):
    """sum o do of one is that of the other, with keys for values and queries for gradients."""
    (q, k, v, g, gv), _ = Case(T=40, K=12, V=12).drawn(rng)
    do = rng.standard_normal(v.shape).astype(SINGLE)
    o, dq = (
        backend.tohost(backend.run(gla, *map(backend.asarray, arrays), scale=1.0))
        for arrays in ((q, k, v, g, gv), (do, v, k, gv, g))
    )
    assert_close("sum", (o * do).sum(-1, dtype=DOUBLE), (q * dq).sum(-1, dtype=DOUBLE), SINGLE)


def test_calls_alike(backend, rng):
    """The second call of a kind takes a shorter way, with a mask of its own."""
    case = Case(B=2, T=30, groups=2, layout="bthd", masked=True)
    for _ in range(3):
        arrays, (start, _) = case.drawn(rng)
        mask = case.mask(rng)
        inputs = [there(backend, case, x, mask) for x in arrays]
        o = backend.run(gla, *inputs, initial_state=backend.asarray(start), **arguments(backend, case, mask))
        assert_close("o", backend.tohost(o).swapaxes(1, 2), computed(case, arrays, start, mask)[0], SINGLE)


def test_heads_are_wide(backend, rng):
    """Whose gradients, too, go over tiles of channels and of columns."""
    case = Case(B=1, H=1, T=70, K=300, V=260)
    arrays, (start, dht) = case.drawn(rng)
    do = rng.standard_normal(arrays[2].shape).astype(SINGLE)
    wanted, expected = computed(case, arrays, start, None)
    gradients, dh0 = pulled_back(case, arrays, start, None, do, dht)
    given = [backend.asarray(x) for x in arrays]
    (o, final), pull = backend.run(vjp, gla, *given, initial_state=backend.asarray(start), output_final_state=True)
    assert_close("o", backend.tohost(o), wanted, SINGLE)
    assert_close("state", backend.tohost(final), expected, SINGLE)
    for x, y in zip(pull(backend.asarray(do), backend.asarray(dht)), (*gradients, dh0), strict=True):
        assert_close("gradient", backend.tohost(x), y, SINGLE, factor=10)


def test_heads_take_turns(backend, rng, monkeypatch):
    """Where what is kept between kernels is larger than the inputs."""
    if backend.device is None:
        pytest.skip("NumPy keeps less")
    case = Case(B=2, H=3, bounds=None)
    arrays, (start, dht) = case.drawn(rng)
    do = rng.standard_normal(arrays[2].shape).astype(SINGLE)
    wanted, dh0 = pulled_back(case, arrays, start, None, do, dht)
    monkeypatch.setattr(gated_backward, "STATE_BYTES", 1)
    given = [backend.asarray(x) for x in arrays]
    _, pull = backend.run(vjp, gla, *given, initial_state=backend.asarray(start))
    for x, y in zip(pull(backend.asarray(do), backend.asarray(dht)), (*wanted, dh0), strict=True):
        assert_close("gradient", backend.tohost(x), y, SINGLE, factor=10)


def test_what_kernels_do_not_take_is_refused(backend, rng):
    if backend.device is None:
        pytest.skip("NumPy takes all")
    wide = backend.asarray(np.zeros((1, 2, 5, 257), SINGLE))
    v = backend.asarray(np.zeros((1, 2, 5, 4), SINGLE))
    with pytest.raises(NotSupported, match="gla with gv: .*K=257 is over 256"):
        backend.run(gla, wide, wide, v, wide, v, mode="recurrent")


# -- the host plans ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype, gates", [(SINGLE, None), (BFLOAT16, None), (BFLOAT16, SINGLE)], ids=str)
@pytest.mark.parametrize("stateful", [False, True], ids=["", "states"])
def test_plans_and_replays(stateful, dtype, gates, rng):
    """Calls alike share a plan, also where it copies a gate."""
    on, case = planned.Noting(), Case(T=20, K=24, V=16, dtype=dtype, gates=(gates, None))
    for _ in range(3):
        arrays, (start, dht) = case.drawn(rng)
        do = rng.standard_normal(arrays[2].shape).astype(dtype)
        initial = start if stateful else None
        problem = GLA_VALUE_GATE.bind(arrays, gradient=True, output_final_state=True, initial_state=initial)
        for one, many, rest in (
            (planned.run, planned.replayed, ()),
            (planned.pull, planned.replayed_pull, (do, (dht,) if stateful else None)),
        ):
            wanted, found = flat(one(problem, on, *rest)), flat(many(problem, on, *rest))
            assert all(x is y is None or same_bits(x, y) for x, y in zip(found, wanted, strict=True))
    assert len(planned.compiled(problem)) == 2
    plan = planned.plan_of(problem.replace(gradient=False), on)
    chunk = 32 if dtype == BFLOAT16 else 16
    assert plan.mode == "chunk" and plan.tiles == {"BK": 64, "BV": 64, "chunk": chunk, "sub_chunk": 8}
    assert planned.plan_of(problem.replace(gradient=False, mode="recurrent"), on).tiles == {"BK": 64, "BV": 32}
    assert plan.copies == (("gv: in float32, as the other gate",) if gates else ())


@pytest.mark.parametrize(
    "dtype, gates", [(SINGLE, None), (BFLOAT16, None), (BFLOAT16, SINGLE), (HALF, SINGLE)], ids=str
)
def test_blocks_fit_small_cards(dtype, gates):
    """Whose blocks have 99 KB of shared memory; more channels than a launch has are several."""
    on = planned.Noting(capability=89)
    on.shared_per_block = 99 * 1024
    for K, V, launches in ((64, 64, 1), (128, 128, 1 + (gates is SINGLE and dtype == BFLOAT16)), (300, 128, None)):
        arrays = [np.zeros((1, 1, 9, n), dtype) for n in (K, K, V)]
        arrays += [np.zeros((1, 1, 9, n), gates or dtype) for n in (K, V)]
        plan = planned.plan_of(GLA_VALUE_GATE.bind(arrays), on)
        assert all(kernel.shared_bytes <= on.shared_per_block for kernel in plan.kernels)
        assert len(plan.launches) == (launches or -(-K // plan.tiles["BK"]))


def test_few_heads_are_cut_into_segments():
    arrays = [np.zeros((1, 1, 530, 8), SINGLE)] * 5
    plan = planned.plan_of(GLA_VALUE_GATE.bind(arrays, output_final_state=True), planned.Noting())
    assert plan.tiles["segments"] == 4
    assert planned.names(plan) == ["value_gate_forward", "gated_scan_segments", "value_gate_forward"]


def test_scratch_is_what_is_made(rng):
    on, (arrays, (start, _)) = planned.Noting(), Case(T=20, K=24, V=16).drawn(rng)
    problem = GLA_VALUE_GATE.bind(arrays, gradient=True)
    found = flat(planned.pull(problem, on, arrays[2], None))
    scratch = planned.plan_of(problem, on).scratch
    assert sum(x.nbytes for x in on.made) == scratch + sum(x.nbytes for x in found if x is not None)
    assert planned.plan_of(problem.replace(initial_state=(start,)), on).scratch == scratch


# -- the public face, on the host alone --------------------------------------------------------------------------------
def test_finite_differences(rng):
    case = Case(T=5, K=3, V=2, dtype=DOUBLE, bounds=(0, 2, 5))
    arrays, (start, dht) = case.drawn(rng)
    inputs, do = [*arrays, start], rng.standard_normal(arrays[2].shape)

    def result():
        o, final = gla(*arrays, initial_state=start, output_final_state=True, cu_seqlens=[0, 2, 5], mode="recurrent")
        return (o * do).sum() + (final * dht).sum()

    for mode in GLA_VALUE_GATE.modes:
        found = vjp(gla, *arrays, initial_state=start, cu_seqlens=[0, 2, 5], mode=mode)[1](do, dht)
        for x, dx in zip(inputs, found, strict=True):
            wanted = np.empty(x.size)
            for place in range(x.size):
                value = x.flat[place]
                x.flat[place] = value + 1e-6
                above = result()
                x.flat[place] = value - 1e-6
                wanted[place] = (above - result()) / 2e-6
                x.flat[place] = value
            np.testing.assert_allclose(dx, wanted.reshape(x.shape), rtol=1e-6, atol=1e-8)


def test_long_and_large(rng):
    """Pieces of all lengths, chunk sizes and values that leave little room."""
    for regime in ("weak", "positive", "zero", "by_channel", "spikes-40"):
        (q, k, v, g, gv), (start, _) = Case(T=700, K=8, V=6, regimes=("logsigmoid", regime)).drawn(rng)
        arrays = [q, k, 1e15 * v, g, gv]
        wanted, _ = computed(Case(T=700, K=8, V=6), arrays, 1e15 * start, None)
        for chunk_size in (None, 16, 48):
            o = gla(*arrays, initial_state=1e15 * start, chunk_size=chunk_size)
            assert_close("o", o / 1e15, wanted / 1e15, SINGLE)


def test_five_arrays_by_place_or_by_name(rng):
    arrays, _ = Case(T=8).drawn(rng)
    *four, gv = arrays
    o, pull = vjp(gla, *arrays)
    named, by_name = vjp(gla, *four, gv=gv)
    assert same_bits(o, named) and same_bits(gla(*arrays), gla(*four, gv=gv))
    assert all(same_bits(x, y) for x, y in zip(pull(o), by_name(o), strict=True)) and len(pull(o)) == 5
    for rest in ((None,), ()):
        assert same_bits(gla(*four, *rest), gla(*four))
        assert len(vjp(gla, *four, *rest)[1](o)) == 4
        assert explain(gla, *four, *rest).op == "gla"


def test_explained(rng):
    arrays, _ = Case(T=8).drawn(rng)
    found = explain(gla, *arrays)
    assert (found.op, found.backend, found.mode) == ("gla with gv", "numpy", "chunk")
    assert found.kernels == ("linattn_np.backends.numpy.value_gate",)
    assert found.bytes == sum(x.nbytes for x in arrays) + arrays[2].nbytes
    assert explain(gla, *arrays, mode="recurrent").kernels == ("linattn_np.backends.numpy.recurrent",)
    assert explain(gla, *arrays, mask=np.ones((1, 8), bool)).copies == ("q, k, v, g, gv: without padding",)
    assert {"cupy", "numba"} == set(found.reasons)
    grouped, _ = Case(T=8, groups=2).drawn(rng)
    assert [copy.split(":")[0] for copy in explain(gla, *grouped).copies] == ["v", "gv"]


WRONG = {
    "V": ({"gv": np.zeros((2, 3, 7, 4), SINGLE)}, ContractError, "gv has V=4, but V=5 elsewhere"),
    "K": ({"gv": np.zeros((2, 3, 7), SINGLE)}, ContractError, "gv has 3 axes"),
    "T": ({"gv": np.zeros((2, 3, 6, 5), SINGLE)}, ContractError, "gv has T=6, but T=7 elsewhere"),
    "H": ({"gv": np.zeros((2, 6, 7, 5), SINGLE)}, ContractError, "gv has H=6, but H=3 elsewhere"),
    "HV": (
        {"v": np.zeros((2, 6, 7, 5), SINGLE)},
        ContractError,
        "gv has HV=3, but HV=6 elsewhere; gv is .2, 3, 7, 5., ",
    ),
    "heads": ({name: np.zeros((2, 4, 7, 5), SINGLE) for name in ("v", "gv")}, ContractError, "v has 4 heads"),
    "dtype": ({"gv": np.zeros((2, 3, 7, 5), HALF)}, ContractTypeError, "gv has dtype float16"),
    "list": ({"gv": [0.0]}, ContractTypeError, "gv is a builtins.list"),
    "staged": ({"mode": "staged"}, ContractError, "mode is 'staged', expected one of 'auto', 'recurrent', 'chunk'"),
    "parallel": ({"mode": "parallel"}, ContractError, "mode is 'parallel'"),
    "materialize": ({"materialize": True}, ContractError, "materialize has no meaning with gv"),
    "numba": ({"backend": "numba"}, NotSupported, "numba: it has the gated family, the delta rules"),
    "out": ({"out": None}, ContractError, "out shares memory with gv"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    changes, error, complaint = WRONG[wrong]
    given = {name: np.zeros((2, 3, 7, 5 if "v" in name else 4), SINGLE) for name in GLA_VALUE_GATE.arrays}
    changes = {"out": given["gv"]} if wrong == "out" else changes
    with pytest.raises(error, match=f"gla with gv: {complaint}") as caught:
        gla(**given | changes)
    assert type(caught.value) is error


def test_no_other_operator_takes_it(rng):
    q, k, v, g, gv = Case(T=4).drawn(rng)[0]
    with pytest.raises(TypeError, match="'gv'"):
        vjp(simple_gla, q, k, v, g, gv=gv)
