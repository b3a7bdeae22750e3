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

LEAST_CAPABILITY = 80  # of the cards that are served: sm_80 has cp.async and tf32 products
SHARED_BY_DEFAULT = 48 * 1024  # bytes of dynamic shared memory that a kernel may use without asking


def cupy():
    """CuPy, which is imported at first use."""
    import cupy

    return cupy


class CupyDevice:
    """The current CUDA device. A kernel begins when the previous one has ended.

    portable : whether planners see the capability of the oldest card that is served, so that they plan the kernels that
        run on every card
    """

    def __init__(self, portable: bool = False):
        self.portable = portable

    # -- properties --
    @property
    def capability(self) -> int:
        """The compute capability, 10 times its major number plus its minor one: 90 for Hopper."""
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
        """The most bytes of shared memory that a block may have."""
        return attribute(current(), "MaxSharedMemoryPerBlockOptin")

    @property
    def memory(self) -> int:
        """Bytes of memory that calls may allocate: all of the card's, or the limit of CuPy's memory pool."""
        whole = whole_memory(current())
        return min(whole, cupy().get_default_memory_pool().get_limit() or whole)

    @property
    def queue(self):
        """Identifies the queue of work: (stream, thread), since threads may have default streams of their own."""
        return cupy().cuda.get_current_stream().ptr, get_ident()

    def record(self, event=None):
        """Records `event`, or a new one, after all that has been enqueued on the current stream, and returns it."""
        event = event or cupy().cuda.Event(disable_timing=True)
        event.record()
        return event

    def wait(self, event):
        """Makes the current stream wait until all work recorded by `event` is done."""
        cupy().cuda.get_current_stream().wait_event(event)

    def finish(self, event):
        """Makes the host wait until all work recorded by `event` is done."""
        event.synchronize()

    @property
    def capturing(self) -> bool:
        """Whether launches on the current stream are captured by a CUDA graph now."""
        return cupy().cuda.get_current_stream().is_capturing()

    # -- arrays --
    def empty(self, shape, dtype):
        return cupy().empty(shape, dtype)

    def zeros(self, shape, dtype):
        return cupy().zeros(shape, dtype)

    def upload(self, host):
        """A copy on the device of the NumPy array `host`."""
        if self.capturing:
            raise RuntimeError(
                "host integers (cu_seqlens, slots) cannot be sent to the device while a graph is captured: "
                "make the same call once before"
            )
        return cupy().asarray(host)

    def pinned(self, count, dtype):
        """So many numbers on the host, from which `write` copies without waiting."""
        return np.frombuffer(cupy().cuda.alloc_pinned_memory(count * dtype.itemsize), dtype, count)

    def write(self, host, x):
        """Copies an array of `pinned` to the contiguous array x. It may change once the device has done so."""
        x.data.copy_from_host_async(host.ctypes.data, host.nbytes)

    def lent(self, x) -> bool:
        """Whether another library owns the memory of `x`. That library then keeps it for its own CUDA graphs."""
        return isinstance(x.data.mem, cupy().cuda.UnownedMemory)

    def view(self, x, shape, strides, dtype, offset):
        """An array in the memory of `x`, `offset` bytes after its first number."""
        start = x.data + offset if x.size else x.data  # an empty array has no address
        return cupy().ndarray(shape, dtype, start, strides)

    def copy(self, source, target):
        """Copies the bytes of a contiguous array to another one."""
        target.data.copy_from_device_async(source.data, source.nbytes)

    def fill(self, x):
        """Writes zeros to a contiguous array."""
        x.data.memset_async(0, x.nbytes)

    def pointer(self, x) -> int:
        """The address of an array's first number."""
        return x.data.ptr

    def tensor_map(self, x, columns: int, tokens: int, swizzled: bool, heads: int = 1) -> bytes:
        """The driver's CUtensorMap of `x` [B, H, T, D], as `plan.TensorMap` describes it."""
        return tensor_map(x.data.ptr, x.shape, x.strides, x.dtype.name, (columns, tokens, heads), swizzled)

    # -- launches --
    def compile(self, kernels):
        """Begins to compile and load the kernels that are not loaded yet, in other threads. A launch of a kernel waits
        until that kernel is loaded."""
        for kernel in kernels:
            begin_loading(kernel, current())

    def wait_for(self, kernels):
        """Waits until all kernels are compiled and loaded."""
        self.compile(kernels)
        for kernel in kernels:
            load(kernel, current())

    cooperative = False  # whether this device can make all blocks of a launch run at the same time

    def prepared(self, kernel, blocks: int, args: np.ndarray, smem: int | None = None, together: bool = False):
        """A function that enqueues a launch: `blocks` blocks with the argument struct `args` and `smem` bytes of shared
        memory per block, by default those that the kernel declares.

        `together`, on a cooperative device: all blocks run at the same time, so that they may wait for each other.
        """
        smem = kernel.shared_bytes if smem is None else smem
        function = function_with_shared_memory(kernel, smem, current())
        # CuPy looks at every field of a struct, so a struct without fields takes it the least time.
        argument = args.view(np.dtype((np.void, args.nbytes)))
        return partial(function, (blocks,), (kernel.threads,), (argument,), shared_mem=smem)

    def launch(self, kernel, blocks: int, args: np.ndarray, smem: int | None = None):
        """Enqueues a launch at once; see `prepared`."""
        if blocks:  # CuPy would launch one block for 0
            self.prepared(kernel, blocks, args, smem)()

    def captured(self, launches):
        """A function that enqueues all `launches` as one CUDA graph. They are commands of `execute.CompiledPlan` that
        have run before; like these, the function takes one argument, which is not used."""
        stream = cupy().cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            for launch in launches:
                launch(None)
            graph = stream.end_capture()
        return lambda _: graph.launch()

    def product(self, w, x, y, add: bool):
        """A function that enqueues y = x w^T, or y += x w^T if `add`; see `plan.Product` for the shapes."""
        return self.cublas.prepared(x, w.swapaxes(1, 2), y, add)

    @cached_property
    def cublas(self):
        """cuBLAS with a workspace of this object's own, so that the products of device objects on different streams may
        run at the same time."""
        from .blas_lt import CublasLt

        return CublasLt()


