"""Instances of the kernels that go element by element, which several planners launch beside their own."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from .arguments import integers, pointers, rows, structs
from .kernel import Kernel
from .plan import ceil_div

FEATURE_MAPS = {None: "Identity", "elu": "Elu", "relu": "Relu", "exp": "Exp"}


@dataclass(frozen=True)
class FeatureMap(Kernel):
    file = "elementwise/feature_map"
    arguments = (*rows("x y"), *integers("B H T_ C step vectors"))
    threads = 256
    PIECE: ClassVar[int] = 8  # numbers that a thread moves at once
    phi: str
    dtype: np.dtype
    result: np.dtype


@dataclass(frozen=True)
class FeatureGradient(Kernel):
    file = "elementwise/feature_gradient"
    arguments = (*rows("x dy dx"), *integers("B H T_ C"))
    threads = 256
    phi: str
    dtype: np.dtype
    result: np.dtype


@dataclass(frozen=True)
class GateGradient(Kernel):
    file = "elementwise/gate_gradient"
    arguments = (*rows("x y"), *integers("B H T_ C"))
    threads = 128
    gate: np.dtype


@dataclass(frozen=True)
class BonusGradient(Kernel):
    file = "elementwise/bonus_gradient"
    arguments = (*pointers("partial_du du"), *integers("N H K row"))
    threads = 128
    bonus: np.dtype


@dataclass(frozen=True)
class Divide(Kernel):
    file = "elementwise/divide"
    arguments = (*rows("yz o"), *integers("B H T_ V"))
    threads = 128
    dtype: np.dtype


@dataclass(frozen=True)
class DivideGradient(Kernel):
    file = "elementwise/divide_gradient"
    arguments = (*rows("yz do_ dyz"), *integers("B H T_ V columns"))
    threads = 128
    dtype: np.dtype


@dataclass(frozen=True)
class CopyRows(Kernel):
    """Copies of arrays with longer or shorter rows, which it fills up with zeros."""

    file = "elementwise/copy_rows"
    COPIES: ClassVar[int] = 8
    threads = 256
    PIECES: ClassVar[int] = 4 * threads  # of 16 bytes, a block
    constants = (("COPIES", "COPIES"), ("THREADS * AT_ONCE", "PIECES"))
    arguments = structs(
        "copies",
        COPIES,
        (*pointers("from_ to"), *integers("b h t c H T width rows_b rows_h rows_t row numbers size first")),
    )


def sum_of_parts(draft, parts, total):
    """total [..., H, K], which may be a part of longer rows, of parts [N, ..., H, K] in float32 or float64."""
    (N, *heads, K), kernel = parts.shape, BonusGradient(total.dtype)
    sizes = {"N": N, "H": prod(heads), "K": K, "row": total.strides[-2] // total.dtype.itemsize}
    blocks = ceil_div(8 * sizes["H"] * K, kernel.threads)
    draft.launch(kernel, blocks, partial_du=parts, du=total, **sizes)
