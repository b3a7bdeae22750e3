"""Imports numba.cuda, and launches kernels. Other modules import neither themselves."""

import sys
import warnings

import numpy as np

# When numba-cuda 0.30 is imported it reads np.row_stack, which NumPy 2.5 no longer has.
_missing = not hasattr(np, "row_stack")
if _missing:
    np.row_stack = np.vstack
try:
    import numba.cuda.np.arrayobj  # noqa: F401
finally:
    if _missing:
        del np.row_stack

from numba import cuda
from numba.core import config

THREADS = 64  # of a block, in every kernel
SIMULATED = bool(vars(config)["ENABLE_CUDASIM"])  # Numba reads this from the environment


def launch(kernel, blocks, *arguments):
    """Enqueues `kernel` on CuPy's current stream; does nothing if an array is empty, as no state then changes."""
    if blocks == 0 or any(getattr(x, "size", 1) == 0 for x in arguments):
        return
    if SIMULATED:
        kernel[blocks, THREADS](*map(simulated, arguments))
    else:
        stream = cuda.external_stream(sys.modules["cupy"].cuda.get_current_stream().ptr)
        with warnings.catch_warnings():  # Numba warns of small grids, which small problems have
            warnings.filterwarnings("ignore", ".*Grid size")
            configured = kernel[blocks, THREADS, stream]
        configured(*map(on_device, arguments))


def on_device(x):
    """An array wrapped for Numba, which would otherwise synchronise the array's stream; other arguments unchanged."""
    return cuda.as_cuda_array(x, sync=False) if hasattr(x, "__cuda_array_interface__") else x


def simulated(x):
    """An array wrapped for the simulator, which would otherwise copy it, or refuse its strides; other arguments
    unchanged."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    return FakeCUDAArray(x) if isinstance(x, np.ndarray) else x
