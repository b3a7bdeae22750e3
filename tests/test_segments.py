"""Few heads and many tokens: Hopper's one-pass kernel on segments of sequences, summarised in parts that are finer."""

import numpy as np
import planned
import pytest
from emulator import EmulatedDevice
from planned import results
from reference import assert_close, assert_results, draw, exact, same_bits

from linattn_np import OPS
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import gated_kernels, segments
from linattn_np.declarations import GLA, RWKV6, SIMPLE_GLA

HALF = np.dtype(np.float16)
H200 = EmulatedDevice(90)
DENSE = {"B": 2, "H": 1, "T": 333, "N": 2}
PACKED = {"B": 1, "H": 2, "T": 412, "N": 6}
BOUNDS = (0, 0, 5, 205, 238, 238, 412)


def cut(monkeypatch, P, R):
    """Every sequence into P segments of R parts."""
    for name in ("segments_that_fill", "cheapest_forward_count"):
        monkeypatch.setattr(segments, name, lambda *sizes: P)
    monkeypatch.setattr(segments, "parts_per_segment", lambda *sizes: R)


def split_columns(monkeypatch):
    """Every head's columns of V shared by the blocks of a cluster."""
    monkeypatch.setattr(segments, "split_columns", lambda heads, V, *_: V > gated_kernels.PANEL)


@pytest.mark.pairwise
@pytest.mark.parametrize("final", [False, True], ids=["", "final"])
@pytest.mark.parametrize("P, R", [(2, 3), (3, 2), (5, 8)])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "op, K, V",
    [(GLA, 64, 64), (RWKV6, 128, 72), (GLA, 200, 136), (SIMPLE_GLA, 128, 64)],
    ids=["gla", "rwkv6", "wide-gla", "simple_gla"],
)
def test_parts_of_segments(hopper, rng, monkeypatch, op, K, V, packed, P, R, final):
    """Odd lengths, empty sequences, more parts than chunks; the same bits at every call."""
    cut(monkeypatch, P, R)
    sizes, arguments = (PACKED, {"cu_seqlens": BOUNDS}) if packed else (DENSE, {})
    sizes = sizes | {"K": K, "V": V}
    arrays = draw(op, rng, sizes, BFLOAT16, "weak")
    start = rng.standard_normal((sizes["N"], sizes["H"], K, V)).astype(np.float32) if final else None
    found = results(op, arrays, hopper, start, final, **arguments)
    assert_results(OPS[op], arrays, found, BFLOAT16, initial_state=start, **arguments)
    assert all(map(same_bits, found, results(op, arrays, hopper, start, final, **arguments)))


@pytest.mark.pairwise
@pytest.mark.parametrize("gate", ["trained", "weak", "by_channel", "spikes-40", "some-inf", "all-inf", "positive"])
@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize(
    "op, K, V, dtype",
    [
        (GLA, 72, 64, BFLOAT16),
        (RWKV6, 128, 136, HALF),
        (GLA, 136, 64, BFLOAT16),
        (SIMPLE_GLA, 64, 64, HALF),
        (SIMPLE_GLA, 136, 64, BFLOAT16),
    ],
    ids=["gla", "rwkv6", "wide-gla", "simple_gla", "wide-simple_gla"],
)
def test_segments_of_any_gates(hopper, rng, monkeypatch, op, K, V, dtype, P, gate):
    """States that depend on all of a segment's tokens, on the last, or on none."""
    cut(monkeypatch, P, 1)
    arrays = draw(op, rng, {"B": 1, "H": 1, "T": 1050, "K": K, "V": V}, dtype, gate)
    start = rng.standard_normal((1, 1, K, V)).astype(np.float32)
    if gate == "positive":  # a state that grows e^10 times, and float16
        arrays[2], start = arrays[2] / dtype.type(1024), start / 1024
    found = results(op, arrays, hopper, start, True)
    assert_results(OPS[op], arrays, found, dtype, initial_state=start)


