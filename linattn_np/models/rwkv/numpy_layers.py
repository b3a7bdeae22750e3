"""The layers of an RWKV model in NumPy and float32, on rows of tokens [T, D]."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from .. import array_math
from ..devices import on_host
from .state import CallSequences
from .version import Version, hidden_act, initial_states, name_in_block, stacked

FLOAT32 = np.dtype(np.float32)


class NumpyLayers:
    """The weights of all layers, and the computation of logits. Several threads may call it, with different states.

    A version's subclass sets `version`; `mixes`, a module with the functions `time_mix` and `channel_mix`; and
    `operations`, the class with the operations that these functions call. The arguments `tokens`, `state`, `sequences`
    and `last` of methods are those of `Model.forward`, which has checked them; `tokens` is [T], of all sequences.
    """

    # What `Model` reads of its layers, besides methods: where they are; the class of arrays, and how to make them; the
    # dtype of a state; and `turn`, a context for a call.
    makes_states = False
    device, Array, asarray, zeros = "cpu", np.ndarray, staticmethod(on_host), staticmethod(np.zeros)
    state_dtype, turn = FLOAT32, staticmethod(nullcontext)  # `Model.turn` needs no lock: calls share no buffers
    version: ClassVar[Version]
    mixes: ClassVar[ModuleType]
    operations: ClassVar[type[MixOperations]]

    def __init__(self, weights, sizes, dtype, loaded):
        self.dtype = dtype
        self.load(weights, sizes, loaded, in_float32)

    def load(self, weights, sizes, loaded, convert):
        """Loads all weights. ``convert(field, weight, arrays)`` makes the array of a `Weight` from the parameters
        `arrays`; `field` is its name in the layers. ``loaded(parameter)`` counts the bytes that are loaded."""
        version = self.version
        self.layer_eps, self.group_eps = version.norm_eps(weights)
        self.hidden_act = hidden_act(weights)
        array_of = partial(loaded_array, version, weights, loaded, convert)
        self.model_weights = version.model_arrays(array_of)
        self.layers = [version.layer_arrays(f"blocks.{i}.", array_of) for i in range(sizes["L"])]
        trained_states = initial_states(weights)  # of every layer, or none
        self.initial_wkv = [array.astype(FLOAT32) for array in trained_states]
        for array in trained_states:
            loaded(array)

    def __repr__(self):
        return f"{type(self).__name__}({len(self.layers)} layers, {self.dtype})"

    def logits(self, tokens, state, sequences, last):
        """Logits [T, V]; if `last`, a row for the last token of each sequence."""
        return self.head(self.hidden(tokens, state, sequences, last))

    def hidden(self, tokens, state, sequences, last):
        """The head's input [T, D]; if `last`, a row for the last token of each sequence."""
        return self.run(self.operations_for(sequences), tokens, state, sequences, last)

    def head(self, x):
        """Logits [n, V] of rows of the head's input, x [n, D]."""
        return self.operations_for(None).multiply(self.model_weights.head, x)

    def operations_for(self, sequences):
        return self.operations(self, sequences)

    def run(self, ops, tokens, state, sequences, last):
        """Runs all layers with the operations `ops`, which update `state`; returns the head's input."""
        weights = self.model_weights
        x = array_math.layer_norm(weights.embedding[tokens].astype(FLOAT32, copy=False), weights.ln0, self.layer_eps)
        for layer, att_shift, wkv, ffn_shift in zip(self.layers, *state.arrays):
            x = self.mixes.time_mix(ops, layer, x, att_shift, wkv)
            x = self.mixes.channel_mix(ops, layer, x, ffn_shift)
        return array_math.layer_norm(x[sequences.last_tokens] if last else x, weights.ln_out, self.layer_eps)


def loaded_array(version, weights, loaded, convert, field, weight, names):
    """The array of one weight, as `NumpyLayers.load` describes it; `names`: the full names of its parameters."""
    axes = version.block.get(name_in_block(names[0]), "").split()  # such as ["1", "1", "D"]; [] outside the layers
    ones = axes.count("1")  # axes of size 1, which are all at the beginning, and are removed
    array = convert(field, weight, [weights[name].reshape(weights[name].shape[ones:]) for name in names])
    for name in names:
        loaded(weights[name])
    return array


def in_float32(field, weight, arrays):
    """A weight in float32; matrices other than the embedding are [..., inputs, outputs], for products x W."""
    array = stacked(arrays).astype(FLOAT32, copy=False)
    return array if not weight.matrix or weight.inputs_first or field == "embedding" else array.swapaxes(-1, -2)


@dataclass
class MixOperations:
    """`mix_operations.CommonOperations` on NumPy arrays.

    The parts `shift` [P, D] and `wkv` [P, H, N, N] of a layer's state are updated in place. P: the sequences that the
    state holds, of which a call may have a part; H heads of N channels. Each call of the layers makes an object of its
    own.
    """

    layers: Any  # a `NumpyLayers`, for the eps of layer norms and the activation
    sequences: CallSequences

    def shift_mix(self, layer, norm, maa, x, shift):
        # xx: the normed x; d: the previous token's xx less xx; maa: the name of the weights of the mixes.
        xx = array_math.layer_norm(x, getattr(layer, norm), self.layers.layer_eps)
        d = token_shift(xx, shift, self.sequences)
        return xx + d * array_math.beside(getattr(layer, maa), x), xx, d

    def product(self, layer, name, x):
        return self.multiply(getattr(layer, name), x)

    def multiply(self, matrix, x):
        return x @ matrix

    def recurrence_of(self, operator, step, arrays, vectors, wkv):
        """The result [T, H, N] of `operator`, or of its `step` if each sequence has one token; updates `wkv`.

        operator, step : `linattn_np.rwkv6` and `linattn_np.rwkv6_step`, for example
        arrays, vectors : the operator's arguments in their order: those with tokens, [T, H, N], then those without
        """
        sequences = self.sequences
        if sequences.one_token_each:
            return step(*arrays, *vectors, wkv, scale=1.0, slots=sequences.slots)
        o, wkv[sequences.state_rows] = operator(
            *(array[None] for array in arrays),
            *vectors,
            scale=1.0,
            layout="bthd",
            cu_seqlens=sequences.bounds,
            initial_state=wkv[sequences.state_rows],
            output_final_state=True,
        )
        return o[0]

    def squared_product(self, layer, name, x):
        return array_math.ACTIVATIONS[self.layers.hidden_act](self.product(layer, name, x))

    def add_product(self, layer, name, x, y):
        x += self.product(layer, name, y)
        return x


def token_shift(x, shift, sequences):
    """x_{t-1} - x_t for x [T, D], in every sequence.

    shift : [P, D]. The row of each sequence holds x of the token before the sequence's first one, and is replaced by x
        of its last one
    """
    if sequences.one_token_each:
        d = shift[sequences.state_rows] - x
        shift[sequences.state_rows] = x
        return d
    d = np.empty_like(x)
    d[1:] = x[:-1]
    d[sequences.first_tokens] = shift[sequences.state_rows]
    shift[sequences.state_rows] = x[sequences.last_tokens]
    d -= x
    return d
