"""RWKV-7's loss and its gradients on NumPy arrays, without a framework; the equations are `RWKV7`'s.

What lies between the mixed inputs and the output's matrix takes CuPy arrays too, for `cuda_grad`.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ...ops.functions import rwkv7
from ..array_math import affine, fused, lerp, library_of, sigmoid, tanh
from ..rwkv import grad
from ..rwkv.grad import normalize, relu_squared_vjp, tanh_vjp, total
from ..rwkv.version import GROUP_NORM_EPS
from . import math


class Mixes:
    """The two mixes and their pullbacks, as `rwkv.grad.loss` takes them.

    first : the first layer's values, once it has computed them
    dfirst : of the layers that have been pulled back, the sum of the gradients of `first`
    """

    def __init__(self, *how):
        self.how, self.first, self.dfirst = how, None, 0

    def recorded(self) -> Recorded:
        return Recorded(self, *self.how)

    def time_mix(self, layer, x):
        ops = self.recorded()
        return math.time_mix(ops, layer, x, None, None), partial(time_mix_vjp, ops, layer)

    def channel_mix(self, layer, x):
        ops = self.recorded()
        return math.channel_mix(ops, layer, x, None), partial(channel_mix_vjp, ops, layer)


loss = partial(grad.loss, Mixes)


class Recorded(grad.Recorded):
    """`math.MixOperations` that keep their pullbacks."""

    def __init__(self, mixes, *how):
        super().__init__(*how)
        self.mixes = mixes

    def log_decay(self, layer, low):
        self.decay_low = tanh(low)
        self.decay_opening = opened(self.product(layer, "decay_up", self.decay_low), layer.decay)
        return -math.DECAY * self.decay_opening

    def learning_rate(self, layer, low):
        self.icl = opened(self.product(layer, "icl_up", low), layer.icl)
        return self.icl

    def output_gate(self, layer, low):
        self.gate_opening = opened(low, 0.0)
        return self.product(layer, "gate_up", self.gate_opening)

    def first_value(self, v):
        self.mixes.first = v
        return v

    def residual_value(self, layer, v, low):
        self.change = self.mixes.first - v
        self.value_opening = opened(self.product(layer, "value_up", low), layer.value)
        return lerp(v, self.change, self.value_opening)

    def keys(self, layer, k, icl):
        self.k = k
        self.kappa, self.pull_kappa = unit_heads((k * layer.removal).reshape(*k.shape[:-1], *layer.bonus.shape))
        return self.kappa.reshape(k.shape), written(k, icl, layer.replacement)

    def recurrence(self, layer, r, w, k, v, kappa, icl, wkv):
        heads = *w.shape[:-1], *layer.bonus.shape
        r, k, v, a, b = (self.products.cast(x).reshape(heads) for x in (r, k, v, -kappa, kappa * icl))
        return self.recurrence_of(layer, rwkv7, r, w.reshape(heads), k, v, a, b).astype(w.dtype, copy=False)

    def bonus_norm(self, layer, o, r, k, v, gate):
        self.r, self.key, self.v = (x.reshape(o.shape) for x in (r, k, v))
        normed, self.pull_group = normalize(o, GROUP_NORM_EPS)
        self.share = (self.r * self.key * layer.bonus).sum(axis=-1, keepdims=True)
        self.normed, self.gate = normed.reshape(gate.shape), gate
        self.ungated = affine(self.normed, *layer.ln_x) + (self.share * self.v).reshape(gate.shape)
        return self.ungated * gate


def time_mix_vjp(ops, layer, dy, to):
    """The gradient of x; those of the layer's weights go to `to`."""
    dmixed = gated_vjp(ops, layer, ops.pulls["output"](ops.pull_drop(dy), to.output), to)
    return dy + mix_vjp(ops, stack_of(*dmixed), layer.mix, to.mix, to.ln1)


