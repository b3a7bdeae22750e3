"""Compiles kernels with another NVRTC than the one that is installed: the oldest that is served.

python tests/translated.py FOLDER 13.0 SEED     the folder holds its library, as pip puts it: pip install --target

For Hopper, so that all code is read: instances go through the front end, which is what differs between releases, a part
that has every template argument. Of half of the files where warpgroups multiply, one of the widest goes through the
assembler, too: an older one may have no registers for what a newer one can do, and serialise products. SEED draws them.
"all" in place of SEED reads every instance, and has each go through the assembler where warpgroups multiply, in half an
hour of a core: threads of a warp must meet before what it does as a whole, in every instance (convergence.py).
"""

import ctypes
import math
import multiprocessing
import os
import random
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pairs

ARCH = "sm_90a"


def load(folder, wanted):
    """Has cuda-bindings find this library: one that is loaded already comes before one that is installed."""
    for name in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):  # the second opens the first by its name
        (library,) = Path(folder).rglob(name)
        ctypes.CDLL(str(library), os.RTLD_GLOBAL)
    import nvrtc

    found = ".".join(map(str, nvrtc.release()))
    if found != wanted:
        raise RuntimeError(f"NVRTC is {found}, expected {wanted}")


def refused(kernels):
    """Why the front end refuses these instances of one file, or nothing."""
    import nvrtc

    from linattn_np.backends.cupy import source

    try:
        nvrtc.read(source.program(kernels), [kernel.expression for kernel in kernels], ARCH)
    except RuntimeError as error:
        return f"{kernels[0].file}:\n{error}"
    return None


def widest(kernels, seed):
    """The largest of instances that differ in sizes alone, since it wants most registers: of these, one."""
    by_types = defaultdict(list)
    for kernel in kernels:
        by_types[tuple(word for word in kernel.template if not word.isdigit())].append(kernel)
    size = lambda kernel: math.prod(int(word) for word in kernel.template if word.isdigit())
    return [max(random.Random(seed).choice([*by_types.values()]), key=size)]


def assembled(kernels):
    """Why the assembler refuses instances of one file, or that it serialises products, or nothing."""
    import nvrtc

    from linattn_np.backends.cupy import source

    try:
        nvrtc.compile_text(source.program(kernels), [kernel.expression for kernel in kernels], ARCH)
    except RuntimeError as error:
        said = str(error)
        if "serialized" in said or not nvrtc.ADVICE.search(said):  # other advice may differ between releases
            return f"{kernels[0].file}:\n{said}"
    return None


def apart():
    """The instance that CUDA 13.0's assembler once made with a thread that never met its warp."""
    import numpy as np

    from linattn_np.array_kinds import BFLOAT16
    from linattn_np.backends.cupy.gated_kernels import SINGLE_PASS, GatedForwardSm90

    return GatedForwardSm90("AfterWrite", SINGLE_PASS, BFLOAT16, np.dtype(np.float32), 64, 64)


def main(folder, wanted, seed):
    import catalog

    from linattn_np.backends.cupy import source

    every = defaultdict(list)
    for kernel in catalog.kernels():
        every[kernel.file].append(kernel)
    multiply = [kernels for kernels in every.values() if "wgmma.mma_async" in source.text(kernels[0].file)]
    if seed == "all":
        read = [*every.values()]
        products = [[kernel] for kernels in multiply for kernel in kernels if kernel.arch == ARCH]
    else:
        read = [pairs.instances(kernels, 1, seed) for kernels in every.values()]
        drawn = random.Random(seed).sample(multiply, len(multiply) // 2)
        products = [widest(kernels, int(seed)) for kernels in drawn] + [[apart()]]
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=processes, initializer=partial(load, folder, wanted)) as pool:
        advice, refusals = pool.map(assembled, products), pool.map(refused, read)
        complaints = [said for said in (*refusals, *advice) if said]
    done = f"takes {sum(map(len, read))} instances of {len(read)} files"
    print("\n".join(complaints) or f"NVRTC {wanted} {done}, and assembles {sum(map(len, products))}")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
