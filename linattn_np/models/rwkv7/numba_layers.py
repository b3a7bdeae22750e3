"""RWKV-7's layers on the CPU by Numba's loops: the operations of prompts. A step of one token is one loop, `step`.

Each operation computes what `mixes.MixOperations` says of its name. Arrays are float32, [T, D] for T tokens and D
channels, in H heads of N:

    layer     the arrays of `weights.LAYER`. Vectors [D]: decay, icl and value, which are added before a sigmoid;
              removal and replacement, factors of k; bonus [H, N]; ln_x (weight, bias) [2, D]. Matrices: names in _up
    low       [T, rank]: the product with the first matrix, of a name in _down
    icl       the in-context learning rate. kappa: the key of what is removed, k removal over its norm, head by head
    first_v   the first layer's v, which `first_value` has stored
    o         [T, H, N], the result of the recurrence; gate: the output gate

A loop overwrites its first argument: `low`, k, v or o, new arrays of the call, which nobody reads as they were before.
"""

from typing import ClassVar

import numpy as np

from ..rwkv import numba_layers
from ..rwkv.numba_loops import tanh_in_place
from . import mixes, numba_loops, numpy_layers


class PromptOperations(numba_layers.PromptOperations, numpy_layers.MixOperations):
    """`mixes.MixOperations` by loops, with matrices of the module `matrices`, in float32 or fewer bits."""

    def log_decay(self, layer, low):
        tanh_in_place(low)
        return self.opened(layer, "decay", low, -mixes.DECAY)

    def learning_rate(self, layer, low):
        return self.opened(layer, "icl", low, 1.0)

    def opened(self, layer, name, low, factor):
        """factor sigmoid(base + low up^T), for the weights `name` (the base) and `name`_up."""
        y = self.product(layer, f"{name}_up", low)
        numba_loops.biased_sigmoid(y, getattr(layer, name), factor)
        return y

    def output_gate(self, layer, low):
        numba_loops.sigmoid_in_place(low)
        return self.product(layer, "gate_up", low)

    def residual_value(self, layer, v, low):
        numba_loops.residual_value(v, self.first_v, self.product(layer, "value_up", low), layer.value)
        return v

    def keys(self, layer, k, icl):
        # the loop returns kappa, and changes k to the key with which the recurrence writes
        return numba_loops.keys(k, icl, layer.removal, layer.replacement, len(layer.bonus)), k

    def bonus_norm(self, layer, o, r, k, v, gate):
        # copied only if the recurrence has returned another order of axes
        o = np.ascontiguousarray(o.reshape(gate.shape))
        bonus = layer.bonus.ravel()
        numba_loops.bonus_norm(o, r, k, v, gate, layer.ln_x, bonus, len(layer.bonus), self.layers.group_eps)
        return o


class NumbaLayers(numba_layers.NumbaLayers, numpy_layers.NumpyLayers):
    """The general layers of loops with RWKV-7's tables and mixes, operations of prompts and loops."""

    operations = PromptOperations
    loops: ClassVar = numba_loops
