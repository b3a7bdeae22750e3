"""Instances of the kernels that go element by element, which several planners launch beside their own."""

from __future__ import annotations

from math import prod
from typing import ClassVar

import numpy as np

from .arguments import members, structs
from .kernel import Kernel
from .plan import ceil_div

FEATURE_MAPS = {None: "Identity", "elu": "Elu", "relu": "Relu", "exp": "Exp"}


class FeatureMap(Kernel):
    file = "elementwise/feature_map"
    arguments = members("rows x y, integers B H T_ C step vectors")
    threads = 256
    PIECE: ClassVar[int] = 8  # numbers that a thread moves at once
    phi: str
    dtype: np.dtype
    result: np.dtype


class FeatureGradient(Kernel):
    file = "elementwise/feature_gradient"
    arguments = members("rows x dy dx, integers B H T_ C")
    threads = 256
    phi: str
    dtype: np.dtype
    result: np.dtype


class GateGradient(Kernel):
    file = "elementwise/gate_gradient"
    arguments = members("rows x y, integers B H T_ C")
    threads = 128
    gate: np.dtype


class BonusGradient(Kernel):
    file = "elementwise/bonus_gradient"
    arguments = members("pointers partial_du du, integers N H K row")
    threads = 128
    bonus: np.dtype


class Divide(Kernel):
    file = "elementwise/divide"
    arguments = members("rows yz o, integers B H T_ V")
    threads = 128
    dtype: np.dtype


class DivideGradient(Kernel):
    file = "elementwise/divide_gradient"
    arguments = members("rows yz do_ dyz, integers B H T_ V columns")
    threads = 128
    dtype: np.dtype


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
        members("pointers from_ to, integers b h t c H T width rows_b rows_h rows_t row numbers size first"),
    )


def sum_of_parts(draft, parts, total):
    """total [..., H, K], which may be a part of longer rows, of parts [N, ..., H, K] in float32 or float64."""
    (N, *heads, K), kernel = parts.shape, BonusGradient(total.dtype)
    sizes = {"N": N, "H": prod(heads), "K": K, "row": total.strides[-2] // total.dtype.itemsize}
    blocks = ceil_div(8 * sizes["H"] * K, kernel.threads)
    draft.launch(kernel, blocks, partial_du=parts, du=total, **sizes)
