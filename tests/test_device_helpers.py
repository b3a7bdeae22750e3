"""ptx.cuh, function by function; and what the emulator must catch before a kernel reaches a card."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatedDevice, EmulatorError, TestKernel, pack
from planned import host

from linattn_np.backends.cupy.device import CupyDevice

KERNELS = Path(__file__).parent / "kernels"
STORAGE = {"float": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
PRODUCTS = {"tf32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def run(device, case, values, shape, dtype, n=None):
    """One warp of the test kernel `helpers` with template argument `case`."""
    kernel = TestKernel(f"{KERNELS}/helpers", (case,), threads=32)
    return launch(device, kernel, values, shape, dtype, values.size if n is None else n, smem=1024)


def run_warpgroup(device, case, values, shape, dtype, n=0):
    """Four warps of the test kernel `warpgroup` with template argument `case`."""
    kernel = TestKernel(f"{KERNELS}/warpgroup", (case,), threads=128, arch="sm_90a")
    return launch(device, kernel, values, shape, dtype, n, smem=48 * 1024)


def launch(device, kernel, values, shape, dtype, n, smem, blocks=1):
    source, out = device.upload(values), device.empty(shape, dtype)
    args = pack(source=device.pointer(source), out=device.pointer(out), n=n)
    device.launch(kernel, blocks, args, smem=smem)
    return host(out)


@pytest.fixture
def hopper(device):
    """A device that has the instructions of sm_90a: the emulator, or a card that they were made for."""
    if isinstance(device, CupyDevice):
        import cupy

        if cupy.cuda.Device().compute_capability != "90":
            pytest.skip("sm_90a runs on compute capability 9.0 alone")
    return device


def bits(array):
    return array.view(f"u{array.itemsize}")


def upper_bits(x):
    """What a product reads of x: of a float 19 of the 32 bits."""
    return (bits(x) & np.uint32(0xFFFFE000)).view(np.float32) if x.dtype == np.float32 else x


def product(a, b):
    return upper_bits(a).astype(np.float64) @ upper_bits(b).astype(np.float64)


def words(*arrays):
    return np.concatenate([np.ascontiguousarray(array).view(np.uint32).ravel() for array in arrays])


def floats_of_every_size(rng):
    """Random bit patterns, which have every exponent, and values on and beside the ties of 16-bit types."""
    random = rng.integers(0, 2**32, 4096, dtype=np.uint32)
    ties = rng.integers(0, 2**16, 1024, dtype=np.uint32) << 16
    near = [ties + offset for offset in (0, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    special = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519, 65520, 2**-24, 2**-25, 3e38])
    return np.concatenate([random, *near, bits(special)]).view(np.float32)


@pytest.mark.parametrize("storage", STORAGE)
def test_to_float_is_exact_for_every_pattern(device, rng, storage):
    dtype = np.dtype(STORAGE[storage])
    patterns = np.arange(2**16, dtype=np.uint16)
    values = floats_of_every_size(rng) if storage == "float" else patterns.view(dtype)
    got = run(device, f"Widen<{storage}>", values, values.shape, np.float32)
    np.testing.assert_array_equal(got, values.astype(np.float32))


@pytest.mark.parametrize("storage", STORAGE)
def test_from_float_rounds_to_nearest_even(device, rng, storage):
    values = floats_of_every_size(rng)
    got = run(device, f"Narrow<{storage}>", values, values.shape, STORAGE[storage])
    with np.errstate(over="ignore", invalid="ignore"):
        want = values.astype(STORAGE[storage])
    number = ~np.isnan(values)
    np.testing.assert_array_equal(bits(got)[number], bits(want)[number])
    assert np.isnan(got[~number].astype(np.float32)).all()


def test_to_tf32_rounds_ties_away(device, rng):
    values = floats_of_every_size(rng)
    values = values[np.isfinite(values) & (abs(values) >= np.finfo(np.float32).tiny)]
    want = (bits(values).astype(np.uint64) + 0x1000).astype(np.uint32) & np.uint32(0xFFFFE000)
    np.testing.assert_array_equal(run(device, "Tf32", values, values.shape, np.uint32), want)


def test_exp2_approx(device, rng):
    values = np.float32([*rng.uniform(-125, 127, 992), *[0.0] * 16, *[-np.inf] * 16])
    got = run(device, "Exp2", values, values.shape, np.float32)
    np.testing.assert_allclose(got, np.exp2(values.astype(np.float64)), rtol=2**-22)
    assert (got[-16:] == 0).all() and (got[-32:-16] == 1).all()


def test_exp2_approx_flushes_denormals(device):
    values = np.linspace(-149, -127, 32, dtype=np.float32)
    assert (run(device, "Exp2", values, values.shape, np.float32) == 0).all()


def test_warp_sum_is_the_same_in_every_lane(device, rng):
    values = rng.standard_normal(32).astype(np.float32)
    got = run(device, "WarpSum", values, values.shape, np.float32)
    assert len(set(bits(got))) == 1
    np.testing.assert_allclose(got[0], values.sum(dtype=np.float64), atol=1e-5)


def test_shuffles_past_the_end_keep_the_own_value(device):
    lanes = np.arange(32)
    back, ahead, broadcast = run(device, "Shuffles", lanes.astype(np.float32), (3, 32), np.float32)
    np.testing.assert_array_equal(back, np.where(lanes >= 3, lanes - 3, lanes))
    np.testing.assert_array_equal(ahead, np.where(lanes < 27, lanes + 5, lanes))
    assert (broadcast == 7).all()


@pytest.mark.parametrize("case, dtype, depth", [
    ("Tf32Product", np.float32, 8), ("Bf16Product", ml_dtypes.bfloat16, 16), ("F16Product", np.float16, 16),
    ("F16ProductAndSum", np.float16, 16),
    ("Bf16Products", ml_dtypes.bfloat16, 16), ("F16Products", np.float16, 16),
])  # fmt: skip
def test_mma(device, rng, case, dtype, depth):
    a, b = (rng.standard_normal((rows, depth)).astype(dtype) for rows in (16, 8))
    got = run(device, f"Mma<{case}>", words(a, b), (16, 8), np.float32)
    np.testing.assert_allclose(got, product(a, b.T) + 1, rtol=1e-5, atol=1e-5)


def test_mma_of_eight(device, rng):
    a, b = (rng.standard_normal((rows, 16)).astype(ml_dtypes.bfloat16) for rows in (16, 8))
    got = run(device, "Mma<HalfBf16Product>", words(a, b), (16, 8), np.float32)
    np.testing.assert_allclose(got, product(a[:, :8], b[:, :8].T) + 1, rtol=1e-5, atol=1e-5)


def test_fma_of_pairs_rounds_once(device, rng):
    """With factors as the sum of two numbers x is as good as x times a float, rounded: how values are decayed."""
    x, y = rng.standard_normal((2, 256)).astype(ml_dtypes.bfloat16), rng.random((2, 128), np.float32).ravel()
    first = y.astype(ml_dtypes.bfloat16)
    second = (y - first.astype(np.float32)).astype(ml_dtypes.bfloat16)
    (x, z), pairs = x, (128,)
    given = words(x, second, np.zeros_like(x)), words(x, first, z)
    got = [run(device, "Fma", values, pairs, np.uint32).view(ml_dtypes.bfloat16) for values in given]
    np.testing.assert_array_equal(got[1], (x.astype(np.float64) * first + z.astype(np.float64)).astype(x.dtype))
    whole = run(device, "Fma", words(x, first, got[0]), pairs, np.uint32).view(x.dtype).astype(np.float64)
    exact = x.astype(np.float64) * y
    assert (np.abs(whole - exact) <= 1.01 * 2.0**-8 * np.abs(exact)).all()


def test_product_of_pairs_in_half_precision(device, rng):
    x, y = rng.standard_normal((2, 256)).astype(np.float16)
    y[:8] = 0, -0.0, np.inf, 6e-8, 1e-4, 6e4, -1, 1  # numbers below the normal ones stay
    got = run(device, "Times", words(x, y), (128,), np.uint32).view(np.float16)
    with np.errstate(over="ignore"):
        wanted = (x.astype(np.float64) * y).astype(np.float16)
    np.testing.assert_array_equal(got.view(np.uint16), wanted.view(np.uint16))


def test_tf32_product_through_cp_async(device, rng):
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((5, 16, 8), (5, 8, 8)))
    arrays = [device.upload(a), device.upload(b), device.empty((5, 16, 8), np.float32)]
    args = pack(**{name: device.pointer(array) for name, array in zip("abd", arrays)})
    device.launch(TestKernel(f"{KERNELS}/tf32_product", (), threads=32), 5, args, smem=192 * 4)
    np.testing.assert_array_equal(host(arrays[2]), a @ b)


@pytest.mark.parametrize("transposed", ["false", "true"])
def test_ldmatrix(device, rng, transposed):
    matrices = rng.integers(0, 2**16, (4, 8, 8), dtype=np.uint16)
    got = run(device, f"Ldmatrix<{transposed}>", matrices, (32, 4), np.uint32)
    if transposed == "true":
        matrices = matrices.transpose(0, 2, 1)
    np.testing.assert_array_equal(got, matrices.copy().view(np.uint32).reshape(4, 32).T)


def test_flipped_places(device, rng):
    values, memory = rng.integers(0, 2**32, 96, dtype=np.uint32), np.zeros(256, np.uint32)
    word, pair = np.arange(32), np.arange(64)
    memory[(word ^ 64 // 4) + 128 // 4] = values[:32]
    memory[(pair ^ 32 // 4) + 256 // 4] = values[32:]
    rows = memory[:128].reshape(4, 4, 2, 4)[:, :, ::-1]
    got = run(device, "Flipped", values, (32, 4), np.uint32)
    np.testing.assert_array_equal(got, rows.reshape(4, 32).T)


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("valid", [0, 17, 32])
def test_cp_async_fills_with_zeros_where_not_valid(device, rng, size, valid):
    values = rng.standard_normal((32, size // 4)).astype(np.float32)
    got = run(device, f"CopyAsync<{size}>", values, values.shape, np.float32, n=valid)
    np.testing.assert_array_equal(got, np.where(np.arange(32)[:, None] < valid, values, 0))


@pytest.mark.parametrize("storage", ["bf16", "f16"])
def test_pack_puts_the_first_into_the_lower_half(device, rng, storage):
    pairs = rng.standard_normal((64, 2)).astype(np.float32)
    got = run(device, f"Pack<{storage}>", pairs, (64,), np.uint32, n=64)
    np.testing.assert_array_equal(got.view(STORAGE[storage]).reshape(64, 2), pairs.astype(STORAGE[storage]))


# ---- what only sm_90a has ----------------------------------------------------------------------------------


def test_barrier_sync(hopper, rng):
    values = rng.standard_normal(128).astype(np.float32)
    halves, whole = run_warpgroup(hopper, "NamedBarrier", values, (2, 128), np.float32)
    np.testing.assert_array_equal(halves, values.reshape(2, 64)[:, ::-1].ravel())
    np.testing.assert_array_equal(whole, values[::-1])


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 11])
def test_barrier_passes_stages_on_in_turn(hopper, rng, steps):
    values = rng.integers(-8, 9, (steps, 32)).astype(np.float32)
    got = run_warpgroup(hopper, "Stages", values, (3, 32), np.float32, n=steps)
    want = 2.0 ** np.arange(steps)[::-1] @ values
    np.testing.assert_array_equal(got, np.tile(want, (3, 1)))


@pytest.mark.parametrize("transposed", ["false", "true"])
def test_stmatrix_is_the_inverse_of_ldmatrix(hopper, rng, transposed):
    matrices = rng.integers(0, 2**16, (4, 4, 8, 8), dtype=np.uint16)
    rows = (matrices.transpose(0, 1, 3, 2) if transposed == "true" else matrices).copy().view(np.uint32)
    registers = rows.reshape(4, 4, 32).transpose(0, 2, 1).copy()
    got = run_warpgroup(hopper, f"Stmatrix<{transposed}>", registers, matrices.shape, np.uint16)
    np.testing.assert_array_equal(got, matrices)


@pytest.mark.pairwise
@pytest.mark.parametrize("columns", [16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_wgmma(hopper, rng, kind, columns):
    depth = 128 // np.dtype(PRODUCTS[kind]).itemsize
    a, b = (rng.standard_normal((rows, depth)).astype(PRODUCTS[kind]) for rows in (64, columns))
    case = f"Product<{kind}, {columns}, false>"
    got = run_warpgroup(hopper, case, words(a, b), (64, columns), np.float32, n=b.nbytes // 4)
    np.testing.assert_allclose(got, product(a, b.T), rtol=1e-5, atol=1e-4)


@pytest.mark.pairwise
@pytest.mark.parametrize("columns", [16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_wgmma_of_a_transposed_tile(hopper, rng, kind, columns):
    a, b = (rng.standard_normal(shape).astype(PRODUCTS[kind]) for shape in ((64, 64), (64, columns)))
    panels = np.full((64, max(columns, 64)), np.nan, PRODUCTS[kind])
    panels[:, :columns] = b
    panels = panels.reshape(64, -1, 64).transpose(1, 0, 2)
    case = f"Product<{kind}, {columns}, true>"
    got = run_warpgroup(hopper, case, words(a, panels), (64, columns), np.float32, n=panels.nbytes // 4)
    np.testing.assert_allclose(got, product(a, b), rtol=1e-5, atol=1e-4)


@pytest.mark.pairwise
@pytest.mark.parametrize("columns", [16, 24, 32, 64, 72, 128, 144])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_wgmma_of_two_tiles(hopper, rng, kind, columns):
    a, b = (rng.standard_normal((rows, 64)).astype(PRODUCTS[kind]) for rows in (64, columns))
    case = f"TilesProduct<{kind}, {columns}>"
    got = run_warpgroup(hopper, case, words(a, b), (64, columns), np.float32, n=b.nbytes // 4)
    np.testing.assert_allclose(got, product(a, b.T), rtol=1e-5, atol=1e-4)


def test_wgmma_groups_are_waited_for_in_turn(hopper, rng):
    a, b = (rng.standard_normal((rows, 64)).astype(ml_dtypes.bfloat16) for rows in (64, 32))
    first, second = run_warpgroup(hopper, "Groups", words(a, b), (2, 64, 32), np.float32, n=b.nbytes // 4)
    np.testing.assert_allclose(first, product(a[:, :16], b[:, :16].T), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(second, product(a[:, 16:32], b[:, 16:32].T) + 1, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_two_blocks_of_a_cluster_hand_on_what_they_read(hopper, rng, steps):
    values = rng.standard_normal((4, steps, 64)).astype(np.float32)
    kernel = TestKernel(f"{KERNELS}/exchange", (), threads=64, arch="sm_90a", blocks_per_cluster=2)
    got = launch(hopper, kernel, values, values.shape, np.float32, steps, smem=1024, blocks=4)
    np.testing.assert_array_equal(got, values[[1, 0, 3, 2]])


# ---- the emulator ------------------------------------------------------------------------------------------


def make_mistake(case, blocks=1):
    device = EmulatedDevice()
    values, out = np.ones((blocks, 64), np.float32), device.empty((blocks, 64), np.float32)
    args = pack(source=device.pointer(values), out=device.pointer(out))
    device.launch(TestKernel(f"{KERNELS}/mistakes", (case,), threads=64), blocks, args, smem=256)
    return out


def test_emulator_runs_what_is_right():
    want = np.tile(np.arange(63.0, -1, -1), (3, 1))
    np.testing.assert_array_equal(make_mistake("NoMistake", blocks=3), want)


@pytest.mark.parametrize("case, message", [
    ("DivergentBarrier", r"thread 0 waits in __syncthreads \(.*mistakes.cu:\d+\), but thread 32 waits in"),
    ("ReturnedThreads", "thread 0 waits in __syncthreads .*, but thread 40 has returned"),
    ("DivergentCollective", "thread 0 waits in __shfl_xor_sync .*, but thread 16 waits in __syncthreads"),
    ("PartialMask", "thread 0: __shfl_xor_sync with mask 0xffff"),
    ("WritePastEnd", "wrote to byte 256 of 256"),
    ("WriteBeforeStart", "wrote 4 bytes before its shared memory"),
    ("MisalignedCopy", "thread 1: cp_async to 16 bytes not aligned"),
    ("MisalignedPair", r"thread 1: 0x[0-9a-f]+ is not aligned to 8 bytes \(.*mistakes.cu:\d+\)"),
    ("MisalignedRow", "thread 1: ldmatrix_x4 of a row not aligned"),
    ("AbsentWarp", r"nobody can go on: thread 0 waits in named_barrier_sync \(.*\), thread 32 has returned"),
    ("MixedCounts", r"thread 32: named_barrier_sync\(1, 32\) while others are in named_barrier_sync\(1, 64\)"),
    ("BarrierInUse", r"thread 32: named_barrier_sync\(1, 64\) where other warps may be in the barrier"),
    ("NoSuchBarrier", r"thread 0: named_barrier_sync\(16, 64\): no such barrier"),
    ("DivergentNamedBarrier", r"thread 0 waits in named_barrier_sync .*, but thread 16 waits in __syncthreads"),
    ("MissingArrival", r"nobody can go on: thread 0 waits in mbarrier_wait .*, thread 32 waits in __syncthreads"),
    ("MissingBytes", r"nobody can go on: thread 0 waits in mbarrier_wait .*, thread 1 has returned"),
    ("SurplusArrival", "thread 0: one arrival too many"),
    ("UninitialisedBarrier", "thread 0: mbarrier_arrive of a Barrier that was not initialised"),
    ("TilePastEnd", r"wgmma reads byte \d+ of 256 bytes"),
    ("DivergentTile", "the lanes of a warp give wgmma different tiles"),
    ("CopyBeforeStart", "thread 0: cp_async to 16 bytes not aligned or not in shared memory"),
])  # fmt: skip
def test_emulator_names_the_mistake(case, message):
    with pytest.raises(EmulatorError, match=f"mistakes<{case}>: block 0: {message}"):
        make_mistake(case)
    assert np.isfinite(make_mistake("NoMistake")).all()  # and the process goes on


@pytest.mark.parametrize("case", ["UnwrittenShared", "MissingWait", "MissingCommit", "MissingBulkWait"])
def test_emulator_shows_what_nobody_wrote(case):
    assert np.isnan(make_mistake(case)).all()


@pytest.mark.parametrize("case", ["UnwrittenRegister", "MissingProductWait"])
def test_emulator_shows_an_unwritten_register(case):
    assert (abs(make_mistake(case)) > 1e30).all()


def test_emulator_shows_a_missing_barrier_in_every_block():
    """By either of its halves, since launches have their threads in other orders."""
    launches = [np.isnan(make_mistake("MissingBarrier", blocks=2)).reshape(2, 2, 32).all(-1) for _ in range(3)]
    assert (np.sum(launches, axis=-1) == 1).all() and np.any(launches, axis=0).all()


def test_emulator_shows_what_is_written_beside_an_array():
    device = EmulatedDevice()
    values, out = np.ones(128, np.float32), device.empty(64, np.float32)
    args = pack(source=device.pointer(values), out=device.pointer(out))
    with pytest.raises(EmulatorError, match="wrote beside an array of 256 bytes"):
        device.launch(TestKernel(f"{KERNELS}/mistakes", ("NoMistake",), threads=64), 2, args, smem=256)


def test_emulator_refuses_a_struct_of_another_size():
    kernel = TestKernel(f"{KERNELS}/mistakes", ("NoMistake",), threads=64)
    with pytest.raises(EmulatorError, match="args have 24 bytes, the kernel's struct has 16"):
        EmulatedDevice().launch(kernel, 1, pack(source=0, out=0, n=1))


def test_emulator_reports_the_compilers_message():
    with pytest.raises(EmulatorError, match="(?s)mistakes<NoSuchCase> does not compile.*NoSuchCase"):
        make_mistake("NoSuchCase")


def test_emulated_arrays_are_poisoned():
    device = EmulatedDevice()
    assert np.isnan(device.empty((3, 4), np.float32)).all() and np.isnan(device.empty((2,), ml_dtypes.bfloat16)).all()
    assert device.empty((0, 4), np.float32).shape == (0, 4)


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("at", [(0, 0), (0, 24), (64, 8), (64, 30)], ids=str)
@pytest.mark.parametrize("swizzled", [False, True], ids=["rows", "swizzled"])
@pytest.mark.parametrize("heads", [1, 2])
def test_tensor_copies_of_boxes_that_leave_the_array(hopper, rng, heads, swizzled, at, layout):
    """A box of 16 tokens of an array of 3 heads, 40 tokens and 80 columns: zeros come from outside, nothing goes
    there."""
    columns, tokens, batch, head = 64, 16, 1, 3 - heads
    x = rng.integers(0, 2**16, (2, 3, 40, 80), dtype=np.uint16)
    order = (0, 1, 2, 3) if layout == "bhtd" else (0, 2, 1, 3)
    from_, to = (
        hopper.upload(np.ascontiguousarray(y.transpose(order)).view(np.float16)).transpose(order)
        for y in (x, np.full_like(x, 7))
    )
    raw = hopper.empty((heads * tokens, columns // 8, 8), np.uint16)
    maps = [hopper.tensor_map(y, columns, tokens, swizzled, heads) for y in (from_, to)]
    fields = dict(raw=hopper.pointer(raw), bytes=raw.nbytes, column=at[0], token=at[1], head=head, batch=batch)
    kernel = TestKernel(f"{KERNELS}/tensor_copies", (), threads=32, arch="sm_90a")
    hopper.launch(kernel, 1, pack(*maps, **fields), smem=1024 + raw.nbytes)

    box = np.pad(x[batch, head:], ((0, 0), (0, 16), (0, 128)))[:, at[1] : at[1] + tokens, at[0] : at[0] + columns]
    rows = np.arange(heads * tokens)
    pieces = np.arange(8) ^ (rows % 8)[:, None] if swizzled else np.tile(np.arange(8), (len(rows), 1))
    np.testing.assert_array_equal(host(raw)[rows[:, None], pieces].reshape(box.shape), box)
    want = np.full_like(x, 7)
    inside = slice(head, None), slice(at[1], at[1] + tokens), slice(at[0], at[0] + columns)
    want[batch][inside] = x[batch][inside]
    np.testing.assert_array_equal(np.ascontiguousarray(host(to)).view(np.uint16), want)
