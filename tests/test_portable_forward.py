"""The forward kernel of every card: any sizes and alignment, sequences in segments, products of float32."""

import catalog
import numpy as np
import planned
import pytest
from emulator import EmulatedDevice
from planned import results
from reference import assert_close, assert_results, draw, errors, exact, same_bits

from linattn_np import OPS
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import gated_kernels, segments
from linattn_np.backends.cupy.device import CupyDevice
from linattn_np.declarations import GLA, RWKV6

SINGLE, HALF = np.dtype(np.float32), np.dtype(np.float16)
LEAST_SHARED = 99 * 1024  # bytes of shared memory that a block may have on sm_86, sm_89 and sm_120
BOUNDS = (0, 0, 5, 105, 138, 138, 212)


@pytest.fixture
def portable(device):
    """A device whose plans are those of every card."""
    return CupyDevice(portable=True) if isinstance(device, CupyDevice) else device


@pytest.mark.pairwise("op", "K", "V", "dtype")
@pytest.mark.parametrize("final", [False, True], ids=["", "final"])
@pytest.mark.parametrize("P, R", [(2, 3), (3, 1)])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "op, K, V, dtype",
    [(GLA, 64, 128, BFLOAT16), (RWKV6, 128, 71, SINGLE), (GLA, 200, 130, BFLOAT16), (RWKV6, 40, 7, HALF)],
    ids=["gla", "rwkv6-float32", "wide-gla", "small-rwkv6"],
)
def test_segments(portable, rng, monkeypatch, op, K, V, dtype, packed, P, R, final):
    """Odd lengths, empty sequences, parts of segments; the same bits at every call."""
    monkeypatch.setattr(segments, "segments_that_fill", lambda *sizes: P)
    monkeypatch.setattr(segments, "parts_per_segment", lambda *sizes: R)
    sizes = {"B": 1, "H": 2, "T": 212, "K": K, "V": V, "N": 6 if packed else 1}
    arguments = {"cu_seqlens": BOUNDS} if packed else {}
    arrays = draw(op, rng, sizes, dtype, "trained")
    start = rng.standard_normal((sizes["N"], 2, K, V)).astype(np.float32) if final else None
    found = results(op, arrays, portable, start, final, **arguments)
    assert_results(OPS[op], arrays, found, dtype, initial_state=start, **arguments)
    assert all(map(same_bits, found, results(op, arrays, portable, start, final, **arguments)))


@pytest.mark.pairwise("K", "V")
@pytest.mark.parametrize("dtype", [SINGLE, HALF, BFLOAT16], ids=str)
@pytest.mark.parametrize("K, V", [(300, 512), (512, 129), (257, 64)])
@pytest.mark.parametrize("op", [GLA, RWKV6], ids=lambda op: op.name)
def test_more_channels_and_columns_than_a_block_has(portable, rng, op, K, V, dtype):
    arrays = draw(op, rng, {"B": 1, "H": 1, "T": 41, "K": K, "V": V}, dtype)
    start = rng.standard_normal((1, 1, K, V)).astype(np.float32)
    found = results(op, arrays, portable, start, True)
    assert_results(OPS[op], arrays, found, dtype, initial_state=start)


@pytest.mark.parametrize("op, dtype", [(GLA, SINGLE), (RWKV6, BFLOAT16)], ids=str)
@pytest.mark.parametrize("bounds", [(0, 870), (0, 20, 20, 890)], ids=["dense", "packed"])
def test_few_heads_are_cut_stage_by_stage(portable, rng, op, dtype, bounds):
    """Stage 3 carries the state through segments at the same time, from the states at their starts."""
    sizes = {"B": 1, "H": 2, "T": bounds[-1], "K": 12, "V": 20, "N": len(bounds) - 1}
    arguments = {"cu_seqlens": list(bounds)} if len(bounds) > 2 else {}
    arrays, start = draw(op, rng, sizes, dtype), rng.standard_normal((sizes["N"], 2, 12, 20)).astype(np.float32)
    problem = op.bind([portable.upload(x) for x in arrays], mode="staged", **arguments)
    plan = planned.plan_of(problem, portable)
    assert planned.names(plan)[2:5] == ["gated_segment_states", "gated_scan_segments", "stages_inter_chunk"]
    for final in (False, True):
        found = results(op, arrays, portable, start, final, mode="staged", **arguments)
        assert_results(OPS[op], arrays, found, dtype, initial_state=start, **arguments)


