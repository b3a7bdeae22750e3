"""RWKV-6's loss and its gradients on NumPy or CuPy arrays, without a framework; the equations are `RWKV6`'s.

Every piece returns its result and a pullback, as `linattn_np.vjp` does: a function of the result's gradient, and of
where the gradients of the piece's weights go, that returns the gradient of the piece's input. Arrays are [B, T, D], or
[n, B, T, D] for n mixes of one input, each of which meets its own matrix of a stack.
"""

from __future__ import annotations

import numpy as np

from ...ops.functions import rwkv6
from ..array_math import (
    affine,
    beside,
    fused,
    gated,
    lerp,
    library_of,
    log_decay,
    relu_squared,
    sigmoid,
    sigmoid_gate,
    tanh,
)
from ..single_process import WHOLE
from . import math
from .math import GROUP_NORM_EPS, LAYER_NORM_EPS


def loss(weights, tokens, products, drop, cut=WHOLE):
    """``(value, pull)``: the mean cross entropy, in nats, of every token but the first, given those before it.

    weights : a `Layout.tree` of the model's parameters; ``pull(gradients, done)``, to be called once, fills another,
        and calls done(i) as soon as one of `Layout.parts` is filled
    tokens : integers [B, T + 1], where the weights are
    products : what multiplies matrices, `HostProducts`
    drop : ``drop(x)`` is x without some of its elements, and its pullback
    cut : of tokens that are a part of sequences, as `ranks` has it
    """
    read, wanted = tokens[:, :-1], tokens[:, 1:]
    pulls = []
    x, pull_embedding = embedding(weights, read, products)
    x, pull_drop = drop(x)
    for i, layer in enumerate(weights.layers):
        for mix in (time_mix, channel_mix):
            x, pull = mix(layer, x, products, drop, cut)
            pulls.append((pull, i))
    normed, pull_norm = layer_norm(x, weights.ln_out)
    logits, pull_head = linear(normed, weights.head, products)
    value, pull_value = cross_entropy(logits, wanted)

    def pull(gradients, done=lambda part: None):
        dx = pull_norm(pull_head(pull_value(), gradients.head), gradients.ln_out)
        while pulls:  # what a layer keeps is free once it has been pulled back
            pull_layer, i = pulls.pop()
            dx = pull_layer(dx, gradients.layers[i])
            if i and pulls[-1][1] < i:
                done(i)
        pull_embedding(pull_drop(dx), gradients)
        done(0)

    return value, pull


# -- the two mixes ----------------------------------------------------------------------------------------------------
class Recorded:
    """`math.Pieces` that keep their pullbacks; one object a mix."""

    def __init__(self, products, drop, cut):
        self.products, self.drop, self.cut, self.pulls = products, drop, cut, {}

    def shift_mix(self, layer, norm, maa, x, shift):
        xx, self.pull_norm = layer_norm(x, getattr(layer, norm))
        self.d, self.pull_shift = token_shift(xx, self.cut)
        return lerp(xx, self.d, beside(getattr(layer, maa), x)), xx, self.d

    def product(self, layer, name, x):
        y, self.pulls[name] = linear(x, getattr(layer, name), self.products)
        return y

    def data_mix(self, layer, low, xx, d):
        self.low = tanh(low).reshape(*low.shape[:2], 5, -1)
        self.m = self.product(layer, "maa_up", self.low.transpose(2, 0, 1, 3))
        self.m += beside(layer.maa, xx)
        return lerp(xx, d, self.m)

    def log_decay(self, layer, low):
        self.decay_low = tanh(low)
        self.w = log_decay(layer.decay, self.product(layer, "decay_up", self.decay_low))
        return self.w

    def recurrence(self, layer, kvr, w, wkv):
        heads, cast = (*w.shape[:2], *layer.bonus.shape), self.products.cast
        k, v, r = cast(kvr).reshape(3, *heads)
        arrays = r, k, v, w.reshape(heads), cast(layer.bonus)
        o, self.pull_recurrence = self.cut.vjp_of(rwkv6, *arrays, scale=1.0, layout="bthd")
        return o

    def gated_norm(self, layer, o, gate):
        self.o, self.gate = o, gate
        normed, self.pull_group = normalize(o.astype(gate.dtype, copy=False), GROUP_NORM_EPS)
        self.normed = normed.reshape(gate.shape)
        return gated(self.normed, *layer.ln_x, gate)

    def relu_squared(self, x):
        self.hidden = x
        return relu_squared(x)

    def add_product(self, layer, name, x, y):
        return self.add(x, self.product(layer, name, y))

    def add_gated(self, x, gate, value):
        self.gate, self.value = gate, value
        return self.add(x, sigmoid_gate(gate, value))

    def add(self, x, change):
        change, self.pull_drop = self.drop(change)
        return x + change


