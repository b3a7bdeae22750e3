"""Sequences that are cut over ranks, against one device that has them all: results, gradients, bits and refusals."""

import inspect
import re
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from conftest import DOUBLE, HALF, SINGLE
from reference import LIMITS, assert_close, draw, draw_states, errors, same_bits, stated, with_value_heads

import linattn_np
from linattn_np import distributed, graph_capture
from linattn_np.array_kinds import BFLOAT16
from linattn_np.declarations import GLA_VALUE_GATE
from linattn_np.distributed import Disagreement, RankLost, call_comparison, run_threads
from linattn_np.errors import ContractError, ContractTypeError, NotSupported
from linattn_np.ops import OPS

VARIANTS = {op.name: (op, {}) for op in OPS if op.name != "softmax_attention"}
VARIANTS["retention"] = VARIANTS["retention"][0], {"gamma": [0.5, 0.9]}
VARIANTS["linear_attention-exp"] = VARIANTS["linear_attention"][0], {"feature_map": "exp"}
VARIANTS["linear_attention-normalized"] = (VARIANTS["linear_attention"][0], {"feature_map": "elu", "normalize": True})
VARIANTS["gla-gv"] = GLA_VALUE_GATE, {}
SIZES = {"B": 2, "H": 2, "K": 6, "V": 5}
LENGTHS = {1: [150], 2: [101, 49], 3: [40, 0, 110], 4: [33, 64, 1, 52]}
BOUNDS = [0, 0, 20, 20, 105, 139, 150, 150]  # empty ones, one within a rank, one over a rank, one over three


