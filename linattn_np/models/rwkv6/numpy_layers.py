"""RWKV-6's layers in NumPy and float32, on rows of tokens [T, D], those of a call's sequences one after the other.

`layer` has the arrays of `LAYER` in weights.py. xx are the normed channels of the tokens, d = (those of the tokens
before) - xx, `low` the product with the first matrix of a low-rank pair, before its tanh. `wkv` is the layer's
recurrent state [P, H, N (keys), N (values)] of P sequences, updated in place.
"""

from typing import ClassVar

import numpy as np

from ...ops.functions import rwkv6
from ...ops.steps import rwkv6_step
from .. import array_math
from ..rwkv import numpy_layers
from . import mixes
from .names import VERSION


class MixOperations(numpy_layers.MixOperations):
    """`mixes.MixOperations`, which says what each of them computes, on NumPy arrays."""

    def data_mix(self, layer, low, xx, d):
        low = np.tanh(low).reshape(len(low), 5, -1).swapaxes(0, 1)  # [5, T, A], A the rank; w k v r g, as in layer.maa
        return xx + d * (array_math.beside(layer.maa, xx) + self.product(layer, "maa_up", low))

    def log_decay(self, layer, low):
        return -np.exp(layer.decay + self.product(layer, "decay_up", np.tanh(low)))

    def recurrence(self, layer, kvr, w, wkv):
        # in heads, and in the order of `rwkv6`
        k, v, r, w = (array.reshape(len(array), *layer.bonus.shape) for array in (*kvr, w))
        return self.recurrence_of(rwkv6, rwkv6_step, (r, k, v, w), (layer.bonus,), wkv)

    def gated_norm(self, layer, o, gate):
        normed = array_math.normalize(o, self.layers.group_eps)  # of each head: o is [T, H, N]
        return array_math.affine_times_silu(normed.reshape(gate.shape), *layer.ln_x, gate)

    def add_gated(self, x, gate, value):
        x += array_math.sigmoid(gate) * value
        return x


class NumpyLayers(numpy_layers.NumpyLayers):
    """What the general layers lack: RWKV-6's tables (`version`), mixes and operations."""

    version = VERSION
    mixes: ClassVar = mixes
    operations: ClassVar[type[numpy_layers.MixOperations]] = MixOperations
