"""From the text of a `.cu` file to a kernel on the device.

Importing this module does not import CuPy: the text of a kernel is also what the compile check and the CPU
emulator of the tests take.
"""

import re
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import get_ident

import numpy as np

from .tensor_map import tensor_map

OPTIONS = ("-std=c++17",)
SHARED_BY_DEFAULT = 48 * 1024  # bytes of dynamic shared memory a kernel may use without asking

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*$', re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One instantiation of one `__global__` template.

    `file` is the path under `kernels_cu` without `.cu`; its last part is the name of the `__global__`, of those in
    `gated` all parts, joined by underscores.
    `arch` names the only target that has its instructions, as "sm_90a"; without one it runs on every card.
    `cluster` blocks run together, as its `__cluster_dims__` say.

        >>> Kernel("stages/gated_qk", ("float", "Gla", "64"), threads=128).expression
        'gated_qk<float, Gla, 64>'
    """

    file: str
    template: tuple[str, ...]
    threads: int
    arch: str = ""
    cluster: int = 1

    @property
    def name(self):
        return self.file.replace("/", "_") if self.file.startswith("gated/") else self.file.rsplit("/", 1)[-1]

    @property
    def expression(self):
        return f"{self.name}<{', '.join(self.template)}>" if self.template else self.name


@cache
def root() -> Path:
    """The folder `kernels_cu`: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "kernels_cu", package.parent / "kernels_cu"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"kernels_cu stands neither in {package} nor in {package.parent}")


def text(file, include=None) -> str:
    """The whole program of `file`: its `.cu` with our own includes pasted in, each once.

    CuPy's disk cache does not see what a header holds; a pasted header changes the text and so the key.
    `#line` keeps the compiler's messages on the true file. An include is a name in `kernels_cu/include`, or a path
    under `kernels_cu`; `include` maps it to the file to take instead. `file` may also be an absolute path without
    `.cu`.
    """
    replaced = include or {}
    pasted = set()

    def paste(path):
        source = path.read_text()

        def expand(match):
            name = match[1]
            next_line = source.count("\n", 0, match.start()) + 2
            body = ""
            if name not in pasted:
                pasted.add(name)
                body = paste(replaced.get(name, root() / (name if "/" in name else f"include/{name}")))
            return f'{body}\n#line {next_line} "{path.as_posix()}"'

        return f'#line 1 "{path.as_posix()}"\n' + _INCLUDE.sub(expand, source)

    return paste(root() / f"{file}.cu")


@cache
def _layout(fields):
    """How a struct of 8-byte fields lies in memory; fields: ((name, 'q' or 'd'), ...)."""
    kinds = {"q": np.int64, "d": np.float64}
    dtype = np.dtype([(name, kinds[kind]) for name, kind in fields])
    return struct.Struct("=" + "".join(kind for _, kind in fields)), dtype


def pack(**fields) -> np.ndarray:
    """The one argument of a kernel: a struct of 8-byte fields in the order given, shape (1,).

    Integers and pointers become `long long`, floats `double`, None the null pointer. The value's type
    decides, so a field that is a `double` in the kernel must be given as a float, never as `1`.

        >>> pack(q=0x7f00, T=64, scale=0.125)["scale"]
        array([0.125])
    """
    kinds = tuple((name, "d" if isinstance(value, float) else "q") for name, value in fields.items())
    layout, dtype = _layout(kinds)
    values = (0 if value is None else value for value in fields.values())
    return np.frombuffer(layout.pack(*values), dtype)


def with_maps(maps, fields: np.ndarray) -> np.ndarray:
    """The one argument of a kernel whose struct begins with tensor maps, on 64 bytes as they are: shape (1,)."""
    room = b"".join((*maps, fields.tobytes()))
    return np.frombuffer(room.ljust(-(-len(room) // 64) * 64, b"\0"), np.dtype((np.void, -(-len(room) // 64) * 64)))


@cache
def _capability(device):
    import cupy

    return int(cupy.cuda.Device(device).compute_capability)


@cache
def _load(kernel, device):
    """The kernel on `device`, which must be the current one; an instantiation a module compiles in 0.2 s."""
    import cupy

    options = OPTIONS + ((f"-arch={kernel.arch}",) if kernel.arch else ())
    module = cupy.RawModule(code=text(kernel.file), options=options, name_expressions=(kernel.expression,))
    return module.get_function(kernel.expression)


def load(kernel: Kernel):
    """The CuPy function of `kernel` for the current device, compiled at the first call."""
    import cupy

    return _load(kernel, cupy.cuda.runtime.getDevice())


@cache
def _bytes(count):
    """The type in which CuPy hands an argument on fastest: it looks at every field of a struct."""
    return np.dtype((np.void, count))


@cache
def _ready(kernel, smem, device):
    """What launches `kernel` with `smem` bytes of shared memory on `device`, which must be the current one."""
    function = _load(kernel, device)
    if smem > SHARED_BY_DEFAULT and function.max_dynamic_shared_size_bytes < smem:
        function.max_dynamic_shared_size_bytes = smem
    return function.kernel


class CupyDevice:
    """Allocation and launches of the host plans on the current CUDA device and stream."""

    @property
    def capability(self) -> int:
        """10 major + minor."""
        import cupy

        return _capability(cupy.cuda.runtime.getDevice())

    @property
    def queue(self):
        """What orders the work: the stream, and the thread, which has a default stream of its own when asked for."""
        import cupy

        return cupy.cuda.get_current_stream().ptr, get_ident()

    @property
    def capturing(self) -> bool:
        """Whether launches now go into a CUDA graph."""
        import cupy

        return cupy.cuda.get_current_stream().is_capturing()

    def empty(self, shape, dtype):
        import cupy

        return cupy.empty(shape, dtype)

    def empty_like(self, prototype, shape, dtype):
        """An array of `shape` whose axes lie in memory in the order of `prototype`'s."""
        import cupy

        return cupy.empty_like(prototype, dtype=dtype, order="K", shape=shape)

    def zeros(self, shape, dtype):
        import cupy

        return cupy.zeros(shape, dtype)

    def upload(self, host):
        import cupy

        if self.capturing:
            raise RuntimeError("host integers (cu_seqlens, slots) cannot be sent to the device while a graph is captured: "
                               "make the same call once before, on the same stream and thread")
        return cupy.asarray(host)

    def pointer(self, array) -> int:
        return array.data.ptr

    def tensor_map(self, array, columns: int, tokens: int, swizzled: bool) -> bytes:
        """The driver's CUtensorMap of `array` [B, H, T, D] for boxes of so many columns and tokens.

        The box's rows stand side by side in shared memory, or, `swizzled`, 128 bytes each in the 128-byte swizzle.
        """
        return tensor_map(array.data.ptr, array.shape, array.strides, array.dtype.name, columns, tokens, swizzled)

    def launch(self, kernel: Kernel, blocks: int, args: np.ndarray, smem: int = 0):
        """Enqueue `blocks` blocks on grid x, with `args` from `pack` and `smem` bytes of shared memory."""
        import cupy

        if blocks:       # CuPy would launch one for 0
            function = _ready(kernel, smem, cupy.cuda.runtime.getDevice())
            function((blocks,), (kernel.threads,), (args.view(_bytes(args.nbytes)),), shared_mem=smem)