def gated_vjp(ops, layer, dgated, to):
    """The gradients of the six mixed inputs of `math.gated`, each [B, T, D]."""
    pulls = ops.pulls
    dungated = dgated * ops.gate
    dr, dw, dkey, dv, dkappa, dicl = recurrence_vjp(ops, layer, dungated, to)
    dk, dicl = keys_vjp(ops, layer, dkey, dkappa, dicl, to)
    if hasattr(layer, "value"):
        dopening = sigmoid_vjp(dv * ops.change, ops.value_opening)
        to.value[...] = total(dopening)
        dmixed_v = pulls["value_down"](pulls["value_up"](dopening, to.value_up), to.value_down)
        ops.mixes.dfirst += dv * ops.value_opening
        dv = dv * (1 - ops.value_opening)
    else:
        dmixed_v, dv = 0, dv + ops.mixes.dfirst
    dopening = -math.DECAY * sigmoid_vjp(dw, ops.decay_opening)
    to.decay[...] = total(dopening)
    dlow = tanh_vjp(pulls["decay_up"](dopening, to.decay_up), ops.decay_low)
    dmixed_w = pulls["decay_down"](dlow, to.decay_down)
    dopening = sigmoid_vjp(dicl, ops.icl)
    to.icl[...] = total(dopening)
    dmixed_a = pulls["icl_down"](pulls["icl_up"](dopening, to.icl_up), to.icl_down)
    dlow = sigmoid_vjp(pulls["gate_up"](dgated * ops.ungated, to.gate_up), ops.gate_opening)
    dmixed_g = pulls["gate_down"](dlow, to.gate_down)
    dmixed_k, dmixed_v2, dmixed_r = pulls["kvr"](stack_of(dk, dv, dr), to.kvr)
    return dmixed_w, dmixed_a, dmixed_g, dmixed_k, dmixed_v + dmixed_v2, dmixed_r


def recurrence_vjp(ops, layer, dungated, to):
    """Those of r, w, the key, v, kappa and the learning rate, [B, T, D]."""
    to.ln_x[0], to.ln_x[1] = total(dungated * ops.normed), total(dungated)
    dbonus = dungated.reshape(ops.r.shape)
    dshare = (dbonus * ops.v).sum(axis=-1, keepdims=True)
    to.bonus[...] = (dshare * ops.r * ops.key).sum(axis=1).sum(axis=0)
    doutput = ops.pull_group((dungated * layer.ln_x[0]).reshape(ops.r.shape))
    doutput = ops.products.cast(doutput)
    dr, dw, dkey, dv, da, db = (x.astype(ops.r.dtype, copy=False) for x in ops.pull_recurrence(doutput, to))
    dr, dkey, dv = dr + dshare * ops.key * layer.bonus, dkey + dshare * ops.r * layer.bonus, dv + dbonus * ops.share
    icl = ops.icl.reshape(da.shape)
    return (x.reshape(dungated.shape) for x in (dr, dw, dkey, dv, icl * db - da, ops.kappa * db))


def keys_vjp(ops, layer, dkey, dkappa, dicl, to):
    """Those of k and of the learning rate."""
    to.replacement[...] = total(dkey * ops.k * (ops.icl - 1))
    dremoved = ops.pull_kappa(dkappa.reshape(ops.kappa.shape)).reshape(ops.k.shape)
    to.removal[...] = total(dremoved * ops.k)
    dk = lerp(written(dkey, ops.icl, layer.replacement), dremoved, layer.removal)
    return dk, dicl + dkey * ops.k * layer.replacement


def channel_mix_vjp(ops, layer, dy, to):
    dhidden = relu_squared_vjp(ops.pulls["ffn_value"](ops.pull_drop(dy), to.ffn_value), ops.hidden)
    dmixed = ops.pulls["ffn_key"](dhidden, to.ffn_key)[None]
    return dy + mix_vjp(ops, dmixed, layer.ffn_mix[None], to.ffn_mix[None], to.ln2)


def mix_vjp(ops, dmixed, mix, to_mix, to_norm):
    """The gradient of x, of the gradients [n, B, T, D] of xx + d mix with mix [n, D]."""
    to_mix[...] = total(dmixed * ops.d)
    dd = (dmixed * mix[:, None, None]).sum(axis=0)
    return ops.pull_norm(dmixed.sum(axis=0) + ops.pull_shift(dd), to_norm)


def unit_heads(x):
    """x over its norm along the last axis, which counts for `math.LEAST_NORM` at least, and the pullback."""
    norm = np.sqrt((x * x).sum(axis=-1, keepdims=True))
    scale, long = 1 / np.maximum(norm, math.LEAST_NORM), norm > math.LEAST_NORM
    y = x * scale

    def pull(dy):
        return scale * (dy - y * ((y * dy).sum(axis=-1, keepdims=True) * long))

    return y, pull


def stack_of(*arrays):
    """In an array of its own, without the pointers that CuPy's `stack` would copy to the device."""
    stack = library_of(arrays[0]).empty((len(arrays), *arrays[0].shape), arrays[0].dtype)
    for place, array in zip(stack, arrays):
        place[...] = array
    return stack


@fused
def opened(low, base):
    return sigmoid(base + low)


@fused
def written(k, icl, replacement):
    return k * (1 + (icl - 1) * replacement)


@fused
def sigmoid_vjp(dy, y):
    return dy * y * (1 - y)
