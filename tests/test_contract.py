"""Every operator, backend and mode on every case, held to float64.

The cases cover each value of each axis (tokens, dims, gates, dtypes, layouts, packing, states, buffers) with every
backend and mode at least once; they are not the full product. A backend runs the cases of its sizes: "tiny" suits a
simulator, "small" a CPU, "large" a card.
"""

import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
from conftest import Emulated
from reference import (
    GATES,
    LIMITS,
    assert_close,
    double,
    draw,
    draw_states,
    errors,
    exact,
    exact_vjp,
    guarded,
    literal,
    parts,
    rms,
    same_bits,
    size_of_gradients_terms,
    size_of_terms,
    stated,
    whole,
)

from linattn_np import NotSupported
from linattn_np.array_kinds import BFLOAT16, FLOATS
from linattn_np.layouts import swap_heads
from linattn_np.ops import OPS


@dataclass(frozen=True)
class Case:
    name: str
    T: int = 70
    K: int = 32
    V: int = 24
    B: int = 1
    H: int = 2
    dtype: str = "float32"
    gate: str = "logsigmoid"
    gate_dtype: str | None = None  # of gates beside half-precision inputs
    layout: str = "bhtd"
    lengths: tuple = ()  # of packed sequences; they settle T
    initial: str | None = None  # dtype of an initial state
    final: bool = True
    state_dtype: str | None = None
    chunk_size: int | None = None
    scale: float | None = None
    fused: bool = False  # the first three arrays are slices of one buffer, where they share a dtype

    @property
    def sizes(self):
        T = sum(self.lengths) if self.lengths else self.T
        return {"B": self.B, "H": self.H, "T": T, "K": self.K, "V": self.V, "N": len(self.lengths) or self.B}

    @property
    def bounds(self):
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64) if self.lengths else None


