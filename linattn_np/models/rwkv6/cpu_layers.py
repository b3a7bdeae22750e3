"""Which layers run on the CPU: float32 in NumPy, fewer bits through Numba."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

from ...arrays import BFLOAT16
from ..matrices import FORMATS, loops
from .checks import refuse
from .numpy_layers import NumpyLayers
from ...contract import ContractTypeError


def cpu_layers(weights, sizes, dtype, loaded):
    dtype = format_of(weights, dtype)
    if dtype == "float32":
        return NumpyLayers(weights, sizes, dtype, loaded)
    loops()                                                 # NotSupported without Numba
    from .numba_layers import NumbaLayers
    return NumbaLayers(weights, sizes, dtype, loaded)


def format_of(weights, dtype) -> str:
    """One of FORMATS: `dtype`; or bfloat16, where the weights are and Numba is there, else float32."""
    if dtype is None:
        own = weights["head.weight"].dtype
        return "bfloat16" if own == BFLOAT16 and find_spec("numba") else "float32"
    try:
        name = dtype if dtype in FORMATS else np.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in FORMATS:
        refuse(f"dtype is {name}, expected {', '.join(FORMATS)} on the CPU", ContractTypeError)
    return name
