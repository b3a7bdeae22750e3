"""Every kernel that the host plans can ask for compiles for every target, with no GPU, and spills nothing."""

import multiprocessing
import os
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from linattn_np.backends.cupy import catalog, instances, source
from linattn_np.backends.cupy.arguments import integers

pytest.importorskip("cuda.core", reason="cuda-core is not installed: no NVRTC to compile with")

from cuda.core._utils.cuda_utils import NVRTCError  # noqa: E402
from nvrtc import compile_text, translate_text  # noqa: E402

TARGETS = ("sm_80", "sm_90")
REGISTERS = 65536  # of a multiprocessor: what one block can have
WORKERS = min(os.cpu_count(), 4)
KERNELS = defaultdict(list)  # by file and target
for kernel in catalog.kernels():
    for target in (kernel.arch,) if kernel.arch else TARGETS:
        KERNELS[kernel.file, target].append(kernel)


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        yield pool


def shares(kernels):
    """The programs of some instances each, with their expressions, for each worker."""
    parts = [kernels[i::WORKERS] for i in range(min(WORKERS, len(kernels)))]
    return [source.program(part) for part in parts], [[kernel.expression for kernel in part] for part in parts]


# Bytes that the worst instance of a kernel stores and loads for want of registers; all others spill nothing. Half the
# heads of trained models were computed twice before there were these: their registers hold one path for every gate.
SPILLED = {"gated/sm90/backward_queries": 116, "gated/sm90/backward_keys": 228}


@pytest.mark.parametrize("file, target", KERNELS)
def test_kernels_fit_their_registers(pool, file, target):
    usage = {}
    for share in pool.map(partial(compile_text, arch=target), *shares(KERNELS[file, target])):
        usage |= share
    for kernel in KERNELS[file, target]:
        used = usage[kernel.expression]
        assert used.spilled <= SPILLED.get(file, 0), kernel
        assert used.registers * kernel.threads <= REGISTERS, kernel


@pytest.mark.parametrize("file", [file for file, target in KERNELS if target == "sm_90"])
def test_kernels_for_every_card_are_hoppers_too(pool, file):
    """For sm_90a, of which they use nothing, so that the assembler would say what it says for sm_90."""
    list(pool.map(partial(translate_text, arch="sm_90a"), *shares(KERNELS[file, "sm_90"])))


def test_every_file_is_asked_for():
    files = {path.relative_to(source.root()).with_suffix("").as_posix() for path in source.root().rglob("*.cu")}
    assert files == {file for file, _ in KERNELS}


def test_every_product_of_a_warpgroup_assembles():
    products = [("tf32", "false"), *((kind, way) for kind in ("bf16", "f16") for way in ("false", "true"))]
    expressions = [
        f"warpgroup<Product<{kind}, {columns}, {way}>>" for kind, way in products for columns in (16, 32, 64, 128, 256)
    ]
    expressions += ["warpgroup<TilesProduct<bf16>>", "warpgroup<TilesProduct<f16>>"]
    text = source.text(Path(__file__).parent / "kernels" / "warpgroup")
    usage = compile_text(text, [*expressions, "warpgroup<Groups>", "warpgroup<Stages>"], "sm_90a")
    assert all(used.spilled == 0 for used in usage.values())


def test_errors_name_the_true_file_and_line(tmp_path):
    header, kernel = tmp_path / "header.cuh", tmp_path / "source.cu"
    header.write_text("struct Args { long long n; };\n#ifdef WRONG\nwrong in header\n#endif\n")
    kernel.write_text(
        '#include "ptx.cuh"\n#include "header.cuh"\n\n__global__ void source(const Args args) { wrong; }\n'
    )
    text = source.text(tmp_path / "source", include={"header.cuh": header})
    with pytest.raises(NVRTCError, match=rf"{kernel}\(4\): error"):
        compile_text(text, ["source"], "sm_80")
    with pytest.raises(NVRTCError, match=rf"{header}\(3\): error"):
        compile_text("#define WRONG\n" + text, ["source"], "sm_80")


@dataclass(frozen=True)
class Wrong(instances.Recurrent):
    """An instance whose host is wrong about a size or the order of the argument."""

    more_shared: ClassVar[int] = 0

    @property
    def template(self):
        return super().template[:4]

    @property
    def shared_bytes(self):
        return super().shared_bytes + self.more_shared


class TooLarge(Wrong):
    more_shared = 16


class TooSmall(Wrong):
    more_shared = -16


class Swapped(Wrong):
    arguments = (
        *instances.Recurrent.arguments[:3],
        instances.Recurrent.arguments[4],
        instances.Recurrent.arguments[3],
        *instances.Recurrent.arguments[5:],
    )


class Longer(Wrong):
    arguments = (*instances.Recurrent.arguments, *integers("more"))


@pytest.mark.parametrize("wrong", [TooLarge, TooSmall, Swapped, Longer])
def test_a_wrong_size_does_not_compile(wrong):
    """Neither one that is too large nor one that is too small."""
    kernel = wrong("AfterWrite", np.dtype(np.float32), np.dtype(np.float32), 64)
    with pytest.raises((NVRTCError, RuntimeError), match="the host and the kernel differ|no member"):
        compile_text(source.program([kernel]), [kernel.expression], "sm_80")
    compile_text(source.text(kernel.file), [kernel.expression], "sm_80")
