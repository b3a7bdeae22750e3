"""Grouped value heads are the call with what they share repeated for each of them, whatever the backend: q and k, and
the gate where it has no more heads."""

import numpy as np
import pytest
from conftest import SINGLE
from reference import assert_close, draw, draw_states, exact, parts, same_bits, stated, turned, whole, with_value_heads

from linattn_np import ContractError, explain, gla, gla_step, simple_gla, softmax_attention, value_heads, vjp
from linattn_np.array_kinds import BFLOAT16
from linattn_np.dispatch import choose
from linattn_np.ops import OPS

G = 3
VARIANTS = {op.name: (op, function, {}) for op, function in OPS.items() if op.state}
VARIANTS["linear_attention-elu-normalized"] = (
    *VARIANTS["linear_attention"][:2],
    {"feature_map": "elu", "normalize": True},
)
SIZES = {"B": 2, "H": 2, "T": 40, "K": 16, "V": 8, "N": 2}
PACKED = {**SIZES, "B": 1, "N": 3}
BOUNDS = [0, 23, 23, 40]
WIDE = {**SIZES, "B": 1, "N": 1, "H": 1, "T": 20, "V": 100}


OUT = "B HV T V"


def axes_of(op):
    """The axes of each array, HV where it has value heads."""
    return [axes.replace("H", "HV") if name in with_value_heads(op) else axes for name, axes in op.arrays.items()]


def axes_of_state(op, options):
    parts = stated(op, options).state
    return [axes.replace("H", "HV") if axes.endswith("V") else axes for axes in parts]


def heads(axes):
    """How many times the heads of a caller's array are those of q."""
    return G if "HV" in axes.split() else 1


def drawn(op, options, rng, sizes, dtype=SINGLE):
    """Arrays and states of a grouped call."""
    many = {**sizes, "H": G * sizes["H"]}
    arrays = [
        y if heads(axes) > 1 else x
        for x, y, axes in zip(draw(op, rng, sizes, dtype), draw(op, rng, many, dtype), axes_of(op))
    ]
    few, enough = (draw_states(stated(op, options), rng, count, dtype) for count in (sizes, many))
    states = tuple(y if heads(axes) > 1 else x for x, y, axes in zip(few, enough, axes_of_state(op, options)))
    return arrays, states


def repeated(x, axes):
    """`x` for every value head."""
    return x if heads(axes) > 1 else np.repeat(x, G, axis=axes.split().index("H"))


def gathered(x, axes):
    """Gradients of repeated heads added up."""
    if heads(axes) > 1:
        return x
    at = axes.split().index("H")
    return x.reshape(*x.shape[:at], -1, G, *x.shape[at + 1 :]).sum(at + 1)


def spread(op, options, sizes):
    """The options of the repeated call: a decay a head is repeated too."""
    if op.name == "retention":
        return {**options, "gamma": np.repeat(1 - 2.0 ** (-5 - np.arange(sizes["H"])), G)}
    return options


def in_memory(x, axes, layout):
    """`x` as a caller has it in a layout."""
    return np.ascontiguousarray(x.swapaxes(1, 2)) if layout == "bthd" and axes.split()[2:3] == ["T"] else x


@pytest.mark.pairwise
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "layout, turns", [("bhtd", False), ("bhtd", True), ("bthd", True)], ids=["bhtd", "bhtd-turned", "bthd-turned"]
)
def test_is_the_call_on_repeated_heads(backend, variant, layout, turns, packed, rng):
    """Every mode; turned: backwards in time with states [N, HV, V, K]."""
    op, function, options = VARIANTS[variant]
    sizes = PACKED if packed else SIZES
    options = {**options, **({"cu_seqlens": BOUNDS} if packed else {}), "reverse": turns}
    host, start = drawn(op, options, rng, sizes)
    axes = axes_of(op)
    wanted, expected = exact(
        function,
        [repeated(x, a) for x, a in zip(host, axes)],
        initial_state=whole(tuple(map(repeated, start, axes_of_state(op, options)))),
        **spread(op, options, sizes),
    )
    for mode in backend.modes[op.name]:
        there = [backend.asarray(in_memory(x, a, layout)) for x, a in zip(host, axes)]
        o, final = backend.run(
            function,
            *there,
            mode=mode,
            layout=layout,
            **options,
            output_final_state=True,
            state_v_first=turns,
            initial_state=whole(tuple(backend.asarray(turned(part) if turns else part) for part in start)),
        )
        assert_close(f"o, {mode}", backend.tohost(o), in_memory(wanted, OUT, layout), SINGLE)
        assert all(stride > 0 for stride in o.strides)
        for part, x, a in zip(parts(final), parts(expected), axes_of_state(op, options), strict=True):
            part = backend.tohost(part)
            assert_close("state", turned(part) if turns else part, gathered(x, a) / (G if heads(a) == 1 else 1), SINGLE)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "layout, turns", [("bhtd", False), ("bhtd", True), ("bthd", True)], ids=["bhtd", "bhtd-turned", "bthd-turned"]
)
def test_gradients(backend, variant, layout, turns, rng):
    """Those of the repeated call in float64, added up over a group; the initial state's too."""
    if not backend.gradients:
        pytest.skip(f"{backend.name} has no gradients")
    compare_gradients(backend, variant, SIZES, rng, layout, turns)


