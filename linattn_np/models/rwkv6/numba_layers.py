"""RWKV-6's layers on the CPU by Numba's loops. Arguments of operations: see `numpy_layers`; loops write to their first
argument."""

from typing import ClassVar

import numpy as np

from ..rwkv import numba_layers
from ..rwkv.numba_loops import tanh_in_place
from . import math, numba_loops, numpy_layers
from .names import VERSION


class PromptOperations(numba_layers.PromptOperations, numpy_layers.MixOperations):
    """`math.MixOperations` on matrices in few bits."""

    def data_mix(self, layer, low, xx, d):
        tanh_in_place(low)
        low = low.reshape(len(low), 5, -1).swapaxes(0, 1)
        m = self.product(layer, "maa_up", low)
        numba_loops.data_mix(m, layer.maa, xx, d)
        return m

    def gated_norm(self, layer, o, gate):
        o = np.ascontiguousarray(o.reshape(gate.shape))
        numba_loops.gated_norm(o, gate, layer.ln_x, len(layer.bonus), self.layers.group_eps)
        return o

    def add_gated(self, x, gate, value):
        numba_loops.add_gated(x, gate, value)
        return x


class NumbaLayers(numba_layers.NumbaLayers):
    version = VERSION
    mixes: ClassVar = math
    operations = PromptOperations
    loops: ClassVar = numba_loops
