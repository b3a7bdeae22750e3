"""Launches in which a kernel takes the room the one before it leaves (programmatic dependent launch, sm_90).

Only for kernels that call `wait_for_previous` before they read or write what another kernel writes or reads.
"""

import ctypes
from functools import cache

import numpy as np

from .build import SHARED_BY_DEFAULT, CupyDevice, Kernel, load

LEAST_CAPABILITY = 90
PROGRAMMATIC_STREAM_SERIALIZATION = 6       # of the driver's CUlaunchAttributeID


class LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute: 8 bytes of name, 64 of value."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(LaunchAttribute)),
                ("count", ctypes.c_uint)]


OVERLAP = LaunchAttribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=(ctypes.c_int * 16)(1))


@cache
def driver():
    return ctypes.CDLL("libcuda.so.1")


@cache
def entry(kernel, smem, device):
    """The driver's handle of `kernel` on `device`, which must be the current one."""
    function = load(kernel)
    if smem > SHARED_BY_DEFAULT:
        function.max_dynamic_shared_size_bytes = smem
    function.preferred_shared_memory_carveout = 100     # for all: only an empty multiprocessor can change it
    return ctypes.c_void_p(function.kernel.ptr)


class OverlappedDevice(CupyDevice):
    def launch(self, kernel: Kernel, blocks: int, args: np.ndarray, smem: int = 0):
        import cupy

        if blocks == 0:
            return
        stream, attributes = cupy.cuda.get_current_stream().ptr, ctypes.pointer(OVERLAP)
        config = LaunchConfig((blocks, 1, 1), (kernel.threads, 1, 1), smem, stream, attributes, 1)
        function = entry(kernel, smem, cupy.cuda.runtime.getDevice())
        parameters = ctypes.c_void_p(args.ctypes.data)
        status = driver().cuLaunchKernelEx(ctypes.byref(config), function, ctypes.byref(parameters), None)
        if status:
            raise RuntimeError(f"{kernel.expression}: the driver refused the launch with CUresult {status}")


def best_device():
    """What launches fastest on the current CUDA device."""
    import cupy

    capability = int(cupy.cuda.Device().compute_capability)
    return OverlappedDevice() if capability >= LEAST_CAPABILITY else CupyDevice()
