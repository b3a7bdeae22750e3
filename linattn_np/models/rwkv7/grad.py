"""RWKV-7's loss and its gradients on NumPy arrays, without a framework; the equations are `RWKV7`'s.

"icl" is the in-context learning rate; an *opening* is the result of a sigmoid. A name with d, such as dk, is the
gradient of the loss with respect to k. `grads` has the fields of `layer`, for the gradients of the weights.
"""

from functools import partial

import numpy as np

from ...ops.functions import rwkv7
from ..array_math import sigmoid
from ..rwkv import grad
from ..rwkv.grad import mixes_vjp, normalize, relu_squared_vjp, sigmoid_vjp, sum_over_tokens, tanh_vjp
from . import mixes


class RecordingOperations(grad.RecordingOperations):
    """`mixes.MixOperations` that store what the pullbacks below need.

    shared.first_v : the first layer's values
    shared.dfirst_v : the sum of the gradients of `first_v`, over the layers whose pullback has been called. The first
        layer's pullback, which is called last, reads it
    """

    def log_decay(self, layer, low):
        self.decay_low = np.tanh(low)
        self.decay_opening = sigmoid(layer.decay + self.product(layer, "decay_up", self.decay_low))
        return -mixes.DECAY * self.decay_opening

    def learning_rate(self, layer, low):
        self.icl = sigmoid(layer.icl + self.product(layer, "icl_up", low))
        return self.icl

    def output_gate(self, layer, low):
        self.gate_opening = sigmoid(low)
        return self.product(layer, "gate_up", self.gate_opening)

    def first_value(self, v):
        self.shared.first_v, self.shared.dfirst_v = v, 0
        return v

    def residual_value(self, layer, v, low):
        self.change = self.shared.first_v - v
        self.value_opening = sigmoid(layer.value + self.product(layer, "value_up", low))
        return v + self.change * self.value_opening

    def keys(self, layer, k, icl):
        self.k = k
        self.kappa, self.pull_kappa = normalized_heads((k * layer.removal).reshape(*k.shape[:-1], *layer.bonus.shape))
        return self.kappa.reshape(k.shape), replacement_key(k, icl, layer.replacement)

    def recurrence(self, layer, r, w, k, v, kappa, icl, wkv):
        heads = *w.shape[:-1], *layer.bonus.shape
        r, k, v, a, b = (self.products.cast(x).reshape(heads) for x in (r, k, v, -kappa, kappa * icl))
        return self.recurrence_of(layer, rwkv7, r, w.reshape(heads), k, v, a, b).astype(w.dtype, copy=False)

    def bonus_norm(self, layer, o, r, k, v, gate):
        # score: the factor of v in the bonus.
        self.r, self.key, self.v = (x.reshape(o.shape) for x in (r, k, v))
        normed, self.pull_group = normalize(o, self.group_eps)
        self.score = (self.r * self.key * layer.bonus).sum(axis=-1, keepdims=True)
        self.normed, self.gate = normed.reshape(gate.shape), gate
        weight, bias = layer.ln_x
        self.ungated = self.normed * weight + bias + (self.score * self.v).reshape(gate.shape)
        return self.ungated * gate


def time_mix_vjp(ops, layer, dy, grads):
    """The gradient of x from `dy`, that of the residual after the mix; those of the layer's weights go to `grads`.

    ops : the `RecordingOperations` with which `mixes.time_mix` was computed
    """
    dmixed = gated_vjp(ops, layer, ops.pulls["output"](ops.pull_drop(dy), grads.output), grads)
    return dy + mixes_vjp(ops, np.stack(dmixed), layer.mix, grads.mix, grads.ln1)


