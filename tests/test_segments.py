"""Few heads and many tokens: Hopper's one-pass kernel on segments of sequences, summarised in parts that are finer."""

import numpy as np
import planned
import pytest
from emulator import EmulatedDevice
from reference import assert_close, draw, exact, same_bits

from linattn_np import OPS
from linattn_np.arrays import BFLOAT16
from linattn_np.backends.cupy import instances, tuning
from linattn_np.ops import GLA, RWKV6, SIMPLE_GLA

HALF = np.dtype(np.float16)
H200 = EmulatedDevice(90)
DENSE = {"B": 2, "H": 1, "T": 333, "N": 2}
PACKED = {"B": 1, "H": 2, "T": 412, "N": 6}
BOUNDS = (0, 0, 5, 205, 238, 238, 412)


@pytest.fixture
def hopper(device):
    if device.capability != 90:
        pytest.skip("only Hopper's kernel cuts sequences")
    return device


def cut(monkeypatch, P, R):
    """Every sequence into P segments of R parts."""
    monkeypatch.setattr(tuning, "segments", lambda *sizes: P)
    monkeypatch.setattr(tuning, "parts", lambda *sizes: R)


def cut_tail(monkeypatch, later):
    """Every sequence in two, so many tokens behind its middle, where the first part's block may have to do both."""
    monkeypatch.setattr(tuning, "in_two", lambda *sizes: (later, True))


def computed(device, op, arrays, start, final, **arguments):
    problem = op.bind([device.upload(x) for x in arrays], output_final_state=final,
                      initial_state=None if start is None else device.upload(start), **arguments)
    o, parts = planned.run(problem, device)
    return [x.get() if hasattr(x, "get") else x for x in (o, *(parts or ()))]


@pytest.mark.parametrize("final", [False, True], ids=["", "final"])
@pytest.mark.parametrize("P, R", [(2, 3), (3, 2), (5, 8)])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("op, K, V", [(GLA, 64, 64), (RWKV6, 128, 72), (GLA, 200, 136), (SIMPLE_GLA, 128, 64)],
                         ids=["gla", "rwkv6", "wide-gla", "simple_gla"])
def test_parts_of_segments(hopper, rng, monkeypatch, op, K, V, packed, P, R, final):
    """Odd lengths, empty sequences, more parts than chunks; the same bits at every call."""
    cut(monkeypatch, P, R)
    sizes, arguments = (PACKED, {"cu_seqlens": BOUNDS}) if packed else (DENSE, {})
    sizes = sizes | {"K": K, "V": V}
    arrays = draw(op, rng, sizes, BFLOAT16, "weak")
    start = rng.standard_normal((sizes["N"], sizes["H"], K, V)).astype(np.float32) if final else None
    found = computed(hopper, op, arrays, start, final, **arguments)
    for what, x, y in zip(("o", "state"), found, exact(OPS[op], arrays, initial_state=start, **arguments)):
        assert_close(what, x, y, BFLOAT16)
    assert all(map(same_bits, found, computed(hopper, op, arrays, start, final, **arguments)))


@pytest.mark.parametrize("gate", ["logsigmoid", "weak", "by_channel", "spikes-40", "some-inf", "all-inf", "positive"])
@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("op, K, V, dtype", [(GLA, 72, 64, BFLOAT16), (RWKV6, 128, 136, HALF), (GLA, 136, 64, BFLOAT16),
                                             (SIMPLE_GLA, 64, 64, HALF), (SIMPLE_GLA, 136, 64, BFLOAT16)],
                         ids=["gla", "rwkv6", "wide-gla", "simple_gla", "wide-simple_gla"])
def test_segments_that_forget(hopper, rng, monkeypatch, op, K, V, dtype, P, gate):
    """Segments of more tokens than are looked at, whose states depend on all of them, on the last, or on none."""
    cut(monkeypatch, P, 1)
    arrays = draw(op, rng, {"B": 1, "H": 1, "T": 1050, "K": K, "V": V}, dtype, gate)
    start = rng.standard_normal((1, 1, K, V)).astype(np.float32)
    if gate == "positive":                                      # a state that grows e^10 times, and float16
        arrays[2], start = arrays[2] / dtype.type(1024), start / 1024
    found = computed(hopper, op, arrays, start, True)
    for what, x, y in zip(("o", "state"), found, exact(OPS[op], arrays, initial_state=start)):
        assert_close(what, x, y, dtype, rows=4)         # so many have some that cancel


