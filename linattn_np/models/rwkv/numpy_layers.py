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
from .state import Rows
from .version import Version, initial_states, name_in_block, stacked

FLOAT32 = np.dtype(np.float32)


class NumpyLayers:
    """The weights of all layers, and the computation of logits.

    A version's subclass sets `version`; `mixes`, a module with the functions `time_mix` and `channel_mix`; and
    `operations`, the class with the operations that these functions call.
    """

    device, Array, asarray, zeros = "cpu", np.ndarray, staticmethod(on_host), staticmethod(np.zeros)
    state_dtype, turn = FLOAT32, staticmethod(nullcontext)  # calls need no lock: each has arrays of its own
    version: ClassVar[Version]
    mixes: ClassVar[ModuleType]
    operations: ClassVar[type[MixOperations]]

    def __init__(self, weights, sizes, dtype, loaded):
        self.dtype = dtype
        self.load(weights, sizes, loaded, in_float32)

    def load(self, weights, sizes, loaded, convert):
        """Loads all weights. ``convert(field, weight, arrays)`` makes the array of each from its parameters; `loaded`
        is called with each parameter."""
        version = self.version
        self.layer_eps, self.group_eps = version.norm_eps(weights)
        array_of = partial(loaded_array, version, weights, loaded, convert)
        self.model_weights = version.model_arrays(array_of)
        self.layers = [version.layer_arrays(f"blocks.{i}.", array_of) for i in range(sizes["L"])]
        self.tuned = [array.astype(FLOAT32) for array in initial_states(weights)]
        for array in initial_states(weights):
            loaded(array)

    def __repr__(self):
        return f"{type(self).__name__}({len(self.layers)} layers, {self.dtype})"

    def logits(self, tokens, state, rows, last):
        """Logits [T, V], or [N, V] for each sequence's last token."""
        ops = self.operations_for(rows)
        return ops.multiply(self.model_weights.head, self.run(ops, tokens, state, rows, last))

    def hidden(self, tokens, state, rows, last):
        """The head's input [T, D], or [N, D] for each sequence's last token."""
        return self.run(self.operations_for(rows), tokens, state, rows, last)

    def operations_for(self, rows):
        return self.operations(self, rows)

    def run(self, ops, tokens, state, rows, last):
        """Runs all layers with the operations `ops`; returns the head's input."""
        weights = self.model_weights
        x = array_math.layer_norm(weights.embedding[tokens].astype(FLOAT32, copy=False), weights.ln0, self.layer_eps)
        for layer, att_shift, wkv, ffn_shift in zip(self.layers, *state.arrays):
            x = self.mixes.time_mix(ops, layer, x, att_shift, wkv)
            x = self.mixes.channel_mix(ops, layer, x, ffn_shift)
        return array_math.layer_norm(x[rows.last] if last else x, weights.ln_out, self.layer_eps)


def loaded_array(version, weights, loaded, convert, field, weight, names):
    """The array of one weight, as `NumpyLayers.load` describes it; `names`: the full names of its parameters."""
    ones = version.block.get(name_in_block(names[0]), "").split().count("1")  # axes of size 1 that files have first
    array = convert(field, weight, [weights[name].reshape(weights[name].shape[ones:]) for name in names])
    for name in names:
        loaded(weights[name])
    return array


def in_float32(field, weight, arrays):
    """A weight in float32; matrices other than the embedding are [..., K, M], for products x W."""
    array = stacked(arrays).astype(FLOAT32, copy=False)
    return array if not weight.matrix or weight.inputs_first or field == "embedding" else array.swapaxes(-1, -2)


@dataclass
class MixOperations:
    """The operations of mixes that all versions have in common, on NumPy arrays; `rwkv6.math.MixOperations` specifies
    them.

    The parts `shift` [P, D] and `wkv` [P, H, N, N] of a layer's state are updated in place.
    """

    layers: Any  # the `NumpyLayers`
    rows: Rows

    def shift_mix(self, layer, norm, maa, x, shift):
        xx = array_math.layer_norm(x, getattr(layer, norm), self.layers.layer_eps)
        d = token_shift(xx, shift, self.rows)
        return xx + d * array_math.beside(getattr(layer, maa), x), xx, d

    def product(self, layer, name, x):
        return self.multiply(getattr(layer, name), x)

    def multiply(self, matrix, x):
        return x @ matrix

    def recurrence_of(self, operator, step, arrays, rest, wkv):
        """`operator` of `arrays` [T, H, N] and `rest` on all sequences, or its `step` if each has one token."""
        rows = self.rows
        if rows.single:
            return step(*arrays, *rest, wkv, scale=1.0, slots=rows.slots)
        o, wkv[rows.states] = operator(
            *(array[None] for array in arrays),
            *rest,
            scale=1.0,
            layout="bthd",
            cu_seqlens=rows.bounds,
            initial_state=wkv[rows.states],
            output_final_state=True,
        )
        return o[0]

    def relu_squared(self, x):
        return array_math.relu_squared(x)

    def add_product(self, layer, name, x, y):
        x += self.product(layer, name, y)
        return x


def token_shift(x, shift, rows):
    """x_{t-1} - x_t in every sequence of x [T, D]. `shift` [P, D] has x of the token before each sequence's first one;
    it gets x of the sequence's last one."""
    if rows.single:
        d = shift[rows.states] - x
        shift[rows.states] = x
        return d
    d = np.empty_like(x)
    d[1:] = x[:-1]
    d[rows.first] = shift[rows.states]
    shift[rows.states] = x[rows.last]
    d -= x
    return d
