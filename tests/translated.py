"""Translates every kernel with another NVRTC than the one that is installed: the oldest that is served.

python tests/translated.py FOLDER 13.0      the folder holds its library, as pip puts it: pip install --target FOLDER

The front end alone, which is what differs between releases, for Hopper, so that all code is read: of each kernel the
instances that have between them every pair of template arguments.
"""

import ctypes
import multiprocessing
import os
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

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


def complaint(kernels):
    """Why the compiler refuses these instances of one file, or nothing."""
    import nvrtc

    from linattn_np.backends.cupy import source

    try:
        nvrtc.translate(source.program(kernels), [kernel.expression for kernel in kernels], ARCH, "-G")
    except RuntimeError as error:
        return f"{kernels[0].file}:\n{error}"


def main(folder, wanted):
    import pairs

    from linattn_np.backends.cupy import catalog

    every = defaultdict(list)
    for kernel in catalog.kernels():
        every[kernel.file].append(kernel)
    chosen = [pairs.instances(kernels) for kernels in every.values()]
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=processes, initializer=partial(load, folder, wanted)) as pool:
        complaints = list(filter(None, pool.map(complaint, chosen)))
    print("\n".join(complaints) or f"NVRTC {wanted} takes {sum(map(len, chosen))} instances of {len(chosen)} files")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
