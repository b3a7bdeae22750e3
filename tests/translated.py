"""Compiles kernels with another NVRTC than the one that is installed: the oldest that is served.

python tests/translated.py FOLDER 13.0      the folder holds its library, as pip puts it: pip install --target FOLDER

For Hopper, so that all code is read: of each kernel the instances that have between them every pair of template
arguments go through the front end, which is what differs between releases. Where warpgroups multiply, the widest go
through the assembler, too: an older one may have no registers for what a newer one can do, and serialise products.
"""

import ctypes
import math
import multiprocessing
import os
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pairs

ARCH = "compute_90a"


def load(folder, wanted):
    """Has cuda-bindings find this library: one that is loaded already comes before one that is installed."""
    for name in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):  # the second opens the first by its name
        (library,) = Path(folder).rglob(name)
        ctypes.CDLL(str(library), os.RTLD_GLOBAL)
    import nvrtc

    found = ".".join(map(str, nvrtc.release()))
    if found != wanted:
        raise RuntimeError(f"NVRTC is {found}, expected {wanted}")


def translated(kernels):
    """(why the compiler refuses these instances of one file, or nothing; whether they have products of warpgroups)."""
    import nvrtc

    from linattn_np.backends.cupy import source

    try:
        ptx = nvrtc.translate(source.program(kernels), [kernel.expression for kernel in kernels], ARCH, "-G")
    except RuntimeError as error:
        return f"{kernels[0].file}:\n{error}", False
    return None, "wgmma.mma_async" in ptx.code


def widest(kernels):
    """The largest of instances that differ in sizes alone, since it wants most registers: of these, enough for every
    pair of the other arguments.
    """
    by_types = defaultdict(list)
    for kernel in kernels:
        by_types[tuple(word for word in kernel.template if not word.isdigit())].append(kernel)
    size = lambda kernel: math.prod(int(word) for word in kernel.template if word.isdigit())
    return pairs.instances([max(alike, key=size) for alike in by_types.values()])


def assembled(kernels):
    """Why the assembler refuses instances of one file, or that it serialises products, or nothing."""
    import nvrtc

    from linattn_np.backends.cupy import source

    try:
        nvrtc.compile_text(source.program(kernels), [kernel.expression for kernel in kernels], kernels[0].arch)
    except RuntimeError as error:
        said = str(error)
        if "serialized" in said or not nvrtc.ADVICE.search(said):  # other advice may differ between releases
            return f"{kernels[0].file}:\n{said}"
    return None


def main(folder, wanted):
    from linattn_np.backends.cupy import catalog

    every = defaultdict(list)
    for kernel in catalog.kernels():
        every[kernel.file].append(kernel)
    chosen = [pairs.instances(kernels) for kernels in every.values()]

    def pool():  # NVRTC remembers -G: what assembles has processes of its own
        processes = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(mp_context=processes, initializer=partial(load, folder, wanted))

    with pool() as first, pool() as second:
        results = list(first.map(translated, chosen))
        products = [
            widest(kernels) for kernels, (_, multiplies) in zip(every.values(), results, strict=True) if multiplies
        ]
        advice = second.map(assembled, products)
        complaints = [said for said in (*(said for said, _ in results), *advice) if said]
    done = f"takes {sum(map(len, chosen))} instances of {len(chosen)} files, and assembles {sum(map(len, products))}"
    print("\n".join(complaints) or f"NVRTC {wanted} {done}")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
