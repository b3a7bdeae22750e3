"""Calls alike share their checks and their plan, and nothing else; a call that differs in anything shares neither."""

import gc
import weakref
from functools import cache
from threading import Thread

import numpy as np
import planned
import pytest
from emulator import EmulatedDevice
from reference import draw, flat, same_bits

from linattn_np import ContractError, ContractTypeError, gla, gla_step, graph_capture, retention, rwkv6_step
from linattn_np.array_kinds import BFLOAT16, signature
from linattn_np.backends.cupy import execute, segments
from linattn_np.checked_calls import MEMOS
from linattn_np.conversions import with_output
from linattn_np.declarations import GLA, GLA_STEP, RETENTION, RWKV6, RWKV6_STEP
from linattn_np.layouts import swap_heads

SIZES = {"B": 2, "H": 2, "T": 40, "K": 16, "V": 8}


def arrays(op=GLA, dtype=np.float32, seed=0, layout="bhtd", **sizes):
    drawn = draw(op, np.random.default_rng(seed), {**SIZES, **sizes}, dtype)
    return [np.ascontiguousarray(swap_heads(x, axes, layout)) for x, axes in zip(drawn, op.arrays.values())]


# -- checks -----------------------------------------------------------------------------------------------------------
def test_calls_alike_share_a_memo_and_no_arrays():
    first, second = GLA.bind(arrays(), scale=0.5), GLA.bind(arrays(seed=1), scale=0.5)
    assert first.memo is second.memo and first.sizes == second.sizes and first.scale == second.scale
    assert all(first[name] is not second[name] for name in GLA.arrays)
    out = np.empty((2, 40, 2, 8), np.float32)
    start = np.zeros((2, 2, 16, 8), np.float32)
    for _ in range(2):
        inputs = arrays(layout="bthd")
        problem = GLA.bind(inputs, layout="bthd", out=out, initial_state=start)
        assert problem["q"].shape == (2, 2, 40, 16) and problem["q"].base is inputs[0] and problem.example is inputs[0]
        assert problem.out.shape == (2, 2, 40, 8) and problem.out.base is out and problem.initial_state == (start,)
    for _ in range(2):
        state, slots = np.zeros((5, 2, 16, 8)), [3, 1]
        problem = GLA_STEP.bind(arrays(GLA_STEP), state=state, slots=slots)
        assert problem.options["state"] is state and problem.options["slots"].tolist() == slots


def changed(x):
    """The same shape, not the same kind of array."""
    wide = np.concatenate([x, x], axis=-1)
    read_only = x.copy()
    read_only.flags.writeable = False
    return [wide[..., : x.shape[-1]], wide[..., ::2], np.asfortranarray(x), x[:, ::-1], read_only]


def test_what_differs_shares_nothing():
    q, *rest = arrays()
    memo = GLA.bind([q, *rest]).memo
    assert all(GLA.bind([x, *rest]).memo is not memo for x in changed(q))
    assert GLA.bind(arrays(dtype=np.float16)).memo is not memo
    assert GLA.bind(arrays(T=41)).memo is not memo
    assert GLA.bind(arrays(), layout="bthd").memo is not memo
    assert GLA.bind(arrays(), gradient=True).memo is not memo
    problems = [
        GLA.bind(arrays(B=1), **options)
        for options in (
            {},
            {"scale": 1.0},
            {"scale": 0.0},
            {"scale": -0.0},
            {"mode": "chunk"},
            {"chunk_size": 32},
            {"chunk_size": 64},
            {"output_final_state": True},
            {"state_dtype": np.float64},
            {"materialize": True},
            {"cu_seqlens": [0, 40]},
            {"cu_seqlens": [0, 39, 40]},
            {"cu_seqlens": [0, 38, 40]},
            {"out": np.empty((1, 2, 40, 8), np.float32)},
            {"initial_state": np.zeros((1, 2, 16, 8), np.float32)},
            {"initial_state": np.zeros((1, 2, 16, 8), BFLOAT16)},
        )
    ]
    assert len({id(problem.memo) for problem in problems}) == len(problems)
    assert np.signbit([problem.scale for problem in problems[2:4]]).tolist() == [False, True]
    assert GLA.bind(arrays(B=1), cu_seqlens=np.array([0, 39, 40])).memo is problems[11].memo  # by value
    decays = [
        RETENTION.bind(arrays(RETENTION), gamma=gamma)
        for gamma in ([0.5, 0.25], [0.5, 0.2], 0.5, [0.5, 0.5], np.float32([0.5, 0.25]), np.array([0.5, 0.25]))
    ]
    assert len({id(problem.memo) for problem in decays}) == 5 and decays[5].memo is decays[0].memo  # by value
    assert RETENTION.bind(arrays(RETENTION), gamma=[1, 0]).memo is not None


