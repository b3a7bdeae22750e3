"""Where plans are executed: allocation, copies and launches on the current CUDA device and stream.

Importing this module does not import CuPy. The tests' emulator is a device of the same interface.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property, lru_cache, partial
from threading import Lock, get_ident

import numpy as np

from .source import OPTIONS, program

LEAST_CAPABILITY = 80  # cp.async and tf32 products came with sm_80
SHARED_BY_DEFAULT = 48 * 1024  # bytes of dynamic shared memory that a kernel may use without asking


class CupyDevice:
    """The current CUDA device, on which a kernel begins when the one before it has ended. `portable`: planners are told
    that it is the oldest card that is served, so that they plan the kernels of every card.
    """

    def __init__(self, portable: bool = False):
        self.portable = portable

    # -- properties --
    @property
    def capability(self) -> int:
        """10 major + minor."""
        return LEAST_CAPABILITY if self.portable else capability(current())

    @property
    def multiprocessors(self) -> int:
        return attribute(current(), "MultiProcessorCount")

    @property
    def shared_per_multiprocessor(self) -> int:
        """Bytes of shared memory."""
        return attribute(current(), "MaxSharedMemoryPerMultiprocessor")

    @property
    def shared_per_block(self) -> int:
        """Bytes of shared memory that a block may have."""
        return attribute(current(), "MaxSharedMemoryPerBlockOptin")

    @property
    def queue(self):
        """Identifies the queue of work: the stream and the thread, as threads may have default streams of their own."""
        import cupy

        return cupy.cuda.get_current_stream().ptr, get_ident()

    def record(self, event=None):
        """Records `event`, or a new one, after all that has been enqueued on the current stream, and returns it."""
        import cupy

        event = event or cupy.cuda.Event(disable_timing=True)
        event.record()
        return event

    def wait(self, event):
        """Has the current stream wait until all work before `event` is done."""
        import cupy

        cupy.cuda.get_current_stream().wait_event(event)

    def finish(self, event):
        """Has the host wait for `event`."""
        event.synchronize()

    @property
    def capturing(self) -> bool:
        """Whether launches now go into a CUDA graph."""
        import cupy

        return cupy.cuda.get_current_stream().is_capturing()

    # -- arrays --
    def empty(self, shape, dtype):
        import cupy

        return cupy.empty(shape, dtype)

    def zeros(self, shape, dtype):
        import cupy

        return cupy.zeros(shape, dtype)

    def upload(self, host):
        import cupy

        if self.capturing:
            raise RuntimeError(
                "host integers (cu_seqlens, slots) cannot be sent to the device while a graph is captured: "
                "make the same call once before"
            )
        return cupy.asarray(host)

    def lent(self, x) -> bool:
        """Whether another library has allocated the memory of `x`, and keeps it for its own CUDA graphs."""
        import cupy

        return isinstance(x.data.mem, cupy.cuda.UnownedMemory)

    def view(self, x, shape, strides, dtype, offset):
        """An array in the memory of `x`, `offset` bytes behind its first number."""
        import cupy

        start = x.data + offset if x.size else x.data  # an empty array has no address
        return cupy.ndarray(shape, dtype, start, strides)

    def copy(self, source, target):
        """Copies the bytes of a contiguous array to another one."""
        target.data.copy_from_device_async(source.data, source.nbytes)

    def fill(self, x):
        """Writes zeros to a contiguous array."""
        x.data.memset_async(0, x.nbytes)

    def pointer(self, x) -> int:
        return x.data.ptr

    def tensor_map(self, x, columns: int, tokens: int, swizzled: bool, heads: int = 1) -> bytes:
        """The driver's CUtensorMap of `x` [B, H, T, D], as `plan.TensorMap` describes it."""
        return tensor_map(x.data.ptr, x.shape, x.strides, x.dtype.name, (columns, tokens, heads), swizzled)

    # -- launches --
    def compile(self, kernels):
        """Begins to compile and load the kernels that are not loaded yet, in other threads. A launch waits for its
        kernel."""
        for kernel in kernels:
            loading(kernel, current())

    def wait_for(self, kernels):
        """Waits until all kernels are compiled and loaded."""
        self.compile(kernels)
        for kernel in kernels:
            load(kernel, current())

    cooperative = False  # whether all blocks of a launch can be at work at once

    def prepared(self, kernel, blocks: int, args: np.ndarray, smem: int | None = None, together: bool = False):
        """A function that enqueues `blocks` blocks on grid x, with `args` and `smem` bytes of shared memory.

        `together`, on a cooperative device: all blocks run at the same time, so that they may wait for each other.
        """
        smem = kernel.shared_bytes if smem is None else smem
        function = ready(kernel, smem, current())
        # CuPy looks at every field of a struct: one without fields takes it the least time.
        argument = args.view(np.dtype((np.void, args.nbytes)))
        return partial(function, (blocks,), (kernel.threads,), (argument,), shared_mem=smem)

    def launch(self, kernel, blocks: int, args: np.ndarray, smem: int | None = None):
        if blocks:  # CuPy would launch one for 0
            self.prepared(kernel, blocks, args, smem)()

    def captured(self, launches):
        """A function that enqueues all `launches`, which have run before, as one CUDA graph."""
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            for launch in launches:
                launch(None)
            graph = stream.end_capture()
        return lambda _: graph.launch()

    def product(self, w, x, y, add: bool):
        """A function that enqueues y = x w^T, or adds it to y, as `plan.Product` describes it."""
        return self.cublas.prepared(x, w.swapaxes(1, 2), y, add)

    @cached_property
    def cublas(self):
        """cuBLAS with a workspace for this object alone: objects on different streams multiply at the same time."""
        from .blas import Cublas

        return Cublas()


