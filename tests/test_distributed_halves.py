"""A segment's call in two halves on Hopper: what it does to a state, then its outputs, and no pass twice."""

from types import SimpleNamespace

import numpy as np
import planned
import pytest
from conftest import HALF
from reference import (
    LIMITS,
    assert_close,
    deviation_of_dg,
    draw,
    errors,
    rms,
    same_bits,
    size_of_gate_terms,
    size_of_gradients_terms,
    size_of_terms,
)
from test_delta_kernels import HARD_LIMITS, terms_of_later_tokens
from test_distributed import VARIANTS, Call

import linattn_np
from linattn_np import derived, distributed
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import PLANNERS, execute
from linattn_np.backends.cupy import segments as cuts
from linattn_np.backends.cupy.gated_kernels import SEGMENT_STATE
from linattn_np.dispatch import call, summarise
from linattn_np.distributed import run_threads
from linattn_np.distributed.recurrence import MessageLayout, Recurrence
from linattn_np.summary import Transition

FAMILY = [name for name in VARIANTS if name not in ("gla-gv", "linear_attention-normalized")]
# No kernel summarises delta rules: a rank gets their transition, a matrix, from a whole call, as in `test_two_ranks`.
SUMMARISED = [name for name in FAMILY if VARIANTS[name][0].transition is not Transition.RANK_ONE]
SIZES = {"B": 1, "H": 1, "K": 16, "V": 8, "N": 1}
TOKENS = 700  # in three parts of at least 128 tokens, for the first rank


def arrays_of(variant, rng, dtype, tokens=TOKENS, gate="by_channel"):
    op, own = VARIANTS[variant]
    own = own | ({"gamma": [0.9]} if variant == "retention" else {})
    return op, own, draw(op, rng, SIZES | {"T": tokens}, dtype, gate)


@pytest.fixture
def hopper(backend, monkeypatch):
    monkeypatch.setattr(cuts, "SPARED", 0)  # so few tokens are cut
    monkeypatch.setattr(cuts, "CUT_SMALL", 0)
    if backend.name != "hopper":
        pytest.skip("only Hopper's kernels cut sequences")
    with backend.in_dispatch():
        yield backend


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=str)
@pytest.mark.parametrize("operator", SUMMARISED)
def test_a_summary_and_what_goes_on_from_it(hopper, operator, dtype, rng):
    """The state from zero, which the last segment of a whole call may leave instead, its decays, and the bits of such a
    call without its first pass."""
    op, own, arrays = arrays_of(operator, rng, dtype)
    (final,), decays, summaries = summarise(op, arrays, backend="hopper", **own)
    more = own | {"backend": "hopper", "output_final_state": True, "state_dtype": np.dtype(np.float32)}
    function = getattr(linattn_np, op.name)
    o, whole = function(*arrays, **more)
    assert_close("the state from zero", final, whole, np.dtype(np.float32))
    again, state = call(op, arrays, summaries=summaries, **more)
    assert same_bits(again, o) and same_bits(state, whole)
    initial = rng.standard_normal(final.shape, dtype=np.float32)
    _, moved = function(*arrays, initial_state=initial, **more)
    by = decay_of(op, own, decays)
    assert_close("the state", by * initial + final, moved, np.dtype(np.float32))
    problem = derived.inner_call(op.bind(arrays, **own)).replace(memo=None)
    call_to_plan = PLANNERS[problem.op], "plan", problem, hopper.device
    plan = execute.plan_of(*call_to_plan, summaries=summaries)
    assert not any(is_summary(kernel) for kernel in plan.kernels)
    assert any(map(is_summary, execute.plan_of(*call_to_plan).kernels))


def decay_of(op, own, decays, tokens=TOKENS):
    """What multiplies any other state over so many tokens; a backend need not say what all know."""
    assert (decays is None) == (not op.gates)
    return own.get("gamma", [1.0])[0] ** tokens if decays is None else decays.reshape(-1, 1)