class Call:
    """A call with all that it may have, the arrays of all ranks, and its results computed by ranks or by one.

    Everything is in the layout of the call.
    """

    def __init__(
        self,
        variant,
        rng,
        *,
        packed=False,
        dtype=DOUBLE,
        states=True,
        heads=1,
        mask=False,
        total=150,
        gate="logsigmoid",
        **options,
    ):
        self.op, self.own = VARIANTS[variant]
        self.name = self.op.name.split()[0]
        self.options = self.own | options
        sizes = {**SIZES, "T": total, "N": len(BOUNDS) - 1 if packed else SIZES["B"]}
        if packed:
            self.options["cu_seqlens"], sizes["B"] = BOUNDS, 1
        self.arrays = draw(self.op, rng, sizes, dtype, gate)
        declared = stated(self.op, self.own)
        if heads > 1:  # value heads, and with them the heads of S, though not of z
            grown = sizes | {"H": heads * sizes["H"]}
            self.arrays = [
                y if name in with_value_heads(self.op) else x
                for name, x, y in zip(self.op.arrays, self.arrays, draw(self.op, rng, grown, dtype, gate))
            ]
            sizes["S"] = heads
        state_dtype = DOUBLE if dtype == DOUBLE else SINGLE
        self.state = (
            tuple(
                part if part.ndim == 4 or heads == 1 else part[:, : SIZES["H"]]
                for part in draw_states(declared, rng, sizes | {"H": heads * sizes["H"]}, state_dtype)
            )
            if states
            else ()
        )
        self.do = rng.standard_normal((sizes["B"], heads * sizes["H"], total, sizes["V"])).astype(dtype)
        self.dht = tuple(rng.standard_normal(part.shape).astype(state_dtype) for part in self.state)
        if self.options.get("state_v_first"):
            self.state, self.dht = (tuple(x.swapaxes(2, 3) for x in parts) for parts in (self.state, self.dht))
        if self.options.get("layout") == "bthd":
            self.do = np.ascontiguousarray(self.do.swapaxes(1, 2))
            self.arrays = [
                np.ascontiguousarray(x.swapaxes(1, 2)) if "T" in axes.split() else x
                for x, axes in zip(self.arrays, self.op.arrays.values())
            ]
        self.mask = rng.random((sizes["B"], total)) < 0.8 if mask else None
        if states:
            self.options["output_final_state"] = True

    @property
    def axis(self):
        return 1 if self.options.get("layout") == "bthd" else 2

    def part(self, x, axes, start, stop):
        if "T" not in axes.split():
            return x
        return x[(slice(None),) * self.axis + (slice(start, stop),)]

    def given(self, start=None, stop=None):
        given = dict(self.options)
        if self.state:
            given["initial_state"] = self.state if len(self.state) > 1 else self.state[0]
        if self.mask is not None:
            given["mask"] = self.mask[:, start:stop]
        return given

    def on_rank(self, lengths, gradient, comm, *, there=lambda x: x, back=lambda x: x, **more):
        """(results, gradients) of one rank, on the host; `there` and `back` take arrays to where it computes."""
        stop = sum(lengths[: comm.rank + 1])
        start = stop - lengths[comm.rank]
        arrays = [there(self.part(x, axes, start, stop)) for x, axes in zip(self.arrays, self.op.arrays.values())]
        given = {**self.given(start, stop), "comm": comm, **more}
        for name in {"initial_state", "mask"} & set(given):
            given[name] = all_of(there, given[name])
        function = getattr(distributed, self.name)
        if not gradient:
            return list(map(back, flat(function(*arrays, **given)))), ()
        result, pullback = distributed.vjp(function, *arrays, **given)
        do = there(self.part(self.do, self.op.out, start, stop))
        gradients = pullback(do, *(all_of(there, dht) for dht in self.cotangents))
        return list(map(back, flat(result))), list(map(back, flat(gradients)))

    @property
    def cotangents(self):
        return [self.dht if len(self.dht) > 1 else self.dht[0]] if self.dht else []

    def whole(self, found):
        """What the ranks found, put together; what every rank has must be the same on all, to the bit."""
        results, gradients = zip(*found)
        return (
            self.together(results, [self.op.out]),
            self.together(gradients, self.op.arrays.values()) if gradients[0] else [],
        )

    def together(self, by_rank, axes):
        whole = []
        for number, parts in enumerate(zip(*by_rank, strict=True)):
            if number < len(axes) and "T" in list(axes)[number].split():
                whole.append(np.concatenate(parts, axis=self.axis))
            else:
                assert all(same_bits(part, parts[0]) for part in parts), f"number {number} differs by rank"
                whole.append(parts[0])
        return whole

    def by_ranks(self, lengths, gradient=True, **more):
        return self.whole(run_threads(partial(self.on_rank, lengths, gradient, **more), len(lengths)))

    def by_one(self, gradient=True, **more):
        """(results, gradients) of the operator itself, on all tokens."""
        function, given = getattr(linattn_np, self.name), {**self.given(), **more}
        if not gradient:
            return flat(function(*self.arrays, **given)), ()
        result, pullback = linattn_np.vjp(function, *self.arrays, **given)
        return flat(result), flat(pullback(self.do, *self.cotangents))

    def exactly(self, gradient=True):
        """The same in float64, token by token."""
        twin = object.__new__(Call)
        vars(twin).update(vars(self))
        for name in ("arrays", "state", "dht"):
            setattr(twin, name, type(getattr(self, name))(x.astype(DOUBLE) for x in getattr(self, name)))
        twin.do = self.do.astype(DOUBLE)
        return twin.by_one(gradient, mode="recurrent")

    def compare(self, found, wanted, dtype=DOUBLE, factor=10):
        for what, x, y in zip(("result", "gradient"), found, wanted, strict=True):
            for number, (a, b) in enumerate(zip(x, y, strict=True)):
                assert a.shape == b.shape
                # Keys made of gates are rounded: a row of a few numbers that cancels carries the errors of its terms.
                assert_close(f"{what} {number}", a, b, dtype, factor=factor, rows=5 if self.name == "hgrn2" else 1)


def all_of(function, parts):
    return tuple(map(function, parts)) if isinstance(parts, tuple) else function(parts)


