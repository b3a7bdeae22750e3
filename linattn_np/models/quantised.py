"""Checkpoints with matrices in 8 or 4 bits: safetensors files that have two arrays for a matrix.

    <name> int8 [M, K],          <name>.scales float32 [M]                  w = scale q
    <name> uint8 [M, K / 2],     <name>.scales bfloat16 [M, blocks]         w = scale (q - 8)

A byte of uint8 has two numbers; the lower four bits are those of the even column. A bfloat16 scale is that of a block:
BLOCK = 32 neighbours in a row, the row's last block maybe fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from ..array_kinds import BFLOAT16
from ..errors import ContractError
from .matrices import BLOCK, Matrix, of_rows, quantised
from .number_checks import shown

SCALES = ".scales"
FLOAT32 = np.dtype(np.float32)


class Stored:
    """A matrix in 8 or 4 bits from a file. Code that loads weights may use it as a float32 array, or take its bits.

    Each conversion makes a new array, whatever `copy` says.
    """

    dtype, ndim = FLOAT32, 2

    def __init__(self, format: str, q: np.ndarray, scales: np.ndarray):
        self.format, self.q, self.scales = format, q, scales
        self.shape = (q.shape[0], q.shape[1] * (2 if format == "int4" else 1))
        self.nbytes = q.nbytes + scales.nbytes

    def __repr__(self):
        return f"Stored({list(self.shape)}, {self.format})"

    def reshape(self, shape):
        """The object itself. Loaders reshape arrays only to remove leading axes of size 1, which no matrix has."""
        return self

    def __array__(self, dtype=None, copy=None):
        return self.matrix([self]).widened().astype(dtype or FLOAT32, copy=False)

    def astype(self, dtype, copy=True):
        return np.asarray(self).astype(dtype, copy=False)

    @staticmethod
    def matrix(stack: list[Stored]) -> Matrix:
        """The `Matrix` of one of these, or of several of the same shape and format."""
        # [matrices, M, ...], also of one matrix, as `quantised` returns them: int4 from 0 to 15
        q, scales = (np.stack([getattr(stored, name) for stored in stack]) for name in ("q", "scales"))
        if stack[0].format == "int4":
            q, scales = np.stack([q & 15, q >> 4], -1).reshape(*q.shape[:-1], -1), scales.view(np.uint16)
        shape = stack[0].shape if len(stack) == 1 else (len(stack), *stack[0].shape)
        return of_rows(stack[0].format, q, scales, shape)


def with_stored_matrices(weights: Mapping) -> dict:
    """`weights` with a `Stored` for each matrix and its scales; ContractError for bad names, dtypes, shapes, scales."""
    found = {name: array for name, array in weights.items() if not name.endswith(SCALES)}
    for name, scales in weights.items():
        if not name.endswith(SCALES):
            continue
        name = name.removesuffix(SCALES)
        if name not in found:
            refuse(f"{shown(name + SCALES)} are the scales of no matrix")
        q = found[name]
        format = {np.dtype(np.int8): "int8", np.dtype(np.uint8): "int4"}.get(q.dtype)
        if format is None or q.ndim != 2:
            refuse(f"{shown(name)} is {q.dtype} with {q.ndim} axes and has scales, expected int8 or uint8 with two")
        wanted = (len(q),) if format == "int8" else (len(q), -(-2 * q.shape[1] // BLOCK))
        dtype = FLOAT32 if format == "int8" else BFLOAT16
        if scales.shape != wanted or scales.dtype != dtype:
            refuse(f"{shown(name + SCALES)} is {scales.dtype} {scales.shape}, expected {dtype} {wanted}")
        if not np.isfinite(scales.astype(np.float32)).all():
            refuse(f"{shown(name + SCALES)} has numbers that are not finite")
        found[name] = Stored(format, q, scales)
    return found


def file_arrays(weights: Mapping, names, format: str) -> dict:
    """The arrays of a quantised file for `weights`: the matrices `names` [out, in] in `format`, "int8" or "int4"."""
    arrays = {}
    for name, array in weights.items():
        if name not in names:
            arrays[name] = array
            continue
        q, scales = (part[0] for part in quantised(np.asarray(array)[None], format))
        if format == "int4":
            if q.shape[1] % 2:
                refuse(f"{shown(name)} has {q.shape[1]} columns, expected an even number for int4")
            q, scales = q[:, ::2] | q[:, 1::2] << 4, scales.view(BFLOAT16)
        arrays[name], arrays[name + SCALES] = q, scales
    return arrays


def refuse(complaint: str) -> NoReturn:
    raise ContractError(f"checkpoint: {complaint}")