@pytest.mark.pairwise
@pytest.mark.parametrize("gate_dtype", [None, np.float32], ids=["", "float32"])
@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "op, K, V, dtype",
    [(GLA, 128, 128, BFLOAT16), (RWKV6, 72, 136, BFLOAT16), (RWKV6, 128, 128, HALF), (GLA, 64, 72, HALF)],
    ids=["gla", "wide-rwkv6", "rwkv6", "small-gla"],
)
def test_columns_split_over_a_cluster(hopper, rng, monkeypatch, op, K, V, dtype, packed, P, gate_dtype):
    """Blocks that make chunks in turn for both, one of them more than the other; the same bits at every call."""
    split_columns(monkeypatch)
    cut(monkeypatch, P, 2)
    sizes, arguments = (PACKED, {"cu_seqlens": BOUNDS}) if packed else (DENSE, {})
    sizes = sizes | {"K": K, "V": V}
    arrays = draw(op, rng, sizes, dtype, "trained", gate_dtype)
    start = rng.standard_normal((sizes["N"], sizes["H"], K, V)).astype(np.float32)
    found = results(op, arrays, hopper, start, True, **arguments)
    assert_results(OPS[op], arrays, found, dtype, initial_state=start, **arguments)
    assert all(map(same_bits, found, results(op, arrays, hopper, start, True, **arguments)))


@pytest.mark.pairwise("op", "K", "V", "gate")
@pytest.mark.parametrize("final", [False, True], ids=["", "final"])
@pytest.mark.parametrize(
    "op, K, V, gate",
    [(GLA, 128, 128, "weak"), (RWKV6, 64, 128, "positive"), (GLA, 200, 136, "trained"), (SIMPLE_GLA, 136, 64, "weak")],
    ids=["gla", "rwkv6", "wide-gla", "simple_gla"],
)
def test_a_short_first_segment_beside_the_rest(hopper, rng, monkeypatch, op, K, V, gate, final):
    """Two sequences leave part of the card idle, in which their first segments are made."""
    cut(monkeypatch, 1, 2)
    monkeypatch.setattr(segments, "short_first_segment", lambda *sizes: 160)
    arrays = draw(op, rng, {"B": 2, "H": 2, "T": 411, "K": K, "V": V}, BFLOAT16, gate)
    start = rng.standard_normal((2, 2, K, V)).astype(np.float32) if final else None
    found = results(op, arrays, hopper, start, final)
    assert_results(OPS[op], arrays, found, BFLOAT16, initial_state=start)
    plan = planned.plan_of(op.bind([hopper.upload(x) for x in arrays], output_final_state=final), hopper)
    summaries = 1 + (K > gated_kernels.TILES[-1])  # a launch for every 128 channels
    schedules = [kernel.schedule for kernel in plan.kernels if hasattr(kernel, "schedule")]
    assert not any("scan" in name for name in planned.names(plan))
    assert (
        plan.tiles["segments"] == 2 and schedules.count(gated_kernels.SEGMENT_STATE) == summaries == len(schedules) - 1
    )


@pytest.mark.parametrize("op", [GLA, RWKV6])
def test_the_last_segment_leaves_the_final_state(hopper, rng, monkeypatch, op):
    """So it is not summarised for that."""
    cut(monkeypatch, 3, 1)
    arrays = draw(op, rng, {"B": 1, "H": 1, "T": 200, "K": 64, "V": 64}, BFLOAT16)
    plan = planned.plan_of(op.bind([hopper.upload(x) for x in arrays], output_final_state=True), hopper)
    (summary,) = (step for step in plan.launches if getattr(step.kernel, "schedule", "") == gated_kernels.SEGMENT_STATE)
    assert summary.args["computed"] == 2 and plan.launches[-1].args["final"] is not None


@pytest.mark.parametrize("final", [False, True], ids=["", "final"])
def test_states_that_nobody_needs_are_not_waited_for(hopper, rng, monkeypatch, final):
    """Without a final state a NaN in the last segment stays where it is; with one it is in there."""
    cut(monkeypatch, 2, 2)
    arrays = draw(GLA, rng, {"B": 1, "H": 1, "T": 256, "K": 64, "V": 64}, BFLOAT16)
    arrays[1][:, :, 200, 3] = np.nan
    o, *state = results(GLA, arrays, hopper, None, final)
    assert np.isfinite(o[:, :, :200].astype(np.float32)).all() and np.isnan(o[:, :, 200:].astype(np.float32)).any()
    assert not final or np.isnan(state[0][0, 0, 3]).all()