def time_mix(layer, x, products, drop, cut):
    do = Recorded(products, drop, cut)

    def pull(dy, to):
        """The gradient of x; those of the layer's weights go to `to`."""
        pulls, normed, gate, d = do.pulls, do.normed, do.gate, do.d
        daffine, dgate = gated_vjp(pulls["output"](do.pull_drop(dy), to.output), normed, *layer.ln_x, gate)
        to.ln_x[0], to.ln_x[1] = total(daffine * normed), total(daffine)
        doutput = do.pull_group((daffine * layer.ln_x[0]).reshape(do.o.shape))
        dr, dk, dv, dw, du = do.pull_recurrence(doutput.astype(do.o.dtype, copy=False))
        to.bonus[...] = du
        dlow = dw.reshape(dy.shape) * do.w  # w is its own derivative
        to.decay[...] = total(dlow)
        dlow = tanh_vjp(pulls["decay_up"](dlow, to.decay_up), do.decay_low)
        dmixed_w = pulls["decay_down"](dlow, to.decay_down)
        dkvrg = library_of(dy).empty((4, *dy.shape), dr.dtype)
        for place, gradient in zip(dkvrg, (dk, dv, dr, dgate)):
            place[...] = gradient.reshape(dy.shape)
        dmixed = pulls["kvrg"](dkvrg, to.kvrg)
        dm = library_of(do.m).empty(do.m.shape, do.m.dtype)
        np.multiply(dmixed_w, d, out=dm[0])
        np.multiply(dmixed, d, out=dm[1:])
        to.maa[...] = total(dm)
        dlow = pulls["maa_up"](dm, to.maa_up).transpose(1, 2, 0, 3)
        dlow = tanh_vjp(dlow, do.low)
        dmixed_x = pulls["maa_down"](dlow.reshape(*dlow.shape[:2], -1), to.maa_down)
        to.maa_x[...] = total(dmixed_x * d)
        dx, dd = mixes_vjp(dmixed_x, dmixed_w, *dmixed, layer.maa_x, *do.m)
        return dy + do.pull_norm(dx + do.pull_shift(dd), to.ln1)

    return math.time_mix(do, layer, x, None, None), pull


def channel_mix(layer, x, products, drop, cut):
    do = Recorded(products, drop, cut)

    def pull(dy, to):
        pulls, d = do.pulls, do.d
        dgate, dvalue = sigmoid_gate_vjp(do.pull_drop(dy), do.gate, do.value)
        dhidden = relu_squared_vjp(pulls["ffn_value"](dvalue, to.ffn_value), do.hidden)
        dk, dr = pulls["ffn_key"](dhidden, to.ffn_key), pulls["ffn_receptance"](dgate, to.ffn_receptance)
        to.ffn_maa[0], to.ffn_maa[1] = total(dk * d), total(dr * d)
        dx, dd = two_mixes_vjp(dk, dr, *layer.ffn_maa)
        return dy + do.pull_norm(dx + do.pull_shift(dd), to.ln2)

    return math.channel_mix(do, layer, x, None), pull


# -- pieces with weights ----------------------------------------------------------------------------------------------
def embedding(weights, tokens, products):
    """LN(emb; ln0) of each token."""
    V, D = weights.embedding.shape
    table, pull_norm = layer_norm(weights.embedding[None].astype(weights.ln0.dtype, copy=False), weights.ln0)

    def pull(dx, to):
        hot = (tokens.reshape(-1, 1) == library_of(dx).arange(V)).astype(
            dx.dtype
            # A product with one-hot rows adds in a fixed order; atomics would not.
        )
        dtable = products.matmul(products.cast(hot).T, products.cast(dx).reshape(-1, D))
        to.embedding[...] = pull_norm(dtable[None], to.ln0)[0]

    return table[0][tokens], pull


