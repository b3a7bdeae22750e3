"""RWKV-6's layers on the CPU: few tokens by Numba's loops, prompts by BLAS."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from ...arrays import BFLOAT16
from ..matrices import FEW, pack
from ..quantised import Stored
from ..threads import Board
from . import math
from . import numba_loops as loops
from . import weights as table
from .numpy_layers import FLOAT32, NumpyLayers, Pieces

# Matrices of low rank are a few percent of all, and what they compute steers the state: int4 leaves them 8 bits.
FINER = {"int4": "int8"}


class NumbaLayers(NumpyLayers):
    """Matrices in one of `matrices.FORMATS`; the embedding, of which a token reads one row, in bfloat16 or float32."""

    def __init__(self, weights, sizes, dtype, loaded):
        self.dtype = dtype
        super().load(weights, sizes, loaded, partial(kept, dtype))
        everything = [*vars(self.whole).values(), *(x for layer in self.layers for x in vars(layer).values())]
        self.nbytes = sum(array.nbytes for array in everything)
        self.step_bytes = self.nbytes - self.whole.embedding.nbytes

    def __repr__(self):
        return f"NumbaLayers({len(self.layers)} layers, {self.dtype}, {self.nbytes:,} bytes)"

    def logits(self, tokens, state, rows, last):
        """[T, V], or [N, V] of each sequence's last token."""
        board = Board()
        if not rows.single or len(tokens) > FEW:
            return self.run(Prompt(rows, board), tokens, state, rows, last)
        with board.helped(self.step_bytes):
            slots = np.arange(len(tokens)) if rows.slots is None else rows.slots
            return self.run(Step(rows, board, slots), tokens, state, rows, last)


def kept(format, field, weight, arrays):
    """A weight as products or the mixes take it."""
    if field != "embedding" and all(isinstance(array, Stored) and array.format == format for array in arrays):
        return Stored.matrix(arrays)
    array = table.stacked(arrays)
    if not weight.matrix or (field == "embedding" and format == "float32"):
        return np.ascontiguousarray(array, FLOAT32)
    if field == "embedding":
        return array.astype(BFLOAT16)
    if weight.inputs_first:
        return pack(array.swapaxes(-1, -2), FINER.get(format, format))
    return pack(array, format)


@dataclass
class Prompt(Pieces):
    """`math.Pieces` on such matrices; NumPy's exponentials are faster than Numba's, its passes are not."""

    board: Board

    def multiply(self, matrix, x):
        return matrix(x, self.board)

    def data_mix(self, layer, low, xx, d):
        low = np.tanh(low).reshape(len(low), 5, -1).swapaxes(0, 1)
        m = self.product(layer, "maa_up", low)
        loops.data_mix(m, layer.maa, xx, d)
        return m

    def relu_squared(self, x):
        loops.relu_squared(x)
        return x


@dataclass
class Step(Prompt):
    """The same for a token of each of a few sequences; `slots` has each one's row of the state."""

    slots: np.ndarray

    def shift_mix(self, layer, norm, maa, x, shift):
        norm, maa = getattr(layer, norm), getattr(layer, maa)
        maa = maa.reshape(-1, maa.shape[-1])
        mixed, xx, d = np.empty((len(maa), *x.shape), FLOAT32), np.empty_like(x), np.empty_like(x)
        loops.shift_mix(x, norm, maa, shift, self.slots, math.LAYER_NORM_EPS, mixed, xx, d)
        return mixed, xx, d

    def log_decay(self, layer, low):
        w = self.product(layer, "decay_up", np.tanh(low))
        loops.log_decay(w, layer.decay)
        return w

    def recurrence(self, layer, kvr, w, wkv):
        o = np.empty_like(w)
        loops.recurrence(kvr, w, layer.bonus, wkv, self.slots, o)
        return o

    def gated_norm(self, layer, o, gate):
        loops.gated_norm(o, gate, layer.ln_x, len(layer.bonus), math.GROUP_NORM_EPS)
        return o

    def add_gated(self, x, gate, value):
        loops.add_gated(x, gate, value)
        return x
