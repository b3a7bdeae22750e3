"""The text of a kernel and its argument, before any compiler sees them."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import catalog
import numpy as np
import pytest
from conftest import PATIENCE
from emulator import EmulatedDevice

from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import arguments, execute, gated_kernels, rwkv6_model_kernels, stages
from linattn_np.backends.cupy import device as devices
from linattn_np.backends.cupy.plan import (
    CallerArray,
    Copy,
    Draft,
    Fill,
    Launch,
    Ref,
    TensorMap,
    Upload,
    aligned16,
    as_array,
    has_rows,
    is_contiguous,
    mappable,
)
from linattn_np.backends.cupy.source import checks, text

SINGLE = np.dtype(np.float32)


def test_importing_the_backend_does_not_import_cupy():
    program = "import sys, linattn_np.backends.cupy.device; sys.exit('cupy' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


# -- instances ---------------------------------------------------------------------------------------------------------
def test_an_instance_spells_its_fields():
    assert gated_kernels.ScanBothWays(True).expression == "gated_scan_both_ways<true>"
    assert gated_kernels.ScanSegments(4, False).expression == "gated_scan_segments<4, false>"
    step = rwkv6_model_kernels.DecodeFew(BFLOAT16, SINGLE, 8)
    assert step.expression == "rwkv6_decode_few<bf16, float, 8>"
    assert stages.GatedQk("AfterWrite", SINGLE).expression == "stages_gated_qk<AfterWrite, float>"


def test_instances_of_two_kernels_differ():
    """Also where their fields are the same."""
    every = list(catalog.kernels())
    assert len(set(every)) == len(every)
    assert gated_kernels.GatedBackwardStates("AfterWrite", SINGLE, SINGLE, 3, 64) != gated_kernels.GatedBackwardValues(
        "AfterWrite", SINGLE, SINGLE, 3, 64
    )


def test_all_shared_memory_is_checked():
    """Whatever an instance asks for is compared with a type of its kernel."""
    for kernel in catalog.kernels():
        assert bool(kernel.shared_bytes) == bool(kernel.shared_types), kernel
        assert kernel.arguments and "sizeof" in checks(kernel)


def test_kernels_that_overlap_wait_for_the_one_before():
    for kernel in catalog.kernels():
        assert kernel.overlaps == ("wait_for_previous();" in text(kernel.file)), kernel


def test_includes_are_pasted_once_and_the_others_left_alone(tmp_path):
    inner, outer = tmp_path / "inner.cuh", tmp_path / "outer.cuh"
    inner.write_text("int inner;\n")
    outer.write_text('#include "inner.cuh"\nint outer;\n')
    (tmp_path / "kernel.cu").write_text(
        '#include "inner.cuh"  // first\n#include "outer.cuh"\n#include <system.h>\nint kernel;\n'
    )
    program = text(tmp_path / "kernel", {"inner.cuh": inner, "outer.cuh": outer})
    lines = [line for line in program.splitlines() if line]
    assert lines == [
        f'#line 1 "{tmp_path}/kernel.cu"',
        f'#line 1 "{inner}"',
        "int inner;",
        f'#line 2 "{tmp_path}/kernel.cu"',
        f'#line 1 "{outer}"',
        f'#line 2 "{outer}"',
        "int outer;",
        f'#line 3 "{tmp_path}/kernel.cu"',
        "#include <system.h>",
        "int kernel;",
    ]


# -- arguments ---------------------------------------------------------------------------------------------------------
def given(name="x", shape=(2, 3, 4, 8), dtype=SINGLE, start=0):
    strides = np.empty(shape, np.float32).strides
    return CallerArray(name, shape, strides, dtype, start)


def test_an_argument_is_packed_as_declared():
    declared = arguments.members("strided q, pointers u none, int64s T, float64s scale")
    memory = given()
    args = {
        "q": as_array(memory)[:, :, 1:],
        "u": Ref(memory, 24),
        "none": None,
        "T": np.int32(64),
        "scale": np.float64(-0.125),
    }
    packed = arguments.Packed(declared, args, {memory: 1})
    words = packed.filled(np.array([7, 1 << 47]), None)
    assert words.tolist()[:7] == [(1 << 47) + 32, 96, 32, 8, (1 << 47) + 24, 0, 64]
    assert words[7:].view(np.float64).tolist() == [-0.125]
    assert arguments.size_of(declared) == words.nbytes
    assert dict(arguments.offsets(declared)) == {"q": 0, "u": 32, "none": 40, "T": 48, "scale": 56}


def test_a_declaration_names_kinds_and_members():
    found = arguments.members("tensor_maps+strided q do_, pointers? u, shape, int64s T")
    assert [(x.name, x.kind) for x in found[:4]] == [
        ("q", "map"),
        ("do_", "map"),
        ("q_rows", "rows"),
        ("do_rows", "rows"),
    ]
    assert [(x.name, x.kind, x.optional) for x in found[4:]] == [
        ("u", "pointer", True),
        ("shape", "shape", False),
        ("T", "integer", False),
    ]


def test_members_that_may_be_null_can_be_left_out():
    scan = gated_kernels.ScanSegments(1, False)
    given = dict.fromkeys(("states", "decays", "starts", *"PRHKV", "BV"), 1)
    assert scan.complete(given) == given | {"column_decays": None, "initial": None, "final": None}


def test_tensor_maps_and_structs_are_packed_in_place():
    inner = arguments.members("tensor_maps m, int64s n")
    declared = (*arguments.structs("two", 2, inner), *arguments.members("int64s last"))
    memory = given()
    box = TensorMap(as_array(memory), 8, 4, False)
    packed = arguments.Packed(declared, {"two": [{"m": box, "n": 5}, {"m": box, "n": 6}], "last": 7}, {memory: 0})
    words = packed.filled(np.array([64]), lambda found: bytes([found.columns] * 128))
    assert arguments.size_of(inner) == 192 and arguments.size_of(declared) == 448 == words.nbytes
    assert words[[16, 24 + 16, 48]].tolist() == [5, 6, 7]
    assert words[:16].tobytes() == words[24:40].tobytes() == bytes([8] * 128)


def test_an_argument_that_is_missing_or_too_many_is_refused():
    kernel, missing = rwkv6_model_kernels.GatedAdd(SINGLE), {"x": 0, "gate": 0, "value": 0}
    for wrong in (missing, missing | {"count": 1, "W": 1}):
        with pytest.raises(TypeError, match="rwkv6_gated_add takes"):
            Draft().launch(kernel, 1, **wrong)


# -- compiling ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def compiling(monkeypatch):
    """`device.compiled` is the function that a test puts into the list."""
    found = []
    monkeypatch.setattr(devices, "FUNCTIONS", {})
    monkeypatch.setattr(devices, "compilers", lambda pool=ThreadPoolExecutor(2): pool)
    monkeypatch.setattr(devices, "current", lambda: 0)
    monkeypatch.setattr(devices, "compiled", lambda kernel, device: found[-1](kernel))
    return found


def test_kernels_are_compiled_side_by_side_and_once(compiling):
    both, done = Barrier(2), []
    compiling.append(lambda kernel: (both.wait(PATIENCE), done.append(kernel), kernel.name)[-1])
    kernels, device = [rwkv6_model_kernels.GatedAdd(dtype) for dtype in (SINGLE, BFLOAT16)], devices.CupyDevice()
    device.compile(kernels)
    device.compile(kernels)
    device.wait_for(kernels)
    assert [devices.load(kernel, 0) for kernel in kernels] == [kernel.name for kernel in kernels]
    assert set(done) == set(kernels) and len(done) == 2


def test_a_kernel_that_failed_is_tried_again(compiling):
    def failing(kernel):
        raise RuntimeError("no memory")

    compiling.append(failing)
    with pytest.raises(RuntimeError, match="no memory"):
        devices.load(rwkv6_model_kernels.GatedAdd(SINGLE), 0)
    compiling.append(lambda kernel: "loaded")
    assert devices.load(rwkv6_model_kernels.GatedAdd(SINGLE), 0) == "loaded"


# -- plans -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., 2:5],
        lambda x: x[:, ::-1],
        lambda x: x[1],
        lambda x: x[:, :, None],
        lambda x: x[..., None, 3],
        lambda x: x[..., -1],
        lambda x: x.swapaxes(1, 3)[::2],
        lambda x: x[1:1],
    ],
)
def test_views_are_numpys(view):
    memory = np.arange(2 * 3 * 4 * 8, dtype=np.float32).reshape(2, 3, 4, 8)
    wanted, found = view(memory), view(as_array(given()))
    assert found.shape == wanted.shape and found.nbytes == wanted.nbytes and found.ndim == wanted.ndim
    offset = wanted.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    assert found.offset == offset or not wanted.size
    assert all(a == b or size <= 1 for a, b, size in zip(found.strides, wanted.strides, wanted.shape))
    if wanted.size:
        seen = EmulatedDevice().view(memory, found.shape, found.strides, found.dtype, found.offset)
        assert np.array_equal(seen, wanted)
    assert is_contiguous(found) == wanted.flags.c_contiguous


def test_where_16_bytes_can_be_read_at_once():
    x = as_array(given())
    assert aligned16(x) and aligned16(x[..., :4]) and not aligned16(x[..., :3]) and not aligned16(x[..., 1:5])
    assert not aligned16(as_array(given(start=4))) and not has_rows(x.swapaxes(2, 3)) and has_rows(x[:, :, ::-1])
    assert mappable(x) and aligned16(x[:, :, ::2, ::2]) and not mappable(x[:, :, ::2, ::2])


def test_memory_in_the_order_of_another():
    draft = Draft()
    turned = as_array(given()).swapaxes(1, 2)
    assert draft.like(turned).strides == turned.strides
    assert (
        draft.like(as_array(given()).swapaxes(2, 3)).strides == np.empty((2, 3, 8, 4), np.float32).strides
    )  # has no rows
    assert [buffer.nbytes for buffer in draft.buffers] == 2 * [2 * 3 * 4 * 8 * 4]


def test_steps_are_executed_in_order():
    """A copy to another dtype, zeros, a table, a launch, a copy into what the caller gave."""
    draft, x, out = Draft(), given("x", (8,)), given("out", (8,))
    half = draft.cast(as_array(x), np.dtype(np.float16), "x: in half")
    zeros, total, kernel = draft.empty((8,), SINGLE), draft.empty((8,), SINGLE), rwkv6_model_kernels.GatedAdd
    draft.fill(zeros)
    table = draft.table(np.arange(4))
    draft.fill(total)
    copy = draft.contiguous_copy(half, SINGLE)
    draft.launch(kernel(SINGLE), 1, x=total, gate=None, value=copy, count=8)
    draft.copy(copy[::-1], as_array(out))
    plan = draft.plan((as_array(out), total, zeros[2:], None, table), given=(x, out))
    assert [type(step) for step in plan.steps] == [Copy, Fill, Upload, Fill, Copy, Launch, Copy]
    assert plan.copies == ("x: in half",) and plan.kernels == (kernel(SINGLE),)
    assert plan.scratch == 16 + 32
    run = execute.CompiledPlan(plan, EmulatedDevice())
    for turn in range(3):
        arrays = np.random.default_rng(turn).permutation(8).astype(np.float32), np.empty(8, np.float32)
        (found, total, zeros, none, table), _ = run(arrays)
        assert found is arrays[1] and np.array_equal(found, arrays[0][::-1])
        assert np.array_equal(total, arrays[0])
        assert not zeros.any() and zeros.shape == (6,) and none is None and table.tolist() == [0, 1, 2, 3]