@pytest.mark.pairwise
def test_gradients_of_wide_groups(backend, variant, rng):
    """More columns together than a tile of the CUDA kernels has."""
    if not backend.gradients:
        pytest.skip(f"{backend.name} has no gradients")
    compare_gradients(backend, variant, WIDE, rng)


def test_wide_groups_are_taken_whole(backend, rng):
    """Tiles cover any number of columns, of a gradient too."""
    if not backend.gradients:
        pytest.skip(f"{backend.name} has no gradients")
    op = VARIANTS["gla"][0]
    problem = op.bind([backend.asarray(x) for x in drawn(op, {}, rng, WIDE)[0]])
    for gradient in (False, True):
        assert backend.run(choose, problem.replace(gradient=gradient, memo=None)) == backend.name


def compare_gradients(backend, variant, sizes, rng, layout="bhtd", turns=False):
    op, function, options = VARIANTS[variant]
    options = {**options, "reverse": turns}
    host, start = drawn(op, options, rng, sizes)
    axes, state = axes_of(op), axes_of_state(op, options)
    do = rng.standard_normal([{**sizes, "H": G * sizes["H"]}[axis] for axis in "B H T V".split()]).astype(SINGLE)
    dht = tuple(rng.standard_normal(part.shape).astype(SINGLE) for part in start)

    def states(given):
        return whole(tuple(backend.asarray(turned(part) if turns else part) for part in given))

    _, pull = backend.run(
        vjp,
        function,
        *(backend.asarray(in_memory(x, a, layout)) for x, a in zip(host, axes)),
        layout=layout,
        state_v_first=turns,
        initial_state=states(start),
        **options,
    )
    *found, initial = pull(backend.asarray(in_memory(do, OUT, layout)), states(dht))

    def first(x, a):
        """What has one head for a group takes the gradient of the group's first alone."""
        x = repeated(x, a).astype(np.float64)
        return x if heads(a) > 1 else np.where(np.arange(x.shape[1])[:, None] % G == 0, x, 0)

    double = [repeated(x, a).astype(np.float64) for x, a in zip(host, axes)]
    *wanted, expected = vjp(
        function,
        *double,
        initial_state=whole(tuple(repeated(x, a).astype(np.float64) for x, a in zip(start, state))),
        **spread(op, options, sizes),
    )[1](do.astype(np.float64), whole(tuple(map(first, dht, state))))
    for name, a, x, y in zip(op.arrays, axes, found, wanted, strict=True):
        assert_close(f"d{name}", backend.tohost(x), in_memory(gathered(y, a), a, layout), SINGLE, factor=10)
    for part, x, a in zip(parts(initial), parts(expected), state, strict=True):
        part = backend.tohost(part)
        assert_close("dh0", turned(part) if turns else part, gathered(x, a), SINGLE, factor=10)


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_calls_alike_and_out(backend, layout, rng):
    """The second call of a kind takes a shorter way; `out` is written in either memory order."""
    op = VARIANTS["gla"][0]
    for _ in range(3):
        host, (start,) = drawn(op, {}, rng, SIZES)
        wanted, expected = exact(gla, [repeated(x, a) for x, a in zip(host, axes_of(op))], initial_state=start)
        there = [backend.asarray(in_memory(x, a, layout)) for x, a in zip(host, axes_of(op))]
        out = backend.asarray(in_memory(np.full((2, 2 * G, 40, 8), np.nan, SINGLE), OUT, layout))
        o, final = backend.run(
            gla, *there, layout=layout, out=out, initial_state=backend.asarray(start), output_final_state=True
        )
        assert o is out
        assert_close("o", backend.tohost(out), in_memory(wanted, OUT, layout), SINGLE)
        assert_close("state", backend.tohost(final), expected, SINGLE)