def current() -> int:
    import cupy

    return cupy.cuda.runtime.getDevice()


@cache
def attribute(device: int, name: str) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes[name])


@cache
def capability(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).compute_capability)


# -- compiling ---------------------------------------------------------------------------------------------------------
LOADING: dict[tuple, Future] = {}  # the CuPy functions, also those still to come, by kernel and device
LOADING_LOCK = Lock()
BEGUN: set[tuple] = set()  # options with which NVRTC has compiled something
BEGUN_LOCK = Lock()
NOTHING = 'extern "C" __global__ void nothing() {}'


@cache
def compilers() -> ThreadPoolExecutor:
    """The threads that compile: NVRTC takes a core for seconds, without Python's lock."""
    return ThreadPoolExecutor(os.cpu_count(), "linattn-nvrtc")


def loading(kernel, device: int) -> Future:
    """The CuPy function of `kernel` on `device`, which another thread may still have to compile."""
    with LOADING_LOCK:
        found = LOADING.get((kernel, device))
        if found is None:
            found = LOADING[kernel, device] = compilers().submit(compiled, kernel, device)
        return found


def load(kernel, device: int):
    """The CuPy function of `kernel` on `device`."""
    found = loading(kernel, device)
    try:
        return found.result()
    except Exception:  # what fails now, as for lack of memory, may succeed later
        LOADING.pop((kernel, device), None)
        raise


def compiled(kernel, device: int):
    """Compiles and loads `kernel` in this thread, in 0.1 to 2 s; returns the CuPy function."""
    import cupy

    options = OPTIONS + ((f"-arch={kernel.arch}",) if kernel.arch else ())
    with cupy.cuda.Device(device):
        try:
            begin_compiling(options)
            return function_of(kernel, options)
        except OSError:  # CuPy's folder is full, or gone
            os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
            return function_of(kernel, options)


def function_of(kernel, options):
    """The CuPy function of `kernel`, in a module of its own."""
    import cupy

    module = cupy.RawModule(code=program([kernel]), options=options, name_expressions=(kernel.expression,))
    return module.get_function(kernel.expression)


def begin_compiling(options):
    """Compiles an empty kernel with these options once, while other threads wait.

    CuPy compiles such a kernel before the first one of these options, and remembers its result. Threads that begin at
    the same time would all do so, one after the other.
    """
    import cupy

    with BEGUN_LOCK:
        if options not in BEGUN:
            cupy.RawModule(code=NOTHING, options=options).compile()
            BEGUN.add(options)


@cache
def ready(kernel, smem: int, device: int):
    """CuPy's function that launches `kernel` with `smem` bytes of shared memory on `device`, which must be current."""
    function = load(kernel, device)
    if smem > SHARED_BY_DEFAULT and function.max_dynamic_shared_size_bytes < smem:
        function.max_dynamic_shared_size_bytes = smem
    return function.kernel