def flat(result):
    return [x for part in result for x in flat(part)] if isinstance(result, (tuple, list)) else [result]


# -- the same numbers as one ------------------------------------------------------------------------------------------
@pytest.mark.pairwise
@pytest.mark.parametrize("ranks", LENGTHS)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_results_and_gradients(variant, packed, ranks, rng):
    """Ranks with other numbers of tokens, none too; initial and final state and their gradients."""
    call = Call(variant, rng, packed=packed)
    call.compare(call.by_ranks(LENGTHS[ranks]), call.exactly())


@pytest.mark.parametrize("variant", ["delta_rule", "gated_delta_rule", "kda"])
def test_an_option_of_some_operators(variant, rng):
    call = Call(variant, rng, qk_l2norm=True)
    call.compare(call.by_ranks(LENGTHS[3]), call.exactly())


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_ways_round(variant, packed, rng):
    """Backwards in time, [B, T, H, ...], states [N, H, V, K]."""
    more = {"reverse": True, "layout": "bthd", "state_v_first": "normalized" not in variant}
    call = Call(variant, rng, packed=packed, **more)
    call.compare(call.by_ranks(LENGTHS[4]), call.exactly())


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_without_states(variant, packed, rng):
    call = Call(variant, rng, packed=packed, states=False)
    call.compare(call.by_ranks(LENGTHS[3]), call.exactly())


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "retention"])
def test_padding(variant, reverse, rng):
    call = Call(variant, rng, mask=True, reverse=reverse)
    call.compare(call.by_ranks(LENGTHS[4]), call.exactly())


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_grouped_value_heads(variant, layout, rng):
    call = Call(variant, rng, heads=3, layout=layout)
    call.compare(call.by_ranks(LENGTHS[2]), call.exactly())


