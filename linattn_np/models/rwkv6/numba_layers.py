"""RWKV-6's layers on the CPU: products by Numba's loops, and a token of each sequence by one call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from ...array_kinds import BFLOAT16
from ..helper_threads import Board
from ..matrices import FEW, pack
from ..matrix_loops import multiply_at
from ..quantised import Stored
from ..rwkv.version import stacked
from . import numba_loops as loops
from .numpy_layers import FLOAT32, NumpyLayers, Pieces, token_shift

# Matrices of low rank are a few percent of all, and what they compute steers the state: int4 leaves them 8 bits.
FINER = {"int4": "int8"}


class NumbaLayers(NumpyLayers):
    """Matrices in one of `matrices.FORMATS`; the embedding, of which a token reads one row, in bfloat16 or float32."""

    def __init__(self, weights, sizes, dtype, loaded):
        self.dtype = dtype
        super().load(weights, sizes, loaded, partial(kept, dtype))
        self.gather()
        everything = [*vars(self.whole).values(), *(x for layer in self.layers for x in vars(layer).values())]
        self.nbytes = sum(array.nbytes for array in everything)
        self.step_bytes = self.nbytes - self.whole.embedding.nbytes

    def __repr__(self):
        return f"NumbaLayers({len(self.layers)} layers, {self.dtype}, {self.nbytes:,} bytes)"

    def logits(self, tokens, state, rows, last):
        """[T, V], or [N, V] of each sequence's last token."""
        board = Board()
        if not rows.single or self.dtype == "float32" and len(tokens) > FEW:
            return self.run(Prompt(self, rows, board), tokens, state, rows, last)
        x = self.whole.embedding[tokens].astype(FLOAT32, copy=False)
        slots = np.arange(len(tokens)) if rows.slots is None else rows.slots
        own = [*map(np.ascontiguousarray, state.arrays)]  # for strided arrays Numba would compile the loop again
        with board.helped(self.step_bytes):
            eps = self.layer_eps, self.group_eps
            logits = loops.step(multiply_at.address, board.array, *self.gathered, eps, x, *own, slots)
        for array, new in zip(state.arrays, own):
            if array is not new:
                array[...] = new
        return logits

    def __getstate__(self):
        """What copies and pickles take: all but the matrices' addresses."""
        return {name: value for name, value in vars(self).items() if name != "gathered"}

    def __setstate__(self, state):
        vars(self).update(state)
        self.gather()

    def gather(self):
        """A table of the matrices' addresses, and the vectors in one array, as a step takes them; the layers' are
        views of it."""
        head, norms = self.whole.head, np.concatenate([self.whole.ln0, self.whole.ln_out])
        matrices = [[described(getattr(layer, name)) for name in loops.MATRICES] for layer in self.layers]
        vectors = np.empty((len(self.layers), sum(loops.VECTORS.values()), norms.shape[-1]), FLOAT32)
        for layer, its in zip(self.layers, vectors):
            ends = np.cumsum([*loops.VECTORS.values()])
            for name, part in zip(loops.VECTORS, np.split(its, ends[:-1])):
                part = part.reshape(getattr(layer, name).shape)
                part[:] = getattr(layer, name)
                setattr(layer, name, part)
        self.gathered = np.array(matrices), np.array(described(head)), vectors, norms


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
    """`math.Pieces` on such matrices; NumPy's exponentials are faster than Numba's, its passes and tanh are not."""

    board: Board

    def multiply(self, matrix, x):
        return matrix(x, self.board)

    def shift_mix(self, layer, norm, maa, x, shift):
        xx = loops.layer_norm(x, getattr(layer, norm), self.layers.layer_eps)
        d = token_shift(xx, shift, self.rows)
        return loops.mixed(xx, d, np.atleast_2d(getattr(layer, maa))), xx, d

    def data_mix(self, layer, low, xx, d):
        loops.tanh_of(low)
        low = low.reshape(len(low), 5, -1).swapaxes(0, 1)
        m = self.product(layer, "maa_up", low)
        loops.data_mix(m, layer.maa, xx, d)
        return m

    def gated_norm(self, layer, o, gate):
        o = np.ascontiguousarray(o.reshape(gate.shape))
        loops.gated_norm(o, gate, layer.ln_x, len(layer.bonus), self.layers.group_eps)
        return o

    def add_gated(self, x, gate, value):
        loops.add_gated(x, gate, value)
        return x

    def relu_squared(self, x):
        loops.relu_squared(x)
        return x