def current() -> int:
    """The number of the current CUDA device."""
    return cupy().cuda.runtime.getDevice()


@cache
def attribute(device: int, name: str) -> int:
    return int(cupy().cuda.Device(device).attributes[name])


@cache
def capability(device: int) -> int:
    return int(cupy().cuda.Device(device).compute_capability)


@cache
def whole_memory(device: int) -> int:
    return int(cupy().cuda.runtime.getDeviceProperties(device)["totalGlobalMem"])


# -- compiling ---------------------------------------------------------------------------------------------------------
FUNCTIONS: dict[tuple, Future] = {}  # (kernel, device) -> its CuPy function, loaded or being loaded
FUNCTIONS_LOCK = Lock()
USED_OPTIONS: set[tuple] = set()  # compiler options with which something was compiled
USED_OPTIONS_LOCK = Lock()
EMPTY_KERNEL = 'extern "C" __global__ void empty() {}'


@cache
def compilers() -> ThreadPoolExecutor:
    """The threads that compile. NVRTC occupies a core for seconds, and releases Python's lock meanwhile."""
    return ThreadPoolExecutor(os.cpu_count(), "linattn-nvrtc")


def begin_loading(kernel, device: int) -> Future:
    """The future CuPy function of `kernel` on `device`. Another thread begins to compile it if none has."""
    with FUNCTIONS_LOCK:
        function = FUNCTIONS.get((kernel, device))
        if function is None:
            function = FUNCTIONS[kernel, device] = compilers().submit(compiled, kernel, device)
        return function


def load(kernel, device: int):
    """The CuPy function of `kernel` on `device`; waits until it is compiled and loaded."""
    function = begin_loading(kernel, device)
    try:
        return function.result()
    except Exception:  # it may succeed next time, for example if there was no memory
        FUNCTIONS.pop((kernel, device), None)
        raise


def compiled(kernel, device: int):
    """Compiles and loads `kernel` in this thread, in 0.1 to 2 s; returns the CuPy function."""
    options = OPTIONS + ((f"-arch={kernel.arch}",) if kernel.arch else ())
    with cupy().cuda.Device(device):
        try:
            prepare_options(options)
            return compile_module(kernel, options)
        except OSError:  # CuPy cannot write to its cache folder
            os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
            return compile_module(kernel, options)


def compile_module(kernel, options):
    """Compiles a module with `kernel` alone; returns the CuPy function."""
    module = cupy().RawModule(code=program([kernel]), options=options, name_expressions=(kernel.expression,))
    return module.get_function(kernel.expression)


def prepare_options(options):
    """Compiles an empty kernel with these options, unless something was compiled with them before.

    CuPy itself compiles such a kernel when it first sees a set of options, and stores the result. Threads that compiled
    their first kernels at the same time would all do so, one after the other.
    """
    with USED_OPTIONS_LOCK:
        if options not in USED_OPTIONS:
            cupy().RawModule(code=EMPTY_KERNEL, options=options).compile()
            USED_OPTIONS.add(options)


