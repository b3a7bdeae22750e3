"""RWKV-7's layers in NumPy and float32, on rows of tokens [T, D], those of a call's sequences one after the other.

`layer` has the arrays of `LAYER` in weights.py. `low` is the product with the first matrix of a low-rank pair, before
its activation, icl the in-context learning rate, kappa the normed key of what is removed. `wkv` is the layer's
recurrent state [P, H, N (keys), N (values)] of P sequences, updated in place.
"""

from typing import ClassVar

import numpy as np

from ...ops.functions import rwkv7
from ...ops.steps import rwkv7_step
from .. import array_math
from ..rwkv import numpy_layers
from . import mixes
from .names import VERSION


class MixOperations(numpy_layers.MixOperations):
    """`mixes.MixOperations`, which says what each of them computes, on NumPy arrays."""

    def log_decay(self, layer, low):
        opening = array_math.sigmoid(layer.decay + self.product(layer, "decay_up", np.tanh(low)))
        return -np.float32(mixes.DECAY) * opening

    def learning_rate(self, layer, low):
        return array_math.sigmoid(layer.icl + self.product(layer, "icl_up", low))

    def output_gate(self, layer, low):
        return self.product(layer, "gate_up", array_math.sigmoid(low))

    def first_value(self, v):
        """v, which is stored for the other layers' `residual_value`."""
        self.first_v = v
        return v

    def residual_value(self, layer, v, low):
        """v, moved towards the first layer's v."""
        return v + (self.first_v - v) * array_math.sigmoid(layer.value + self.product(layer, "value_up", low))

    def keys(self, layer, k, icl):
        """(kappa, the key with which the recurrence writes)."""
        kappa = (k * layer.removal).reshape(len(k), *layer.bonus.shape)
        norms = np.sqrt((kappa * kappa).sum(axis=-1, keepdims=True))
        kappa /= np.maximum(norms, np.float32(mixes.LEAST_NORM))
        return kappa.reshape(k.shape), k * (1 + (icl - 1) * layer.replacement)

    def recurrence(self, layer, r, w, k, v, kappa, icl, wkv):
        # in heads, and in the order of `rwkv7`
        heads = (array.reshape(len(array), *layer.bonus.shape) for array in (r, w, k, v, -kappa, kappa * icl))
        return self.recurrence_of(rwkv7, rwkv7_step, tuple(heads), vectors=(), wkv=wkv)

    def bonus_norm(self, layer, o, r, k, v, gate):
        """The group norm of o over each head, plus the bonus, times the output gate."""
        weight, bias = layer.ln_x
        normed = array_math.normalize(o, self.layers.group_eps).reshape(gate.shape)  # of each head: o is [T, H, N]
        heads = len(o), *layer.bonus.shape
        score = (r.reshape(heads) * k.reshape(heads) * layer.bonus).sum(axis=-1, keepdims=True)
        bonus = (score * v.reshape(heads)).reshape(gate.shape)
        return (normed * weight + bias + bonus) * gate


class NumpyLayers(numpy_layers.NumpyLayers):
    """What the general layers lack: RWKV-7's tables (`version`), mixes and operations."""

    version = VERSION
    mixes: ClassVar = mixes
    operations: ClassVar[type[numpy_layers.MixOperations]] = MixOperations
