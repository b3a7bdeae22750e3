"""Chooses the number of BLAS's threads. Small matrices are faster with one: several threads wait for each other at
every product, and for other programs that use their cores.

The number depends on the size of the matrices alone, and not on the machine's load, so that the same command gives the
same bits.
"""

import os
from contextlib import contextmanager

from ..models.helper_threads import count
from .terminal import to_stderr

SHARE = 4 << 20  # bytes of a matrix per thread
VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")


def blas_for(device: str, sizes: dict):
    """A context in which BLAS has the best number of threads for a model of these sizes, if `device` is the CPU."""
    return blas_threads(device, 4 * sizes["D"] * sizes["F"], "this model is faster with fewer threads of BLAS")


@contextmanager
def blas_threads(device: str, size: int, why: str):
    """A context in which BLAS has the best number of threads for matrices of `size` bytes, if `device` is "cpu".

    Nothing changes if the user has set one of VARIABLES. Without threadpoolctl nothing can be changed; then a message
    with the reason `why` says how the user can.
    """
    if device != "cpu" or any(map(os.environ.get, VARIABLES)):
        yield
        return
    from ..backends.numpy.cores import workers  # imported here, as GPUs do not need it

    count = best_count(size, workers())
    if count == workers():
        yield
        return
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        to_stderr(f"{why}: pip install 'linattn-np[threads]', or set OPENBLAS_NUM_THREADS={count}")
        yield
        return
    with threadpool_limits(count, "blas"):
        yield


def computes_on(device: str, library: str = "") -> str:
    """The first line of a subcommand's messages: "on the GPU (NAME)", or "on the CPU (2 threads, LIBRARY)"."""
    if device == "cpu":
        threads = count()
        return f"on the CPU ({threads} thread{'s' * (threads > 1)}, {library})"
    import cupy

    return f"on the GPU ({cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)['name'].decode()})"


def best_count(size: int, most: int) -> int:
    """The number of threads, at most `most`, for matrices of `size` bytes."""
    return max(1, min(most, size // SHARE))