LOOKALIKES = {  # right arguments, and wrong ones that equal them
    "scale": ({"scale": 1.0}, {"scale": True}, ContractTypeError),
    "chunk_size": ({"chunk_size": 64}, {"chunk_size": 64.0}, ContractError),
    "cu_seqlens": ({"cu_seqlens": [0, 40]}, {"cu_seqlens": [0.0, 40.0]}, ContractError),
    "nested": ({"cu_seqlens": [0, 40]}, {"cu_seqlens": [[0, 40]]}, ContractError),
    "layout": ({"layout": "bhtd"}, {"layout": ["bhtd"]}, ContractError),
}


@pytest.mark.parametrize("case", LOOKALIKES)
def test_lookalikes_are_refused_as_ever(case):
    right, wrong, error = LOOKALIKES[case]
    for _ in range(2):
        gla(*arrays(B=1), **right)
        with pytest.raises(error, match="gla: "):
            gla(*arrays(B=1), **wrong)


class Imposter(float):
    """A number that looks like any other one of its class."""

    def __repr__(self):
        return "1.0"

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return True


class ImposterOfNumPy(np.float64, Imposter):
    def tobytes(self, order="C"):
        return b"same"


@pytest.mark.parametrize("kind", [Imposter, ImposterOfNumPy])
def test_a_number_is_its_value(kind):
    """Not what it says of itself: the second call once took the first one's scale."""
    for value in (1.0, 2.0, -3.0):
        assert GLA.bind(arrays(), scale=kind(value)).scale == value
        assert np.allclose(gla(*arrays(), scale=kind(value)), gla(*arrays(), scale=value))
    q, k, v, _ = arrays()
    found = [retention(q, k, v, gamma=kind(gamma)) for gamma in (0.5, 0.25)]
    assert not np.allclose(*found)


def test_calls_that_fail_are_not_remembered():
    before = len(MEMOS.kept)
    for scale in np.linspace(1e300, 1e301, 50):
        with pytest.raises(ContractError):
            gla(*arrays(), scale=scale)
    assert len(MEMOS.kept) == before


def test_memory_is_checked_at_every_call():
    """What cannot be known from shapes: arrays that overlap."""
    inputs = arrays(V=16)
    for _ in range(2):
        gla(*inputs, out=np.empty_like(inputs[2]))
        with pytest.raises(ContractError, match="out shares memory with v"):
            gla(*inputs, out=inputs[2])
        step = arrays(GLA_STEP, V=16)
        state = np.zeros((2, 2, 16, 16), np.float32)
        gla_step(*step, state)
        with pytest.raises(ContractError, match="state shares memory with k"):
            gla_step(step[0], state[:, :, 0], *step[2:], state)
        with pytest.raises(ContractError, match="out shares memory with state"):
            gla_step(*step, state, out=state[:, :, 0])
        with pytest.raises(ContractError, match="slots"):
            gla_step(*step, state, slots=[0, 2])


def test_no_array_is_kept():
    for _ in range(2):
        inputs, out, state = arrays(GLA_STEP), np.empty((2, 2, 8), np.float32), np.zeros((2, 2, 16, 8), np.float32)
        kept = [weakref.ref(x) for x in (*inputs, out, state)]
        run(GLA_STEP, inputs, device(), state=state, out=out)
        gla_step(*inputs, state, out=out)
        sequence = arrays(layout="bthd")
        kept += map(
            weakref.ref, (*sequence, *flat(run(GLA, sequence, device(), layout="bthd", output_final_state=True)))
        )
        problem, do = GLA.bind(arrays(), gradient=True), arrays()[2]
        kept += map(
            weakref.ref, (do, *problem.arrays.values(), *flat(planned.replayed_pull(problem, device(), do, None)[0]))
        )
        del inputs, out, state, sequence, problem, do
        gc.collect()
        assert not any(ref() is not None for ref in kept)


def test_device_arrays_differ_by_place():
    """Arrays of CuPy at addresses that nobody looks at."""
    cupy = pytest.importorskip("cupy")

    def array(address=1 << 20, device=0, shape=(2, 3), dtype=np.float32, strides=None):
        memory = cupy.cuda.UnownedMemory(address, 1 << 10, None, device)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)

    assert signature(array()) == signature(array(1 << 21))
    others = [
        array(device=1),
        array((1 << 20) + 4),
        array(dtype=np.float16),
        array(shape=(3, 2)),
        array(strides=(4, 8)),
    ]
    assert len({signature(x) for x in (array(), *others)}) == 6


# -- plans ------------------------------------------------------------------------------------------------------------
@cache
def device(capability=80):
    return EmulatedDevice(capability)


def run(op, inputs, on, **arguments):
    return planned.replayed(op.bind(inputs, **arguments), on)