@pytest.mark.parametrize("gate", ["logsigmoid", "spikes-40", "some-inf"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("op, K, V, dtype", [(GLA, 72, 136, BFLOAT16), (RWKV6, 128, 64, HALF), (SIMPLE_GLA, 64, 64, HALF)],
                         ids=["gla", "rwkv6", "simple_gla"])
def test_a_tail_of_its_own(hopper, rng, monkeypatch, op, K, V, dtype, packed, gate):
    """Done by its block where gates forget and by the first part's where they do not, whichever block comes first: one
    head forgets as drawn, one a 16th of it."""
    cut_tail(monkeypatch, 64)
    sizes = {"B": 1, "T": 1900, "N": 4} if packed else {"B": 2, "T": 700, "N": 2}
    sizes |= {"H": 2, "K": K, "V": V}
    arguments = {"cu_seqlens": (0, 750, 1150, 1150, 1900)} if packed else {}
    arrays = draw(op, rng, sizes, dtype, gate, np.float32 if packed else None)
    arrays[3][:, 1] /= 16
    start = None if packed else rng.standard_normal((sizes["N"], sizes["H"], K, V)).astype(np.float32)
    found = computed(hopper, op, arrays, start, not packed, **arguments)
    for what, x, y in zip(("o", "state"), found, exact(OPS[op], arrays, initial_state=start, **arguments)):
        assert_close(what, x, y, dtype, rows=4)
    assert all(map(same_bits, found, computed(hopper, op, arrays, start, not packed, **arguments)))


@pytest.mark.parametrize("gate_dtype", [None, np.float32], ids=["", "float32"])
@pytest.mark.parametrize("P, tail", [(2, False), (3, False), (2, True)], ids=["halves", "segments", "tail"])
def test_what_is_forgotten_is_not_read(hopper, rng, monkeypatch, P, tail, gate_dtype):
    """Also where a channel forgets only just; where one does not quite, all tokens are, whichever block comes first."""
    cut_tail(monkeypatch, tuning.LATER) if tail else cut(monkeypatch, P, 1)
    arrays = draw(GLA, rng, {"B": 1, "H": 1, "T": P * 384, "K": 64, "V": 64}, BFLOAT16, "all-20", gate_dtype)
    arrays[1][0, 0, 40, 3] = np.nan
    second = slice(384 + tuning.LATER * (P == 2), None)          # all but the first segment
    for gate, finite in 2 * ((-0.6, True), (-0.55, False), (-0.55, False)):         # 154 and 141 nats in 256 tokens, of 148
        arrays[3][0, 0, :, 5] = gate
        o, = computed(hopper, GLA, arrays, None, False)
        assert np.isfinite(o[0, 0, second].astype(np.float32)).all() == finite


@pytest.mark.parametrize("final", [False, True], ids=["", "final"])
def test_states_that_nobody_needs_are_not_waited_for(hopper, rng, monkeypatch, final):
    """Without a final state a NaN in the last segment stays where it is; with one it is in there."""
    cut(monkeypatch, 2, 2)
    arrays = draw(GLA, rng, {"B": 1, "H": 1, "T": 256, "K": 64, "V": 64}, BFLOAT16)
    arrays[1][:, :, 200, 3] = np.nan
    o, *state = computed(hopper, GLA, arrays, None, final)
    assert np.isfinite(o[:, :, :200].astype(np.float32)).all() and np.isnan(o[:, :, 200:].astype(np.float32)).any()
    assert not final or np.isnan(state[0][0, 0, 3]).all()


def test_an_initial_state_that_begins_anywhere(hopper, rng, monkeypatch):
    """Not on 16 bytes, as four values at once are read."""
    cut(monkeypatch, 2, 1)
    arrays = draw(GLA, rng, {"B": 1, "H": 1, "T": 128, "K": 64, "V": 64}, BFLOAT16)
    memory = hopper.upload(rng.standard_normal(1 + 64 * 64).astype(np.float32))
    start = memory[1:].reshape(1, 1, 64, 64)
    o, _ = planned.run(GLA.bind([hopper.upload(x) for x in arrays], initial_state=start), hopper)
    o, start = (x.get() if hasattr(x, "get") else x for x in (o, start))
    assert_close("o", o, exact(OPS[GLA], arrays, initial_state=start)[0], BFLOAT16)


def forward(D, schedule=instances.SINGLE_PASS):
    return instances.GatedForwardSm90.fitting("AfterWrite", schedule, BFLOAT16, BFLOAT16, D, D)


@pytest.mark.parametrize("heads, longest, final, P, R", [
    (64, 2048, False, 2, 2),        # 64 blocks of 1024 tokens leave half of the card idle
    (64, 2048, True, 2, 1),         # 128 do not
    (32, 16384, False, 4, 1),       # nor do 96
    (1, 1100, False, 8, 1),         # no shorter than 128 tokens
])
def test_as_many_parts_as_fill_the_card(heads, longest, final, P, R):
    summary = forward(128, instances.SEGMENT_STATE)
    assert tuning.segments(heads, longest, tuning.resident_blocks(summary, H200)) == P
    assert tuning.parts(summary, heads, 128, P, longest, final, H200) == R


@pytest.mark.parametrize("D, heads, longest, halves", [
    (128, 64, 2048, True), (128, 67, 2048, False), (128, 44, 2048, False), (128, 64, 255, False), (128, 64, 8192, True), (128, 64, 8193, False),
    (64, 64, 1024, True), (64, 64, 4096, False), (64, 100, 8193, False), (64, 100, 1024, True), (64, 33, 1024, False), (64, 133, 1024, False),
])
def test_which_sequences_are_cut_in_two(D, heads, longest, halves):
    assert tuning.halves(forward(D), heads, longest, H200) == halves


@pytest.mark.parametrize("D, heads, lengths, tokens", [
    (128, 96, [8192], 1872),                # three of them and of their starts, beside 6320 tokens and a look
    (128, 67, [4096], 1216), (128, 160, [2048], 533), (128, 100, [512], 0),
    (128, 132, [8192], 0), (128, 256, [8192], 0), (128, 128, [8192], 0),       # hardly anything is idle
    (128, 48, [8192, 8191], 0), (64, 160, [8192], 2581), (64, 264, [8192], 0),
])
def test_which_sequences_get_a_tail(D, heads, lengths, tokens):
    assert tuning.tail(forward(D), heads * len(lengths), np.array(lengths), H200) == tokens


@pytest.mark.parametrize("heads, longest, cut", [
    (64, 2048, (tuning.LATER, False)), (66, 8191, (tuning.LATER, False)), (44, 2048, None), (64, 16384, None), (256, 2048, None), (10, 250, None),
    (96, 8192, (6304 - 4096, True)), (96, 8191, (6304 - 4096, True)),
])
def test_where_sequences_are_cut_in_two(heads, longest, cut):
    assert tuning.in_two(forward(128), heads, np.array([longest]), H200) == cut


def test_two_blocks_of_the_smallest_share_a_multiprocessor():
    narrow, wide = (forward(D, instances.SEGMENT_STATE) for D in instances.TILES)
    assert tuning.resident_blocks(narrow, H200) == 2 * tuning.resident_blocks(wide, H200) == 264


def test_tuning_asks_the_device():
    """On a card with fewer multiprocessors, or too little shared memory for two blocks, sequences are cut otherwise."""
    class Small(EmulatedDevice):
        multiprocessors, shared_per_multiprocessor = 66, 164 * 1024

    kernel, lengths = forward(64), np.array([8192])
    assert tuning.resident_blocks(kernel, Small(90)) == 66
    assert tuning.forward_cut(kernel, 64, lengths, H200) == tuning.Cut(4)
    assert tuning.forward_cut(kernel, 16, lengths, Small(90)) == tuning.Cut(4)
    assert tuning.forward_cut(kernel, 64, lengths, Small(90)) == tuning.Cut(1)