@cache
def function_with_shared_memory(kernel, smem: int, device: int):
    """CuPy's function that launches `kernel`, allowed to use `smem` bytes of shared memory, on the current `device`."""
    function = load(kernel, device)
    if smem > max(SHARED_BY_DEFAULT, function.max_dynamic_shared_size_bytes):  # never less than other launches need
        function.max_dynamic_shared_size_bytes = smem
    return function.kernel


# -- tensor maps -------------------------------------------------------------------------------------------------------
TYPES = {"int8": 0, "float16": 6, "float32": 7, "bfloat16": 9}  # of CUtensorMapDataType
SWIZZLE_128B, PROMOTE_256B = 3, 3  # of CUtensorMapSwizzle and CUtensorMapL2promotion


@cache
def driver():
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(1024)  # calls reuse addresses; encoding the maps anew would take half of the host's time of a small call
def tensor_map(pointer: int, shape, strides, dtype: str, box: tuple[int, int, int], swizzled: bool) -> bytes:
    """The CUtensorMap of an array [B, H, T, D]. `strides` are in bytes, multiples of 16 but for the last; `box`: the
    columns, tokens and heads that one tensor copy moves."""
    buffer = ctypes.create_string_buffer(128 + 64)  # the map has 128 bytes, and must start at a multiple of 64
    start = -ctypes.addressof(buffer) % 64

    def array(ctype, values):
        return (ctype * len(values))(*values)

    sizes = array(ctypes.c_uint64, shape[::-1])
    # the driver refuses strides below 16, also those of axes of size 1, which are never used
    outer_strides = array(ctypes.c_uint64, [max(16, stride) for stride in strides[-2::-1]])
    element_strides = array(ctypes.c_uint32, [1] * 4)
    interleave = fill_with_nan = 0  # none
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(buffer) + start),
        TYPES[dtype],
        4,  # axes
        ctypes.c_void_p(pointer),
        sizes,
        outer_strides,
        array(ctypes.c_uint32, [*box, 1]),
        element_strides,
        interleave,
        SWIZZLE_128B if swizzled else 0,
        PROMOTE_256B,
        fill_with_nan,
    )
    if status:
        raise RuntimeError(f"the driver makes no tensor map of {shape} with strides {strides}: CUresult {status}")
    return buffer.raw[start : start + 128]


# -- launches that overlap ---------------------------------------------------------------------------------------------
OVERLAPPING_CAPABILITY = 90
COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # of the driver's CUlaunchAttributeID


class LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute."""

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


assert ctypes.sizeof(LaunchAttribute) == 72 and ctypes.sizeof(LaunchConfig) == 56  # as in cuda.h


@cache
def attributes(*ids):
    """An array of launch attributes with these ids, all with the value 1."""
    return (LaunchAttribute * len(ids))(*(LaunchAttribute(id=id, value=(ctypes.c_int * 16)(1)) for id in ids))


@cache
def driver_function(kernel, smem, device):
    """The driver's handle of `kernel`, allowed to use `smem` bytes of shared memory, on the current `device`."""
    function = function_with_shared_memory(kernel, smem, device)
    # The percentage of on-chip memory that is shared memory. It is the same for all kernels, because a multiprocessor
    # changes it only while no block runs there.
    load(kernel, device).preferred_shared_memory_carveout = 100
    return ctypes.c_void_p(function.ptr)


class OverlappedDevice(CupyDevice):
    """The current CUDA device. A kernel with `overlaps` begins before the previous kernel has ended, as soon as a
    multiprocessor has room for its blocks (programmatic dependent launch, sm_90). The kernel itself waits for the
    previous one before it reads the results of that."""

    cooperative = True

    def prepared(self, kernel, blocks: int, args: np.ndarray, smem: int | None = None, together: bool = False):
        smem, current_stream = kernel.shared_bytes if smem is None else smem, cupy().cuda.get_current_stream
        ids = [COOPERATIVE] * together + [PROGRAMMATIC_STREAM_SERIALIZATION] * kernel.overlaps
        config = LaunchConfig((blocks, 1, 1), (kernel.threads, 1, 1), smem, None, attributes(*ids), len(ids))
        function, launch_kernel = driver_function(kernel, smem, current()), driver().cuLaunchKernelEx
        arguments = ctypes.byref(config), function, ctypes.byref(ctypes.c_void_p(args.ctypes.data)), None

        def launch(args=args):  # the default keeps `args` alive as long as `launch`, which uses its address
            config.stream = current_stream().ptr
            if status := launch_kernel(*arguments):
                raise RuntimeError(f"{kernel.expression}: the driver refused the launch with CUresult {status}")

        return launch


def best_device():
    """The device object that launches fastest on the current CUDA device."""
    return OverlappedDevice() if capability(current()) >= OVERLAPPING_CAPABILITY else CupyDevice()