def is_summary(kernel):
    return getattr(kernel, "schedule", None) == SEGMENT_STATE or getattr(kernel, "what", None) == "Summary"


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=str)
@pytest.mark.parametrize("operator", SUMMARISED)
def test_a_gradients_summary_and_what_goes_on_from_it(hopper, operator, dtype, rng):
    op, own, arrays = arrays_of(operator, rng, dtype, tokens=300)
    do = rng.standard_normal((1, 1, 300, SIZES["V"])).astype(dtype)
    initial, dht = rng.standard_normal((2, 1, 1, SIZES["K"], SIZES["V"]), dtype=np.float32)
    _, pullback = linattn_np.vjp(getattr(linattn_np, op.name), *arrays, backend="hopper", initial_state=initial, **own)
    found = pullback.summarise(do)
    if dtype == HALF and operator not in ("gla", "rwkv6", "hgrn2"):
        assert found is None  # the gate is spread over the channels
        return
    (own_part,), decays, summaries = found
    *_, alone = pullback(do)
    wanted = pullback(do, dht)
    assert_close("the gradient for a dht of zero", own_part, alone, dtype)
    by = decay_of(op, own, decays, tokens=300)
    assert_close("the gradient", by * dht + own_part, wanted[-1], dtype)
    for number, (x, y) in enumerate(zip(pullback.gradients(do, dht, summaries), wanted, strict=True)):
        assert_close(f"gradient {number}", x, y, dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("operator", ["gla", "rwkv6"])
def test_a_gradients_summary_goes_one_way_where_the_states_are_known(
    hopper, operator, batch, segments, rng, monkeypatch
):
    """The forward pass has left them, or there is one segment; the gradients are those of a whole pass."""
    monkeypatch.setattr(cuts, "segments_that_fill", lambda *sizes: segments)
    monkeypatch.setattr(cuts, "cheapest_forward_count", lambda *sizes: segments)
    monkeypatch.setattr(cuts, "cheapest_backward_count", lambda *sizes: segments)
    op, _ = VARIANTS[operator]
    arrays = draw(op, rng, SIZES | {"T": TOKENS, "B": batch, "N": batch}, BFLOAT16, "by_channel")
    do = rng.standard_normal((batch, 1, TOKENS, SIZES["V"])).astype(BFLOAT16)
    start, end = rng.standard_normal((2, batch, 1, SIZES["K"], SIZES["V"]), dtype=np.float32)
    problem = op.bind(arrays, gradient=True, initial_state=start).replace(memo=None)
    call = problem, hopper.device
    _, saved = planned.run_and_save(*call)
    plan = execute.plan_of(PLANNERS[problem.op], "plan_summary_vjp", *call, do=do, saved=saved)
    (summary,) = (step for step in plan.launches if step.kernel.name.endswith("segments"))
    assert summary.args["only_backwards"] == 1
    ((own,), _), summaries = planned.executed("plan_summary_vjp", *call, do=do, saved=saved)
    ((alike,), _), _ = planned.executed("plan_summary_vjp", *call, do=do, saved=())
    assert same_bits(own, alike)
    gradients, initial = planned.pull(*call, do, (end,), saved, summaries)
    wanted, wanted_initial = planned.pull(*call, do, (end,), saved)
    for number, (x, y) in enumerate(zip((*gradients, *initial), (*wanted, *wanted_initial), strict=True)):
        assert_close(f"gradient {number}", x, y, BFLOAT16)


def share_of_dg(rng, arrays, do, wanted, **options):
    """Six standard deviations of dg of one gate a head, beside its size: its terms may cancel."""
    terms = size_of_gate_terms(rng, arrays, do, **options)
    return 6 * deviation_of_dg(TOKENS) * rms(terms) / (rms(wanted) or 1)


@pytest.mark.pairwise
@pytest.mark.parametrize("bounds", [None, [0, 250, TOKENS]], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", FAMILY)
def test_two_ranks(hopper, operator, bounds, rng):
    """Results and gradients in bfloat16 as near as those of one device."""
    op, own, arrays = arrays_of(operator, rng, BFLOAT16)
    own = own | {"cu_seqlens": bounds}
    do = rng.standard_normal((1, 1, TOKENS, SIZES["V"])).astype(BFLOAT16)
    axes = list(op.arrays.values())

    def on_rank(comm):
        part = slice(400 * comm.rank, 400 + 300 * comm.rank)
        given = [x[:, :, part] if "T" in of.split() else x for x, of in zip(arrays, axes)]
        o, pullback = distributed.vjp(getattr(distributed, op.name), *given, comm=comm, backend="hopper", **own)
        return o, *pullback(do[:, :, part])

    found = list(zip(*run_threads(on_rank, 2)))
    wide = [x.astype(np.float64) for x in arrays]
    wanted, pullback = linattn_np.vjp(getattr(linattn_np, op.name), *wide, mode="recurrent", **own)
    for name, of, parts, exact in zip(
        ("o", *op.arrays), (op.out, *axes), found, (wanted, *pullback(do.astype(np.float64))), strict=True
    ):
        whole = np.concatenate(parts, axis=2) if "T" in of.split() else parts[0]
        share = 0
        if (operator, name) == ("simple_gla", "g"):
            share = share_of_dg(rng, arrays, do, exact, **own)
        elif (operator, name) == ("gated_delta_rule", "g"):  # as in `test_gradients_of_chunks_with_hard_keys`
            terms = terms_of_later_tokens(arrays, do, None, None, qk_l2norm=False, bounds=bounds)
            share = 3 * HARD_LIMITS[BFLOAT16] * rms(terms) / rms(exact)
        assert_close(name, whole, exact, BFLOAT16, factor=max(2, share / LIMITS["bfloat16"][0]))


@pytest.mark.pairwise
@pytest.mark.parametrize("gate", ["zero", "all-20", "all-1e30", "some-inf", "all-inf", "positive"])
@pytest.mark.parametrize("operator", ["gla", "rwkv6", "simple_gla"])
def test_gates_of_every_strength(hopper, operator, gate, rng):
    """As near as one device, or within the limits."""
    op, own, arrays = arrays_of(operator, rng, BFLOAT16, gate=gate)
    do = rng.standard_normal((1, 1, TOKENS, SIZES["V"])).astype(BFLOAT16)
    axes = [op.out, *op.arrays.values()]

    def on_rank(comm):
        part = slice(400 * comm.rank, 400 + 300 * comm.rank)
        given = [x[:, :, part] if "T" in of.split() else x for x, of in zip(arrays, axes[1:])]
        o, pullback = distributed.vjp(getattr(distributed, op.name), *given, comm=comm, backend="hopper")
        return o, *pullback(do[:, :, part])

    function = getattr(linattn_np, op.name)
    o, pullback = linattn_np.vjp(function, *arrays, backend="hopper")
    exact, exact_pullback = linattn_np.vjp(function, *(x.astype(np.float64) for x in arrays), mode="recurrent")
    wanted = exact, *exact_pullback(do.astype(np.float64))
    # a row that few tokens make may cancel as a whole
    terms = size_of_terms(function, arrays), *size_of_gradients_terms(function, arrays, do)
    results = zip(axes, zip(*run_threads(on_rank, 2)), (o, *pullback(do)), wanted, terms, strict=True)
    for of, parts, one, want, sums in results:
        found = np.concatenate(parts, axis=2) if "T" in of.split() else parts[0]
        share = share_of_dg(rng, arrays, do, want) if of == "B H T" else 0
        for error, limit, ones in zip(errors(found, want, sums), LIMITS["bfloat16"], errors(one, want, sums)):
            assert error <= max(limit, 2 * ones, share), f"{of}: {error:.1e}, one device's is {ones:.1e}"


def test_the_last_rank_begins_before_the_message(hopper, rng, monkeypatch):
    """Nobody asks for its state, but its own call goes on from there, forward and backward."""
    begun, run = [], execute.run

    def noted(planner, name, *rest, **trees):
        begun.append(name)
        return run(planner, name, *rest, **trees)

    monkeypatch.setattr(execute, "run", noted)
    op, own, arrays = arrays_of("gla", rng, BFLOAT16)

    def on_rank(comm):
        part = slice(400 * comm.rank, 400 + 300 * comm.rank)
        o, pullback = distributed.vjp(distributed.gla, *(x[:, :, part] for x in arrays), comm=comm, backend="hopper")
        pullback(o)

    run_threads(on_rank, 2)
    assert sorted(begun) == [
        name for name in ("plan", "plan_summary", "plan_summary_vjp", "plan_vjp") for _ in range(2)
    ]


@pytest.mark.parametrize("gradient", [False, True])
def test_a_rank_adds_up_no_states_but_those_before_its_own(gradient, rng, monkeypatch):
    by_rank, received = [], Recurrence.summary_of_message

    def counted(recurrence, *arguments):
        by_rank.append(recurrence)
        return received(recurrence, *arguments)

    monkeypatch.setattr(Recurrence, "summary_of_message", counted)
    call = Call("gla", rng, total=100)
    call.compare(call.by_ranks([25] * 4, gradient), call.exactly(gradient))
    assert sorted(map(by_rank.count, set(by_rank))) == ([3, 3, 3, 3] if gradient else [1, 2, 3])


class OnCard:
    """As much of a CuPy array as a message looks at."""

    class Memory:
        def __init__(self, mem, ptr):
            self.mem, self.ptr = mem, ptr

        def __add__(self, offset):
            return OnCard.Memory(self.mem, self.ptr + offset)

    def __init__(self, shape, dtype, data, contiguous=True):
        self.shape, self.dtype, self.data = shape, np.dtype(dtype), data
        self.nbytes, self.flags = int(np.prod(shape)) * self.dtype.itemsize, SimpleNamespace(c_contiguous=contiguous)


def test_a_message_that_lies_side_by_side_is_not_copied():
    row, single, there = MessageLayout([(1, 2, 4, 3), (1, 2, 4)]), np.dtype(np.float32), OnCard.Memory("card", 512)
    state = OnCard((1, 2, 4, 3), single, there)
    decay = OnCard((1, 2, 4), single, there + state.nbytes)
    seen = row.view_of([state, decay], single)
    assert seen.shape == (1, row.length) and seen.data is there
    others = OnCard.Memory("another", 512 + state.nbytes)
    for part in (
        OnCard((1, 2, 4), single, others),
        OnCard((1, 2, 4), single, there + state.nbytes + 4),
        OnCard((1, 2, 4), single, decay.data, contiguous=False),
        OnCard((1, 2, 4), np.float64, decay.data),
    ):
        assert row.view_of([state, part], single) is None
    assert row.view_of([np.zeros(24, single), np.zeros(8, single)], single) is None
