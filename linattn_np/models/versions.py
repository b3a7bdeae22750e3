"""Finds the version of RWKV that a checkpoint has, and loads its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike

import numpy as np
from numpy.typing import DTypeLike

from . import checkpoint
from .rwkv import adapters
from .rwkv.model import Device, Model
from .rwkv6 import RWKV6
from .rwkv7 import RWKV7

VERSIONS: dict[int, type[Model]] = {6: RWKV6, 7: RWKV7}


def kind_of(weights: Mapping) -> type[Model]:
    """The class of the model with these names of weights. `RWKV6` refuses those of other versions, and names them."""
    return RWKV7 if any(name.endswith(".r_k") for name in weights) else RWKV6


def load(
    path: str | PathLike,
    device: Device = "cpu",
    dtype: DTypeLike | None = None,
    progress: Callable[[int, int], object] | None = None,
    state_dtype: DTypeLike = np.float32,
    adapter: str | PathLike | None = None,
) -> Model:
    """The model in a checkpoint, an `RWKV6` or an `RWKV7` as its parameters' names tell.

    Parameters and errors are those of the classes' ``from_file``. One more:

    adapter : the file of a low-rank adapter, or the folder of `linattn-np train --lora`; `rwkv.adapters.merged` merges
        it into the weights

    Example
    -------
    >>> from linattn_np import models
    >>> models.load(models.austen(), dtype="float32")
    RWKV6(4 layers, 256 channels, 4 heads of 64, 256 tokens, float32 on cpu)
    """
    weights = checkpoint.read(path)
    kind = kind_of(weights)
    if adapter is not None:
        weights = adapters.merged(kind, weights, adapters.read(adapter), config=checkpoint.config(path))
    how = dict(device=device, dtype=dtype, progress=progress, state_dtype=state_dtype)
    return kind.of_file(path, weights, **how)