TINY = (
    Case("T1", T=1, K=8, V=8, initial="float32"),
    Case("T15-f16", T=15, K=8, V=16, H=1, dtype="float16"),
    Case("T16-bf16", T=16, K=16, V=8, H=1, dtype="bfloat16", gate="some-inf", initial="float32"),
    Case("T17-bthd", T=17, K=16, V=16, H=2, layout="bthd", gate="all-20", initial="float32"),
    Case("T40-chunk16", T=40, K=12, V=10, H=1, chunk_size=16, gate="weak"),
    Case("tiny-packed", lengths=(0, 1, 17, 0, 20, 0), K=8, V=8, H=1, initial="float32"),
    Case("batch", B=2, H=2, T=2, K=4, V=3, scale=1.0),
    Case("tiny-fused-gate32", T=18, K=8, V=8, H=1, dtype="bfloat16", gate_dtype="float32", fused=True),
    Case("tiny-all-inf", T=17, K=8, V=8, H=1, gate="all-inf", initial="float32"),
    Case("tiny-all-1e30", T=17, K=8, V=8, H=1, gate="all-1e30"),
    Case("K1-V1", B=3, T=5, K=1, V=1, H=4),  # several sums, as one alone may cancel
)
SMALL = (
    *(Case(f"T{T}", T=T, K=16, V=16, initial="float32") for T in (15, 16, 17, 63, 64, 65, 3 * 64 + 7)),
    Case("T0", T=0, initial="float32"),
    Case("B0", B=0),
    Case("H0", H=0),
    *(
        Case(f"K{K}-V{V}", T=65, K=K, V=V, H=1)
        for K, V in ((8, 16), (16, 8), (60, 100), (64, 64), (100, 60), (128, 64), (64, 128), (256, 64), (64, 256))
    ),
    *(Case(f"gate-{gate}", gate=gate, initial="float32") for gate in GATES),
    *(Case(f"gate-{gate}-bf16", gate=gate, dtype="bfloat16") for gate in ("weak", "all-20", "by_channel", "some-inf")),
    Case("gate-some-inf-f16", gate="some-inf", dtype="float16"),
    Case("gate-some-1e30-gate32", gate="some-1e30", dtype="float16", gate_dtype="float32"),
    *(
        Case(f"{dtype}-{gate}", T=3 * 64 + 7, K=64, V=64, H=1, dtype=dtype, gate=gate)
        for dtype in ("float64", "float32", "float16", "bfloat16")
        for gate in ("logsigmoid", "weak")
    ),
    *(Case(f"float64-gate-{gate}", gate=gate, dtype="float64", initial="float64") for gate in GATES),
    Case("bf16-K64-V128", T=20, K=64, V=128, H=1, dtype="bfloat16"),
    Case("bf16-K256-V256", T=140, K=256, V=256, H=1, dtype="bfloat16"),
    Case("f16-K256-V200", T=20, K=256, V=200, H=1, dtype="float16"),
    Case("bf16-K128-gate32", T=65, K=128, V=60, H=1, dtype="bfloat16", gate_dtype="float32"),
    Case("bthd", layout="bthd", B=2, initial="float32"),
    Case("bthd-fused-f16", layout="bthd", B=2, dtype="float16", fused=True),
    Case("bthd-packed", layout="bthd", lengths=(5, 0, 64, 3)),
    Case("fused", K=16, V=16, fused=True),
    Case("fused-uneven", K=20, V=9, fused=True, dtype="bfloat16"),
    Case("packed", lengths=(0, 0, 7, 65, 0, 130, 1, 0), initial="float32"),
    Case("packed-one-token-each", lengths=(1,) * 40, K=8, V=8, initial="float32"),
    Case("packed-all-empty", lengths=(0, 0, 0), initial="float32"),
    Case("packed-one", lengths=(70,), dtype="bfloat16"),
    Case("packed-hard-gates", lengths=(33, 0, 64, 20), gate="some-inf", initial="float32"),
    Case("no-final-state", final=False, initial="float32"),
    Case("bf16-state", dtype="bfloat16", initial="bfloat16", state_dtype="bfloat16"),
    Case("f16-state", dtype="float16", initial="float16", state_dtype="float16"),
    Case("f64-state", initial="float64", state_dtype="float64"),
    Case("chunk16", chunk_size=16),
    Case("chunk48", chunk_size=48, T=100),
    Case("chunk128", chunk_size=128, T=140),
    Case("scale1", scale=1.0, dtype="bfloat16"),
    Case("scale-2", scale=-2.0),
)
LARGE = (
    *(
        Case(f"large-D{D}-{dtype}", B=2, H=4, T=T, K=D, V=D, dtype=dtype, initial="float32")
        for dtype in ("float32", "bfloat16", "float16")
        for D, T in ((64, 1000), (128, 1000), (256, 300))
    ),
    *(
        Case(f"large-{gate}-{dtype}", B=2, H=4, T=1000, K=64, V=128, dtype=dtype, gate=gate)
        for dtype in ("float32", "bfloat16")
        for gate in ("weak", "zero", "by_channel", "some-inf", "spikes-40", "all-20")
    ),
    Case("large-packed", H=4, lengths=(0, *range(1, 60), 500, 0), K=100, V=60, dtype="bfloat16", initial="float32"),
    Case("large-bthd-fused", B=2, H=4, T=1000, K=128, V=128, layout="bthd", fused=True, dtype="bfloat16"),
)
SIZES = {"tiny": TINY, "small": SMALL, "large": LARGE}
CASES = {case.name: case for cases in SIZES.values() for case in cases}
QUICK = ("T65", "bfloat16-weak", "packed-hard-gates")
OPTIONS = {  # of operators with options of their own; cases take them in turn
    "retention": ({}, {"gamma": 0.9}, {"gamma": 0.0}, {"gamma": 1.0}),
    "linear_attention": (
        {},
        {"feature_map": "elu", "normalize": True},
        {"feature_map": "exp"},
        {"feature_map": "relu", "normalize": True},
        {"feature_map": "elu"},
    ),
    "softmax_attention": ({}, {"causal": False}),
}
BY_NAME = {op.name: (op, function) for op, function in OPS.items()}


def applies(case, op, mode):
    """Whether a case says something about an operator and a mode."""
    if case.gate != "logsigmoid" and not op.gates or case.gate_dtype and not op.gates:
        return False
    return case.chunk_size is None or mode in ("chunk", "staged") and "chunk_size" in op.signature.parameters


def combinations(backends):
    for op in OPS:
        for size, cases in SIZES.items():
            for case in cases:
                for name, backend in backends.items():
                    if size in backend.sizes:
                        for mode in backend.modes[op.name]:
                            if backend.takes(op, mode, np.dtype(case.dtype)) and applies(case, op, mode):
                                yield pytest.param(
                                    op.name,
                                    case.name,
                                    name,
                                    mode,
                                    id=f"{op.name}-{name}-{mode}-{case.name}",
                                    marks=pytest.mark.quick if case.name in QUICK else (),
                                )