def test_in_half_precision(backend, rng):
    """Where the kernels for the latest cards step in."""
    op = VARIANTS["gla"][0]
    host, _ = drawn(op, {}, rng, {**SIZES, "K": 64, "V": 32}, BFLOAT16)
    o = backend.run(gla, *(backend.asarray(in_memory(x, a, "bthd")) for x, a in zip(host, axes_of(op))), layout="bthd")
    wanted, _ = exact(gla, [repeated(x, a) for x, a in zip(host, axes_of(op))])
    assert_close("o", backend.tohost(o), wanted.swapaxes(1, 2), BFLOAT16)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "sizes, options",
    [
        ({"T": 70, "K": 64, "V": 32}, {}),
        ({"T": 70, "K": 128, "V": 128}, {"layout": "bthd"}),
        ({"T": 70, "K": 24, "V": 104}, {"reverse": True}),
        ({"T": 70, "K": 64, "V": 64, "B": 1}, {"cu_seqlens": [0, 5, 5, 70]}),
        ({"T": 1100, "K": 128, "V": 72, "B": 1, "H": 1}, {}),
        ({"T": 70, "K": 160, "V": 64}, {}),
        ({"T": 9, "K": 20, "V": 11}, {}),
    ],
    ids=["narrow", "wide", "reversed", "packed", "segments", "tiles", "uneven"],
)
def test_keys_that_heads_of_simple_gla_share(kernel_backend, sizes, options, rng):
    """To the bit what copies of them give, their gradients added up in float32."""
    op, _, _ = VARIANTS["simple_gla"]
    sizes, layout = SIZES | sizes, options.get("layout", "bhtd")
    arrays = draw(op, rng, {**sizes, "H": G * sizes["H"]}, BFLOAT16, gate_dtype=BFLOAT16)
    do = rng.standard_normal(arrays[2].shape).astype(BFLOAT16)
    shared = [x[:, ::G] for x in arrays[:2]]
    copied = [np.repeat(x, G, axis=1) for x in shared]

    def results(q, k):
        there = [
            kernel_backend.asarray(in_memory(x, a, layout)) for x, a in zip((q, k, *arrays[2:]), op.arrays.values())
        ]
        o, pull = kernel_backend.run(vjp, simple_gla, *there, **options)
        return [kernel_backend.tohost(x) for x in (o, *pull(kernel_backend.asarray(in_memory(do, OUT, layout))))]

    for n, (x, y) in enumerate(zip(results(*shared), results(*copied), strict=True)):
        if n in (1, 2):
            y = in_memory(gathered(in_memory(y.astype(SINGLE), OUT, layout), "B H T K"), OUT, layout).astype(BFLOAT16)
        assert same_bits(x, y), ("o", "dq", "dk", "dv", "dg")[n]


# -- on the host alone -------------------------------------------------------------------------------------------------
def test_only_one_layout_copies(rng):
    op = VARIANTS["gla"][0]
    host, _ = drawn(op, {}, rng, SIZES, np.float64)
    out = np.empty((2, 2 * G, 40, 8))
    assert explain(gla, *host).copies == (f"v: the {G} value heads of a head, side by side",)
    assert [copy.split(":")[0] for copy in explain(gla, *host, out=out).copies] == ["v", "out"]
    assert explain(gla, *host, initial_state=np.zeros((2, 2 * G, 16, 8))).copies[1].startswith("initial_state: ")
    there = [in_memory(x, a, "bthd") for x, a in zip(host, axes_of(op))]
    assert explain(gla, *there, layout="bthd").copies == ()
    problem = op.bind(there, layout="bthd", out=in_memory(out, OUT, "bthd"))
    assert np.shares_memory(problem["v"], there[2]) and problem.out is not None
    assert gla(*there, layout="bthd").flags.c_contiguous