@pytest.mark.parametrize("dtype", [SINGLE, HALF, BFLOAT16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_dtypes(variant, dtype, rng):
    """No worse than one device, whatever the number of ranks."""
    call = Call(variant, rng, dtype=dtype)
    found = call.by_ranks(LENGTHS[4])
    assert [x.dtype for x in found[1]] == [x.dtype for x in (*call.arrays, *call.state)]
    call.compare(found, call.exactly(), dtype, factor=3)


@pytest.mark.parametrize("gate", ["zero", "all-20", "all-1e30", "some-inf", "all-inf", "positive", "by_channel"])
@pytest.mark.parametrize("variant", ["gla", "rwkv6", "simple_gla"])
def test_gates_of_every_strength(variant, gate, rng):
    """Within the limits, or as near as one device: strong gates leave gradients that are mostly rounding."""
    call = Call(variant, rng, gate=gate, dtype=SINGLE)
    of_all = zip(flat(call.by_ranks(LENGTHS[4])), flat(call.by_one()), flat(call.exactly()), strict=True)
    for number, (x, one, wanted) in enumerate(of_all):
        for error, limit, ones in zip(errors(x, wanted), LIMITS["float32"], errors(one, wanted)):
            assert error <= max(limit, 2 * ones), f"number {number}: {error:.1e}, one device's is {ones:.1e}"


@pytest.mark.parametrize("total", [0, 1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_few_tokens(variant, total, rng):
    call = Call(variant, rng, total=total)
    call.compare(call.by_ranks([0, *[1] * total, 0]), call.exactly())


def test_the_result_goes_into_out(rng):
    call = Call("gla", rng, states=False, layout="bthd")
    wanted, _ = call.exactly(gradient=False)

    def on_rank(comm):
        out = np.full((2, 75, 2, 5), np.nan)
        (o,), _ = call.on_rank([75, 75], False, comm, out=out, segment_size=25)
        assert o is out
        return [o], ()

    assert_close("o", call.whole(run_threads(on_rank, 2))[0][0], wanted[0], DOUBLE)


@pytest.mark.pairwise
@pytest.mark.parametrize("operator", VARIANTS)
def test_kernels(backend, operator, rng):
    """The CUDA kernels as the emulator runs them, and NumPy, on two ranks."""
    if backend.name in ("cupy", "numba"):
        pytest.skip("host arrays; those of a card are test_segments_on_a_card's")
    call = Call(operator, rng, dtype=SINGLE, total=40, layout="bthd")
    with backend.in_dispatch() if hasattr(backend, "in_dispatch") else nullcontext():
        found = call.by_ranks([24, 16], backend=backend.name)
    call.compare(found, call.exactly(), SINGLE)


@pytest.mark.parametrize("dtype", [SINGLE, BFLOAT16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", VARIANTS)
def test_segments_on_a_card(card, operator, packed, dtype, rng):
    """All that a card does but the messages."""
    if card.name == "numba":
        pytest.skip("Numba has no gradients")
    call = Call(operator, rng, packed=packed, dtype=dtype, layout="bthd")
    found = call.on_rank([150], True, distributed.Alone(), there=card.asarray, back=card.tohost, segment_size=25)
    call.compare(found, call.exactly(), dtype, factor=3)


@pytest.mark.parametrize("lengths", [[75, 75], [50, 75, 25], [25, 50, 25, 50]], ids=["two", "three", "four"])
@pytest.mark.parametrize("operator", VARIANTS)
def test_cards_have_the_bits_of_one(card, operator, lengths, rng):
    if card.cupy.cuda.runtime.getDeviceCount() < len(lengths):
        pytest.skip("there are too few CUDA devices")
    call, more = Call(operator, rng, dtype=SINGLE, layout="bthd"), {"there": card.asarray, "back": card.tohost}
    more["segment_size"] = 25
    work = partial(call.on_rank, lengths, True, **more)
    found = call.whole(run_threads(work, len(lengths), device="cuda"))
    one = call.on_rank([150], True, distributed.Alone(), **more)
    assert all(same_bits(x, y) for x, y in zip(flat(found), flat(one), strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("operator", ["gla", "rwkv6"])
def test_captured_calls(card, operator, ranks, rng, monkeypatch):
    """A graph gives the bits of the call for other numbers too, and writes into nobody else's memory."""
    cupy = card.cupy
    if cupy.cuda.runtime.getDeviceCount() < ranks:
        pytest.skip("there are too few CUDA devices")
    monkeypatch.setattr(graph_capture, "in_graphs", [])
    call = Call(operator, rng, dtype=SINGLE, total=2048, states=False)
    lengths = [2048 // ranks] * ranks

    def on_rank(comm):
        with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):
            return captured(comm)

    def captured(comm):
        part = slice(lengths[0] * comm.rank, lengths[0] * (comm.rank + 1))
        arrays = [card.asarray(x[:, :, part] if x.ndim > 2 else x) for x in call.arrays]
        do = card.asarray(call.do[:, :, part])

        def both():
            o, pullback = distributed.vjp(
                getattr(distributed, operator), *arrays, comm=comm, segment_size=512 if ranks == 1 else None
            )
            return [o, *pullback(do)]

        def bits():
            return list(map(card.tohost, both()))

        before = [x.copy() for x in arrays]
        wanted = [bits()]
        arrays[2][...] *= -2  # v
        wanted.append(bits())
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            both()
            stream.synchronize()
            stream.begin_capture()
            found = both()
            graph = stream.end_capture()
            others = [cupy.full(size, 7, np.uint8) for size in 40 * [512, 4096, 1 << 15, 1 << 17]]
            for given, bits_then in ((arrays[2].copy(), wanted[1]), (before[2], wanted[0])):
                arrays[2][...] = given
                comm.all_gather(np.zeros(1))()  # ranks of one process launch together, as they enqueue messages
                graph.launch(stream)
                assert all(same_bits(card.tohost(x), y) for x, y in zip(found, bits_then, strict=True))
            assert all((other == 7).all() for other in others)
        return len(graph_capture.in_graphs)

    kept = [on_rank(distributed.Alone())] if ranks == 1 else run_threads(on_rank, 2, device="cuda")
    assert all(kept)


# -- the same bits ---------------------------------------------------------------------------------------------------
@pytest.mark.pairwise
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [SINGLE, BFLOAT16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_bits_depend_on_the_segments_alone(variant, dtype, packed, rng):
    """One device that cuts at the same places has the bits of 2, 3 and 4 ranks, gradients too."""
    call = Call(variant, rng, packed=packed, dtype=dtype)
    one = call.by_ranks([150], segment_size=25)
    for lengths in ([75, 75], [25, 100, 25], [50, 25, 50, 25]):
        for x, y in zip(flat(call.by_ranks(lengths, segment_size=25)), flat(one), strict=True):
            assert same_bits(x, y), lengths
    call.compare(one, call.exactly(), dtype, factor=3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_rank_without_segments_is_the_operator(variant, rng):
    call = Call(variant, rng, dtype=SINGLE)
    for found, wanted in zip(call.by_ranks([150]), call.by_one()):
        assert all(same_bits(x, y) for x, y in zip(found, wanted, strict=True))


# -- refusals ---------------------------------------------------------------------------------------------------------
def refused(change, rng, ranks=3, **options):
    """What each rank says when `change(rank, arrays, given)` has changed its call."""
    call = Call("gla", rng, **options)

    def on_rank(comm):
        arrays = [x[:, :, :50] for x in call.arrays]
        given = call.given()
        change(comm.rank, arrays, given)
        with pytest.raises(ContractError) as raised:
            distributed.gla(*arrays, comm=comm, **given)
        return raised.value

    return run_threads(on_rank, ranks)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("reverse", True, "reverse is True on rank 2, but False on ranks 0 and 1"),
        ("mode", "recurrent", "mode is recurrent on rank 2, but auto on ranks 0 and 1"),
        ("segment_size", 25, "the size of segments is 25 on rank 2, but None on ranks 0 and 1"),
        ("output_final_state", False, "output_final_state is False on rank 2, but True on ranks 0 and 1"),
        ("initial_state", None, "initial_state is not given on rank 2, but given on ranks 0 and 1"),
    ],
)
def test_ranks_that_differ_are_named(name, value, words, rng):
    def change(rank, arrays, given):
        if name == "mode":
            given["mode"] = "auto"
        if rank == 2:
            given[name] = value

    found = refused(change, rng)
    assert all(type(error) is Disagreement and str(error) == f"gla: {words}" for error in found)


@pytest.mark.parametrize("lengths", [[75, 75], [75, 30], [75, 0]])
def test_a_call_like_the_last_but_for_another_ranks_tokens(lengths, rng):
    """The first rank begins as it did then; what it has begun in vain changes nothing."""
    calls = [Call("gla", rng, total=total) for total in (75 + 40, sum(lengths))]

    def on_rank(comm):
        calls[0].on_rank([75, 40], True, comm)
        return calls[1].on_rank(lengths, True, comm)

    calls[1].compare(calls[1].whole(run_threads(on_rank, 2)), calls[1].by_one())


def test_a_call_like_the_last_but_for_another_ranks_meaning(rng):
    call = Call("gla", rng)

    def on_rank(comm):
        call.on_rank([75, 75], True, comm)
        with pytest.raises(Disagreement) as raised:
            call.on_rank([75, 75], True, comm, scale=0.5 if comm.rank else None)
        return str(raised.value)

    for words in run_threads(on_rank, 2):
        assert re.search(
            "gla: scale is .* on rank 0, but 0.5 on rank 1|scale is 0.5 on rank 1, but .* on rank 0", words
        )


def test_calls_alike_say_once_what_they_mean(rng, monkeypatch):
    said = []
    monkeypatch.setattr(
        call_comparison,
        "header_and_text",
        lambda *what, plain=call_comparison.header_and_text: said.append(what) or plain(*what),
    )
    call, other = Call("gla", rng, states=False), Call("gla", rng, states=False, total=100)

    def on_rank(comm):
        found = [call.on_rank([75, 75], False, comm) for _ in range(3)]
        assert all(same_bits(x[0][0], found[0][0][0]) for x in found)
        other.on_rank([50, 50], False, comm)

    run_threads(on_rank, 2)
    assert sorted(tokens for tokens, _ in said) == [50, 50, 75, 75]


def test_other_dtypes_and_sizes_are_named(rng):
    def change(rank, arrays, given):
        given["initial_state"] = None
        if rank == 1:
            arrays[:] = [x[:, :1].astype(np.float32) for x in arrays]

    for error in refused(change, rng):
        assert "the size of H is 1 on rank 1, but 2 on ranks 0 and 2" in str(error)
        assert "the dtype of q is float32 on rank 1, but float64 on ranks 0 and 2" in str(error)


def test_ranks_in_other_calls_are_named(rng):
    """Two operators, an operator and a gradient, an operator and a training."""
    call, other = (Call(name, rng, states=False) for name in ("gla", "linear_attention"))

    def on_rank(comm):
        said, arrays = [], [x[:, :, :50] for x in call.arrays]
        o, pullback = distributed.vjp(distributed.gla, *arrays, comm=comm)
        for stray in (
            lambda: other.on_rank([50, 50], False, comm),
            lambda: pullback(o),
            lambda: distributed.DataParallel(comm).agree({"the seed": 1}),
        ):
            with pytest.raises(Disagreement) as raised:
                stray() if comm.rank else distributed.gla(*arrays, comm=comm)
            said.append(str(raised.value).partition(": ")[2])
        with pytest.raises(Disagreement, match="rank 1 is at the beginning of Training, step 7") as raised:
            distributed.DataParallel(comm).clock(7, 1.0) if comm.rank else distributed.gla(*arrays, comm=comm)
        return said

    others = "linear_attention", "gla's gradient", "Training"
    for said in run_threads(on_rank, 2):
        assert said == [f"the call is gla on rank 0, but {name} on rank 1" for name in others]


def test_a_refused_call_ends_all_ranks(rng):
    def change(rank, arrays, given):
        if rank == 1:
            arrays[2] = arrays[2][:, :, :3]

    found = refused(change, rng)
    words = "gla: v has T=3, but T=50 elsewhere"
    assert words in str(found[1]) and type(found[1]) is ContractError
    for error in (found[0], found[2]):
        assert type(error) is Disagreement and f"rank 1 refused its call: ContractError: {words}" in str(error)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"cu_seqlens": [0, 100], "initial_state": None}, "packs all sequences into one row, so B must be 1"),
        ({"segment_size": 20}, r"segment_size is 20, but the ranks have \[50, 50, 50\] tokens"),
        ({"segment_size": 0}, "segment_size is 0, expected a positive int or None"),
        ({"mode": "none"}, "mode is 'none', expected one of"),
        ({"backend": "cupy"}, "gla: cupy: the arrays are on the host"),
        (
            {"initial_state": np.zeros((1, 2, 6, 5))},
            "initial_state is .1, 2, 6, 5., expected .N, H, K, V. = .2, 2, 6, 5.",
        ),
    ],
)
def test_misfits_are_refused(given, words, rng):
    for error in refused(lambda rank, arrays, all_given: all_given.update(given), rng):
        assert re.search(words, str(error))


def test_sequences_must_end_where_the_tokens_do(rng):
    def change(rank, arrays, given):
        given["cu_seqlens"] = [0, 20, 150]

    words = "gla: cu_seqlens must run from 0 to T=100, got 0 to 150, the tokens of all ranks: [50, 50]"
    for error in refused(change, rng, packed=True, states=False, ranks=2):
        assert str(error) == words


def test_a_rank_without_a_backend_ends_all_ranks(rng):
    def change(rank, arrays, given):
        if rank == 2:
            given["backend"] = "cupy"

    found = refused(change, rng)
    assert all("rank 2 refused its call: NotSupported: gla: cupy: the arrays are" in str(error) for error in found[:2])
    assert type(found[2]) is NotSupported


def test_gradients_that_do_not_fit_end_all_ranks(rng):
    call = Call("gla", rng)

    def on_rank(comm):
        parts = [x[:, :, :75] for x in call.arrays]
        with pytest.raises(ContractError, match="out cannot be given to vjp"):
            distributed.vjp(distributed.gla, *parts, comm=comm, out=parts[2])
        _, pullback = distributed.vjp(distributed.gla, *parts, comm=comm)
        with pytest.raises(ContractError) as raised:
            pullback(call.do[:, :, : 75 - comm.rank])
        return str(raised.value)

    first, second = run_threads(on_rank, 2)
    assert "rank 1 refused its call: ContractError: gla: do is" in first
    assert second.startswith("gla: do is (2, 2, 74, 5)")


def test_a_thread_that_ends_ends_the_others(rng):
    call = Call("gla", rng)
    ends = []

    def on_rank(comm):
        if comm.rank == 1:
            raise KeyError("something else")
        try:
            call.on_rank(LENGTHS[3], False, comm)
        except RankLost as error:
            ends.append(str(error))
            raise

    with pytest.raises(KeyError, match="something else"):
        run_threads(on_rank, 3)
    assert ends == ["rank 1 has ended: KeyError: 'something else'"] * 2
    with pytest.raises(RankLost, match="waited 0.1 s for rank 1"):
        run_threads(lambda comm: comm.rank or comm.all_gather(np.zeros(1))(), 2, limit_s=0.1)


def test_engines_that_do_not_fit(rng):
    arrays = Call("gla", rng, states=False).arrays
    with pytest.raises(ContractTypeError, match="gla: comm is a NoneType, expected an engine, such as connect"):
        distributed.gla(*arrays, comm=None)
    cards = distributed.Alone()
    cards.homes = ("cuda",)
    with pytest.raises(ContractError, match="gla: comm is a Alone, which takes arrays on cuda, but these are on host"):
        distributed.gla(*arrays, comm=cards)
    with pytest.raises(TypeError, match="vjp: op is .*, expected one of linattn_np.distributed's operators: gla, "):
        distributed.vjp(linattn_np.gla, *arrays, comm=distributed.Alone())
    with pytest.raises(ValueError, match="Alone: there is no rank 1"):
        distributed.Alone().send(arrays[0], 1)


def test_other_libraries_arrays(rng):
    """JAX arrays go in and come out; arrays on a device need an engine that takes them."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    call = Call("gla", rng, dtype=SINGLE, states=False)
    wanted, _ = call.by_ranks([75, 75], gradient=False)
    call.arrays = [jax.numpy.asarray(x) for x in call.arrays]
    found = run_threads(partial(call.on_rank, [75, 75], False), 2)
    assert all(isinstance(o, jax.Array) for (o,), _ in found)
    assert same_bits(np.concatenate([o for (o,), _ in found], axis=2), wanted[0])


def test_signatures_are_the_operators_own():
    """They are written out so that an editor shows them. Two arguments are theirs; softmax attention is not here."""
    KEYWORD, EMPTY = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    for op, function in OPS.items():
        if op.name == "softmax_attention":
            assert not hasattr(distributed, op.name)
            continue
        found = dict(inspect.signature(getattr(distributed, op.name)).parameters)
        assert [(found[name].kind, found.pop(name).default) for name in ("comm", "segment_size")] == [
            (KEYWORD, EMPTY),
            (KEYWORD, None),
        ]
        wanted = inspect.signature(function).parameters
        assert list(map(str, found.values())) == list(map(str, wanted.values())), op.name
        assert [x.kind for x in found.values()] == [x.kind for x in wanted.values()], op.name
