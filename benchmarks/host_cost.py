"""What a call costs on the host: microseconds of Python from the public function to the last launch, which is left
out.

    python benchmarks/host_cost.py

Needs CuPy, and no card: arrays are CuPy's at addresses that nobody reads, and launching does nothing. Every call is
one alike to an earlier one, so that its checks and its plan are known. Times are of this thread alone, and the least
of several rounds is what the code costs; allocation is CuPy's array object without its memory pool.
"""

import statistics
import time
from itertools import count

import cupy
import numpy as np

import linattn_np
from linattn_np.array_kinds import BFLOAT16
from linattn_np.autodiff import pullback_of
from linattn_np.backends import cupy as kernels
from linattn_np.backends.cupy.device import CupyDevice
from linattn_np.declarations import GLA

SINGLE = np.dtype(np.float32)
ROUNDS, CALLS = 30, 500
PLACES = count(1)
MEMORY = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 30, 1 << 40, None, 0), 0)


class IdleDevice(CupyDevice):
    """A Hopper card that is never there."""

    capability, multiprocessors, memory = 90, 132, 140 << 30
    shared_per_multiprocessor, shared_per_block = 228 * 1024, 227 * 1024
    queue, capturing = (0, 0), False

    def empty(self, shape, dtype):
        return cupy.ndarray(shape, dtype, MEMORY)

    def zeros(self, shape, dtype):
        return cupy.ndarray(shape, dtype, MEMORY)

    def upload(self, host):
        return cupy.ndarray(host.shape, host.dtype, MEMORY)

    def fill(self, x):
        pass

    def copy(self, source, target):
        pass

    def tensor_map(self, *described):
        return bytes(128)

    def compile(self, kernels):
        pass

    def prepared(self, *launch):
        return nothing


def nothing():
    pass


def arrays(*shapes, dtype=BFLOAT16):
    """Each in memory of its own, which no result lies in."""
    return [cupy.ndarray(shape, dtype, MEMORY + (next(PLACES) << 26)) for shape in shapes]


def calls():
    """(name, function) of every call that is timed."""
    B, H, T, D = 8, 16, 256, 64
    q, k, g, v = arrays(*4 * [(B, H, D)])
    state, out = arrays((B, H, D, D), dtype=SINGLE)[0], arrays((B, H, D))[0]
    yield "gla_step", lambda: linattn_np.gla_step(q, k, v, g, state)
    yield "gla_step with out", lambda: linattn_np.gla_step(q, k, v, g, state, out=out)
    Q, K, V, G, do = arrays(*5 * [(B, H, T, D)])
    yield "gla", lambda: linattn_np.gla(Q, K, V, G)
    yield "gla's pullback", lambda: pullback_of(GLA, (Q, K, V, G))(do)
    pull = pullback_of(GLA, (Q, K, V, G))
    yield "gla's pullback, bound", lambda: pull(do)
    scalar = arrays((B, H, T), dtype=SINGLE)[0]
    yield "simple_gla", lambda: linattn_np.simple_gla(Q, K, V, scalar)


def microseconds(function) -> list[float]:
    """Of one call, in every round."""
    function()
    found = []
    for _ in range(ROUNDS):
        begun = time.thread_time()
        for _ in range(CALLS):
            function()
        found.append((time.thread_time() - begun) / CALLS * 1e6)
    return found


def main():
    kernels.DEVICE, kernels.why_too_old = IdleDevice(), lambda device: None
    cupy.cuda.runtime.getDevice = lambda: 0
    for name, function in calls():
        times = microseconds(function)
        print(f"{name:24} {min(times):6.1f} us at least, {statistics.median(times):6.1f} us in the middle")


if __name__ == "__main__":
    main()