def gated_vjp(ops, layer, dgated, grads):
    """The gradients of the six mixes w a g k v r that `mixes.gated` takes, each [B, T, D]."""
    pulls = ops.pulls
    dungated = dgated * ops.gate
    dr, dw, dkey, dv, dkappa, dicl = recurrence_vjp(ops, layer, dungated, grads)
    dk, dicl = keys_vjp(ops, layer, dkey, dkappa, dicl, grads)
    if hasattr(layer, "value"):  # v = own v + (first_v - own v) opening
        dopening = sigmoid_vjp(dv * ops.change, ops.value_opening)
        grads.value[...] = sum_over_tokens(dopening)
        dmixed_v = pulls["value_down"](pulls["value_up"](dopening, grads.value_up), grads.value_down)
        ops.shared.dfirst_v += dv * ops.value_opening
        dv = dv * (1 - ops.value_opening)
    else:
        dmixed_v, dv = 0, dv + ops.shared.dfirst_v  # the first layer, whose v is first_v
    dopening = -mixes.DECAY * sigmoid_vjp(dw, ops.decay_opening)
    grads.decay[...] = sum_over_tokens(dopening)
    dlow = tanh_vjp(pulls["decay_up"](dopening, grads.decay_up), ops.decay_low)
    dmixed_w = pulls["decay_down"](dlow, grads.decay_down)
    dopening = sigmoid_vjp(dicl, ops.icl)
    grads.icl[...] = sum_over_tokens(dopening)
    dmixed_a = pulls["icl_down"](pulls["icl_up"](dopening, grads.icl_up), grads.icl_down)
    dlow = sigmoid_vjp(pulls["gate_up"](dgated * ops.ungated, grads.gate_up), ops.gate_opening)
    dmixed_g = pulls["gate_down"](dlow, grads.gate_down)
    # the mix of v has two products: with `kvr`, and with `value_down`
    dmixed_k, dmixed_v_of_matrix, dmixed_r = pulls["kvr"](np.stack((dk, dv, dr)), grads.kvr)
    return dmixed_w, dmixed_a, dmixed_g, dmixed_k, dmixed_v + dmixed_v_of_matrix, dmixed_r


def recurrence_vjp(ops, layer, dungated, grads):
    """The gradients of r, w, the replacement key, v, kappa and icl [B, T, D], through recurrence, norm and bonus.

    dungated : the gradient of the time mix's output before the output gate
    """
    grads.ln_x[0], grads.ln_x[1] = sum_over_tokens(dungated * ops.normed), sum_over_tokens(dungated)
    dbonus = dungated.reshape(ops.r.shape)
    dscore = (dbonus * ops.v).sum(axis=-1, keepdims=True)
    grads.bonus[...] = (dscore * ops.r * ops.key).sum(axis=1).sum(axis=0)
    doutput = ops.pull_group((dungated * layer.ln_x[0]).reshape(ops.r.shape))
    doutput = ops.products.cast(doutput)
    dr, dw, dkey, dv, da, db = (x.astype(ops.r.dtype, copy=False) for x in ops.pull_recurrence(doutput, grads))
    dr, dkey, dv = dr + dscore * ops.key * layer.bonus, dkey + dscore * ops.r * layer.bonus, dv + dbonus * ops.score
    icl = ops.icl.reshape(da.shape)
    # a = -kappa, b = kappa icl
    return (x.reshape(dungated.shape) for x in (dr, dw, dkey, dv, icl * db - da, ops.kappa * db))


def keys_vjp(ops, layer, dkey, dkappa, dicl, grads):
    """The gradients of k and of icl; `dicl` has those through the recurrence."""
    grads.replacement[...] = sum_over_tokens(dkey * ops.k * (ops.icl - 1))
    dremoved = ops.pull_kappa(dkappa.reshape(ops.kappa.shape)).reshape(ops.k.shape)
    grads.removal[...] = sum_over_tokens(dremoved * ops.k)
    dk = replacement_key(dkey, ops.icl, layer.replacement) + dremoved * layer.removal
    return dk, dicl + dkey * ops.k * layer.replacement


def channel_mix_vjp(ops, layer, dy, grads):
    """As `time_mix_vjp`, for `mixes.channel_mix`."""
    dhidden = relu_squared_vjp(ops.pulls["ffn_value"](ops.pull_drop(dy), grads.ffn_value), ops.hidden)
    dmixed = ops.pulls["ffn_key"](dhidden, grads.ffn_key)[None]
    return dy + mixes_vjp(ops, dmixed, layer.ffn_mix[None], grads.ffn_mix[None], grads.ln2)


MIXES = ((mixes.time_mix, time_mix_vjp), (mixes.channel_mix, channel_mix_vjp))
loss = partial(grad.loss, RecordingOperations, MIXES)


def normalized_heads(x):
    """(x / max(|x|, `mixes.LEAST_NORM`), pull) with the norm |x| along the last axis."""
    norm = np.sqrt((x * x).sum(axis=-1, keepdims=True))
    scale, above_least = 1 / np.maximum(norm, mixes.LEAST_NORM), norm > mixes.LEAST_NORM
    y = x * scale

    def pull(dy):
        return scale * (dy - y * ((y * dy).sum(axis=-1, keepdims=True) * above_least))

    return y, pull


def replacement_key(k, icl, replacement):
    """The key with which the recurrence writes; also the pullback of this function in k."""
    return k * (1 + (icl - 1) * replacement)
