"""The library of an array: NumPy, CuPy, torch, JAX, or any with DLPack or the CUDA array interface; conversions.

CuPy, torch and JAX are not imported to look: an array of theirs exists only after its library was imported.
"""

import sys

import ml_dtypes
import numpy as np

from .cupy_folder import folder_for_cupy

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = tuple(np.dtype(t) for t in (np.float64, np.float32, np.float16)) + (BFLOAT16,)  # that operators accept

# CuPy's ndarray, once `device_array_types` has found that CuPy is imported: `signature`, which every call needs several
# times, then looks no further.
DEVICE_ARRAY_TYPES: list[type] = []

_DLPACK_HOST = (1, 3)  # kDLCPU, kDLCUDAHost
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def kind(x) -> str | None:
    """'numpy', 'cupy', 'torch', 'jax', 'dlpack', 'cuda' (the CUDA array interface), or None if `x` is no array.

    The first that fits: arrays of CuPy, torch and JAX have DLPack, too, and subclasses of theirs and NumPy's count.
    """
    if isinstance(x, np.ndarray):
        return "numpy"
    for library, name in (("cupy", "ndarray"), ("torch", "Tensor"), ("jax", "Array")):
        module = sys.modules.get(library)
        if module is not None and isinstance(x, getattr(module, name, ())):
            return library
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return "dlpack"
    return "cuda" if hasattr(x, "__cuda_array_interface__") else None


def to_native(x, library: str):
    """`x`, for which `kind` returned `library` (not None), as a numpy.ndarray or cupy.ndarray over the same memory."""
    if library in ("numpy", "cupy"):
        return np.asarray(x) if library == "numpy" else x  # asarray: a subclass such as np.memmap becomes an ndarray
    if library == "torch":
        x = with_numbers_in_memory(x)
    if library == "cuda" or int(x.__dlpack_device__()[0]) in _DLPACK_CUDA:
        folder_for_cupy()  # where CuPy keeps kernels, which must be set before the import
        import cupy

        return cupy.asarray(x) if library == "cuda" else cupy.from_dlpack(x)
    if int(x.__dlpack_device__()[0]) not in _DLPACK_HOST:
        raise TypeError(f"array of {type(x).__module__} lives on a device that is neither the host nor CUDA")
    if library == "torch":
        torch = sys.modules["torch"]
        if x.dtype == torch.bfloat16:  # NumPy's DLPack, unlike CuPy's, has none: cross as integers
            return np.from_dlpack(x.view(torch.int16)).view(BFLOAT16)
    if library == "jax":
        return np.asarray(x)
    return np.from_dlpack(x)


def with_numbers_in_memory(x):
    """The tensor without its gradient, for readers of its memory other than torch. A lazily negated tensor has numbers
    of the other sign in memory, and a lazy tensor of zeros has no memory: either is copied."""
    x = x.detach() if x.requires_grad else x
    return x.clone() if x._is_zerotensor() else x.resolve_neg()


def from_native(native, library: str, example):
    """A result as the caller's kind of array, without a copy where that library allows it. `example`: an array of the
    caller's, whose namespace makes a result of kind 'dlpack'."""
    if library in ("numpy", "cupy"):
        return native
    if any(step < 0 for step in native.strides):  # of a sequence that was turned over; few libraries have such strides
        native = native.copy()
    if library == "cuda":
        return native
    bfloat16_on_host = isinstance(native, np.ndarray) and native.dtype == BFLOAT16
    if library == "torch":
        torch = sys.modules["torch"]
        if bfloat16_on_host:
            return torch.from_dlpack(native.view(np.int16)).view(torch.bfloat16)
        # CuPy's memory may be a torch tensor's (`interop.torch_calls.memory_of_torch`): CuPy keeps it as `_owner`. Then
        # the result is a view of that tensor, so that torch's allocator knows and frees the memory.
        memory = None if isinstance(native, np.ndarray) else getattr(native.data.mem, "_owner", None)
        return view_of(memory, native) if isinstance(memory, torch.Tensor) else torch.from_dlpack(native)
    if library == "jax":
        jax = sys.modules["jax"]
        return jax.numpy.asarray(native) if bfloat16_on_host else jax.dlpack.from_dlpack(native)
    namespace = getattr(example, "__array_namespace__", None)
    return namespace().from_dlpack(native) if namespace else native


def view_of(memory, native):
    """The tensor with the numbers of a CuPy array in the memory that torch's tensor `memory` owns."""
    torch = sys.modules["torch"]
    storage, size = memory.untyped_storage(), native.itemsize
    empty = torch.empty(0, dtype=getattr(torch, native.dtype.name), device=memory.device)
    start = (native.data.ptr - storage.data_ptr()) // size if native.size else 0
    return empty.set_(storage, start, native.shape, tuple(step // size for step in native.strides))


def home(x) -> str:
    """Where a native array lives: 'host' or 'cuda:<ordinal>'."""
    return "host" if isinstance(x, np.ndarray) else f"cuda:{x.device.id}"


def signature(x, addresses=None):
    """A hashable of a NumPy or CuPy array: shape, strides and dtype; of NumPy's also whether it is writeable, of CuPy's
    the address modulo 16 and the device. None for anything else, subclasses too.

    Arrays of equal signatures share checks (`checked_calls`) and CuPy's plans (`backends.cupy.execute`). The address of
    a device array is appended to the list `addresses`, if there is one.
    """
    array_type = type(x)
    if array_type is np.ndarray:
        return x.shape, x.strides, x.dtype, x.flags.writeable
    if array_type in (DEVICE_ARRAY_TYPES or device_array_types()):
        memory = x.data
        address = memory.ptr
        if addresses is not None:
            addresses.append(address)
        return x.shape, x.strides, x.dtype, address % 16, memory.device_id
    return None


def device_array_types():
    """DEVICE_ARRAY_TYPES, which gets CuPy's type once CuPy is imported."""
    if "cupy" in sys.modules:
        DEVICE_ARRAY_TYPES[:] = [sys.modules["cupy"].ndarray]
    return DEVICE_ARRAY_TYPES