def pytest_generate_tests(metafunc):
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize(
            "op, case, backend, mode", list(combinations(metafunc.config.backends)), indirect=["backend"]
        )
    elif "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", metafunc.config.backends, indirect=True)


@lru_cache(maxsize=2)
def posed(op_name, case, seed):
    """(host arrays, the call's arguments but for mode and out, exact o, exact final state parts, the size of o's
    terms).
    """
    op, function = BY_NAME[op_name]
    rng = np.random.default_rng([seed, zlib.crc32(f"{op_name} {case.name}".encode())])
    arrays = draw(op, rng, case.sizes, case.dtype, case.gate, case.gate_dtype)
    turns = OPTIONS.get(op_name, ({},))
    options = dict(turns[list(CASES).index(case.name) % len(turns)])
    if case.scale is not None:
        options["scale"] = case.scale
    if case.lengths:
        options["cu_seqlens"] = case.bounds
    if case.initial and op.state:
        parts = draw_states(stated(op, options), rng, case.sizes, case.initial)
        options["initial_state"] = parts if len(parts) > 1 else parts[0]
    return arrays, options, *exact(function, arrays, **options), size_of_terms(function, arrays, **options)


def native_inputs(backend, arrays, op, case):
    """The host arrays where the backend wants them, in the case's layout and buffers."""
    arrays = [np.ascontiguousarray(swap_heads(x, axes, case.layout)) for x, axes in zip(arrays, op.arrays.values())]
    if not case.fused:
        return [backend.asarray(x.copy()) for x in arrays]
    together = [n for n, x in enumerate(arrays[:3]) if x.dtype == arrays[0].dtype]
    buffer = backend.asarray(np.concatenate([arrays[n] for n in together], axis=-1))
    stops = dict(zip(together, np.cumsum([arrays[n].shape[-1] for n in together]).tolist()))
    return [
        buffer[..., stops[n] - x.shape[-1] : stops[n]] if n in stops else backend.asarray(x)
        for n, x in enumerate(arrays)
    ]


def native_state(backend, state):
    return whole(tuple(backend.asarray(part.copy()) for part in parts(state)))


@pytest.mark.pairwise("backend", "mode")
def test_float64(op, case, backend, mode, seed):
    case = CASES[case]
    declared, function = BY_NAME[op]
    arrays, options, o_exact, final_exact, terms = posed(op, case, seed)
    inputs = native_inputs(backend, arrays, declared, case)
    before = [backend.tohost(x).copy() for x in inputs]
    arguments = {"layout": case.layout, "mode": mode, **options}
    if case.chunk_size:
        arguments["chunk_size"] = case.chunk_size
    if "initial_state" in options:
        arguments["initial_state"] = native_state(backend, options["initial_state"])
    final_asked = case.final and bool(declared.state)
    if final_asked:
        arguments |= {"output_final_state": True, "state_dtype": case.state_dtype}
    out = guarded(backend, swap_heads(o_exact, declared.out, case.layout).shape, case.dtype)

    result = backend.run(function, *inputs, **arguments, out=out.view)

    o, final = result if final_asked else (result, None)
    assert o is out.view
    out.assert_rest_untouched()
    what = f"{op} on {backend.name}, mode {mode}, {case}, options {sorted(options)}"
    o = swap_heads(backend.tohost(o), declared.out, case.layout)
    assert_close(f"{what}: o", o, o_exact, case.dtype, terms=terms)
    if final_asked:
        state_dtype = np.dtype(case.state_dtype or ("float64" if case.dtype == "float64" else "float32"))
        coarser = max(case.dtype, state_dtype.name, key=list(LIMITS).index)
        for part, wanted in zip(parts(final), parts(final_exact), strict=True):
            assert part.dtype == state_dtype
            assert_close(f"{what}: final state", backend.tohost(part), wanted, coarser)
    for x, copy in zip(inputs, before):
        assert same_bits(backend.tohost(x), copy), "an input was changed"
    if "initial_state" in options:
        for part, copy in zip(parts(arguments["initial_state"]), parts(options["initial_state"])):
            assert same_bits(backend.tohost(part), copy), "the initial state was changed"


