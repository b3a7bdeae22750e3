"""Launches in which a kernel takes the room the one before it leaves (programmatic dependent launch, sm_90).

Only for kernels that call `wait_for_previous` before they read or write what another kernel writes or reads. A
cooperative launch begins when there is room for all its blocks, so that they may wait for each other.
"""

import ctypes
from functools import cache

import numpy as np

from .build import SHARED_BY_DEFAULT, CupyDevice, Kernel, load

LEAST_CAPABILITY = 90
COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6      # of the driver's CUlaunchAttributeID


class LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute: 8 bytes of name, 64 of value."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(LaunchAttribute)),
                ("count", ctypes.c_uint)]


def attributes(*ids):
    return (LaunchAttribute * len(ids))(*(LaunchAttribute(id=id, value=(ctypes.c_int * 16)(1)) for id in ids))


OVERLAP = attributes(PROGRAMMATIC_STREAM_SERIALIZATION)
TOGETHER = attributes(COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION)


@cache
def driver():
    return ctypes.CDLL("libcuda.so.1")


@cache
def entry(kernel, smem, device):
    """The driver's handle of `kernel` on `device`, which must be the current one."""
    function = load(kernel)
    if smem > max(SHARED_BY_DEFAULT, function.max_dynamic_shared_size_bytes):        # never less than others launch it with
        function.max_dynamic_shared_size_bytes = smem
    function.preferred_shared_memory_carveout = 100     # for all: only an empty multiprocessor can change it
    return ctypes.c_void_p(function.kernel.ptr)


class OverlappedDevice(CupyDevice):
    def launch(self, kernel: Kernel, blocks: int, args: np.ndarray, smem: int = 0, attributes=OVERLAP):
        import cupy

        if blocks == 0:
            return
        stream = cupy.cuda.get_current_stream().ptr
        config = LaunchConfig((blocks, 1, 1), (kernel.threads, 1, 1), smem, stream, attributes, len(attributes))
        function = entry(kernel, smem, cupy.cuda.runtime.getDevice())
        parameters = ctypes.c_void_p(args.ctypes.data)
        status = driver().cuLaunchKernelEx(ctypes.byref(config), function, ctypes.byref(parameters), None)
        if status:
            raise RuntimeError(f"{kernel.expression}: the driver refused the launch with CUresult {status}")

    def launch_together(self, kernel: Kernel, args: np.ndarray, smem: int):
        """A block on every multiprocessor, all at work at once."""
        import cupy

        self.launch(kernel, cupy.cuda.Device().attributes["MultiProcessorCount"], args, smem, TOGETHER)


def best_device():
    """What launches fastest on the current CUDA device."""
    import cupy

    capability = int(cupy.cuda.Device().compute_capability)
    return OverlappedDevice() if capability >= LEAST_CAPABILITY else CupyDevice()
