"""The kernels of kernels_cu on the CPU: EmulatedDevice compiles them with g++ and runs them on NumPy arrays.

`cuda_cpu.hpp` says what is emulated and what is checked; `runtime.cu` schedules threads and multiplies matrices.
"""

import ctypes
import os
import struct
import subprocess
import tempfile
import weakref
from contextlib import contextmanager
from dataclasses import field
from functools import cache, partial
from pathlib import Path

import disk
import numpy as np

from linattn_np.backends.cupy import source
from linattn_np.backends.cupy.kernel import Kernel

HERE = Path(__file__).parent
TWINS = {path.name: path for path in HERE.glob("*.cuh")}
FLAGS = (
    "-std=c++17", "-w", "-fPIC", "-shared", "-fvisibility=hidden",
    "-march=native", "-ffp-contract=off",  # conversions of halves are instructions, but no multiplication fuses unasked
    "-fno-gnu-unique",  # each kernel's library keeps its own statics
    "-fno-strict-aliasing",  # kernels read one type's bits as another's, as CUDA compilers allow
    "-nostdinc++",  # C's headers, which g++ has read in less time
    "-fno-exceptions", "-fno-asynchronous-unwind-tables",  # a tenth of the time to compile, and nothing unwinds
)  # fmt: skip
CHECKED = (  # of kernels
    "-Og", "-finline-functions-called-once", "-ftree-sra", "-ftree-ter", "-ftree-coalesce-vars",  # two thirds of -O1's
    # time to compile, and what comes out runs a quarter longer: most kernels run for less time than g++ takes
    "-ftrivial-auto-var-init=pattern",  # an uninitialised register shows
    "-fsanitize=alignment", "-fno-sanitize-recover",  # a misaligned place ends the launch: the runtime has the handler
    "-nodefaultlibs",  # ... and no library has another; what is needed else, the runtime's libraries have
)  # fmt: skip
GUARD = 1024  # bytes on either side of an array that a plan makes; no kernel may write there
ENTRY = """
extern "C" __attribute__((visibility("default")))
const char* emulated_launch(const void* args, size_t size, long long blocks, int threads, size_t smem, int cluster) {{
  return emulator::launch(&{expression}, args, size, blocks, threads, smem, cluster);
}}
"""


class EmulatorError(RuntimeError):
    """A kernel that does not compile, or does what the hardware leaves undefined."""


