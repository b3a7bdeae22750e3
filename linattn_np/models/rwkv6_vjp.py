"""RWKV-6's loss and its gradients on NumPy or CuPy arrays, without a framework; the equations are `RWKV6`'s.

Every piece returns its result and a pullback, as `linattn_np.vjp` does: a function of the result's gradient, and of
where the gradients of the piece's weights go, that returns the gradient of the piece's input. Arrays are [B, T, D], or
[n, B, T, D] for n mixes of one input, each of which meets its own matrix of a stack.
"""

from __future__ import annotations

import sys
from functools import cache, wraps

import numpy as np

from ..autodiff import vjp
from ..ops import rwkv6
from .rwkv6 import GROUP_NORM_EPS, LAYER_NORM_EPS


def loss(weights, tokens, products, drop):
    """``(value, pull)``: the mean cross entropy, in nats, of every token but the first, given those before it.

    weights : a `Layout.tree` of the model's parameters; ``pull(gradients)``, to be called once, fills another one
    tokens : integers [B, T + 1], where the weights are
    products : what multiplies matrices, `HostProducts` or `CudaProducts`
    drop : ``drop(x)`` is x without some of its elements, and its pullback
    """
    read, wanted = tokens[:, :-1], tokens[:, 1:]
    pulls = []
    x, pull_embedding = embedding(weights, read, products)
    x, pull_drop = drop(x)
    for i, block in enumerate(weights.blocks):
        for mix in (time_mix, channel_mix):
            x, pull = residual(mix, block, x, products, drop)
            pulls.append((pull, i))
    normed, pull_norm = layer_norm(x, weights.ln_out)
    logits, pull_head = linear(normed, weights.head, products)
    value, pull_value = cross_entropy(logits, wanted)

    def pull(gradients):
        dx = pull_norm(pull_head(pull_value(), gradients.head), gradients.ln_out)
        while pulls:                                    # what a layer keeps is free once it has been pulled back
            pull_layer, i = pulls.pop()
            dx = pull_layer(dx, gradients.blocks[i])
        pull_embedding(pull_drop(dx), gradients)

    return value, pull


def residual(mix, block, x, products, drop):
    """x + drop(mix(x))."""
    change, pull_mix = mix(block, x, products)
    change, pull_drop = drop(change)
    return x + change, lambda dy, to: dy + pull_mix(pull_drop(dy), to)


def keep(x):
    """Drops nothing."""
    return x, lambda dy: dy


# -- the two mixes ----------------------------------------------------------------------------------------------------
def time_mix(block, x, products):
    B, T, D = x.shape
    H, N = block.bonus.shape
    x, pull_norm = layer_norm(x, block.ln1)
    d, pull_shift = token_shift(x)
    mixed, pull_mixes = data_mixes(block, x, d, products)                       # five: w k v r g
    kvrg, pull_kvrg = linear(mixed[1:], block.kvrg, products)
    low, pull_low = low_rank(mixed[0], block.decay_down, block.decay_up, products)
    w = log_decay(block.decay, low)
    k, v, r = (array.reshape(B, T, H, N) for array in products.cast(kvrg[:3]))
    o, pull_operator = vjp(rwkv6, r, k, v, w.reshape(B, T, H, N), products.cast(block.bonus), scale=1.0, layout="bthd")
    normed, pull_group = normalize(o.astype(x.dtype, copy=False), GROUP_NORM_EPS)
    normed, gate = normed.reshape(x.shape), kvrg[3]
    y, pull_output = linear(gated(normed, *block.ln_x, gate), block.output, products)

    def pull(dy, to):
        daffine, dgate = gated_vjp(pull_output(dy, to.output), normed, *block.ln_x, gate)
        to.ln_x[0], to.ln_x[1] = total(daffine * normed), total(daffine)
        do = pull_group((daffine * block.ln_x[0]).reshape(o.shape))
        dr, dk, dv, dw, du = pull_operator(do.astype(o.dtype, copy=False))
        to.bonus[...] = du
        dlow = dw.reshape(x.shape) * w                                          # w is its own derivative
        to.decay[...] = total(dlow)
        dkvrg = of(dy).empty(kvrg.shape, dr.dtype)
        for place, gradient in zip(dkvrg, (dk, dv, dr, dgate)):
            place[...] = gradient.reshape(x.shape)
        dx, dd = pull_mixes(pull_low(dlow, to.decay_down, to.decay_up), pull_kvrg(dkvrg, to.kvrg), to)
        return pull_norm(dx + pull_shift(dd), to.ln1)

    return y, pull


