"""The kernels that the host plans can ask for compile for every target, with no GPU, and spill nothing.

Most of the time goes into the compiler's middle, which makes the same PTX for all cards of a generation: so each
instance is translated once for each, and assembled for every card. What was compiled before is not compiled again:
`disk.py` says where it is kept.

With --exhaustive the main targets have every instance, and the others those that have between them every pair of
arguments. Without it a part is compiled: of a third of the files, some of every folder, a quarter of the instances that
have every single argument, each for one of all targets: another part, for other targets, for another seed.
`translated.py` has more instances read, of every file.
"""

import random
import re
from collections import defaultdict
from itertools import cycle
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import gated_kernels, source
from linattn_np.backends.cupy.arguments import members
from linattn_np.backends.cupy.plan import SHAPE

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed: no NVRTC to compile with")

import catalog  # noqa: E402
import disk  # noqa: E402
import nvrtc  # noqa: E402
import pairs  # noqa: E402
import under_way  # noqa: E402

MAIN = ("sm_80", "sm_90")
OTHERS = ("sm_86", "sm_89", "sm_100", "sm_120")
REGISTERS = 65536  # of a multiprocessor: what one block can have
KERNELS = defaultdict(list)  # by file
for kernel in catalog.kernels():
    KERNELS[kernel.file].append(kernel)
KERNELS.default_factory = None  # a file that is gone is an error

try:
    nvrtc.release(), nvrtc.ptxas()
except Exception as error:
    pytest.skip(f"no CUDA compiler: {error}", allow_module_level=True)