@pytest.mark.pairwise("op", "K", "V", "dtype")
@pytest.mark.parametrize("gate_dtype", [None, np.float32], ids=["", "float32"])
@pytest.mark.parametrize("R", [1, 3])
@pytest.mark.parametrize(
    "op, K, V, dtype",
    [(GLA, 64, 64, BFLOAT16), (RWKV6, 128, 128, HALF), (GLA, 200, 64, BFLOAT16), (RWKV6, 72, 136, BFLOAT16)],
    ids=["gla", "rwkv6", "wide-gla", "narrow-rwkv6"],
)
def test_what_a_segments_end_forgets_is_not_summarised(hopper, rng, monkeypatch, op, K, V, dtype, R, gate_dtype):
    """A NaN there stays in its own segment; where one channel keeps, nothing is left out."""
    monkeypatch.setattr(segments, "split_columns", lambda *sizes: False)
    cut(monkeypatch, 2, R)
    arrays = draw(op, rng, {"B": 1, "H": 2, "T": 1210, "K": K, "V": V}, dtype, "weak", gate_dtype)
    keys, gates = arrays[1], arrays[3]
    gates[:, 0] = rng.uniform(-1.2, -0.8, gates[:, 0].shape)
    gates[:, 0, 20:24] = 0.5
    wanted = exact(OPS[op], arrays)
    for what, x, y in zip(("o", "state"), results(op, arrays, hopper, None, True), wanted):
        assert_close(what, x, y, dtype)
    keys[:, :, 10] = np.nan
    o, state = results(op, arrays, hopper, None, True)
    assert_close("o", o[:, :1, 608:], wanted[0][:, :1, 608:], dtype)
    assert_close("state", state[:, :1], wanted[1][:, :1], dtype)
    assert np.isnan(o[:, 1, 608:].astype(np.float32)).any() and np.isnan(o[:, 0, 12:608].astype(np.float32)).any()


@pytest.mark.parametrize("every_card", [False, True], ids=["hopper", "portable"])
@pytest.mark.parametrize("gate_dtype", [None, np.float32], ids=["", "float32"])
def test_what_grew_before_it_decayed_is_not_forgotten(hopper, rng, monkeypatch, every_card, gate_dtype):
    """By 60 nats, before 50 nats of decay: one gate that grows near the segment's end, however little, tells of it."""
    cut(monkeypatch, 2, 1)
    device = EmulatedDevice() if every_card else hopper
    arrays = draw(GLA, rng, {"B": 1, "H": 1, "T": 1210, "K": 64, "V": 64}, BFLOAT16, "weak", gate_dtype)
    gates = arrays[3]
    gates[:, :, :400], gates[:, :, 400:460], gates[:, :, 460:605] = -0.01, 1, -0.35
    gates[:, :, 600] = 0.01
    o, state = results(GLA, arrays, device, None, True)
    assert_results(OPS[GLA], arrays, [o, state], BFLOAT16)


@pytest.mark.pairwise("op", "dtype", "every_card")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("gate_dtype", [None, np.float32], ids=["", "float32"])
@pytest.mark.parametrize("R", [1, 3])
@pytest.mark.parametrize(
    "op, dtype, every_card",
    [
        (GLA, BFLOAT16, False),
        (RWKV6, HALF, False),
        (SIMPLE_GLA, BFLOAT16, False),
        (GLA, BFLOAT16, True),
        (RWKV6, np.dtype(np.float32), True),
        (SIMPLE_GLA, np.dtype(np.float32), True),
    ],
    ids=["gla", "rwkv6-float16", "simple_gla", "portable-gla", "portable-rwkv6", "portable-simple_gla"],
)
def test_what_grows_again_is_not_forgotten(hopper, rng, monkeypatch, op, dtype, every_card, R, gate_dtype, packed):
    """60 nats of decay before a cut, and about 62 of growth behind it, over segments. Nothing is written in between.
    The gates are random, since equal ones would all be rounded alike."""
    cut(monkeypatch, 5, R)
    start = 90 if packed else 0
    arguments = {"cu_seqlens": (0, start, start + 1210)} if packed else {}
    arrays = draw(op, rng, {"B": 1, "H": 1, "T": start + 1210, "K": 64, "V": 64}, dtype, "weak", gate_dtype)
    keys, gates, growth = arrays[1], arrays[3], np.s_[:, :, start + 520 : start + 1080]
    gates[...], gates[:, :, start + 480], gates[growth] = -0.01, -60, rng.uniform(0.1, 0.12, gates[growth].shape)
    keys[:, :, start + 400 : start + 1080] = 0
    found = results(op, arrays, EmulatedDevice() if every_card else hopper, None, True, **arguments)
    assert_results(OPS[op], arrays, found, dtype, **arguments)