def linear(x, w, products):
    """x w, for x [..., B, T, K] and w [..., K, M]."""
    rows = products.cast(x).reshape(*x.shape[:-3], -1, x.shape[-1])
    y = products.matmul(rows, w)

    def pull(dy, to):
        dy = products.cast(dy).reshape(y.shape)
        products.matmul(rows.swapaxes(-1, -2), dy, out=to)
        return products.matmul(dy, w.swapaxes(-1, -2)).reshape(x.shape)

    return y.reshape(*x.shape[:-1], w.shape[-1]), pull


def layer_norm(x, weight_and_bias):
    weight, bias = weight_and_bias
    normed, pull_normalize = normalize(x, LAYER_NORM_EPS)

    def pull(dy, to):
        to[0], to[1] = total(dy * normed), total(dy)
        return pull_normalize(dy * weight)

    return affine(normed, weight, bias), pull


# -- pieces without ---------------------------------------------------------------------------------------------------
def normalize(x, eps):
    """(x - mean) / sqrt(variance + eps) along the last axis."""
    scale = 1 / library_of(x).sqrt(x.var(-1, keepdims=True) + eps)
    normed = centred(x, x.mean(-1, keepdims=True), scale)

    def pull(dy):
        return normalize_vjp(dy, normed, scale, dy.mean(-1, keepdims=True), (dy * normed).mean(-1, keepdims=True))

    return normed, pull


def token_shift(x, cut):
    """x_{t-1} - x_t, with zero before a sequence's first."""
    d = -x
    d[:, 1:] += x[:, :-1]
    if (before := cut.from_before(x[:, -1])) is not None:
        d[:, 0] += before

    def pull(dd):
        dx = -dd
        dx[:, :-1] += dd[:, 1:]
        if (behind := cut.from_behind(dd[:, 0])) is not None:
            dx[:, -1] += behind
        return dx

    return d, pull


def cross_entropy(logits, wanted):
    """Its mean; the pullback takes nothing, as the loss is what is pulled back."""
    xp, wanted = library_of(logits), wanted[..., None]
    top = logits.max(-1, keepdims=True)
    log_sum = xp.log(xp.exp(logits - top).sum(-1, keepdims=True)) + top
    value = (log_sum - xp.take_along_axis(logits, wanted, -1)).mean()
    vocabulary = xp.arange(logits.shape[-1])
    return value, lambda: entropy_vjp(logits, log_sum, wanted, vocabulary, 1 / wanted.size)


def total(x):
    """The sum over batch and time of [..., B, T, D], in two steps, as one would keep few of a GPU's cores busy."""
    return x.sum(-2).sum(-2)


# -- elementwise -------------------------------------------------------------------------------------------------------
@fused
def tanh_vjp(dy, y):
    return dy * (1 - y * y)


@fused
def centred(x, mean, scale):
    return (x - mean) * scale


@fused
def normalize_vjp(dy, y, scale, mean, projection):
    return scale * (dy - mean - y * projection)


@fused
def mixes_vjp(dx, dw, dk, dv, dr, dg, mx, mw, mk, mv, mr, mg):
    """``(dx, dd)`` of the six x + d m."""
    return dx + dw + dk + dv + dr + dg, dx * mx + dw * mw + dk * mk + dv * mv + dr * mr + dg * mg


@fused
def two_mixes_vjp(dk, dr, mk, mr):
    return dk + dr, dk * mk + dr * mr


@fused
def gated_vjp(dy, x, weight, bias, gate):
    """The gradients of x weight + bias, and of the gate."""
    opening = sigmoid(gate)
    silu = gate * opening
    return dy * silu, dy * (x * weight + bias) * (opening + silu * (1 - opening))


@fused
def relu_squared_vjp(dy, x):
    return 2 * dy * library_of(x).maximum(x, 0)


@fused
def sigmoid_gate_vjp(dy, gate, value):
    opening = sigmoid(gate)
    return dy * value * opening * (1 - opening), dy * opening


@fused
def entropy_vjp(logits, log_sum, wanted, vocabulary, share):
    return (library_of(logits).exp(logits - log_sum) - (wanted == vocabulary)) * share