def data_mixes(block, x, d, products):
    """x + d (maa + m), with m = tanh((x + d maa_x) maa_w1) maa_w2 for each of the five."""
    down, pull_down = linear(lerp(x, d, block.maa_x), block.maa_down, products)
    low = tanh(down).reshape(*x.shape[:2], 5, -1)
    m, pull_up = linear(low.transpose(2, 0, 1, 3), block.maa_up, products)
    m += block.maa

    def pull(dmixed_w, dmixed_kvrg, to):
        """``(dx, dd)``."""
        dm = of(m).empty(m.shape, m.dtype)
        np.multiply(dmixed_w, d, out=dm[0])
        np.multiply(dmixed_kvrg, d, out=dm[1:])
        to.maa[:, 0, 0] = total(dm)
        dlow = pull_up(dm, to.maa_up).transpose(1, 2, 0, 3)
        dmixed_x = pull_down(tanh_vjp(dlow, low).reshape(down.shape), to.maa_down)
        to.maa_x[...] = total(dmixed_x * d)
        return mixes_vjp(dmixed_x, dmixed_w, *dmixed_kvrg, block.maa_x, *m)

    return lerp(x, d, m), pull


def channel_mix(block, x, products):
    x, pull_norm = layer_norm(x, block.ln2)
    d, pull_shift = token_shift(x)
    mixed_k, mixed_r = lerp(x, d, block.ffn_maa)
    hidden, pull_key = linear(mixed_k, block.ffn_key, products)
    value, pull_value = linear(relu_squared(hidden), block.ffn_value, products)
    gate, pull_receptance = linear(mixed_r, block.ffn_receptance, products)

    def pull(dy, to):
        dgate, dvalue = sigmoid_gate_vjp(dy, gate, value)
        dhidden = relu_squared_vjp(pull_value(dvalue, to.ffn_value), hidden)
        dk, dr = pull_key(dhidden, to.ffn_key), pull_receptance(dgate, to.ffn_receptance)
        to.ffn_maa[0, 0, 0], to.ffn_maa[1, 0, 0] = total(dk * d), total(dr * d)
        dx, dd = two_mixes_vjp(dk, dr, *block.ffn_maa)
        return pull_norm(dx + pull_shift(dd), to.ln2)

    return sigmoid_gate(gate, value), pull


# -- pieces with weights ----------------------------------------------------------------------------------------------
def embedding(weights, tokens, products):
    """LN(emb; ln0) of each token."""
    V, D = weights.embedding.shape[1:]
    table, pull_norm = layer_norm(weights.embedding.astype(weights.ln0.dtype, copy=False), weights.ln0)

    def pull(dx, to):
        hot = (tokens.reshape(-1, 1) == of(dx).arange(V)).astype(dx.dtype)      # a sum in one order, without atomics
        dtable = products.matmul(products.cast(hot).T, products.cast(dx).reshape(-1, D))
        to.embedding[...] = pull_norm(dtable[None], to.ln0)

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


