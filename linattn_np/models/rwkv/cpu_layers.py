"""Chooses the layers for the CPU: Numba's loops, or NumPy in float32 if Numba is not installed."""

import numpy as np

from ...errors import ContractTypeError, NotSupported
from ..matrices import FORMATS, loops
from ..quantised import Stored
from .numpy_layers import FLOAT32


def cpu_layers(kind, weights, sizes, dtype, state_dtype, loaded):
    """The layers of a model of class `kind`; `loaded` is called with each array once it has been read."""
    kind.version.checked_dtype(state_dtype, (FLOAT32,), " for the state on the CPU")
    dtype = format_of(kind.version, weights, dtype)
    if dtype == "float32" and not has_loops():
        return kind.numpy_layers(weights, sizes, dtype, loaded)
    loops()  # NotSupported without Numba
    return kind.module("numba_layers").NumbaLayers(weights, sizes, dtype, loaded)


def has_loops() -> bool:
    """Whether Numba's loops can be used."""
    try:
        return bool(loops())
    except NotSupported:
        return False


def format_of(version, weights, dtype) -> str:
    """One of FORMATS: `dtype`, or by default the weights' own; without Numba, float32 in place of bfloat16."""
    if dtype is None:
        head = weights["head.weight"]
        own_format = head.format if isinstance(head, Stored) else str(head.dtype)
        return own_format if own_format in FORMATS and (own_format != "bfloat16" or has_loops()) else "float32"
    try:
        name = dtype if dtype in FORMATS else np.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in FORMATS:
        version.refuse(f"dtype is {name}, expected {', '.join(FORMATS)} on the CPU", ContractTypeError)
    return name
