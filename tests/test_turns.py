"""The simulator whose threads take turns does what Numba's does: barriers, errors, and what a lacking barrier shows."""

import numpy as np
import pytest
from conftest import SIMULATOR

if not SIMULATOR:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from numba import cuda

THREADS = 8


def reversed_by(*, barrier):
    """What a block makes of 0, 1, 2, ... when every thread reads what another has written."""

    @cuda.jit
    def kernel(out):
        shared = cuda.shared.array(THREADS, np.float32)
        i = cuda.threadIdx.x
        shared[i] = -1
        cuda.syncthreads()
        shared[i] = i
        if barrier:
            cuda.syncthreads()
        out[cuda.blockIdx.x, i] = shared[THREADS - 1 - i]

    out = np.full((2, THREADS), np.nan, np.float32)
    kernel[2, THREADS](out)
    return out


def test_threads_meet_at_a_barrier():
    assert (reversed_by(barrier=True) == np.arange(THREADS)[::-1]).all()


def test_a_lacking_barrier_always_shows():
    assert not (reversed_by(barrier=False) == np.arange(THREADS)[::-1]).all()


def test_an_error_ends_the_threads_that_wait():
    @cuda.jit
    def kernel(out):
        if cuda.threadIdx.x == THREADS // 2:
            out[1] = 0  # there is no such element
        cuda.syncthreads()
        out[0] = 1

    out = np.zeros(1, np.float32)
    with pytest.raises(IndexError, match="tid=.*4, 0, 0.*index 1 is out of bounds"):
        kernel[1, THREADS](out)
    assert out[0] == 0
