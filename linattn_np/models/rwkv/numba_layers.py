"""The layers of an RWKV model on the CPU in Numba's loops; a step, one token of each sequence, is a single call."""

from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import ClassVar

import numpy as np

from ...array_kinds import BFLOAT16
from ..helper_threads import Board
from ..matrices import MOST_BY_LOOPS, Pool, pack
from ..matrix_loops import multiply
from ..quantised import Stored
from . import numba_loops as loops
from .numpy_layers import FLOAT32, MixOperations, NumpyLayers, token_shift
from .version import SQRELU, stacked

# {format of the large matrices: another format, of the low-rank ones}; these are small, and decays depend on them.
LOW_RANK_FORMAT = {"int4": "int8"}


class NumbaLayers(NumpyLayers):
    """Layers with matrices in one of `matrices.FORMATS`; the embedding is bfloat16, or float32 in that format.

    A version's subclass also sets `loops`, the module of its `step` and of the tables VECTORS, with FIRST and END, and
    MATRICES.
    """

    loops: ClassVar[ModuleType]

    def __init__(self, weights, sizes, dtype, loaded):
        self.dtype = dtype
        pool = Pool()  # neighbouring memory for all matrices, which a step reads one after the other
        super().load(weights, sizes, loaded, partial(packed, dtype, pool))
        self.make_step_arguments()
        everything = [*vars(self.model_weights).values(), *(x for layer in self.layers for x in vars(layer).values())]
        self.nbytes = sum(array.nbytes for array in everything)
        self.step_bytes = self.nbytes - self.model_weights.embedding.nbytes

    def __repr__(self):
        return f"{type(self).__name__}({len(self.layers)} layers, {self.dtype}, {self.nbytes:,} bytes)"

    def logits(self, tokens, state, sequences, last):
        """Logits [T, V], or [N, V] for each sequence's last token."""
        many = self.dtype == "float32" and len(tokens) > MOST_BY_LOOPS
        # the loop of a step has RWKV's own activation
        if not sequences.one_token_each or many or self.hidden_act != SQRELU:
            return super().logits(tokens, state, sequences, last)
        board = Board()  # one for each call, so that several threads may decode
        x = self.model_weights.embedding[tokens].astype(FLOAT32, copy=False)
        slots = np.arange(len(tokens)) if sequences.slots is None else sequences.slots
        state_arrays = [*map(np.ascontiguousarray, state.arrays)]  # for strided ones Numba would compile the loop again
        with board.helped(self.step_bytes):
            eps = self.layer_eps, self.group_eps
            logits = self.loops.step(multiply.address, board.array, *self.step_arguments, eps, x, *state_arrays, slots)
        for array, updated in zip(state.arrays, state_arrays):
            if array is not updated:
                array[...] = updated
        return logits

    def operations_for(self, sequences):
        """The operations of one call, for prompts."""
        return self.operations(self, sequences, Board())

    def __getstate__(self):
        """The attributes for copies and pickles: all but the addresses of matrices."""
        return {name: value for name, value in vars(self).items() if name != "step_arguments"}

    def __setstate__(self, attributes):
        vars(self).update(attributes)
        self.make_step_arguments()

    def make_step_arguments(self):
        """Sets `step_arguments`, for `step`: the descriptions of all matrices, and all vectors in one array.

        The layers' own vectors become views of this array. Matrices and vectors that a layer lacks are 0. Called
        again for a copy, as its matrices have other addresses.
        """
        head, norms = self.model_weights.head, np.concatenate([self.model_weights.ln0, self.model_weights.ln_out])
        matrices = np.zeros((len(self.layers), len(self.loops.MATRICES), len(head.description)), np.int64)
        vectors = np.zeros((len(self.layers), sum(self.loops.VECTORS.values()), norms.shape[-1]), FLOAT32)
        for i, layer in enumerate(self.layers):
            for index, name in enumerate(self.loops.MATRICES):
                if name in vars(layer):
                    matrices[i, index] = getattr(layer, name).description
            for name, first, end in zip(self.loops.VECTORS, self.loops.FIRST, self.loops.END):
                if name in vars(layer):
                    part = vectors[i, first:end].reshape(getattr(layer, name).shape)
                    part[:] = getattr(layer, name)
                    setattr(layer, name, part)
        self.step_arguments = matrices, head.description, vectors, norms


def packed(format, pool, field, weight, arrays):
    """A weight as the layers read it: a packed matrix in `format`, in a `Pool`; bfloat16 or float32 for the embedding;
    or a float32 array. `field`, `weight` and `arrays` are as in `NumpyLayers.load`."""
    if field != "embedding" and all(isinstance(array, Stored) and array.format == format for array in arrays):
        return pool.move(Stored.matrix(arrays))
    array = stacked(arrays)
    if not weight.matrix or (field == "embedding" and format == "float32"):
        return np.ascontiguousarray(array, FLOAT32)
    if field == "embedding":
        return array.astype(BFLOAT16)
    if weight.inputs_first:
        return pool.move(pack(array.swapaxes(-1, -2), LOW_RANK_FORMAT.get(format, format)))
    return pool.move(pack(array, format))


@dataclass
class PromptOperations(MixOperations):
    """The operations of mixes for prompts, with packed matrices; loops replace NumPy where they are faster."""

    board: Board  # by which threads share products

    def multiply(self, matrix, x):
        return matrix(x, self.board)

    def shift_mix(self, layer, norm, maa, x, shift):
        xx = loops.layer_norm(x, getattr(layer, norm), self.layers.layer_eps)
        d = token_shift(xx, shift, self.sequences)
        return loops.mixed(xx, d, np.atleast_2d(getattr(layer, maa))), xx, d

    def squared_product(self, layer, name, x):
        if self.layers.hidden_act != SQRELU:
            return super().squared_product(layer, name, x)
        y = self.product(layer, name, x)
        loops.relu_squared(y)
        return y
