"""ptx.cuh, function by function; and what the emulator must catch before a kernel reaches a card."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatedDevice, EmulatorError

from linattn_np.backends.cupy.build import Kernel, pack

KERNELS = Path(__file__).parent / "kernels"
STORAGE = {"float": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def host(array):
    return array.get() if hasattr(array, "get") else array


def run(device, case, values, shape, dtype, n=None):
    """One warp of the test kernel `helpers` with template argument `case`."""
    source, out = device.upload(values), device.empty(shape, dtype)
    args = pack(source=device.pointer(source), out=device.pointer(out), n=values.size if n is None else n)
    device.launch(Kernel(f"{KERNELS}/helpers", (case,), threads=32), 1, args, smem=1024)
    return host(out)


def bits(array):
    return array.view(f"u{array.itemsize}")


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


@pytest.mark.parametrize("product, dtype, depth", [
    ("Tf32Product", np.float32, 8), ("Bf16Product", ml_dtypes.bfloat16, 16), ("F16Product", np.float16, 16),
])  # fmt: skip
def test_mma(device, rng, product, dtype, depth):
    a, b = (rng.standard_normal((rows, depth)).astype(dtype) for rows in (16, 8))
    words = np.concatenate([a.view(np.uint32), b.view(np.uint32)])
    got = run(device, f"Mma<{product}>", words, (16, 8), np.float32)
    if dtype == np.float32:  # the unit reads 19 of the 32 bits
        a, b = ((bits(x) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b))
    np.testing.assert_allclose(got, a.astype(np.float64) @ b.astype(np.float64).T + 1, rtol=1e-5, atol=1e-5)


def test_tf32_product_through_cp_async(device, rng):
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((5, 16, 8), (5, 8, 8)))
    arrays = [device.upload(a), device.upload(b), device.empty((5, 16, 8), np.float32)]
    args = pack(**{name: device.pointer(array) for name, array in zip("abd", arrays)})
    device.launch(Kernel(f"{KERNELS}/tf32_product", (), threads=32), 5, args, smem=192 * 4)
    np.testing.assert_array_equal(host(arrays[2]), a @ b)


@pytest.mark.parametrize("transposed", ["false", "true"])
def test_ldmatrix(device, rng, transposed):
    matrices = rng.integers(0, 2**16, (4, 8, 8), dtype=np.uint16)
    got = run(device, f"Ldmatrix<{transposed}>", matrices, (32, 4), np.uint32)
    if transposed == "true":
        matrices = matrices.transpose(0, 2, 1)
    np.testing.assert_array_equal(got, matrices.copy().view(np.uint32).reshape(4, 32).T)


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("valid", [0, 17, 32])
def test_cp_async_fills_with_zeros_where_not_valid(device, rng, size, valid):
    values = rng.standard_normal((32, size // 4)).astype(np.float32)
    got = run(device, f"CopyAsync<{size}>", values, values.shape, np.float32, n=valid)
    np.testing.assert_array_equal(got, np.where(np.arange(32)[:, None] < valid, values, 0))


# ---- the emulator ------------------------------------------------------------------------------------------


def make_mistake(case, blocks=1):
    device = EmulatedDevice()
    values, out = np.ones((blocks, 64), np.float32), device.empty((blocks, 64), np.float32)
    args = pack(source=device.pointer(values), out=device.pointer(out))
    device.launch(Kernel(f"{KERNELS}/mistakes", (case,), threads=64), blocks, args, smem=256)
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
    ("MisalignedRow", "thread 1: ldmatrix_x4 of a row not aligned"),
    ("CopyBeforeStart", "thread 0: cp_async to 16 bytes not aligned or not in shared memory"),
])  # fmt: skip
def test_emulator_names_the_mistake(case, message):
    with pytest.raises(EmulatorError, match=f"mistakes<{case}>: block 0: {message}"):
        make_mistake(case)
    assert np.isfinite(make_mistake("NoMistake")).all()  # and the process goes on


@pytest.mark.parametrize("case", ["UnwrittenShared", "MissingWait", "MissingCommit"])
def test_emulator_shows_what_nobody_wrote(case):
    assert np.isnan(make_mistake(case)).all()


def test_emulator_shows_an_unwritten_register():
    assert (abs(make_mistake("UnwrittenRegister")) > 1e30).all()


def test_emulator_shows_a_missing_barrier_in_every_block():
    even, odd = make_mistake("MissingBarrier", blocks=2)
    assert np.isnan(even[:32]).all() and np.isnan(odd[32:]).all()


def test_emulator_refuses_a_struct_of_another_size():
    kernel = Kernel(f"{KERNELS}/mistakes", ("NoMistake",), threads=64)
    with pytest.raises(EmulatorError, match="args have 24 bytes, the kernel's struct has 16"):
        EmulatedDevice().launch(kernel, 1, pack(source=0, out=0, n=1))


def test_emulator_reports_the_compilers_message():
    with pytest.raises(EmulatorError, match="(?s)mistakes<NoSuchCase> does not compile.*NoSuchCase"):
        make_mistake("NoSuchCase")


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
def test_emulated_arrays_are_poisoned_in_the_order_of_their_prototype(order):
    prototype = np.zeros((3, 4, 5), np.float32).transpose(order)
    array = EmulatedDevice().empty_like(prototype, prototype.shape, np.float64)
    assert np.isnan(array).all()
    assert np.argsort(array.strides).tolist() == np.argsort(prototype.strides).tolist()
