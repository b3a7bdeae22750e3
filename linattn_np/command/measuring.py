"""Measures the time and the memory of calls on a device. benchmarks/devices.py uses these classes, too."""

import platform
import statistics
import time
import tracemalloc
from contextlib import suppress
from functools import partial

import numpy as np

from ..array_kinds import BFLOAT16
from ..models.array_math import sigmoid
from .terminal import device_of, status

CALLS = 5  # of which `median_ms` is the median
COPIED = 1 << 28  # bytes of the copy that `ms_of_a_byte` times


def cpu() -> str:
    """The CPU's name, or its architecture if there is no /proc/cpuinfo or no name in it."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.machine()


class Cpu:
    """The CPU.

    longest : the most tokens of a call in `compare`, by default
    tokens : the tokens of a call in `bench`, by default
    """

    xp, dtype, longest, tokens = np, np.dtype(np.float32), 16384, 1024

    def __init__(self):
        self.name = cpu()

    def ms(self, call):
        """The milliseconds of a call."""
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def with_peak(self, call):
        """(a call's result, the peak of the bytes that it allocates, its result's included)."""
        tracemalloc.start()
        try:
            return call(), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


class Cuda:
    """The current CUDA device; see `Cpu`."""

    dtype, longest, tokens = BFLOAT16, 131072, 4096

    def __init__(self):
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.xp, self.name = cupy, properties["name"].decode()

    def ms(self, call):
        start, stop = self.enqueued(call)
        stop.synchronize()
        return self.xp.cuda.get_elapsed_time(start, stop)

    def enqueued(self, call):
        """Two events on the stream, before and after the work that the call enqueues."""
        start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
        start.record()
        call()
        stop.record()
        return start, stop

    def with_peak(self, call):
        pool = self.xp.cuda.MemoryPool()
        with self.xp.cuda.using_allocator(pool.malloc):
            return call(), pool.total_bytes()


def chosen(name):
    """The device of the option --device; NotSupported if "cuda" cannot be used."""
    return Cpu() if device_of(name, "argument --device") == "cpu" else Cuda()


def drawn(device, op, **sizes) -> list:
    """Random arrays for a call of a declared operator. Gates are logsigmoid of normal numbers; the bonus is float32."""
    rng = device.xp.random.default_rng(0)
    normal, arrays = partial(rng.standard_normal, dtype=np.float32), {}
    for name, axes in op.arrays.items():
        x = normal(tuple(sizes[axis] for axis in axes.split()))
        arrays[name] = -device.xp.log1p(device.xp.exp(-x)) if name in op.decays else x
    found = contracting(arrays, device.xp)
    return [x if name == "u" else x.astype(device.dtype) for name, x in found.items()]


def contracting(arrays, xp):
    """The arrays of a call by name. Those of a delta rule are changed so that states stay bounded, as in models: keys
    have length 1, and strengths are between 0 and 1. RWKV-7 has a strength for each channel of b: the matrix by which a
    token multiplies a state then has eigenvalues, but not always a norm, of at most 1."""

    def unit(x):
        return x / xp.linalg.norm(x, axis=-1, keepdims=True)

    if "beta" in arrays:
        return arrays | {"k": unit(arrays["k"]), "beta": sigmoid(arrays["beta"])}
    if "b" in arrays:
        removed = unit(arrays["a"])
        return arrays | {"a": -removed, "b": removed * sigmoid(arrays["b"])}
    return arrays


def median_ms(device, call) -> float:
    """The median time of CALLS calls."""
    return statistics.median(device.ms(call) for _ in range(CALLS))


def ms_of_a_byte(device) -> float:
    """The milliseconds to read or write a byte, at the bandwidth of a copy."""
    with status("measuring the memory ..."):
        source = device.xp.ones(COPIED, np.uint8)
        target = device.xp.empty_like(source)
        return median_ms(device, lambda: device.xp.copyto(target, source)) / (2 * COPIED)