# -- what the cases rest on --------------------------------------------------------------------------------------------
def test_size_of_terms(rng):
    """Of random signs alone: the root of the mean of squares."""
    for name in ("gla", "rwkv6", "simple_gla", "retention", "linear_attention"):
        op, function = BY_NAME[name]
        arrays = draw(op, rng, {"B": 1, "H": 2, "T": 2, "K": 2, "V": 1}, np.float64)
        start, signs = rng.standard_normal((1, 2, 2, 1)), np.array([*np.ndindex((2,) * 6)]) * 2 - 1
        total = 0
        for sign in signs:  # of each key's and state's channels; queries' signs and values' would change nothing
            k = arrays[1] * sign[:4].reshape(1, 1, 2, 2)
            given = [arrays[0], k, *arrays[2:]]
            total += exact(function, given, initial_state=start * sign[4:].reshape(1, 1, 2, 1))[0] ** 2
        found = size_of_terms(function, arrays, initial_state=start)
        np.testing.assert_allclose(found, np.sqrt(total / len(signs)), rtol=1e-12)


def test_size_of_gradients_terms(rng):
    for name in ("gla", "rwkv6", "simple_gla"):
        op, function = BY_NAME[name]
        arrays = draw(op, rng, {"B": 1, "H": 2, "T": 2, "K": 2, "V": 1}, np.float64)
        do, signs = rng.standard_normal((1, 2, 2, 1)), np.array([*np.ndindex((2,) * 4)]).reshape(-1, 1, 1, 2, 2) * 2 - 1
        for signed, seen in ((0, [1, 2]), (1, [0])):  # the signs of queries, and of keys
            total = 0
            for sign in signs:
                given = [x * sign if n == signed else x for n, x in enumerate(arrays)]
                total += np.array([np.linalg.norm(x) ** 2 for x in exact_vjp(function, given, do)[2][:3]])
            found = size_of_gradients_terms(function, arrays, do)
            norms = np.array([np.linalg.norm(x) for x in found[:3]])
            np.testing.assert_allclose(norms[seen], np.sqrt(total / len(signs))[seen], rtol=1e-12)


@pytest.mark.parametrize("op", [op for op in BY_NAME if op != "softmax_attention"])
@pytest.mark.parametrize("case", ["tiny-packed", "batch", "T17-bthd", "tiny-all-inf", "scale-2"])
def test_exact_answer_is_the_papers_equation(op, case, seed):
    declared, _ = BY_NAME[op]
    arrays, options, o, final, _ = posed(op, CASES[case], seed)
    options = {name: double(x) if name == "initial_state" else x for name, x in options.items()}
    o_literal, final_literal = literal(declared, [double(x) for x in arrays], **options)
    assert_close("o", o, o_literal, "float64")
    for part, wanted in zip(parts(final), parts(final_literal), strict=True):
        assert_close("final state", part, wanted, "float64")


def test_error_figures_see_what_they_should(rng):
    wanted = rng.standard_normal((2, 3, 400, 16))
    assert errors(wanted, wanted) == (0, 0)
    one_row = wanted.copy()
    one_row[1, 2, 77] = 0
    whole, worst = errors(one_row, wanted)
    assert whole < 0.05 and 0.9 < worst <= 1.1
    nan = wanted.copy()
    nan[0, 0, 0, 0] = np.nan
    with pytest.raises(AssertionError):
        assert_close("nan", nan, wanted, "bfloat16")
    rounded = wanted.astype(BFLOAT16)
    assert 1e-3 < errors(rounded, wanted)[0] < 2.5e-3
    assert np.isclose(rms(np.array([3.0, 4.0])), 12.5**0.5)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_what_a_backend_declares_is_what_it_runs(op, backend, rng, request):
    """Every mode and dtype either runs or says why not: nothing falls between. Emulated, each costs a compilation:
    there one of two modes runs with half of the dtypes, the other with the other half."""
    first, half = rng.integers(len(FLOATS)), len(FLOATS) // 2
    few = isinstance(backend, Emulated) and not request.config.getoption("--exhaustive")
    for m, mode in enumerate(op.modes):
        for n, dtype in enumerate(FLOATS):
            arrays = [backend.asarray(x) for x in draw(op, rng, {"B": 1, "H": 1, "T": 2, "K": 8, "V": 8}, dtype)]
            if not backend.takes(op, mode, dtype):
                with pytest.raises(NotSupported, match=f"{op.name}: {backend.name}: "):
                    backend.run(OPS[op], *arrays, mode=mode)
            elif not few or (n - half * m - first) % len(FLOATS) < half:
                assert backend.run(OPS[op], *arrays, mode=mode).shape == (1, 1, 2, 8)


