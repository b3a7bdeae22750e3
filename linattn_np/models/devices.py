"""Where a model computes."""

import ctypes
import importlib.util
import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..cupy_folder import folder_for_cupy
from ..errors import ContractError, NotSupported
from .number_checks import shown

DEVICES = ("cpu", "cuda")


def check_device(owner: str, device: str):
    """ContractError for what is no device; NotSupported says why the GPU cannot be used."""
    if not isinstance(device, str) or device not in DEVICES:
        raise ContractError(f"{owner}: device is {shown(device)}, expected 'cpu' or 'cuda'")
    if device == "cpu":
        return
    folder_for_cupy()
    try:
        import cupy

        if not cupy.cuda.is_available():
            raise ImportError("CuPy finds no CUDA device")
        from cupy.cuda import cublas  # noqa: F401  the matrix products are cuBLAS's
    except ImportError as error:
        raise NotSupported(f"{owner}: device 'cuda' cannot be used: {why_no_cupy(error)}") from None


def why_no_cupy(error: ImportError) -> str:
    """In a line why CuPy cannot be used."""
    if error.name == "cupy":
        return "CuPy is not installed; pip install 'linattn-np[cuda13]', or [cuda12], brings it"
    return str(error).splitlines()[0]


def cuda_devices() -> int:
    """CUDA devices that the driver shows to this process, 0 without CuPy, which it takes half a second to import."""
    driver, count = cuda_driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def may_be_several() -> bool:
    """Whether this host may show more than one CUDA device, as far as one sees without asking its driver."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    nodes = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    return len(nodes) != 1 and (shown is None or "," in shown)


def uses_cuda() -> bool:
    """Whether this process has loaded CUDA's driver."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        return True
    except OSError:
        return False


def open_beside(number: int = 0) -> threading.Thread:
    """Has a thread open a CUDA device, where there is one, while this one imports CuPy: both take a quarter of a
    second. The process does not end before the thread has, which CUDA would not like."""

    def opened():
        driver, device, context = cuda_driver(), ctypes.c_int(), ctypes.c_void_p()
        if driver and not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), number):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # CUDA's runtime takes the same one

    thread = threading.Thread(target=opened)
    with suppress(RuntimeError):  # the system gives no thread: CuPy opens the device
        thread.start()
    return thread


def cuda_driver():
    """None where it is not there, or of no use for want of CuPy."""
    try:
        return ctypes.CDLL("libcuda.so.1") if importlib.util.find_spec("cupy") else None
    except OSError:
        return None


class NotCopied:
    """What keeps addresses of a device's memory in the arguments of kernels and in graphs: a copy would have the same
    ones. `copy`, `deepcopy` and `pickle` are refused with NotSupported."""

    def __reduce_ex__(self, protocol):
        raise NotSupported(
            f"{type(self).__name__}: what is on the GPU cannot be copied or pickled. Threads can share it; another "
            "copy, or another process, loads it from its file again"
        )


def on_host(array):
    """`array` as NumPy's, copied there from a device if it is not on the host."""
    return array.get() if hasattr(array, "get") else np.asarray(array)