def test_an_initial_state_that_begins_anywhere(hopper, rng, monkeypatch):
    """Not on 16 bytes, as four values at once are read."""
    cut(monkeypatch, 2, 1)
    arrays = draw(GLA, rng, {"B": 1, "H": 1, "T": 128, "K": 64, "V": 64}, BFLOAT16)
    memory = hopper.upload(rng.standard_normal(1 + 64 * 64).astype(np.float32))
    start = memory[1:].reshape(1, 1, 64, 64)
    o, _ = planned.run(GLA.bind([hopper.upload(x) for x in arrays], initial_state=start), hopper)
    assert_close("o", planned.host(o), exact(OPS[GLA], arrays, initial_state=planned.host(start))[0], BFLOAT16)


def forward(D, schedule=gated_kernels.SINGLE_PASS, dtype=BFLOAT16):
    return gated_kernels.GatedForwardSm90.fitting("AfterWrite", schedule, dtype, dtype, D, D)


@pytest.mark.parametrize(
    "heads, longest, final, P, R",
    [
        (64, 2048, False, 2, 2),  # 64 blocks of 1024 tokens leave half of the card idle
        (64, 2048, True, 2, 1),  # 128 do not
        (32, 16384, False, 4, 4),  # 96 leave some of it, 384 hardly any in three waves
        (1, 1100, False, 8, 1),  # no shorter than 128 tokens
    ],
)
def test_as_many_parts_as_fill_the_card(heads, longest, final, P, R):
    summary = forward(128, gated_kernels.SEGMENT_STATE)
    assert segments.segments_that_fill(heads, longest, summary.resident_blocks(H200)) == P
    assert segments.parts_per_segment(summary, heads, 128, P, longest, final, H200) == R


@pytest.mark.parametrize(
    "lengths, heads", [((100,) * 50, 100), ((100, 60) * 20, 64), ((1000, *[10] * 99), 4), ((0, 0), 0)]
)
def test_heads_of_short_sequences_leave_the_card_to_long_ones(lengths, heads):
    bounds = np.cumsum([0, *lengths])
    arrays = [np.zeros((1, 2, bounds[-1], 64), BFLOAT16)] * 4
    assert segments.heads_at_work(GLA.bind(arrays, cu_seqlens=bounds)) == heads


@pytest.mark.parametrize(
    "blocks, longest, most, P",
    [
        (64, 512, 264, 1),  # four would spare 384 tokens
        (64, 1024, 264, 4),
        (16, 512, 132, 1),
        (16, 1024, 132, 8),
        (64, 1024, 132, 1),
        (64, 2048, 132, 2),
        (0, 0, 132, 1),
    ],
)
def test_a_cut_of_hoppers_forward_pass_spares_enough(blocks, longest, most, P):
    assert segments.segments_that_fill(blocks, longest, most, segments.SPARED) == P


@pytest.mark.parametrize(
    "heads, longest, D, P",
    [
        (8, 513, 64, 9),
        (16, 512, 64, 8),
        (32, 512, 64, 1),  # where four would need two launches more for 384 tokens less
        (64, 1024, 64, 4),
        (8, 513, 128, 1),
        (1, 1024, 128, 16),  # of two chunks each
        (16, 1024, 128, 8),  # which fill the card
        (64, 2048, 128, 2),
        (0, 0, 64, 1),
    ],
)
def test_a_cut_of_gates_for_every_channel_takes_less_time(heads, longest, D, P):
    assert segments.cheapest_forward_count(heads, heads, longest, forward(D), D, H200) == P


@pytest.mark.parametrize(
    "blocks, longest, P",
    [
        (256, 4096, 1),  # two waves, nearly full
        (96, 8192, 4),  # three full waves of a quarter, where one would leave 36 multiprocessors idle
        (100, 8192, 1),  # four waves of a quarter would gain nothing
        (140, 8192, 4),  # a wave of 8 blocks would take as long as one of 132
        (64, 2048, 2),
        (32, 16384, 4),
        (16, 32768, 8),
        (1, 1100, 18),  # a chunk of 32 tokens more takes longer than to join seven segments more
        (0, 0, 1),
    ],
)
def test_segments_fill_the_waves_of_the_backward_kernels(blocks, longest, P):
    assert segments.cheapest_backward_count(blocks, longest, H200.multiprocessors, 128, 128) == P


@pytest.mark.parametrize(
    "blocks, T, length",
    [
        (96, 8192, 2048),  # 36 multiprocessors make three each, while the others make what is left
        (100, 8192, 1024),  # 32, four each
        (64, 2048, 0),  # two equal ones
        (32, 16384, 0),  # half of the card and more would wait for the long ones
        (256, 4096, 0),  # no multiprocessor is idle
        (96, 8193, 0),  # states are kept at other tokens
    ],
)
def test_a_short_segment_for_idle_multiprocessors(blocks, T, length):
    sizes = H200.multiprocessors, 128, 128
    P = segments.cheapest_backward_count(blocks, T, *sizes)
    assert segments.short_segment(P, blocks, T, *sizes) == length


