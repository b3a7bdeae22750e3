"""RWKV-6's loss and its gradients on NumPy arrays, without a framework; the equations are `RWKV6`'s.

A name with d, such as dk, is the gradient of the loss with respect to k; d alone is the token shift, the previous
token's xx less xx, of normed channels xx. `grads` has the fields of `layer`, for the gradients of the weights.
"""

from functools import partial

import numpy as np

from ...ops.functions import rwkv6
from ..array_math import affine_times_silu, beside, sigmoid
from ..rwkv import grad
from ..rwkv.grad import mixes_vjp, normalize, relu_squared_vjp, sigmoid_vjp, sum_over_tokens, tanh_vjp
from . import mixes


class RecordingOperations(grad.RecordingOperations):
    """`mixes.MixOperations` that store what `time_mix_vjp` and `channel_mix_vjp` need. `low` is the product with the
    first matrix of a low-rank pair, m the weights of the five mixes xx + d m."""

    def data_mix(self, layer, low, xx, d):
        self.low = np.tanh(low).reshape(*low.shape[:2], 5, -1)
        self.m = self.product(layer, "maa_up", self.low.transpose(2, 0, 1, 3))
        self.m += beside(layer.maa, xx)
        return xx + d * self.m

    def log_decay(self, layer, low):
        self.decay_low = np.tanh(low)
        self.w = -np.exp(layer.decay + self.product(layer, "decay_up", self.decay_low))
        return self.w

    def recurrence(self, layer, kvr, w, wkv):
        heads, cast = (*w.shape[:2], *layer.bonus.shape), self.products.cast
        k, v, r = cast(kvr).reshape(3, *heads)
        return self.recurrence_of(layer, rwkv6, r, k, v, w.reshape(heads), cast(layer.bonus))

    def gated_norm(self, layer, o, gate):
        self.o, self.gate = o, gate
        normed, self.pull_group = normalize(o.astype(gate.dtype, copy=False), self.group_eps)
        self.normed = normed.reshape(gate.shape)
        return affine_times_silu(self.normed, *layer.ln_x, gate)

    def add_gated(self, x, gate, value):
        self.opening, self.value = sigmoid(gate), value
        return self.add(x, self.opening * value)


def time_mix_vjp(ops, layer, dy, grads):
    """The gradient of x from `dy`, that of the residual after the mix; those of the layer's weights go to `grads`.

    ops : the `RecordingOperations` with which `mixes.time_mix` was computed
    """
    pulls, normed, gate, d = ops.pulls, ops.normed, ops.gate, ops.d
    daffine, dgate = gated_vjp(pulls["output"](ops.pull_drop(dy), grads.output), normed, *layer.ln_x, gate)
    grads.ln_x[0], grads.ln_x[1] = sum_over_tokens(daffine * normed), sum_over_tokens(daffine)
    doutput = ops.pull_group((daffine * layer.ln_x[0]).reshape(ops.o.shape))
    dr, dk, dv, dw, du = ops.pull_recurrence(doutput.astype(ops.o.dtype, copy=False), grads)
    grads.bonus[...] = du
    ddecay = dw.reshape(dy.shape) * ops.w  # w = -exp(decay + ...) is its own derivative
    grads.decay[...] = sum_over_tokens(ddecay)
    dlow = tanh_vjp(pulls["decay_up"](ddecay, grads.decay_up), ops.decay_low)
    dmixed_w = pulls["decay_down"](dlow, grads.decay_down)
    dkvrg = np.stack([gradient.reshape(dy.shape) for gradient in (dk, dv, dr, dgate)])
    dmixed = np.concatenate((dmixed_w[None], pulls["kvrg"](dkvrg, grads.kvrg)))
    dm = dmixed * d
    grads.maa[...] = sum_over_tokens(dm)
    dlow = pulls["maa_up"](dm, grads.maa_up).transpose(1, 2, 0, 3)
    dlow = tanh_vjp(dlow, ops.low)
    dmixed_x = pulls["maa_down"](dlow.reshape(*dlow.shape[:2], -1), grads.maa_down)
    grads.maa_x[...] = sum_over_tokens(dmixed_x * d)
    dd = dmixed_x * layer.maa_x + (dmixed * ops.m).sum(axis=0)
    return dy + ops.pull_norm(dmixed_x + dmixed.sum(axis=0) + ops.pull_shift(dd), grads.ln1)


def channel_mix_vjp(ops, layer, dy, grads):
    """As `time_mix_vjp`, for `mixes.channel_mix`."""
    pulls, dchange = ops.pulls, ops.pull_drop(dy)
    dgate = sigmoid_vjp(dchange * ops.value, ops.opening)
    dhidden = relu_squared_vjp(pulls["ffn_value"](dchange * ops.opening, grads.ffn_value), ops.hidden)
    dk, dr = pulls["ffn_key"](dhidden, grads.ffn_key), pulls["ffn_receptance"](dgate, grads.ffn_receptance)
    return dy + mixes_vjp(ops, np.stack((dk, dr)), layer.ffn_maa, grads.ffn_maa, grads.ln2)


MIXES = ((mixes.time_mix, time_mix_vjp), (mixes.channel_mix, channel_mix_vjp))
loss = partial(grad.loss, RecordingOperations, MIXES)


def gated_vjp(dy, x, weight, bias, gate):
    """The gradients of x weight + bias and of the gate, for y = (x weight + bias) silu(gate)."""
    opening = sigmoid(gate)
    silu = gate * opening
    return dy * silu, dy * (x * weight + bias) * (opening + silu * (1 - opening))
