"""The kernels of kernels_cu on the CPU: EmulatedDevice compiles them with g++ and runs them on NumPy arrays.

`cuda_cpu.hpp` says what is emulated and what is checked.
"""

import ctypes
import hashlib
import os
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from linattn_np.backends.cupy import build

HERE = Path(__file__).parent
FLAGS = (
    "-std=c++17", "-O2", "-w", "-fPIC", "-shared", "-fvisibility=hidden",
    "-fno-gnu-unique",  # each kernel's library keeps its own statics
    "-fno-strict-aliasing",  # kernels read one type's bits as another's, as CUDA compilers allow
    "-ftrivial-auto-var-init=pattern",  # an uninitialised register shows
)  # fmt: skip
ENTRY = """
extern "C" __attribute__((visibility("default")))
const char* emulated_launch(const void* args, size_t size, long long blocks, int threads, size_t smem) {{
  return emulator::launch(&{expression}, args, size, blocks, threads, smem);
}}
"""


class EmulatorError(RuntimeError):
    """A kernel that does not compile, or does what the hardware leaves undefined."""


def _folder():
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for parent in (Path(cache_home), Path(tempfile.gettempdir())):
        folder = parent / "linattn_np" / "emulator"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise EmulatorError("no writable folder for compiled kernels")


def _compile(kernel):
    """The shared library of one instantiation, from the disk where the same text was compiled before."""
    runtime = HERE / "cuda_cpu.hpp"
    source = f'#line 1 "{runtime}"\n{runtime.read_text()}'
    source += build.text(kernel.file, include={"ptx.cuh": HERE / "ptx.cuh"})
    source += ENTRY.format(expression=kernel.expression)
    key = hashlib.sha256("\0".join((*FLAGS, source)).encode()).hexdigest()[:32]
    library = _folder() / f"{kernel.name}-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            output = Path(folder) / library.name
            command = ["g++", *FLAGS, "-x", "c++", "-", "-o", str(output)]
            result = subprocess.run(command, input=source, capture_output=True, text=True)
            if result.returncode:
                raise EmulatorError(f"{kernel.expression} does not compile\n{result.stderr}")
            os.replace(output, library)  # another process may be writing the same file
    return library


@cache
def _load(kernel):
    library = ctypes.PyDLL(str(_compile(kernel)))  # keeps the GIL: its statics hold one launch
    launch = library.emulated_launch
    launch.restype = ctypes.c_char_p
    launch.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong, ctypes.c_int, ctypes.c_size_t
    return launch


class EmulatedDevice:
    """`build.CupyDevice` on NumPy arrays; `empty` holds NaN, so that a value nobody wrote shows."""

    def __init__(self, capability=80):
        self.capability = capability

    def empty(self, shape, dtype):
        return self._poisoned(np.empty(shape, dtype))

    def empty_like(self, prototype, shape, dtype):
        return self._poisoned(np.empty_like(prototype, dtype=dtype, order="K", shape=shape))

    def zeros(self, shape, dtype):
        return np.zeros(shape, dtype)

    def upload(self, host):
        return np.array(host)

    def pointer(self, array) -> int:
        return array.ctypes.data

    def tensor_map(self, array, columns, tokens, swizzled) -> bytes:
        sizes, strides = array.shape[::-1], array.strides[::-1]
        box = columns, tokens, array.dtype.itemsize, swizzled
        return struct.pack("=q4q4q4i", array.ctypes.data, *sizes, *strides, *box).ljust(128, b"\0")

    def launch(self, kernel, blocks, args, smem=0):
        error = _load(kernel)(args.ctypes.data, args.nbytes, blocks, kernel.threads, smem)
        if error:
            raise EmulatorError(f"{kernel.expression}: {error.decode()}")

    @staticmethod
    def _poisoned(array):
        memory = array.ravel(order="K")  # a view: the array is contiguous in its own order
        memory.view(np.uint8)[...] = 0xFF
        return array