CALLS = {
    "plain": {},
    "recurrent": {"mode": "recurrent"},
    "staged": {"mode": "staged"},
    "scale": {"scale": -2.0},
    "final": {"output_final_state": True},
    "bthd": {"layout": "bthd", "output_final_state": True},
    "packed": {"cu_seqlens": [0, 17, 17, 40], "output_final_state": True},
    "packed-staged": {"cu_seqlens": [0, 17, 40], "mode": "staged"},
}


@pytest.mark.pairwise
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("op", [GLA, RWKV6], ids=lambda op: op.name)
def test_a_replay_does_what_the_plan_does(op, case, dtype, capability, monkeypatch):
    """Also where the first call was given one array twice, and later ones were not."""
    on, options = device(capability), dict(CALLS[case])
    B = 1 if "cu_seqlens" in options else 2
    calls = [arrays(op, dtype, seed, options.get("layout", "bhtd"), B=B, V=16) for seed in range(3)]
    calls[0][1] = calls[0][0]
    wanted = [flat(planned.run(op.bind(call, **options), on)) for call in calls]
    found = [flat(run(op, calls[0], on, **options))]
    planned.forbid_planning(monkeypatch, op)
    found += [flat(run(op, call, on, **options)) for call in calls[1:]]
    for left, right in zip(found, wanted):
        assert all(
            x is y is None or same_bits(x, y) and x.strides == y.strides for x, y in zip(left, right, strict=True)
        )
    assert not np.shares_memory(found[1][0], found[2][0])


@pytest.mark.parametrize("slots", [None, [4, 1]], ids=["rows", "slots"])
@pytest.mark.parametrize("op", [GLA_STEP, RWKV6_STEP], ids=lambda op: op.name)
def test_a_replayed_step_updates_the_state_of_its_call(op, slots, monkeypatch):
    for turn in range(3):
        inputs, out = arrays(op, seed=turn), np.full((2, 2, 8), np.nan, np.float32)
        state = np.random.default_rng(turn).standard_normal((5 if slots else 2, 2, 16, 8)).astype(np.float32)
        mine = state.copy()
        step = gla_step if op is GLA_STEP else rwkv6_step
        wanted = step(*inputs, state, slots=slots)
        if turn:
            planned.forbid_planning(monkeypatch, op)
        assert run(op, inputs, device(), state=mine, slots=slots, out=out) is out
        np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(mine, state, rtol=1e-4, atol=1e-5)


def test_what_copies_is_replayed_too(monkeypatch):
    """Copies are steps of a plan: of arrays without rows, into such, and to another dtype."""
    for turn in range(3):
        if turn == 1:
            planned.forbid_planning(monkeypatch, GLA)
        q, k, v, g = arrays(seed=turn)
        wanted, state = gla(q, k, v, g, output_final_state=True)
        out = np.full((2, 2, 8, 40), np.nan, np.float32).swapaxes(2, 3)
        columns = np.asfortranarray(q)
        start = np.zeros((2, 2, 16, 8))  # float64, which the kernels do not read
        for inputs, options in (
            ((columns, k, v, g), {}),
            ((q, k, v, g), {"out": out}),
            ((q, k, v, g), {"initial_state": start}),
        ):
            problem = GLA.bind(inputs, **options)
            o, _ = planned.replayed(problem, device())
            assert o is out or "out" not in options
            np.testing.assert_allclose(o, wanted, rtol=1e-3, atol=1e-4)
            assert len(planned.compiled(problem)) == 1
        assert (
            flat(run(GLA, (q, k, v, g), device(), output_final_state=True, state_dtype=np.float64))[1].dtype
            == np.float64
        )


PULLS = {
    "plain": {},
    "states": {"start": True, "dht": True},
    "dht": {"dht": True},
    "bthd": {"layout": "bthd", "start": True},
    "reverse": {"reverse": True},
    "packed": {"cu_seqlens": [0, 17, 17, 40], "start": True, "dht": True},
    "segments": {"T": 300, "B": 1, "dht": True},
}


def pull_problem(op, dtype, seed, *, start=False, dht=False, **options):
    """(problem, do, dht)."""
    sizes = {"B": options.pop("B", 1 if "cu_seqlens" in options else 2), "T": options.pop("T", 40), "V": 16}
    inputs = arrays(op, dtype, seed, options.get("layout", "bhtd"), **sizes)
    rng, N = np.random.default_rng(seed), len(options.get("cu_seqlens", [0] * (sizes["B"] + 1))) - 1
    states = [rng.standard_normal((N, 2, 16, 16)).astype(np.float32) for _ in range(2)]
    problem = op.bind(inputs, gradient=True, initial_state=states[0] if start else None, **options)
    do = rng.standard_normal(problem["v"].shape).astype(dtype)
    return problem, do, (states[1],) if dht else None