def low_rank(x, down, up, products):
    """tanh(x down) up."""
    low, pull_down = linear(x, down, products)
    low = tanh(low)
    y, pull_up = linear(low, up, products)
    return y, lambda dy, to_down, to_up: pull_down(tanh_vjp(pull_up(dy, to_up), low), to_down)


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
    scale = 1 / of(x).sqrt(x.var(-1, keepdims=True) + eps)
    normed = centred(x, x.mean(-1, keepdims=True), scale)

    def pull(dy):
        return normalize_vjp(dy, normed, scale, dy.mean(-1, keepdims=True), (dy * normed).mean(-1, keepdims=True))

    return normed, pull


def token_shift(x):
    """x_{t-1} - x_t, with zero before the first."""
    d = -x
    d[:, 1:] += x[:, :-1]

    def pull(dd):
        dx = -dd
        dx[:, :-1] += dd[:, 1:]
        return dx

    return d, pull


def cross_entropy(logits, wanted):
    """Its mean; the pullback takes nothing, as the loss is what is pulled back."""
    xp, wanted = of(logits), wanted[..., None]
    top = logits.max(-1, keepdims=True)
    log_sum = xp.log(xp.exp(logits - top).sum(-1, keepdims=True)) + top
    value = (log_sum - xp.take_along_axis(logits, wanted, -1)).mean()
    vocabulary = xp.arange(logits.shape[-1])
    return value, lambda: entropy_vjp(logits, log_sum, wanted, vocabulary, 1 / wanted.size)


def total(x):
    """The sum over batch and time of [..., B, T, D], in two steps, as one would keep few of a GPU's cores busy."""
    return x.sum(-2).sum(-2)


def of(x):
    """The library of an array, NumPy or CuPy."""
    return np if isinstance(x, np.ndarray) else sys.modules["cupy"]


# -- elementwise ------------------------------------------------------------------------------------------------------
def fused(function):
    """An elementwise `function` that is one launch where the arrays are CuPy's."""
    @wraps(function)
    def call(*arrays):
        return (function if of(arrays[0]) is np else on_cupy(function))(*arrays)
    return call


@cache
def on_cupy(function):
    name = f"rwkv6_{function.__name__}"             # its own could be one of CUDA's, as tanh is
    return sys.modules["cupy"].fuse(kernel_name=name)(function)


def sigmoid(x):
    return 0.5 * of(x).tanh(0.5 * x) + 0.5          # 1 / (1 + exp(-x)) without its overflow


@fused
def tanh(x):
    return of(x).tanh(x)


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
def affine(x, weight, bias):
    return x * weight + bias


@fused
def lerp(x, d, share):
    return x + d * share


@fused
def mixes_vjp(dx, dw, dk, dv, dr, dg, mx, mw, mk, mv, mr, mg):
    """``(dx, dd)`` of the six x + d m."""
    return dx + dw + dk + dv + dr + dg, dx * mx + dw * mw + dk * mk + dv * mv + dr * mr + dg * mg


@fused
def two_mixes_vjp(dk, dr, mk, mr):
    return dk + dr, dk * mk + dr * mr


@fused
def log_decay(base, low):
    return -of(low).exp(base + low)


@fused
def gated(x, weight, bias, gate):
    """(x weight + bias) silu(gate)."""
    return (x * weight + bias) * gate * sigmoid(gate)


@fused
def gated_vjp(dy, x, weight, bias, gate):
    """The gradients of x weight + bias, and of the gate."""
    opening = sigmoid(gate)
    silu = gate * opening
    return dy * silu, dy * (x * weight + bias) * (opening + silu * (1 - opening))


@fused
def relu_squared(x):
    x = of(x).maximum(x, 0)
    return x * x


@fused
def relu_squared_vjp(dy, x):
    return 2 * dy * of(x).maximum(x, 0)


@fused
def sigmoid_gate(gate, value):
    return sigmoid(gate) * value


@fused
def sigmoid_gate_vjp(dy, gate, value):
    opening = sigmoid(gate)
    return dy * value * opening * (1 - opening), dy * opening


@fused
def entropy_vjp(logits, log_sum, wanted, vocabulary, share):
    return (of(logits).exp(logits - log_sum) - (wanted == vocabulary)) * share
