"""The one place that imports numba.cuda, and the one that launches."""

import sys
import warnings

import numpy as np

# numba-cuda 0.30 registers np.row_stack, which NumPy 2.5 no longer has, as its array code is imported.
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

SIMULATED = bool(vars(config)["ENABLE_CUDASIM"])  # which Numba makes from the environment


def launch(kernel, blocks, threads, *arguments):
    """Enqueues `kernel` on CuPy's current stream. An empty array leaves nothing to do: states stay."""
    if blocks == 0 or any(getattr(x, "size", 1) == 0 for x in arguments):
        return
    if SIMULATED:
        kernel[blocks, threads](*map(simulated, arguments))
    else:
        stream = cuda.external_stream(sys.modules["cupy"].cuda.get_current_stream().ptr)
        with warnings.catch_warnings():  # of a small grid: the problem is small
            warnings.filterwarnings("ignore", ".*Grid size")
            configured = kernel[blocks, threads, stream]
        configured(*map(on_device, arguments))


def on_device(x):
    """Numba synchronises the stream of every foreign array; one that is wrapped it takes as it is."""
    return cuda.as_cuda_array(x, sync=False) if hasattr(x, "__cuda_array_interface__") else x


def simulated(x):
    """Arrays of any strides, in place; the simulator would copy them, and refuses some."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    return FakeCUDAArray(x) if isinstance(x, np.ndarray) else x
