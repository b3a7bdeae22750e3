"""Where a model computes."""

from __future__ import annotations

import numpy as np

from ..errors import ContractError, NotSupported

DEVICES = ("cpu", "cuda")


def check_device(owner: str, device: str):
    """ContractError for what is no device; NotSupported says why the GPU cannot be used."""
    if device not in DEVICES:
        raise ContractError(f"{owner}: device is {device!r}, expected 'cpu' or 'cuda'")
    if device == "cpu":
        return
    try:
        import cupy

        if not cupy.cuda.is_available():
            raise ImportError("CuPy finds no CUDA device")
        from cupy.cuda import cublas  # noqa: F401  the matrix products are cuBLAS's
    except ImportError as error:
        raise NotSupported(f"{owner}: device 'cuda' cannot be used: {str(error).splitlines()[0]}") from None


def on_host(array):
    """`array` as NumPy's, copied there from a device if it is not on the host."""
    return array.get() if hasattr(array, "get") else np.asarray(array)