@pytest.mark.pairwise
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", PULLS)
@pytest.mark.parametrize("op", [GLA, RWKV6], ids=lambda op: op.name)
def test_a_recorded_pullback_does_what_the_plan_does(op, case, dtype, capability, monkeypatch):
    """Strong gates of one head, then of none, then of another: nothing of a call is left over."""
    monkeypatch.setattr(segments, "SEGMENT", 48)
    on, calls = device(capability), [pull_problem(op, dtype, seed, **PULLS[case]) for seed in range(4)]
    for (problem, *_), head in zip(calls, (1, None, 0, None)):
        if head is not None:
            problem.arrays[op.gates[0]][:, head, 20:25] = -20
    calls[0][0].memo.pop("plans", None)  # of other lengths of segments
    wanted = [planned.pull(problem, on, do, dht) for problem, do, dht in calls]
    found = [planned.replayed_pull(calls[0][0], on, *calls[0][1:])]
    assert len(planned.compiled(calls[0][0])) == 1
    planned.forbid_planning(monkeypatch, op)
    found += [planned.replayed_pull(problem, on, do, dht) for problem, do, dht in calls[1:]]
    for left, right in zip(found, wanted):
        pairs = zip(flat(left), flat(right), strict=True)
        assert all(x is y is None or same_bits(x, y) and x.strides == y.strides for x, y in pairs)
    assert not np.shares_memory(found[1][0][0], found[2][0][0])


def test_pullbacks_of_other_gradients_share_nothing(monkeypatch):
    """Nor do a pullback and the forward pass of the same problem; where time is reversed it may have room for o or
    not.
    """
    on = EmulatedDevice()
    problem, do, dht = pull_problem(GLA, np.float32, 50, T=41, dht=True, reverse=True)
    strided = np.concatenate([do, do], axis=-1)[..., :16]
    wanted = flat(planned.pull(problem, on, do, None))
    for given in (problem, with_output(problem)):
        for x in (do, strided):
            found = flat(planned.replayed_pull(given, on, x, None))
            assert all(x is y is None or same_bits(x, y) for x, y in zip(found, wanted, strict=True))
    planned.replayed_pull(problem, on, do, dht)
    planned.replayed(with_output(problem), on)
    assert len(planned.compiled(problem)) == 4
    planned.replayed_pull(problem, on, do.astype(np.float64), dht)
    assert len(planned.compiled(problem)) == 5


def test_a_pullbacks_graph_keeps_its_scratch(monkeypatch):
    monkeypatch.setattr(graph_capture, "in_graphs", [])
    on = EmulatedDevice(90)
    on.capturing = True
    problem, do, _ = pull_problem(RWKV6, BFLOAT16, 0, T=33)
    gradients, _ = planned.replayed_pull(problem, on, do, None)
    assert sum(x.nbytes for x in graph_capture.in_graphs) == planned.plan_of(problem, on).scratch
    assert not any(x is y for x in graph_capture.in_graphs for y in gradients)


def test_each_queue_has_tables_of_its_own():
    on = EmulatedDevice()
    problem = GLA.bind(arrays(B=1), cu_seqlens=[0, 11, 40])
    for on.queue in range(2 * execute.COMPILED_PLANS):
        planned.replayed(problem, on)
        assert (on, on.queue, "plan") in problem.memo["plans"]
    assert len(planned.compiled(problem)) <= execute.COMPILED_PLANS


def test_a_graph_keeps_its_tables_and_scratch(monkeypatch):
    monkeypatch.setattr(graph_capture, "in_graphs", [])
    on = EmulatedDevice()
    problem = GLA.bind(arrays(B=1), cu_seqlens=[0, 12, 40])
    planned.replayed(problem, on)
    assert not graph_capture.in_graphs
    on.capturing = True
    o, _ = planned.replayed(problem, on)
    (table,) = graph_capture.in_graphs
    assert table is not o and table.dtype == np.int64
    planned.replayed(GLA.bind(arrays(B=1), mode="staged"), on)
    assert len(graph_capture.in_graphs) == 1 + 6


def test_a_graph_takes_the_tables_of_another_queue(monkeypatch):
    """While one is captured nothing can be sent."""
    monkeypatch.setattr(graph_capture, "in_graphs", [])
    on = EmulatedDevice()
    problem = GLA.bind(arrays(B=1), cu_seqlens=[0, 13, 40])
    wanted, _ = planned.replayed(problem, on)
    on.queue, on.capturing, on.upload = 1, True, None
    found, _ = planned.replayed(problem, on)
    assert same_bits(found, wanted) and len(graph_capture.in_graphs) == 1


def test_threads_share_plans():
    on, results = EmulatedDevice(), {}

    def work(seed):
        results[seed] = [run(GLA, arrays(seed=seed), on)[0] for _ in range(5)]

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, found in results.items():
        wanted = planned.run(GLA.bind(arrays(seed=seed)), on)[0]
        assert all(same_bits(o, wanted) for o in found)