@pytest.mark.pairwise("K", "V", "shared")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("K, V, shared", [(136, 72, 227), (384, 76, 163), (500, 68, 227), (136, 132, 99)])
@pytest.mark.parametrize("op", [GLA, RWKV6], ids=lambda op: op.name)
def test_wide_heads(portable, rng, monkeypatch, op, K, V, shared, packed):
    """One pass over operands that are made once, where a block has the memory; the same bits at every call."""
    monkeypatch.setattr(segments, "segments_that_fill", lambda *sizes: 1)
    if isinstance(portable, CupyDevice):
        if shared * 1024 != portable.shared_per_block:
            pytest.skip("a card has the memory that it has")
        device = portable
    else:
        device = EmulatedDevice()
        device.shared_per_block = shared * 1024
    sizes = {"B": 1, "H": 1, "T": 212, "K": K, "V": V, "N": 6 if packed else 1}
    arguments = {"cu_seqlens": BOUNDS} if packed else {}
    arrays = draw(op, rng, sizes, BFLOAT16, "trained")
    start = rng.standard_normal((sizes["N"], 1, K, V)).astype(np.float32)
    kernels = planned.names(planned.plan_of(op.bind([device.upload(x) for x in arrays], **arguments), device))
    wide = ["gated_wide_operands", "gated_wide_forward"] if shared > 99 else ["gated_forward"] * 3
    assert kernels == wide
    found = results(op, arrays, device, start, True, **arguments)
    assert_results(OPS[op], arrays, found, BFLOAT16, initial_state=start, **arguments)
    assert all(map(same_bits, found, results(op, arrays, device, start, True, **arguments)))


@pytest.mark.pairwise
@pytest.mark.parametrize("P", [1, 2], ids=["", "cut"])
@pytest.mark.parametrize("K", [72, 136])
@pytest.mark.parametrize("off", [1, 2, 4, 8])
@pytest.mark.parametrize("gate_dtype", [None, SINGLE], ids=["", "gate32"])
@pytest.mark.parametrize("dtype", [SINGLE, BFLOAT16], ids=str)
def test_rows_begin_anywhere(portable, rng, monkeypatch, dtype, gate_dtype, off, K, P):
    """Slices so many elements into a buffer: the bits of aligned arrays."""
    monkeypatch.setattr(segments, "segments_that_fill", lambda *sizes: P)
    arrays = draw(GLA, rng, {"B": 1, "H": 2, "T": 45, "K": K, "V": 64}, dtype, gate_dtype=gate_dtype)

    def shifted(x):
        memory = portable.upload(np.concatenate([np.zeros(off, x.dtype), x.ravel()]))
        return memory[off:].reshape(x.shape)

    o, _ = planned.run(GLA.bind([shifted(x) for x in arrays]), portable)
    assert same_bits(planned.host(o), results(GLA, arrays, portable)[0])


@pytest.mark.pairwise("op", "K", "V", "dtype")
@pytest.mark.parametrize("gate_dtype", [None, SINGLE], ids=["", "gate32"])
@pytest.mark.parametrize("R", [1, 3])
@pytest.mark.parametrize(
    "op, K, V, dtype",
    [(GLA, 64, 128, BFLOAT16), (RWKV6, 72, 71, SINGLE), (GLA, 200, 130, BFLOAT16), (RWKV6, 40, 7, HALF)],
    ids=["gla", "rwkv6-float32", "wide-gla", "small-rwkv6"],
)
def test_what_a_segments_end_forgets_is_not_summarised(portable, rng, monkeypatch, op, K, V, dtype, R, gate_dtype):
    """A NaN there stays in its own segment; where one channel keeps, nothing is left out."""
    monkeypatch.setattr(segments, "segments_that_fill", lambda *sizes: 2)
    monkeypatch.setattr(segments, "parts_per_segment", lambda *sizes: R)
    arrays = draw(op, rng, {"B": 1, "H": 3, "T": 410, "K": K, "V": V}, dtype, "weak", gate_dtype)
    keys, gates = arrays[1], arrays[3]
    gates[:, 0] = rng.uniform(-1.2, -0.8, gates[:, 0].shape)
    gates[:, 0, 20:24] = 0.5
    gates[:, 2, 190] = -np.inf
    wanted = exact(OPS[op], arrays)
    for what, x, y in zip(("o", "state"), results(op, arrays, portable, None, True), wanted):
        assert_close(what, x, y, dtype)
    keys[:, :, 10] = np.nan
    o, state = results(op, arrays, portable, None, True)
    assert_close("o", o[:, ::2, 224:], wanted[0][:, ::2, 224:], dtype)
    assert_close("state", state[:, ::2], wanted[1][:, ::2], dtype)
    assert np.isnan(o[:, 1, 224:].astype(np.float32)).any() and np.isnan(o[:, 0, 12:200].astype(np.float32)).any()


