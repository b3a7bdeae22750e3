"""Which layers run on the CPU: those of Numba's loops, and where there is no Numba NumPy's, in float32."""

from __future__ import annotations

import numpy as np

from ...errors import ContractTypeError, NotSupported
from ..matrices import FORMATS, loops
from ..quantised import Stored
from .numpy_layers import FLOAT32


def cpu_layers(kind, weights, sizes, dtype, state_dtype, loaded):
    """The layers of a model of the class `kind`."""
    kind.version.checked_dtype(state_dtype, (FLOAT32,), " for the state on the CPU")
    dtype = format_of(kind.version, weights, dtype)
    if dtype == "float32" and not has_loops():
        return kind.numpy_layers(weights, sizes, dtype, loaded)
    loops()  # NotSupported without Numba
    return kind.module("numba_layers").NumbaLayers(weights, sizes, dtype, loaded)


def has_loops() -> bool:
    try:
        return bool(loops())
    except NotSupported:
        return False


def format_of(version, weights, dtype) -> str:
    """One of FORMATS: `dtype`, or that of the weights, which for bfloat16 is float32 where there is no Numba."""
    if dtype is None:
        head = weights["head.weight"]
        own = head.format if isinstance(head, Stored) else str(head.dtype)
        return own if own in FORMATS and (own != "bfloat16" or has_loops()) else "float32"
    try:
        name = dtype if dtype in FORMATS else np.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in FORMATS:
        version.refuse(f"dtype is {name}, expected {', '.join(FORMATS)} on the CPU", ContractTypeError)
    return name