@pytest.mark.parametrize(
    "blocks, T, length",
    [
        (96, 8192, 2048),  # 36 multiprocessors make three each, while the others make what is left
        (96, 1024, 0),  # two more launches would take what is gained
        (128, 8192, 0),  # four idle ones cannot do much
        (256, 4096, 0),
    ],
)
def test_a_short_first_segment_for_idle_multiprocessors(blocks, T, length):
    assert segments.short_first_segment(blocks, T, H200.multiprocessors) == length


@pytest.mark.parametrize(
    "heads, V, longest, split",
    [
        (64, 128, 2048, True),
        (66, 128, 2048, True),
        (67, 128, 2048, False),
        (64, 64, 2048, False),
        (33, 136, 2048, True),
        (34, 136, 2048, False),
        (32, 128, 16384, True),
        (16, 128, 32768, False),
        (1, 128, 300, True),
        (1, 128, 1100, False),
    ],
)
def test_which_heads_are_split_by_columns(heads, V, longest, split):
    kernels = forward(128), forward(128, gated_kernels.CLUSTER_SPLIT_V)
    assert segments.split_columns(heads, V, longest, H200, *kernels) == split


@pytest.mark.parametrize(
    "D, dtype, gate, split",
    [
        (128, HALF, HALF, False),
        (128, BFLOAT16, np.dtype(np.float32), False),
        (128, HALF, np.dtype(np.float32), True),  # one group of producers in any case
        (64, HALF, HALF, True),
    ],
)
def test_no_columns_are_split_where_that_halves_the_producers(D, dtype, gate, split):
    schedules = gated_kernels.SINGLE_PASS, gated_kernels.CLUSTER_SPLIT_V
    kernels = [gated_kernels.GatedForwardSm90.fitting("AfterWrite", x, dtype, gate, D, 128) for x in schedules]
    assert segments.split_columns(64, 128, 2048, H200, *kernels) == split


def test_two_blocks_of_the_smallest_share_a_multiprocessor():
    narrow, wide = (forward(D) for D in gated_kernels.TILES)
    finer = forward(64, dtype=HALF)
    assert narrow.resident_blocks(H200) == 2 * wide.resident_blocks(H200) == 264
    assert finer.resident_blocks(H200) == 264


def test_a_cut_asks_the_device():
    """On a card with fewer multiprocessors, or too little shared memory for two blocks, sequences are cut otherwise."""

    class Small(EmulatedDevice):
        multiprocessors, shared_per_multiprocessor = 66, 164 * 1024

    kernel = forward(64)
    assert kernel.resident_blocks(H200) == 264 and kernel.resident_blocks(Small(90)) == 66
    kernels = forward(128), forward(128, gated_kernels.CLUSTER_SPLIT_V)
    on_h200, on_small = (segments.split_columns(64, 128, 2048, card, *kernels) for card in (H200, Small(90)))
    assert on_h200 and not on_small


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "pullback"])
@pytest.mark.parametrize("H, T", [(16, 2048), (96, 8192), (100, 64)])
@pytest.mark.parametrize("op", [GLA, SIMPLE_GLA])
def test_each_decision_is_made_once_a_plan(op, H, T, gradient, monkeypatch):
    asked = []
    cheapest = ("cheapest_forward_count", "cheapest_backward_count")
    for name in ("forward_cut", "backward_way", *cheapest, "split_columns"):
        decide = getattr(segments, name)
        monkeypatch.setattr(segments, name, lambda *a, name=name, decide=decide: (asked.append(name), decide(*a))[1])
    shapes = {"B H T": (1, H, T), "B H T K": (1, H, T, 128), "B H T V": (1, H, T, 128)}
    arrays = [np.zeros(shapes[axes], BFLOAT16) for axes in op.arrays.values()]
    planned.plan_of(op.bind(arrays, gradient=gradient).replace(memo=None), H200)
    assert len(set(asked)) == len(asked) and bool(asked) == (op is GLA)


def test_float64_is_not_summarised(rng):
    """Its kernels go token by token: they have no segments, and no sizes of shared memory."""
    problem = GLA.bind(draw(GLA, rng, {"B": 1, "H": 1, "T": 64, "K": 8, "V": 8}, np.dtype(np.float64)))
    assert planned.executed("plan_summary", problem, EmulatedDevice(90)) is None