@pytest.mark.parametrize("op", [GLA, RWKV6], ids=lambda op: op.name)
def test_one_product_of_float32(portable, rng, monkeypatch, op):
    """Operands rounded to tf32, sums and state in float32: between float32's error and bfloat16's."""
    arrays = draw(op, rng, {"B": 1, "H": 2, "T": 70, "K": 64, "V": 64}, SINGLE, "trained")
    wanted = exact(OPS[op], arrays)[0]
    three = errors(results(op, arrays, portable)[0], wanted)[0]
    monkeypatch.setattr(segments, "tf32_products", lambda dtype: 1)
    one = errors(results(op, arrays, portable)[0], wanted)[0]
    assert three < 2e-6 and 1e-5 < one < 6e-4


@pytest.mark.parametrize("dtype", [SINGLE, HALF, BFLOAT16], ids=str)
def test_every_card_has_room(dtype):
    """A block of every plan, with gates of either type, fits where a card has least shared memory."""

    class Least(EmulatedDevice):
        shared_per_block, shared_per_multiprocessor = LEAST_SHARED, 100 * 1024

    for gate_dtype, K in ((None, 64), (None, 128), (SINGLE, 128), (SINGLE, 300)):
        arrays = draw(
            GLA, np.random.default_rng(0), {"B": 1, "H": 1, "T": 2000, "K": K, "V": 128}, dtype, "weak", gate_dtype
        )
        for kernel in planned.plan_of(GLA.bind(arrays), Least()).kernels:
            assert kernel.shared_bytes <= LEAST_SHARED, kernel


def test_every_instance_is_in_the_catalog():
    """Of those that a device with much or little shared memory is planned."""
    listed = set(catalog.kernels())
    for shared in (LEAST_SHARED, 227 * 1024):
        for dtype, gate, K, V in ((BFLOAT16, SINGLE, 128, 128), (SINGLE, SINGLE, 300, 64), (HALF, SINGLE, 256, 128)):
            instance = dtype, gate, 3 if dtype == SINGLE else 1, K, V, shared
            assert gated_kernels.GatedSegmentStates.fitting(*instance) in listed
            for schedule in (gated_kernels.SINGLE_PASS, gated_kernels.SPLIT_CHANNELS):
                assert gated_kernels.GatedForward.fitting("BeforeWrite", schedule, *instance) in listed


@pytest.mark.parametrize("dtype", (SINGLE, BFLOAT16), ids=str)
def test_a_burst_of_growth(portable, rng, dtype):
    """One gate of 50 among gates of 0: factors about a sub-chunk's middle may be as large."""
    arrays = draw(GLA, rng, {"B": 1, "H": 1, "T": 30, "K": 8, "V": 8, "N": 1}, dtype)
    arrays[3][...] = 0
    arrays[3][:, :, 10] = 50
    found = results(GLA, arrays, portable)[0].astype(np.float64)
    wanted = exact(OPS[GLA], arrays)[0]
    error = np.sqrt(np.mean((found - wanted) ** 2, -1) / np.mean(wanted**2, -1))
    assert error.max() < (1e-5 if dtype == SINGLE else 4e-2)


@pytest.mark.parametrize("dtype", (SINGLE, BFLOAT16), ids=str)
def test_a_segment_that_grows_beyond_range(portable, rng, monkeypatch, dtype):
    """e^128 over a segment, where early tokens write nothing, or so little that it stays in range."""
    monkeypatch.setattr(segments, "segments_that_fill", lambda *sizes: 2)
    arrays = draw(GLA, rng, {"B": 1, "H": 1, "T": 256, "K": 64, "V": 64}, dtype)
    arrays[1][:, :, :112] = 0
    arrays[1][:, :, 28] = 1e-20
    arrays[3][:, :, :128], arrays[3][:, :, 128:] = 1, -1
    o, wanted = results(GLA, arrays, portable)[0], exact(OPS[GLA], arrays)[0]
    assert errors(o, wanted)[0] < (1e-5 if dtype == SINGLE else 2e-2)  # few tokens are nearly all of it
