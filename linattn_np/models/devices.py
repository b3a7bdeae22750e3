"""The devices on which models compute: checks, CUDA's driver, and arrays on the host."""

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
    """ContractError if `device` is not one of DEVICES; NotSupported, with the reason, if the GPU cannot be used. The
    message begins with `owner`, the name of a class or function."""
    if not isinstance(device, str) or device not in DEVICES:
        raise ContractError(f"{owner}: device is {shown(device)}, expected 'cpu' or 'cuda'")
    if device == "cpu":
        return
    folder_for_cupy()  # before the import, which fails where CuPy cannot write kernels to its folder
    try:
        import cupy

        if not cupy.cuda.is_available():
            raise ImportError("CuPy finds no CUDA device")
        from cupy.cuda import cublas  # noqa: F401  the matrix products are cuBLAS's
    except ImportError as error:
        raise NotSupported(f"{owner}: device 'cuda' cannot be used: {why_no_cupy(error)}") from None


def why_no_cupy(error: ImportError) -> str:
    """A line that says why CuPy cannot be used, from the error of its import."""
    if error.name == "cupy":
        return "CuPy is not installed; pip install 'linattn-np[cuda13]', or [cuda12], brings it"
    return str(error).splitlines()[0]


def cuda_devices() -> int:
    """The number of CUDA devices that this process sees; 0 if CuPy is not installed. It does not import CuPy."""
    driver, count = cuda_driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def may_be_several() -> bool:
    """Whether this process may see more than one CUDA device, judged without loading the driver. It may
    where nothing says how many there are: neither /dev/nvidia0, 1, ... nor CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    nodes = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    return len(nodes) != 1 and (visible is None or "," in visible)


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
    """Makes a thread open a CUDA device, if there is one, while this thread imports CuPy: each takes a quarter of a
    second. The thread is no daemon: a process must not end while CUDA opens a device. It is returned even if the system
    did not start it."""

    def open_device():
        driver, device, context = cuda_driver(), ctypes.c_int(), ctypes.c_void_p()
        if driver and not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), number):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # the context that CUDA's runtime uses, too

    thread = threading.Thread(target=open_device)
    with suppress(RuntimeError):  # the system gives no thread: CuPy will open the device
        thread.start()
    return thread


def cuda_driver():
    """The library of CUDA's driver; None if it or CuPy is not installed."""
    try:
        return ctypes.CDLL("libcuda.so.1") if importlib.util.find_spec("cupy") else None
    except OSError:
        return None


class NotCopied:
    """The base of classes whose objects store addresses of a device's memory, in arguments of kernels and in graphs. As
    a copy would use the same memory, `copy`, `deepcopy` and `pickle` raise NotSupported."""

    def __reduce_ex__(self, protocol):
        raise NotSupported(
            f"{type(self).__name__}: what is on the GPU cannot be copied or pickled. Threads can share it; another "
            "copy, or another process, loads it from its file again"
        )


def on_host(array):
    """`array` as a NumPy array; it is copied if it is on a device."""
    return array.get() if hasattr(array, "get") else np.asarray(array)
