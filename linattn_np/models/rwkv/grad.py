"""The loss of RWKV models and its gradients on NumPy or CuPy arrays, without a framework.

Every piece returns its result and a pullback, as `linattn_np.vjp` does: a function of the result's gradient, and of
where the gradients of the piece's weights go, that returns the gradient of the piece's input. Arrays are [B, T, D], or
[n, B, T, D] for n mixes of one input, each of which meets its own matrix of a stack.
"""

from __future__ import annotations

from ..array_math import affine, beside, fused, lerp, library_of, relu_squared
from ..single_process import WHOLE
from .version import LAYER_NORM_EPS


def loss(kind, weights, tokens, products, drop, cut=WHOLE):
    """``(value, pull)``: the mean cross entropy, in nats, of every token but the first, given those before it.

    kind : a version's mixes: ``kind(products, drop, cut)`` has ``time_mix(layer, x)`` and ``channel_mix(layer, x)``,
        each of which returns its result and ``pull(dy, to)``; made once a loss, and pulled back in the opposite order
    weights : a `Layout.tree` of the model's parameters; ``pull(gradients, done)``, to be called once, fills another,
        and calls done(i) as soon as one of `Layout.parts` is filled
    tokens : integers [B, T + 1], where the weights are
    products : what multiplies matrices, `HostProducts`
    drop : ``drop(x)`` is x without some of its elements, and its pullback
    cut : of tokens that are a part of sequences, as `ranks` has it
    """
    read, wanted = tokens[:, :-1], tokens[:, 1:]
    pulls, mixes = [], kind(products, drop, cut)
    x, pull_embedding = embedding(weights, read, products)
    x, pull_drop = drop(x)
    for i, layer in enumerate(weights.layers):
        for mix in (mixes.time_mix, mixes.channel_mix):
            x, pull = mix(layer, x)
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


# -- the pieces of a mix -----------------------------------------------------------------------------------------------
class Recorded:
    """Pieces of all versions that keep their pullbacks; one object a mix, and in it of each name once."""

    def __init__(self, products, drop, cut):
        self.products, self.drop, self.cut, self.pulls = products, drop, cut, {}

    def shift_mix(self, layer, norm, maa, x, shift):
        xx, self.pull_norm = layer_norm(x, getattr(layer, norm))
        self.d, self.pull_shift = token_shift(xx, self.cut)
        return lerp(xx, self.d, beside(getattr(layer, maa), x)), xx, self.d

    def product(self, layer, name, x):
        y, self.pulls[name] = linear(x, getattr(layer, name), self.products)
        return y

    def recurrence_of(self, layer, operator, *arrays):
        """`operator` as `vjp_from_start` has it; `pull_recurrence(do, to)` gives the gradients of its arrays."""
        o, self.pull_recurrence = vjp_from_start(self.cut, layer, operator, *arrays, scale=1.0)
        return o

    def relu_squared(self, x):
        self.hidden = x
        return relu_squared(x)

    def add_product(self, layer, name, x, y):
        return self.add(x, self.product(layer, name, y))

    def add(self, x, change):
        change, self.pull_drop = self.drop(change)
        return x + change


def vjp_from_start(cut, layer, operator, *arrays, scale):
    """The result of `operator` and its pullback, from zeros, or from the layer's `start` [H, N, N] where it has one.

    The pullback takes the result's gradient and where that of a `start` goes, and returns those of the arrays.
    """
    how = {}
    if hasattr(layer, "start"):
        how["initial_state"] = library_of(layer.start).tile(layer.start, (len(arrays[0]), 1, 1, 1))
    o, pull_operator = cut.vjp_of(operator, *arrays, **how, scale=scale, layout="bthd")

    def pull(do, to):
        gradients = pull_operator(do)
        if how:
            *gradients, dstart = gradients
            to.start[...] = dstart.sum(axis=0)
        return gradients

    return o, pull


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
    shape, rows = x.shape, products.cast(x).reshape(*x.shape[:-3], -1, x.shape[-1])  # rows alone are kept

    def pull(dy, to):
        dy = products.cast(dy).reshape(*rows.shape[:-1], w.shape[-1])
        products.matmul(rows.swapaxes(-1, -2), dy, out=to)
        return products.matmul(dy, w.swapaxes(-1, -2)).reshape(shape)

    return products.matmul(rows, w).reshape(*shape[:-1], w.shape[-1]), pull


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
def relu_squared_vjp(dy, x):
    return 2 * dy * library_of(x).maximum(x, 0)


@fused
def entropy_vjp(logits, log_sum, wanted, vocabulary, share):
    return (library_of(logits).exp(logits - log_sum) - (wanted == vocabulary)) * share
