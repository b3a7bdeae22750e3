"""Chooses the layers for the CPU: Numba's loops, or NumPy in float32 if Numba is not installed."""

import numpy as np

from ...errors import ContractTypeError, NotSupported
from ..matrices import FORMATS, loops
from ..quantised import Stored
from .numpy_layers import FLOAT32


def cpu_layers(model_class, weights, sizes, dtype, state_dtype, loaded):
    """The layers of a `model_class`.

    The other arguments: `Model.layers_on` describes them; `loaded` is called with each array once it is loaded.
    ContractTypeError for a dtype that the CPU does not take; NotSupported if `dtype` needs Numba, which is missing.
    """
    model_class.version.checked_dtype(state_dtype, (FLOAT32,), " for the state on the CPU")
    format = format_of(model_class.version, weights, dtype)
    if format == "float32" and not has_loops():
        return model_class.numpy_layers(weights, sizes, format, loaded)
    loops()  # raises NotSupported without Numba
    return model_class.module("numba_layers").NumbaLayers(weights, sizes, format, loaded)


def has_loops() -> bool:
    """Whether Numba's loops can be used."""
    try:
        return bool(loops())
    except NotSupported:
        return False


def format_of(version, weights, dtype) -> str:
    """One of FORMATS, the formats of matrices on the CPU: `dtype`, or by default the format of the weights.

    The default is float32 if the weights have none of FORMATS, or have bfloat16 and Numba is missing. Without Numba a
    file's int8 and int4 stay, and so does a `dtype` that is given: then `cpu_layers` raises.
    """
    if dtype is None:
        head = weights["head.weight"]  # its format is taken as that of all matrices
        own_format = head.format if isinstance(head, Stored) else str(head.dtype)
        return own_format if own_format in FORMATS and (own_format != "bfloat16" or has_loops()) else "float32"
    try:
        name = dtype if dtype in FORMATS else np.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in FORMATS:
        version.refuse(f"dtype is {name}, expected {', '.join(FORMATS)} on the CPU", ContractTypeError)
    return name
