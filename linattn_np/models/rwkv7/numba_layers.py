"""RWKV-7's layers on the CPU by Numba's loops. Arguments of operations: see `numpy_layers`; loops write to their first
argument."""

from typing import ClassVar

import numpy as np

from ..rwkv import numba_layers
from ..rwkv.numba_loops import tanh_in_place
from . import math, numba_loops, numpy_layers
from .names import VERSION


class PromptOperations(numba_layers.PromptOperations, numpy_layers.MixOperations):
    """`math.MixOperations` on matrices in few bits."""

    def log_decay(self, layer, low):
        tanh_in_place(low)
        return self.opened(layer, "decay", low, -math.DECAY)

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
        return numba_loops.keys(k, icl, layer.removal, layer.replacement, len(layer.bonus)), k

    def bonus_norm(self, layer, o, r, k, v, gate):
        o = np.ascontiguousarray(o.reshape(gate.shape))
        bonus = layer.bonus.ravel()
        numba_loops.bonus_norm(o, r, k, v, gate, layer.ln_x, bonus, len(layer.bonus), self.layers.group_eps)
        return o


class NumbaLayers(numba_layers.NumbaLayers):
    version = VERSION
    mixes: ClassVar = math
    operations = PromptOperations
    loops: ClassVar = numba_loops
