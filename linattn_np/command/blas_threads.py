"""How many threads BLAS takes. Small matrices are faster with one: more of them wait for each other at every product,
and where another program is busy they wait for it too.

The number follows from the size of the matrices alone, not from how busy the machine is, so that the same command
gives the same bits.
"""

import os
from contextlib import contextmanager

from ..models.helper_threads import count
from .terminal import say

SHARE = 4 << 20  # bytes of a matrix for which another thread pays
VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")


def blas_for(device: str, sizes: dict):
    """Inside, BLAS has the threads that a model of these sizes is worth, if it is the CPU that computes."""
    return blas_threads(device, 4 * sizes["D"] * sizes["F"], "this model is faster with fewer threads of BLAS")


@contextmanager
def blas_threads(device: str, size: int, why: str):
    """Inside, BLAS has the threads for matrices of so many bytes.

    A user who has set one of VARIABLES has chosen, and without threadpoolctl BLAS stays as it is, and is told `why`.
    """
    if device != "cpu" or any(map(os.environ.get, VARIABLES)):
        yield
        return
    from ..backends.numpy.cores import workers  # late, as cards need none of it

    count = wanted(size, workers())
    if count == workers():
        yield
        return
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        say(f"{why}: pip install 'linattn-np[threads]', or set OPENBLAS_NUM_THREADS={count}")
        yield
        return
    with threadpool_limits(count, "blas"):
        yield


def where(device: str, library: str) -> str:
    """What computes, in the first line of a subcommand's messages."""
    if device == "cpu":
        threads = count()
        return f"on the CPU ({threads} thread{'s' * (threads > 1)}, {library})"
    import cupy

    return f"on the GPU ({cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)['name'].decode()})"


def wanted(size: int, most: int) -> int:
    """Threads for float32 matrices of so many bytes, the largest of a layer."""
    return max(1, min(most, size // SHARE))