# -- tensor maps -------------------------------------------------------------------------------------------------------
TYPES = {"int8": 0, "float16": 6, "float32": 7, "bfloat16": 9}  # of CUtensorMapDataType
SWIZZLE_128B, PROMOTE_256B = 3, 3  # of CUtensorMapSwizzle and CUtensorMapL2promotion


@cache
def driver():
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(1024)  # without a cache: half of the time of a small call; calls reuse the same addresses
def tensor_map(pointer: int, shape, strides, dtype: str, box: tuple[int, int, int], swizzled: bool) -> bytes:
    """CUtensorMap of [B, H, T, D] with the strides in bytes, multiples of 16 but the last; `box` of [D, T, H]."""
    buffer = ctypes.create_string_buffer(128 + 64)  # the map has 128 bytes, and must start at a multiple of 64
    start = -ctypes.addressof(buffer) % 64

    def array(ctype, values):
        return (ctype * len(values))(*values)

    sizes = array(ctypes.c_uint64, shape[::-1])
    steps = array(ctypes.c_uint64, [max(16, step) for step in strides[-2::-1]])  # 0 where there is one element
    ones = array(ctypes.c_uint32, [1] * 4)
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(buffer) + start),
        TYPES[dtype],
        4,
        ctypes.c_void_p(pointer),
        sizes,
        steps,
        array(ctypes.c_uint32, [*box, 1]),
        ones,
        0,
        SWIZZLE_128B if swizzled else 0,
        PROMOTE_256B,
        0,
    )
    if status:
        raise RuntimeError(f"the driver makes no tensor map of {shape} with strides {strides}: CUresult {status}")
    return buffer.raw[start : start + 128]


# -- launches that overlap ---------------------------------------------------------------------------------------------
OVERLAPPING_CAPABILITY = 90
COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # of the driver's CUlaunchAttributeID


class LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute: 8 bytes of name, 64 of value."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    ]


@cache
def attributes(*ids):
    return (LaunchAttribute * len(ids))(*(LaunchAttribute(id=id, value=(ctypes.c_int * 16)(1)) for id in ids))


@cache
def entry(kernel, smem, device):
    """The driver's handle of `kernel` on `device`, which must be the current one."""
    function = load(kernel, device)
    if smem > max(SHARED_BY_DEFAULT, function.max_dynamic_shared_size_bytes):  # never less than other launches need
        function.max_dynamic_shared_size_bytes = smem
    # In percent, the same for all kernels: a multiprocessor changes the share only while it is empty.
    function.preferred_shared_memory_carveout = 100
    return ctypes.c_void_p(function.kernel.ptr)


class OverlappedDevice(CupyDevice):
    """The current CUDA device, on which blocks of a kernel with `overlaps` start as soon as blocks of the kernel before
    it leave room (programmatic dependent launch, sm_90). Such a kernel itself waits for the results that it reads."""

    cooperative = True

    def prepared(self, kernel, blocks: int, args: np.ndarray, smem: int | None = None, together: bool = False):
        import cupy

        smem, current_stream = kernel.shared_bytes if smem is None else smem, cupy.cuda.get_current_stream
        how = [COOPERATIVE] * together + [PROGRAMMATIC_STREAM_SERIALIZATION] * kernel.overlaps
        config = LaunchConfig((blocks, 1, 1), (kernel.threads, 1, 1), smem, None, attributes(*how), len(how))
        function, launch_kernel = entry(kernel, smem, current()), driver().cuLaunchKernelEx
        arguments = ctypes.byref(config), function, ctypes.byref(ctypes.c_void_p(args.ctypes.data)), None

        def launch(args=args):  # the default keeps `args` alive as long as `launch`, which uses its address
            config.stream = current_stream().ptr
            if status := launch_kernel(*arguments):
                raise RuntimeError(f"{kernel.expression}: the driver refused the launch with CUresult {status}")

        return launch


def best_device():
    """The device object that launches fastest on the current CUDA device."""
    return OverlappedDevice() if capability(current()) >= OVERLAPPING_CAPABILITY else CupyDevice()