def test_results_of_other_libraries(rng):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    host, _ = drawn(VARIANTS["gla"][0], {}, rng, SIZES, np.float64)
    tensors = [torch.tensor(x) for x in host]
    wanted = gla(*host, reverse=True)
    assert same_bits(gla(*tensors, reverse=True).numpy(), wanted)
    for x, y in zip(vjp(gla, *tensors)[1](torch.tensor(wanted)), vjp(gla, *host)[1](wanted), strict=True):
        assert same_bits(x.numpy(), y)


def test_heads_that_do_not_fit_are_refused(rng):
    q, k, _, g = draw(VARIANTS["gla"][0], rng, SIZES)
    v = np.zeros((2, 4, 40, 8))
    for few in (1, 3, 5):
        with pytest.raises(ContractError, match=f"gla: v has .*{few}.*H=2.*expected \\[B, H, T, V\\]"):
            gla(q, k, np.zeros((2, few, 40, 8)), g)
    with pytest.raises(
        ContractError, match=r"initial_state is \(2, 2, 16, 8\), expected \[N, HV, K, V\] = \(2, 4, 16, 8\)"
    ):
        gla(q, k, v, g, initial_state=np.zeros((2, 2, 16, 8)))
    with pytest.raises(ContractError, match=r"out is \(2, 2, 40, 8\), expected \[B, HV, T, V\] = \(2, 4, 40, 8\)"):
        gla(q, k, v, g, out=np.zeros((2, 2, 40, 8)))
    pull = vjp(gla, q, k, v, g)[1]
    with pytest.raises(ContractError, match=r"do is \(2, 2, 40, 8\), expected \[B, HV, T, V\]"):
        pull(np.zeros((2, 2, 40, 8)))
    with pytest.raises(ContractError, match=r"dht is \(2, 2, 16, 8\), expected \[N, HV, K, V\]"):
        pull(np.zeros((2, 4, 40, 8)), np.zeros((2, 2, 16, 8)))
    with pytest.raises(ContractError, match="gla_step: v has H=4, but H=2 elsewhere"):
        gla_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], g[:, :, 0], np.zeros((2, 4, 16, 8)))
    with pytest.raises(ContractError, match="softmax_attention: v has HK=4, but HK=2 elsewhere"):
        softmax_attention(q, k, v)


def test_gates_of_simple_gla_have_the_heads_of_v_or_of_q(rng):
    q, k, v, g = draw(VARIANTS["simple_gla"][0], rng, {**SIZES, "H": 4})
    of_few = simple_gla(q[:, :2], k[:, :2], v, g[:, :2])
    assert_close("o", of_few, simple_gla(q[:, :2], k[:, :2], v, np.repeat(g[:, :2], 2, axis=1)), np.float64)
    assert explain(simple_gla, q[:, :2], k[:, :2], v, g).copies == ("q, k: one for every head of v",)
    for keys, values, gates in ((3, 4, 4), (2, 4, 1), (2, 3, 3), (0, 4, 4)):
        with pytest.raises(ContractError, match=r"simple_gla: g (and v have|has H=)"):
            simple_gla(q[:, :keys], k[:, :keys], v[:, :values], g[:, :gates])


@pytest.mark.parametrize("columns", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rows_of_any_length_are_folded(dtype, columns, rng):
    x = rng.random((2, 6, 5, columns)).astype(dtype)
    wanted = np.concatenate([x[:, g::3] for g in range(3)], -1)
    assert same_bits(value_heads.fold(x, 3), wanted) and same_bits(value_heads.unfold(wanted, 3), x)


@pytest.mark.parametrize(
    "V, offset, word", [(8, 0, 16), (8, 4, 8), (12, 0, 8), (6, 0, 4), (8, 2, 4), (7, 0, 2), (8, 1, 2)]
)
def test_copies_move_the_widest_words(V, offset, word):
    """Of which all rows consist, wherever they start: the same bits, whatever is in them."""
    x = np.arange(2 * 6 * 5 * V + offset, dtype=np.uint16).view(BFLOAT16)[offset:].reshape(2, 6, 5, V)
    assert x.ctypes.data % 16 == 2 * offset % 16
    (words,) = value_heads.in_words(x)
    assert words.dtype.itemsize == word and words.shape[-1] * word == 2 * V
    folded = value_heads.fold(x, 3)
    assert same_bits(folded, x.reshape(2, 2, 3, 5, V).swapaxes(2, 3).reshape(2, 2, 5, 3 * V))
    assert same_bits(value_heads.unfold(folded, 3), x)
