"""RWKV-6's layers on the CPU by Numba's loops: the operations of prompts. A step of one token is one loop, `step`.

Each operation computes what `mixes.MixOperations` says of its name. Arrays are float32, [T, D] for T tokens and D
channels, in H heads of N:

    layer     the arrays of `weights.LAYER`: maa [5, D], the weights of the mixes w k v r g; ln_x (weight, bias) [2, D];
              bonus [H, N]; the matrix maa_up, for `product`
    xx, d     the normed x; the previous token's xx less xx
    low       [T, 5 ranks]: the product with maa_down; m [5, T, D]: the products with maa_up, and then the five mixes
    o         [T, H, N], the result of the recurrence; gate: the output gate

A loop overwrites its first argument: `low`, m, o or the residual x, which nobody reads as they were before.
"""

from typing import ClassVar

import numpy as np

from ..rwkv import numba_layers
from ..rwkv.numba_loops import tanh_in_place
from . import numba_loops, numpy_layers


class PromptOperations(numba_layers.PromptOperations, numpy_layers.MixOperations):
    """`mixes.MixOperations` by loops, with matrices of the module `matrices`, in float32 or fewer bits."""

    def data_mix(self, layer, low, xx, d):
        tanh_in_place(low)
        low = low.reshape(len(low), 5, -1).swapaxes(0, 1)
        m = self.product(layer, "maa_up", low)
        numba_loops.data_mix(m, layer.maa, xx, d)
        return m

    def gated_norm(self, layer, o, gate):
        # copied only if the recurrence has returned another order of axes
        o = np.ascontiguousarray(o.reshape(gate.shape))
        numba_loops.gated_norm(o, gate, layer.ln_x, len(layer.bonus), self.layers.group_eps)
        return o

    def add_gated(self, x, gate, value):
        numba_loops.add_gated(x, gate, value)
        return x


class NumbaLayers(numba_layers.NumbaLayers, numpy_layers.NumpyLayers):
    """The general layers of loops with RWKV-6's tables and mixes, operations of prompts and loops."""

    operations = PromptOperations
    loops: ClassVar = numba_loops