def test_new_outputs_lie_in_the_order_of_q(backend):
    """Without `out`: shape, dtype and memory order of the result, for either layout and for a transposed view."""
    for op, function in OPS.items():
        if not backend.modes[op.name]:
            continue
        sizes = {"B": 1, "H": 2, "T": 3, "K": 8, "V": 4}
        dense = [backend.asarray(x) for x in draw(op, np.random.default_rng(0), sizes, np.float32)]
        seen = [
            backend.asarray(np.ascontiguousarray(swap_heads(backend.tohost(x), axes, "bthd")))
            for x, axes in zip(dense, op.arrays.values())
        ]
        views = [swap_heads(x, axes, "bthd") for x, axes in zip(seen, op.arrays.values())]
        o = backend.run(function, *dense)
        assert o.shape == (1, 2, 3, 4) and o.dtype == np.float32 and o.flags.c_contiguous
        for arrays, layout in ((seen, "bthd"), (views, "bhtd")):
            other = backend.run(function, *arrays, layout=layout)
            in_memory = swap_heads(other, op.out, "bthd") if layout == "bhtd" else other
            assert in_memory.shape == (1, 3, 2, 4) and in_memory.flags.c_contiguous
            assert_close(op.name, backend.tohost(in_memory).swapaxes(1, 2), backend.tohost(o), np.float32)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_output_of_every_second_number(backend, op, rng):
    """Its rows start on 16 bytes, and yet no copy of 16 bytes may write them: the numbers between stay."""
    modes = backend.modes[op.name]
    dtype = BFLOAT16 if np.dtype(BFLOAT16) in backend.dtypes else np.float32
    if not modes:
        pytest.skip("not this backend's")
    T, D = (8, 16) if backend.sizes == ("tiny",) else (40, 64)
    arrays = draw(op, rng, {"B": 1, "H": 2, "T": T, "K": D, "V": D}, dtype)
    wanted, _ = exact(OPS[op], arrays)
    memory = backend.asarray(np.full((*wanted.shape[:-1], 2 * D), np.nan, np.float32).astype(dtype))
    backend.run(OPS[op], *map(backend.asarray, arrays), out=memory[..., ::2])
    assert_close("o", backend.tohost(memory)[..., ::2], wanted, dtype, terms=size_of_terms(OPS[op], arrays))
    assert np.isnan(double(backend.tohost(memory)[..., 1::2])).all()


def test_rows_that_are_not_contiguous(backend):
    """Transposed last axes, memory off by one element, negative and zero strides give what their copies give."""
    for op, function in OPS.items():
        if not backend.modes[op.name]:
            continue
        sizes = {"B": 1, "H": 2, "T": 3, "K": 8, "V": 4}
        host = draw(op, np.random.default_rng(0), sizes, np.float32)
        wanted = backend.tohost(backend.run(function, *map(backend.asarray, host)))
        columns = [backend.asarray(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2) for x in host]
        backwards = [backend.asarray(np.ascontiguousarray(x[:, ::-1]))[:, ::-1] for x in host]
        shifted = [backend.asarray(np.append(np.float32(0), x))[1:].reshape(x.shape) for x in host]
        for arrays in (columns, backwards, shifted):
            assert_close(op.name, backend.tohost(backend.run(function, *arrays)), wanted, np.float32)
        one = [backend.asarray(x[:, :1]) if x.ndim > 2 else backend.asarray(x[:1]) for x in host]
        xp = np if isinstance(one[0], np.ndarray) else __import__("cupy")
        repeated = [xp.broadcast_to(x, (x.shape[0], 2, *x.shape[2:]) if x.ndim > 2 else (2, *x.shape[1:])) for x in one]
        both = backend.tohost(backend.run(function, *repeated, **({"gamma": 0.9} if op.name == "retention" else {})))
        assert_close(op.name, both[:, 1], both[:, 0], np.float32)
