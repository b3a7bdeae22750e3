"""Kernels that compute every number, or every row, of an array by itself. Several planners launch them.

A class declares one CUDA kernel: its annotated fields are the template's arguments, in order, and `arguments` the
members of struct Args. There, "strided" are arrays [B, H, T, channels] of any strides but the last, "pointers" are
contiguous arrays, "int64s" sizes. T is called T_, as the template has a type T.
"""

from __future__ import annotations

from math import isqrt, prod
from typing import ClassVar

import numpy as np

from .arguments import members, structs
from .arithmetic import ceil_div
from .kernel import Kernel
from .plan import aligned16

# {a feature map in `declarations.FEATURE_MAPS`: its name in the kernels}
FEATURE_MAPS = {None: "Identity", "elu": "Elu", "relu": "Relu", "exp": "Exp"}
MANY_ARRAYS = 1024  # so many are summed in two launches


class FeatureMap(Kernel):
    """y = phi(x), of C channels. With `step` = 0, every channel of y is computed from the first one of x; else `step`
    is 1. With `vectors` = 1, a thread computes PIECE neighbouring channels of its TOKENS tokens: rows of y, and of x if
    `step` is 1, must then allow 16-byte copies."""

    file = "elementwise/feature_map"
    arguments = members("strided x y, int64s B H T_ C step vectors")
    threads = 256
    PIECE: ClassVar[int] = 8
    TOKENS: ClassVar[int] = 4
    constants = (("PIECE", "PIECE"), ("TOKENS", "TOKENS"))
    phi: str
    dtype: np.dtype  # of x
    result: np.dtype  # of y

    def launch(self, draft, x, y, step, vectors, reason=""):
        """Launches it for arrays [B, H, T, C]."""
        B, H, T, C = y.shape
        threads = B * H * ceil_div(T, self.TOKENS) * C // (self.PIECE if vectors else 1)
        sizes = {"B": B, "H": H, "T_": T, "C": C}
        draft.launch(self, ceil_div(threads, self.threads), reason, x=x, y=y, **sizes, step=step, vectors=vectors)


class FeatureGradient(Kernel):
    """dx = dy phi'(x), of C channels."""

    file = "elementwise/feature_gradient"
    arguments = members("strided x dy dx, int64s B H T_ C")
    threads = 256
    phi: str
    dtype: np.dtype  # of x and dx
    result: np.dtype  # of dy


class GateGradient(Kernel):
    """dg [B, H, T, 1] of a gate that C channels share: the sum of `dg_channels` [B, H, T, C] over the channels. So many
    `lanes` of a warp as `lanes` returns add those of TOKENS tokens."""

    file = "elementwise/gate_gradient"
    arguments = members("strided dg_channels dg, int64s B H T_ C lanes")
    threads = 128
    TOKENS: ClassVar[int] = 4
    constants = (("TOKENS", "TOKENS"),)
    LANE_CHANNELS: ClassVar[int] = 4  # that each lane adds, more only if the whole warp has too few lanes
    dtype: np.dtype  # of dg

    @classmethod
    def lanes(cls, C) -> int:
        """The lanes that add C channels."""
        return min(32, 1 << (ceil_div(C, cls.LANE_CHANNELS) - 1).bit_length())


class SumArrays(Kernel):
    """sum [H, K] = the sum of N `arrays` [N, H, K]; rows of `sum` lie `row_stride` numbers apart."""

    file = "elementwise/sum_arrays"
    arguments = members("pointers arrays sum, int64s N H K row_stride")
    threads = 128
    LANES: ClassVar[int] = 8  # threads that add the N values of one number
    constants = (("LANES", "LANES"),)
    dtype: np.dtype  # of sum


class SumHeads(Kernel):
    """`sum` [B, H, T, C] = the sum of `group` neighbouring heads of `x` [B, H group, T, C]. With `vectors` = 1, a
    thread computes 16 bytes of a row: rows must allow copies of these."""

    file = "elementwise/sum_heads"
    arguments = members("strided x sum, int64s B H T_ C group vectors")
    threads = 256
    dtype: np.dtype

    def launch(self, draft, x, total):
        """Launches it for arrays with rows."""
        B, H, T, C = total.shape
        vectors = int(aligned16(x, total))
        sizes = {"B": B, "H": H, "T_": T, "C": C, "group": x.shape[1] // max(H, 1), "vectors": vectors}
        blocks = ceil_div(B * H * T * C // (16 // self.dtype.itemsize if vectors else 1), self.threads)
        draft.launch(self, blocks, x=x, sum=total, **sizes)


class Divide(Kernel):
    """o = y / z, the normalisation of linear attention: y is columns 0 ... V - 1 of `yz`, and z is column V."""

    file = "elementwise/divide"
    arguments = members("strided yz o, int64s B H T_ V")
    threads = 128
    dtype: np.dtype  # of o


class DivideGradient(Kernel):
    """The gradient of `Divide`: `dyz` from `yz` and do. Both have `columns` columns; those after column V pad rows,
    and their gradient is 0."""

    file = "elementwise/divide_gradient"
    arguments = members("strided yz do_ dyz, int64s B H T_ V columns")
    threads = 128
    dtype: np.dtype  # of do


class CopyRows(Kernel):
    """Copies of up to COPIES arrays `from_` [size_b, size_h, size_t, size_c] to contiguous arrays `to` [B, H, T, C] of
    `count` numbers. Zeros fill what `to` has and `from_` has not.

    A number is an item of `bytes` bytes. Strides of `from_` are in numbers. From `below` bytes before `from_` until
    `above` after it, memory may be read. An array's blocks begin at `first_block`.
    """

    file = "elementwise/copy_rows"
    COPIES: ClassVar[int] = 8
    threads = 256
    FEW_BYTES: ClassVar[int] = 1 << 24  # fewer leave multiprocessors without blocks, unless a thread copies one piece
    constants = (("COPIES", "COPIES"),)
    arguments = structs(
        "copies",
        COPIES,
        members(
            "pointers from_ to, int64s stride_b stride_h stride_t stride_c H T C "
            "size_b size_h size_t size_c count bytes below above first_block"
        ),
    )
    AT_ONCE: int  # pieces of 16 bytes that a thread copies

    @classmethod
    def fitting(cls, nbytes):
        return cls(1 if nbytes < cls.FEW_BYTES else 4)

    @property
    def bytes_of_block(self) -> int:
        return 16 * self.AT_ONCE * self.threads


def sum_arrays(draft, arrays, total):
    """Adds to the plan `draft` launches of total [..., H, K] = the sum of arrays [N, ..., H, K] in float32 or float64.
    `total` may be a slice of an array with longer rows."""
    (N, *heads, K), H = arrays.shape, prod(arrays.shape[1:-1])

    def launch(arrays, total, N, H, row_stride):
        kernel = SumArrays(total.dtype)
        sizes = {"N": N, "H": H, "K": K, "row_stride": row_stride}
        draft.launch(kernel, ceil_div(kernel.LANES * H * K, kernel.threads), arrays=arrays, sum=total, **sizes)

    groups = next((n for n in range(isqrt(N), 1, -1) if N % n == 0), 1) if N >= MANY_ARRAYS else 1
    if groups > 1:  # few threads would add all of them: first every `groups`-th one
        sums = draft.empty((groups, *heads, K), arrays.dtype)
        launch(arrays, sums, N // groups, groups * H, K)
        arrays, N = sums, groups
    launch(arrays, total, N, H, total.strides[-2] // total.dtype.itemsize)