@cache
def _processor():
    """What g++ says of the processor that it compiles for: another one may not run the same library."""
    command = ["g++", "-march=native", "-Q", "--help=target"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _flags():
    """FLAGS, and what an x86 lets g++ do without. Where it has AVX-512, g++ takes half as long again for the same
    kernel. -Og leaves the upper halves of 256-bit registers in use, so that libm's exp2f takes 1,000 cycles for 27:
    structs are moved in 128 bits, which g++ does from 12 on."""
    without = {"-mavx512f": "-mno-avx512f", "-mmove-max=": "-mmove-max=128", "-mstore-max=": "-mstore-max=128"}
    return *FLAGS, *(without[option] for option in without if option in _processor())


def _compiled(output, what, *options, source=None):
    """`output`, made of the file that `options` name, or of `source`, where it is not on the disk."""
    if not output.exists():
        with tempfile.TemporaryDirectory(dir=output.parent) as folder:
            made = Path(folder) / output.name
            command = ["g++", *_flags(), *options, "-o", str(made)]
            result = subprocess.run(command, input=source, capture_output=True, text=True)
            if result.returncode:
                raise EmulatorError(f"{what} does not compile\n{result.stderr}")
            os.replace(made, output)  # another process may be writing the same file
    return output


@cache
def _text():
    """What stands for CUDA."""
    path = HERE / "cuda_cpu.hpp"
    return disk.anywhere(f'#line 1 "{path}"\n{path.read_text()}')


@cache
def _header():
    """The same as a file, and beside it what g++ made of it, which it reads instead in half of the time."""
    header = disk.folder("emulator") / f"cuda_cpu-{disk.key(_processor(), *_flags(), *CHECKED, _text())}.hpp"
    disk.write(header, _text())
    _compiled(header.with_suffix(".hpp.gch"), header.name, *CHECKED, "-x", "c++-header", str(header))
    return header


def _library(name, what, text, *options, with_library=()):
    """The path of one text's, which may have been compiled before."""
    text = disk.anywhere(text)
    library = disk.folder("emulator") / f"{name}-{disk.key(_processor(), *_flags(), *options, *with_library, text)}.so"
    return str(_compiled(library, what, *options, "-x", "c++", "-", "-x", "none", *with_library, source=text))


@cache
def _runtime():
    """The scheduler and the products of matrices: a library that the kernels' name."""
    return _library("runtime", "the emulator", _text() + source.text(HERE / "runtime", TWINS), "-O3")


@contextmanager
def sums_cut_off():
    """Products of matrices have their sums cut off, as tensor cores do it, and not rounded."""
    cuts_off = ctypes.c_bool.in_dll(ctypes.CDLL(_runtime()), "cuts_off_sums")
    cuts_off.value = True
    try:
        yield
    finally:
        cuts_off.value = False


@cache
def _load(kernel):
    text = source.program([kernel], TWINS) + ENTRY.format(expression=kernel.expression)
    options = *CHECKED, "-include", str(_header())
    made = _library(kernel.name, kernel.expression, text, *options, with_library=[_runtime()])
    launch = ctypes.PyDLL(made).emulated_launch  # keeps the GIL: the runtime's statics hold one launch
    launch.restype = ctypes.c_char_p
    launch.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong, ctypes.c_int, ctypes.c_size_t, ctypes.c_int
    return launch


def sizes_of(file, types) -> dict[str, int]:
    """The bytes of C++ types of a kernel's file."""
    sizes = ", ".join(f"sizeof({name})" for name in types)
    found = f'\nextern "C" __attribute__((visibility("default"))) const long long sizes[] = {{{sizes}}};\n'
    text = _text() + source.text(file, TWINS) + found
    library = ctypes.CDLL(_library("sizes", file, text, "-O0", with_library=[_runtime()]))
    return dict(zip(types, (ctypes.c_longlong * len(types)).in_dll(library, "sizes"), strict=True))


class EmulatedDevice:
    """`device.CupyDevice` on NumPy arrays; `empty` holds NaN, so that a value nobody wrote shows, and so does what lies
    around it: a launch that writes there fails. Sizes are an H200's.
    """

    multiprocessors, memory = 132, 140 << 30
    shared_per_multiprocessor, shared_per_block = 228 * 1024, 227 * 1024
    queue, capturing, cooperative = 0, False, False

    def __init__(self, capability=80):
        self.capability = capability
        self.guarded = []  # weak references to the memory of arrays, with what lies around them

    def record(self, event=None):
        return event

    def wait(self, event):
        pass

    def finish(self, event):
        pass

    def empty(self, shape, dtype):
        return self.between_guards(shape, dtype)

    def zeros(self, shape, dtype):
        x = self.between_guards(shape, dtype)
        x[...] = 0
        return x

    def between_guards(self, shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        room = np.full(GUARD + size + GUARD, 0xFF, np.uint8)
        self.guarded.append(weakref.ref(room))
        return room[GUARD : GUARD + size].view(dtype).reshape(shape)

    def upload(self, host):
        return np.array(host)

    def pinned(self, count, dtype):
        return np.empty(count, dtype)

    def write(self, host, x):
        x[...] = host

    def lent(self, x) -> bool:
        return False

    def view(self, x, shape, strides, dtype, offset):
        return np.asarray(Memory(x, shape, strides, np.dtype(dtype), offset)).view(dtype)

    def copy(self, source, target):
        assert source.flags.c_contiguous and target.flags.c_contiguous and source.dtype == target.dtype
        target[...] = source

    def fill(self, x):
        x[...] = 0

    def pointer(self, x) -> int:
        return x.__array_interface__["data"][0]

    def tensor_map(self, x, columns, tokens, swizzled, heads=1) -> bytes:
        sizes, strides = x.shape[::-1], x.strides[::-1]
        box = columns, tokens, heads, x.dtype.itemsize, swizzled
        return struct.pack("=q4q4q5i", self.pointer(x), *sizes, *strides, *box).ljust(128, b"\0")

    def compile(self, kernels):
        pass

    def wait_for(self, kernels):
        for kernel in kernels:
            _load(kernel)

    def prepared(self, kernel, blocks, args, smem=None, together=False):
        assert not together
        return partial(self.launch, kernel, blocks, args, smem)

    def captured(self, launches):
        return lambda _: [launch(None) for launch in launches]

    def product(self, w, x, y, add):
        def multiply():
            found = x.astype(np.float32) @ w.astype(np.float32).swapaxes(1, 2)
            y[...] = y + found if add else found

        return multiply

    def launch(self, kernel, blocks, args, smem=None):
        smem = kernel.shared_bytes if smem is None else smem
        error = _load(kernel)(args.ctypes.data, args.nbytes, blocks, kernel.threads, smem, kernel.blocks_per_cluster)
        if error:
            raise EmulatorError(f"{kernel.expression}: {error.decode()}")
        self.guarded = [memory for memory in self.guarded if memory() is not None]
        for memory in self.guarded:
            room = memory()
            if room is None:  # another thread has let go of it
                continue
            if room[:GUARD].tobytes() + room[-GUARD:].tobytes() != b"\xff" * (2 * GUARD):
                raise EmulatorError(f"{kernel.expression}: wrote beside an array of {room.size - 2 * GUARD} bytes")


class Memory:
    """A view of memory that belongs to `x`, as NumPy's array interface has it."""

    def __init__(self, x, shape, strides, dtype, offset):
        at, _ = x.__array_interface__["data"]
        self.x = x
        self.__array_interface__ = {
            "data": (at + offset, not x.flags.writeable),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{dtype.itemsize}",
            "version": 3,
        }


# -- kernels of the tests' own -----------------------------------------------------------------------------------------
class TestKernel(Kernel):
    """Any instance of any file, whose argument is whatever `pack` made."""

    __test__ = False
    file: str
    words: tuple[str, ...] = ()
    threads: int = field(default=128, kw_only=True)
    arch: str = field(default="", kw_only=True)
    blocks_per_cluster: int = field(default=1, kw_only=True)

    @property
    def name(self):
        return self.file.rsplit("/", 1)[-1]

    @property
    def template(self):
        return self.words


def pack(*maps, **fields):
    """An argument: tensor maps, then integers, addresses and floats in the order given, each by its type."""
    kinds = "".join("d" if isinstance(value, float) else "q" for value in fields.values())
    room = b"".join(maps) + struct.pack(f"={kinds}", *(0 if value is None else value for value in fields.values()))
    return np.frombuffer(room.ljust(-(-len(room) // 64) * 64 if maps else len(room), b"\0"), np.int64)
