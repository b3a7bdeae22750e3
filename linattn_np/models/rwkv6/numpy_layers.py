"""RWKV-6's layers in NumPy and float32, on rows of tokens [T, D]."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...ops.functions import rwkv6
from ...ops.steps import rwkv6_step
from .. import array_math
from ..devices import on_host
from . import math
from . import weights as table
from .state import Rows

FLOAT32 = np.dtype(np.float32)


class NumpyLayers:
    """Weights and what computes with them."""

    device, Array, asarray, zeros = "cpu", np.ndarray, staticmethod(on_host), staticmethod(np.zeros)
    state_dtype, turn = FLOAT32, staticmethod(nullcontext)  # each call has arrays of its own

    def __init__(self, weights, sizes, dtype, loaded):
        self.dtype = dtype
        self.load(weights, sizes, loaded, kept)

    def load(self, weights, sizes, loaded, kept):
        """All weights, each as `kept` makes it of the parameters."""
        self.layer_eps, self.group_eps = table.eps(weights)
        array_of = partial(loaded_array, weights, loaded, kept)
        self.whole = table.whole(array_of)
        self.layers = [table.layer(f"blocks.{i}.", array_of) for i in range(sizes["L"])]
        self.tuned = [array.astype(FLOAT32) for array in table.tuned(weights)]
        for array in table.tuned(weights):
            loaded(array)

    def __repr__(self):
        return f"NumpyLayers({len(self.layers)} layers, {self.dtype})"

    def logits(self, tokens, state, rows, last):
        """[T, V], or [N, V] of each sequence's last token."""
        return self.run(Pieces(self, rows), tokens, state, rows, last)

    def run(self, do, tokens, state, rows, last):
        whole = self.whole
        x = array_math.layer_norm(whole.embedding[tokens].astype(FLOAT32, copy=False), whole.ln0, self.layer_eps)
        for layer, att_shift, wkv, ffn_shift in zip(self.layers, *state.arrays):
            x = math.time_mix(do, layer, x, att_shift, wkv)
            x = math.channel_mix(do, layer, x, ffn_shift)
        return do.multiply(whole.head, array_math.layer_norm(x[rows.last] if last else x, whole.ln_out, self.layer_eps))


def loaded_array(weights, loaded, kept, field, weight, names):
    array = kept(field, weight, table.plain(weights, names))
    for name in names:
        loaded(weights[name])
    return array


def kept(field, weight, arrays):
    """A weight in float32; a matrix, but for the embedding, is [..., K, M], if need be a view."""
    array = table.stacked(arrays).astype(FLOAT32, copy=False)
    return array if not weight.matrix or weight.inputs_first or field == "embedding" else array.swapaxes(-1, -2)


@dataclass
class Pieces:
    """`math.Pieces` on NumPy arrays; `shift` [P, D] and `wkv` [P, H, N, N] are updated in place."""

    layers: NumpyLayers
    rows: Rows

    def shift_mix(self, layer, norm, maa, x, shift):
        xx = array_math.layer_norm(x, getattr(layer, norm), self.layers.layer_eps)
        d = token_shift(xx, shift, self.rows)
        return xx + d * array_math.beside(getattr(layer, maa), x), xx, d

    def product(self, layer, name, x):
        return self.multiply(getattr(layer, name), x)

    def multiply(self, matrix, x):
        return x @ matrix

    def data_mix(self, layer, low, xx, d):
        low = np.tanh(low).reshape(len(low), 5, -1).swapaxes(0, 1)  # [5, T, A]
        return xx + d * (array_math.beside(layer.maa, xx) + self.product(layer, "maa_up", low))

    def log_decay(self, layer, low):
        return array_math.log_decay(layer.decay, self.product(layer, "decay_up", np.tanh(low)))

    def recurrence(self, layer, kvr, w, wkv):
        rows = self.rows
        k, v, r, w = (array.reshape(len(array), *layer.bonus.shape) for array in (*kvr, w))
        if rows.single:
            return rwkv6_step(r, k, v, w, layer.bonus, wkv, scale=1.0, slots=rows.slots)
        o, wkv[rows.states] = rwkv6(
            r[None],
            k[None],
            v[None],
            w[None],
            layer.bonus,
            scale=1.0,
            layout="bthd",
            cu_seqlens=rows.bounds,
            initial_state=wkv[rows.states],
            output_final_state=True,
        )
        return o[0]

    def gated_norm(self, layer, o, gate):
        return array_math.gated(array_math.normalize(o, self.layers.group_eps).reshape(gate.shape), *layer.ln_x, gate)

    def relu_squared(self, x):
        return array_math.relu_squared(x)

    def add_product(self, layer, name, x, y):
        x += self.product(layer, name, y)
        return x

    def add_gated(self, x, gate, value):
        x += array_math.sigmoid_gate(gate, value)
        return x


def token_shift(x, shift, rows):
    """x_{t-1} - x_t within every sequence of x [T, D]; `shift` [P, D] has each one's x_{-1}, afterwards its last."""
    if rows.single:
        before = shift[rows.states] - x
        shift[rows.states] = x
        return before
    before = np.empty_like(x)
    before[1:] = x[:-1]
    before[rows.first] = shift[rows.states]
    shift[rows.states] = x[rows.last]
    before -= x
    return before
