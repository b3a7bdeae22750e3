"""The layers of an RWKV model on the CPU: products by Numba's loops, and a token of each sequence by one call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import ClassVar

import numpy as np

from ...array_kinds import BFLOAT16
from ..helper_threads import Board
from ..matrices import FEW, pack
from ..matrix_loops import multiply
from ..quantised import Stored
from . import numba_loops as loops
from .numpy_layers import FLOAT32, NumpyLayers, Pieces, token_shift
from .version import stacked

# Matrices of low rank are a few percent of all, and what they compute steers the state: int4 leaves them 8 bits.
FINER = {"int4": "int8"}


class NumbaLayers(NumpyLayers):
    """Matrices in one of `matrices.FORMATS`; the embedding, of which a token reads one row, in bfloat16 or float32.

    A version's subclass also sets `loops`, the module of its `step` and of the tables VECTORS and MATRICES.
    """

    loops: ClassVar[ModuleType]

    def __init__(self, weights, sizes, dtype, loaded):
        self.dtype = dtype
        super().load(weights, sizes, loaded, partial(kept, dtype))
        self.gather()
        everything = [*vars(self.whole).values(), *(x for layer in self.layers for x in vars(layer).values())]
        self.nbytes = sum(array.nbytes for array in everything)
        self.step_bytes = self.nbytes - self.whole.embedding.nbytes

    def __repr__(self):
        return f"{type(self).__name__}({len(self.layers)} layers, {self.dtype}, {self.nbytes:,} bytes)"

    def logits(self, tokens, state, rows, last):
        """[T, V], or [N, V] of each sequence's last token."""
        if not rows.single or self.dtype == "float32" and len(tokens) > FEW:
            return super().logits(tokens, state, rows, last)
        board = Board()
        x = self.whole.embedding[tokens].astype(FLOAT32, copy=False)
        slots = np.arange(len(tokens)) if rows.slots is None else rows.slots
        own = [*map(np.ascontiguousarray, state.arrays)]  # for strided arrays Numba would compile the loop again
        with board.helped(self.step_bytes):
            eps = self.layer_eps, self.group_eps
            logits = self.loops.step(multiply.address, board.array, *self.gathered, eps, x, *own, slots)
        for array, new in zip(state.arrays, own):
            if array is not new:
                array[...] = new
        return logits

    def pieces_for(self, rows):
        return self.pieces(self, rows, Board())

    def __getstate__(self):
        """What copies and pickles take: all but the matrices' addresses."""
        return {name: value for name, value in vars(self).items() if name != "gathered"}

    def __setstate__(self, state):
        vars(self).update(state)
        self.gather()

    def gather(self):
        """A table of the matrices' addresses, and the vectors in one array, as a step takes them; the layers' are
        views of it. What a layer lacks is zeros there."""
        head, norms = self.whole.head, np.concatenate([self.whole.ln0, self.whole.ln_out])
        matrices = np.zeros((len(self.layers), len(self.loops.MATRICES), len(described(head))), np.int64)
        vectors = np.zeros((len(self.layers), sum(self.loops.VECTORS.values()), norms.shape[-1]), FLOAT32)
        starts = np.cumsum([0, *self.loops.VECTORS.values()])
        for i, layer in enumerate(self.layers):
            for place, name in enumerate(self.loops.MATRICES):
                if name in vars(layer):
                    matrices[i, place] = described(getattr(layer, name))
            for (name, count), start in zip(self.loops.VECTORS.items(), starts):
                if name in vars(layer):
                    part = vectors[i, start : start + count].reshape(getattr(layer, name).shape)
                    part[:] = getattr(layer, name)
                    setattr(layer, name, part)
        self.gathered = matrices, np.array(described(head)), vectors, norms


def described(matrix):
    """What a loop has to know of a matrix."""
    return matrix.code, *matrix.where, matrix.shape[-2]


def kept(format, field, weight, arrays):
    """A weight as products or the mixes take it."""
    if field != "embedding" and all(isinstance(array, Stored) and array.format == format for array in arrays):
        return Stored.matrix(arrays)
    array = stacked(arrays)
    if not weight.matrix or (field == "embedding" and format == "float32"):
        return np.ascontiguousarray(array, FLOAT32)
    if field == "embedding":
        return array.astype(BFLOAT16)
    if weight.inputs_first:
        return pack(array.swapaxes(-1, -2), FINER.get(format, format))
    return pack(array, format)


@dataclass
class Prompt(Pieces):
    """The shared pieces on such matrices; NumPy's exponentials are faster than Numba's, its passes and tanh are not."""

    board: Board

    def multiply(self, matrix, x):
        return matrix(x, self.board)

    def shift_mix(self, layer, norm, maa, x, shift):
        xx = loops.layer_norm(x, getattr(layer, norm), self.layers.layer_eps)
        d = token_shift(xx, shift, self.rows)
        return loops.mixed(xx, d, np.atleast_2d(getattr(layer, maa))), xx, d

    def relu_squared(self, x):
        loops.relu_squared(x)
        return x