def chosen(kernels, exhaustive, seed):
    """What is measured: instances by target, the only one of a file that has kernels for one card alone."""
    own, most = kernels[0].arch, pairs.instances(kernels, 2)
    if exhaustive:
        return {own: kernels} if own else dict.fromkeys(MAIN, kernels) | dict.fromkeys(OTHERS, most)
    few = pairs.instances(most, 1, seed)
    draw = random.Random(f"{seed} {kernels[0].file}")
    part = draw.sample(few, -(-len(few) // 4))
    if own:
        return {own: part}
    in_turn, every = defaultdict(list), MAIN + OTHERS
    for kernel, target in zip(part, cycle(draw.sample(every, len(every)))):
        in_turn[target].append(kernel)
    return in_turn


def asks_for_the_card(kernel):
    """Models' kernels tell the next one to start, which cards have from 9.0 on."""
    return kernel.file.startswith(("rwkv6/", "rwkv7/"))


def asks_for_shared_memory(kernel):
    """How much multiprocessors have: blocks that have no room there need no registers either."""
    prepare = "delta/prepare", "delta/channel_prepare", "delta/dplr_prepare"
    backward = "delta/backward_chunks", "delta/kda_backward_chunks", "delta/dplr_backward_chunks"
    return kernel.file in ("gated/backward_values", "gated/forward", "value_gate/forward", *prepare, *backward)


def translated_for(target, kernel):
    """The virtual architecture whose PTX serves the card; `test_one_translation_serves_a_generation` holds it."""
    if kernel.arch:
        return kernel.arch.replace("sm", "compute")
    if asks_for_shared_memory(kernel):
        return "compute_86" if target == "sm_89" else target.replace("sm", "compute")
    if int(target.removeprefix("sm_")) >= 100:
        return "compute_100"
    return "compute_90" if target == "sm_90" and asks_for_the_card(kernel) else "compute_80"


def targets(instances):
    """What to assemble, as `nvrtc.measured` wants it."""
    wanted = defaultdict(lambda: defaultdict(list))
    for target, kernels in instances.items():
        for kernel in kernels:
            wanted[translated_for(target, kernel)][target].append(kernel)
    return wanted


# Bytes that the worst instance of a kernel stores and loads for want of registers; all others spill nothing. Hopper's
# registers hold one path for every gate: before there were these, half the heads of trained models were computed twice.
#
# The forward kernels of every card have 128 registers a thread where shared memory has room for two blocks of 128
# channels and columns on a multiprocessor (0.91 ms for 1.04 at 4,4096,64,128 on an H200). Of these sizes spill, x3 is
# float32 in three products, gates are like data or said:
#   gated/forward       sm_90   x3 32 to 64, bfloat16 44 to 76, with float32 gates 112 and 116, float16 40,
#                               its SplitChannels 8
#                       sm_100  x3 12, float16 8, x3 SplitChannels 8 to 16
#   value_gate/forward  sm_80   x3 SegmentState 16, bfloat16 SegmentState with float32 gates 52
#                       sm_90   bfloat16 260, x3 96
#                       sm_100  bfloat16 148, x3 SplitChannels 52
#   delta/kda_backward_chunks  sm_120  what it keeps of pairs, at 255 registers
#   delta/backward_states  sm_80   256 channels, two writes, with outputs: once a chunk
#                          sm_90   two writes 68, float32 16, both of 256 channels with outputs: once a chunk
#                          sm_100  256 channels, two writes, or no outputs: two numbers once a chunk
#   delta/backward_chunks  sm_90   256 channels, 512 threads of 128 registers: float32 352, half precision 36; its 128
#                                  channels 16
#                          sm_100  256 channels: float32 up to 280, half precision 8
# Of others gated/forward on sm_90 (x3, 64 channels: 12 to 184; SplitChannels of 128 by 64 columns 8) and sm_80 (x3,
# RWKV-6, 64 channels: 8 to 32), and value_gate/forward, 64 channels, on sm_80 (bfloat16 8 and 48) and sm_90 (bfloat16
# 36 to 72, x3 8).
# All of this is NVRTC 13.5's. 13.0, which torch's wheels bring, also spills 8 to 76 bytes where 13.5 does not.
SPILLS_OF = (13, 5)
SPILLED = {
    ("gated/sm90/backward_queries", "sm_90a"): 80,  # RWKV-6, bfloat16 with float32 gates; float16 72
    ("gated/sm90/backward_keys", "sm_90a"): 200,
    ("gated/forward", "sm_80"): 32,
    ("gated/forward", "sm_90"): 184,
    ("gated/forward", "sm_100"): 16,
    ("delta/backward_states", "sm_80"): 76,
    ("delta/backward_states", "sm_90"): 68,
    ("delta/backward_states", "sm_100"): 16,
    ("delta/backward_chunks", "sm_90"): 352,
    ("delta/backward_chunks", "sm_100"): 280,
    ("delta/dplr_backward_chunks", "sm_90"): 128,
    ("delta/kda_backward_chunks", "sm_90"): 8,
    ("delta/kda_backward_chunks", "sm_120"): 32,
    ("delta/sm90/scalar_backward_tokens", "sm_90a"): 28,  # addresses, once a block but for one of a chunk
    ("rwkv6/norm_shift", "sm_100"): 32,  # six mixes and four parts
    ("rwkv6/norm_shift", "sm_120"): 32,
    ("rwkv6/shift_mix", "sm_80"): 40,
    ("rwkv6/shift_mix", "sm_86"): 16,
    ("rwkv6/shift_mix", "sm_89"): 16,
    ("rwkv6/shift_mix", "sm_90"): 16,  # float32, and rows beyond 2,048 channels
    ("rwkv6/shift_mix", "sm_120"): 16,
    ("gated/small_forward", "sm_120"): 16,  # RWKV-6, float16, 8 channels
    ("gated/short_backward", "sm_100"): 8,  # 8 tokens, here and below
    ("gated/short_backward", "sm_120"): 8,
    ("gated/short_forward", "sm_80"): 20,
    ("gated/short_forward", "sm_86"): 20,
    ("gated/short_forward", "sm_89"): 20,
    ("gated/short_forward", "sm_120"): 64,
    ("delta/step", "sm_100"): 136,  # states in float32: of 128 channels, and of 256 in half precision, too
    ("delta/step", "sm_120"): 120,
    ("delta/recurrent_forward", "sm_80"): 16,  # RWKV-7 with float32 gates, four columns a lane
    ("delta/recurrent_forward", "sm_86"): 20,
    ("delta/recurrent_forward", "sm_89"): 20,
    ("delta/small_backward", "sm_80"): 224,
    ("delta/small_backward", "sm_86"): 224,
    ("delta/small_backward", "sm_89"): 224,
    ("delta/small_backward", "sm_90"): 144,
    ("gated/backward_channels", "sm_80"): 24,  # float16 in three products
    ("gated/backward_channels", "sm_86"): 24,
    ("gated/backward_channels", "sm_89"): 24,
    ("gated/backward_states", "sm_120"): 136,  # float32 in three products, 128 columns: every 32 tokens
    ("gated/scan_segments", "sm_86"): 48,  # many segments of small states
    ("gated/scan_segments", "sm_89"): 48,
    ("gated/scan_segments", "sm_100"): 28,
    ("gated/scan_segments", "sm_120"): 64,
    ("gated/segment_states", "sm_100"): 16,
    ("gated/segment_states", "sm_120"): 12,
    ("stages/intra_chunk", "sm_80"): 32,  # RWKV-6, 128 channels, data of 16 bits
    ("stages/intra_chunk", "sm_90"): 16,
    ("value_gate/forward", "sm_80"): 52,
    ("value_gate/forward", "sm_90"): 260,
    ("value_gate/forward", "sm_100"): 148,
    ("training/norm_backward", "sm_100"): 92,  # 4,096 channels
}

SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_120": 99}  # of a block, where it is not 227

# Bytes of the worst instance's stack, of Hopper's own kernels; all others have none. An array there costs dear (0.200
# for 0.164 ms in the gradients of simple_gla), and the assembler counts nothing of it as spilled. The gated ones give
# theirs to functions out of line, for gates that grow; forward's to make_scaled, of RWKV-6 in bfloat16 by clusters.
STACK = {
    "gated/sm90/forward": 8,
    "gated/sm90/backward_queries": 224,
    "gated/sm90/backward_keys": 272,
    "delta/sm90/scalar_backward_tokens": 16,
}


@pytest.fixture
def exhaustive(request):
    return request.config.getoption("--exhaustive")


@pytest.mark.pairwise
@pytest.mark.parametrize("folder, file", [(file.rpartition("/")[0], file) for file in KERNELS], ids=KERNELS)
def test_kernels_fit_their_registers(folder, file, exhaustive, seed):
    instances = chosen(KERNELS[file], exhaustive, seed)
    every = {kernel.expression: kernel for kernels in instances.values() for kernel in kernels}
    usage = nvrtc.measured(lambda kernels: disk.anywhere(source.program(kernels)), targets(instances))
    for target, kernels in instances.items():
        assert sorted(usage[target]) == sorted(kernel.expression for kernel in kernels)
    if nvrtc.release() < SPILLS_OF:
        pytest.skip(f"compiled, but registers are compared with those of NVRTC {SPILLS_OF[0]}.{SPILLS_OF[1]} or newer")
    for target in instances:
        for expression, used in usage[target].items():
            if every[expression].shared_bytes > SHARED_KIB.get(target, 227) << 10:
                continue  # no such card runs it
            assert used.spilled <= SPILLED.get((file, target), 0), f"{expression} on {target}"
            assert not KERNELS[file][0].arch or used.stack <= STACK.get(file, 0), f"{expression} on {target}"
            assert used.registers * every[expression].threads <= REGISTERS, f"{expression} on {target}"


def alike(kernels, virtual, other):
    return nvrtc.same_on(source.program(kernels), [kernel.expression for kernel in kernels], virtual, other)


ON_EVERY_CARD = [file for file, kernels in KERNELS.items() if not kernels[0].arch]


@pytest.mark.parametrize("file", [file for file in ON_EVERY_CARD if not asks_for_the_card(KERNELS[file][0])])
def test_one_translation_serves_a_generation(file, exhaustive, seed):
    """Nor do kernels for every card use anything of sm_90a, the name that CuPy compiles for on Hopper."""
    kernels = KERNELS[file] if exhaustive else random.Random(seed).sample(KERNELS[file], 1)
    assert alike(kernels, "compute_80", "compute_90a")
    assert alike(kernels, "compute_100", "compute_120")


def test_asking_for_one_translation_changes_no_other():
    """NVRTC remembers what it was told not to optimise."""
    kernels = KERNELS["softmax/backward_queries"][:2]
    text, expressions = source.program(kernels), [kernel.expression for kernel in kernels]
    before = nvrtc.translate(text, expressions, "compute_80")
    alike(kernels[:1], "compute_80", "compute_90a")
    assert nvrtc.translate(text, expressions, "compute_80") == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", [*MAIN, "sm_120"])
def test_the_assembler_says_what_nvrtc_says(target):
    """NVRTC translates and assembles at once when CuPy asks it."""
    for file in ("gated/segment_states", "recurrent/step", "softmax/forward", "rwkv6/norm_shift"):
        kernel = KERNELS[file][-1]
        text = source.program([kernel])
        ptx = nvrtc.translate(text, [kernel.expression], translated_for(target, kernel))
        assert nvrtc.assemble(ptx, target) == nvrtc.compile_text(text, [kernel.expression], target), kernel


def test_every_file_is_asked_for():
    files = {path.relative_to(source.root()).with_suffix("").as_posix() for path in source.root().rglob("*.cu")}
    assert files == set(KERNELS)


def test_every_product_of_a_warpgroup_assembles():
    products = [("tf32", "false"), *((kind, way) for kind in ("bf16", "f16") for way in ("false", "true"))]
    expressions = [
        f"warpgroup<Product<{kind}, {columns}, {way}>>" for kind, way in products for columns in (16, 32, 64, 128, 256)
    ]
    expressions += [
        f"warpgroup<TilesProduct<{kind}, {n}>>" for kind in ("bf16", "f16") for n in (16, 24, 32, 64, 72, 128, 144)
    ]
    text = source.text(Path(__file__).parent / "kernels" / "warpgroup")
    usage = nvrtc.compile_text(text, [*expressions, "warpgroup<Groups>", "warpgroup<Stages>"], "sm_90a")
    assert all(used.spilled == 0 for used in usage.values())


def test_an_operand_overwritten_while_it_is_read_is_found():
    """It was, until products had ended before the next operands came."""
    kernel = KERNELS["scalar_decay/sm90/weighted_sums"][0]
    code = nvrtc.translate(source.program([kernel]), [kernel.expression], "compute_90a").code
    product, register = re.search(r"wgmma\.mma_async[^;]*\}, *\{(%\w+)[^;]*;", code).group(0, 1)
    released = code.replace(product, f"{product} mov.b32 {register}, 0;", 1)
    assert not under_way.overwritten(code)
    assert [found.by for found in under_way.overwritten(released)] == [f"mov.b32 {register}, 0"]


def test_errors_name_the_true_file_and_line(tmp_path):
    header, kernel = tmp_path / "header.cuh", tmp_path / "source.cu"
    header.write_text("struct Args { long long n; };\n#ifdef WRONG\nwrong in header\n#endif\n")
    kernel.write_text(
        '#include "ptx.cuh"\n#include "header.cuh"\n\n__global__ void source(const Args args) { wrong; }\n'
    )
    text = source.text(tmp_path / "source", include={"header.cuh": header})
    with pytest.raises(RuntimeError, match=rf"{kernel}\(4\): error"):
        nvrtc.compile_text(text, ["source"], "sm_80")
    with pytest.raises(RuntimeError, match=rf"{header}\(3\): error"):
        nvrtc.compile_text("#define WRONG\n" + text, ["source"], "sm_80")


class Wrong(gated_kernels.Recurrent):
    """An instance whose host is wrong about a size or the order of the argument."""

    more_shared: ClassVar[int] = 0

    @property
    def shared_bytes(self):
        return super().shared_bytes + self.more_shared


class TooLarge(Wrong):
    more_shared = 16


class TooSmall(Wrong):
    more_shared = -16


class Swapped(Wrong):
    arguments = (
        *gated_kernels.Recurrent.arguments[:3],
        gated_kernels.Recurrent.arguments[4],
        gated_kernels.Recurrent.arguments[3],
        *gated_kernels.Recurrent.arguments[5:],
    )


class Longer(Wrong):
    arguments = (*gated_kernels.Recurrent.arguments, *members("int64s more"))


class KeptTooRarely(gated_kernels.GatedBackwardQueriesSm90):
    CHECKPOINT_EVERY = 2048


def test_another_number_of_kept_states_does_not_compile():
    kernel = KeptTooRarely("AfterWrite", BFLOAT16, BFLOAT16, 64, 64, gated_kernels.ONE_EACH)
    with pytest.raises(RuntimeError, match="the host and the kernel differ on a size, an offset or a con"):
        nvrtc.translate(source.program([kernel]), [kernel.expression], kernel.arch)
    nvrtc.translate(source.text(kernel.file), [kernel.expression], kernel.arch)


def test_rows_and_shapes_have_the_hosts_order():
    """Kernels compare the offsets of their arguments' members, and not what lies inside these."""
    structs = {"Shape": SHAPE, "StridedRows<float>": ("p", "batch_stride", "head_stride", "token_stride")}
    checks = (
        source.assert_equal(8 * n, f"OFFSET_OF({struct}, {name})")
        for struct, names in structs.items()
        for n, name in enumerate(names)
    )
    nvrtc.read(source.text("stages/chunk_cumsum") + source.CHECKS + "".join(checks), [], "compute_80")


@pytest.mark.parametrize("wrong", [TooLarge, TooSmall, Swapped, Longer])
def test_a_wrong_size_does_not_compile(wrong):
    """Neither one that is too large nor one that is too small."""
    kernel = wrong("AfterWrite", np.dtype(np.float32), np.dtype(np.float32), 64)
    with pytest.raises(RuntimeError, match="the host and the kernel differ|no member"):
        nvrtc.compile_text(source.program([kernel]), [kernel.expression], "sm_80")
    nvrtc.compile_text(source.text(kernel.file), [kernel.expression], "sm_80")
