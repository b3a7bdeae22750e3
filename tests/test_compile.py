"""Every kernel that the host plans can ask for compiles for every target, with no GPU, and spills nothing."""

import multiprocessing
import os
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from linattn_np.backends.cupy import build, tiles

pytest.importorskip("cuda.core", reason="cuda-core is not installed: no NVRTC to compile with")

from cuda.core._utils.cuda_utils import NVRTCError  # noqa: E402
from nvrtc import compile_text, translate_text  # noqa: E402

TARGETS = ("sm_80", "sm_90")
REGISTERS = 65536  # of a multiprocessor: what one block can have
WORKERS = min(os.cpu_count(), 4)
KERNELS = defaultdict(list)  # by file and target
for kernel in tiles.kernels():
    for target in (kernel.arch,) if kernel.arch else TARGETS:
        KERNELS[kernel.file, target].append(kernel)


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        yield pool


def shares(kernels):
    """Their instantiations, some for each worker."""
    expressions = [kernel.expression for kernel in kernels]
    return [expressions[i::WORKERS] for i in range(min(WORKERS, len(expressions)))]


@pytest.mark.parametrize("file, target", KERNELS)
def test_kernels_fit_their_registers(pool, file, target):
    usage = {}
    for share in pool.map(partial(compile_text, build.text(file), arch=target), shares(KERNELS[file, target])):
        usage |= share
    for kernel in KERNELS[file, target]:
        used = usage[kernel.expression]
        assert used.spilled == 0, kernel
        assert used.registers * kernel.threads <= REGISTERS, kernel


@pytest.mark.parametrize("file", [file for file, target in KERNELS if target == "sm_90"])
def test_kernels_for_every_card_are_hoppers_too(pool, file):
    """For sm_90a, of which they use nothing, so that the assembler would say what it says for sm_90."""
    list(pool.map(partial(translate_text, build.text(file), arch="sm_90a"), shares(KERNELS[file, "sm_90"])))


def test_every_file_is_asked_for():
    files = {path.relative_to(build.root()).with_suffix("").as_posix() for path in build.root().rglob("*.cu")}
    assert files == {file for file, _ in KERNELS}


def test_every_product_of_a_warpgroup_assembles():
    products = [("tf32", "false"), *((kind, way) for kind in ("bf16", "f16") for way in ("false", "true"))]
    expressions = [f"warpgroup<Product<{kind}, {columns}, {way}>>"
                   for kind, way in products for columns in (16, 32, 64, 128, 256)]
    text = build.text(Path(__file__).parent / "kernels" / "warpgroup")
    usage = compile_text(text, [*expressions, "warpgroup<Groups>", "warpgroup<Stages>"], "sm_90a")
    assert all(used.spilled == 0 for used in usage.values())


def test_errors_name_the_true_file_and_line(tmp_path):
    header, source = tmp_path / "header.cuh", tmp_path / "source.cu"
    header.write_text("struct Args { long long n; };\n#ifdef WRONG\nwrong in header\n#endif\n")
    source.write_text(
        '#include "ptx.cuh"\n#include "header.cuh"\n\n__global__ void source(const Args args) { wrong; }\n')
    text = build.text(tmp_path / "source", include={"header.cuh": header})
    with pytest.raises(NVRTCError, match=rf"{source}\(4\): error"):
        compile_text(text, ["source"], "sm_80")
    with pytest.raises(NVRTCError, match=rf"{header}\(3\): error"):
        compile_text("#define WRONG\n" + text, ["source"], "sm_80")
