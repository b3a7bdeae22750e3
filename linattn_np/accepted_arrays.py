"""Which arrays are accepted. Every other array is refused with the reason and a way out.

A call reads an array's memory alone. An array that carries more than its memory (a mask, a gradient, a transformation,
other devices), or that has no memory, is refused: a call would silently ignore what it carries.
"""

import sys

import numpy as np

from . import array_kinds
from .messages import kind_of

PLAIN = (np.ndarray, np.memmap)  # a memory map is a plain array in a file


class Refusal(TypeError):
    """An array is not accepted; the message is the part of an error that follows the array's name."""


def accepted(name, x, use: str = "computed", operator: str | None = None):
    """(`x` as a NumPy or CuPy array over the same memory, the kind of `x`); raises Refusal if `x` is not accepted.

    `use` says what the call does with `x`: "computed", "written" or only "copied". `operator` is the name of the
    differentiable function in linattn_np.interop, which the error recommends; None where there is none.
    """
    library = array_kinds.kind(x)
    if library is None:
        way_out = f": np.asarray({name}) is one" if isinstance(x, (list, tuple, int, float, np.generic)) else ""
        raise Refusal(f"is a {kind_of(x)}, expected an array{way_out}")
    if library in REFUSALS and (refusal := REFUSALS[library](x, use, operator)):
        raise Refusal(refusal)
    try:
        return array_kinds.to_native(x, library), library
    except (AttributeError, BufferError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Refusal(f"cannot be read: {error}") from error


def host_array(numbers):
    """Numbers on the host (one, or a list, tuple or array of them) as a NumPy array; None for anything else."""
    plain = isinstance(numbers, (list, tuple, int, float, np.generic))
    try:
        array = np.asarray(numbers) if plain else accepted("", numbers, "copied")[0]
    except (Refusal, ValueError):  # a ragged list
        return None
    return array if isinstance(array, np.ndarray) and array.dtype.kind in "biuf" else None


def differentiable(operator, library) -> str:
    """The end of an error: the differentiable function to use instead, or "" if `operator` is None."""
    return f": import {operator} from linattn_np.interop.{library}" if operator else ""


# -- why a library's array is refused, or None if it is accepted; arguments as in `accepted` ---------------------------
def numpy_refusal(x, use, operator) -> str | None:
    if type(x) in PLAIN:
        return None
    if isinstance(x, np.ma.MaskedArray):
        return (
            f"is a {kind_of(x)}, whose mask would be ignored, expected a plain array: x.filled(0) and, for "
            "padding, the operator's own mask="
        )
    return f"is a {kind_of(x)}, a subclass of numpy.ndarray, expected a plain array: np.asarray(x)"


def cupy_refusal(x, use, operator) -> str | None:
    if type(x) is not sys.modules["cupy"].ndarray:
        return f"is a {kind_of(x)}, a subclass of cupy.ndarray, expected a plain array"
    if x.data.ptr % x.itemsize or any(step % x.itemsize for step, size in zip(x.strides, x.shape) if size > 1):
        return (
            f"has numbers, of {x.dtype} with strides {x.strides}, that do not lie on multiples of {x.itemsize} bytes, "
            "where no GPU can read them"
        )
    return None


def jax_refusal(x, use, operator) -> str | None:
    if isinstance(x, sys.modules["jax"].core.Tracer):
        return f"is a {kind_of(x)}, which has no numbers under JAX's transformations" + differentiable(operator, "jax")
    if x.is_deleted():
        return "is a JAX array that was deleted, or donated to another call"
    if use == "written":
        return "is a JAX array, which nobody may write to" + differentiable(operator, "jax")
    return None


def torch_refusal(x, use, operator) -> str | None:
    torch = sys.modules["torch"]
    instead = differentiable(operator, "torch")
    if torch.compiler.is_compiling():
        return "is traced by torch.compile, which cannot look into this call" + instead
    if recorded(torch):
        return "is in a graph that torch records, which would hold this call's result as a constant" + instead
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "is a tensor under a transformation of torch.func, which would not see this call" + instead
    if misfit := not_plain(torch, x):
        return misfit
    if use == "written" and not_resolved(x):
        return "is a view that torch computes when it is read, but it is written: x.clone() has memory of its own"
    if use == "copied":
        return None
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0 and forward.unpack_dual(x).tangent is not None:
        return "carries a tangent of torch's forward-mode derivatives, which this call would cut"
    if x.requires_grad and torch.is_grad_enabled():
        compute = "pass x.detach() or call under torch.no_grad() to compute alone"
        return "requires grad, which this call would cut" + (
            f"{instead} to train, or {compute}" if instead else f": {compute}"
        )
    return None


REFUSALS = {"numpy": numpy_refusal, "cupy": cupy_refusal, "jax": jax_refusal, "torch": torch_refusal}


# -- torch -------------------------------------------------------------------------------------------------------------
def recorded(torch) -> bool:
    """Whether torch records a graph of its own operators, as `make_fx` and `torch.jit.trace` do."""
    proxies = torch._C._TorchDispatchModeKey.PROXY
    recorders = (
        torch._C._get_tracing_state(),
        torch._C._get_dispatch_mode(proxies),
        torch._ops._get_dispatch_mode_pre_dispatch(proxies),
    )
    return any(recorder is not None for recorder in recorders)


def not_plain(torch, x) -> str | None:
    """Why a tensor that is not plain (strided numbers on the CPU or on CUDA) is refused; None for a plain tensor."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        way_out = ": x.to_local() is this rank's" if hasattr(x, "to_local") else ""
        return f"is a {kind_of(x)}, expected a torch.Tensor or torch.nn.Parameter itself{way_out}"
    if x.is_nested:
        return (
            "is a nested tensor: x.to_padded_tensor(0) with the operator's mask=, or packed sequences with cu_seqlens="
        )
    if x.is_quantized:
        return "is a quantised tensor: x.dequantize()"
    if x.layout is not torch.strided:
        return f"is a tensor of layout {x.layout}, expected torch.strided: x.to_dense()"
    if torch._is_functional_tensor(x):
        return "is a tensor that torch functionalises, which has no memory"
    if x.device.type not in ("cpu", "cuda"):
        return f"is on torch's device {x.device}, expected the CPU or CUDA"
    if x.untyped_storage().nbytes() < extent(x):
        return "is a tensor whose memory was freed"
    return None


def extent(x) -> int:
    """Bytes from the start of a tensor's storage to its last number; 0 without numbers, or if torch computes them."""
    if not x.numel() or x._is_zerotensor():
        return 0
    last = sum(step * (size - 1) for step, size in zip(x.stride(), x.shape))
    return (x.storage_offset() + last + 1) * x.element_size()


def not_resolved(x) -> bool:
    """Whether torch negates or zeroes a tensor's numbers when it reads them, so that memory holds others."""
    return x.is_neg() or x._is_zerotensor()
