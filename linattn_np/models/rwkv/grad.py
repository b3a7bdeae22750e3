"""The loss of RWKV models and its gradients on NumPy arrays, without a framework.

Most functions return (result, pull). The pullback ``pull(dy)`` takes the gradient of the result and returns that of the
input. The pullback of a function with weights, ``pull(dy, out)``, also writes the gradients of the weights to `out`, an
array, or to `grads`, a namespace of arrays with the names of the weights. A pullback is called at most once. Shapes are
not checked: activations are [B, T, D], or [n, B, T, D] for n mixes, each with its own matrix of a stack.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np

from ..array_math import beside, relu_squared
from ..single_process import WHOLE


def loss(operations, mixes, weights, tokens, products, dropout, cut=WHOLE):
    """``(value, pull)``: the mean cross entropy, in nats, of tokens 1 to T, each given the tokens before it.

    ``pull(gradients, layer_done)`` writes the gradients to `gradients`, another `Layout.tree`. It calls layer_done(i)
    as soon as the gradients of layer i's matrices (`Layout.parts`) are complete.

    operations : a version's subclass of `RecordingOperations`
    mixes : [(mix, pullback)] of the version in the order of a layer: ``mix(ops, layer, x)`` is a function of its module
        `mixes`, and ``pullback(ops, layer, dy, grads)`` takes the operations `ops` with which the mix was computed
    weights : a `Layout.tree` of the model's parameters
    tokens : integers [B, T + 1], on the device of the weights
    products : the object that multiplies matrices, a `HostProducts`
    dropout : ``dropout(x)`` returns (x with dropout, pull)
    cut : how ranks share the tokens of sequences, an object like `single_process.WHOLE`, with which they do not
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    pulls, shared = [], SimpleNamespace()
    x, pull_embedding = embedding(weights, inputs, products, weights.eps[0])
    x, pull_drop = dropout(x)
    for i, layer in enumerate(weights.layers):
        for mix, mix_vjp in mixes:
            ops = operations(products, dropout, cut, shared, weights.eps)
            x = mix(ops, layer, x)
            pulls.append((partial(mix_vjp, ops, layer), i))
    normed, pull_norm = layer_norm(x, weights.ln_out, weights.eps[0])
    logits, pull_head = linear(normed, weights.head, products)
    value, pull_value = cross_entropy(logits, targets)

    def pull(gradients, layer_done=lambda i: None):
        dx = pull_norm(pull_head(pull_value(), gradients.head), gradients.ln_out)
        while pulls:  # a mix's stored arrays are freed after its pullback
            pull_mix, i = pulls.pop()
            dx = pull_mix(dx, gradients.layers[i])
            if i and pulls[-1][1] < i:
                layer_done(i)
        pull_embedding(pull_drop(dx), gradients)
        layer_done(0)

    return value, pull


# -- the operations of a mix -------------------------------------------------------------------------------------------
class RecordingOperations:
    """`mix_operations.CommonOperations` on arrays, with their pullbacks.

    Each mix of each layer has an object of its own and calls each operation once, but `product` once for each matrix.
    An operation stores its pullback, or the arrays that the mix's pullback needs, in the object. The pullbacks of
    products are in `pulls`, by the name of the matrix. The arguments `shift` and `wkv` are not used: sequences start
    from zeros, or from the layer's trained `start`. `shared` is one namespace for all mixes of a loss. `eps`: of the
    layer norms, and of the group norm.
    """

    def __init__(self, products, dropout, cut, shared, eps):
        self.products, self.dropout, self.cut, self.shared, self.pulls = products, dropout, cut, shared, {}
        self.layer_eps, self.group_eps = eps

    def shift_mix(self, layer, norm, maa, x, shift):
        """(mixes xx + d maa, xx, d): xx is the normed x, d the difference from the previous token's xx."""
        xx, self.pull_norm = layer_norm(x, getattr(layer, norm), self.layer_eps)
        self.d, self.pull_shift = token_shift(xx, self.cut)
        return xx + self.d * beside(getattr(layer, maa), x), xx, self.d

    def product(self, layer, name, x):
        """The product of x and matrix `name`; stores its pullback in `pulls`."""
        assert name not in self.pulls
        y, self.pulls[name] = linear(x, getattr(layer, name), self.products)
        return y

    def recurrence_of(self, layer, operator, *arrays):
        """The result of `operator`, by `vjp_from_start`; stores its pullback as `pull_recurrence`."""
        o, self.pull_recurrence = vjp_from_start(self.cut, layer, operator, *arrays, scale=1.0)
        return o

    def squared_product(self, layer, name, x):
        """relu of the product of x and matrix `name`, squared; stores the product, and its pullback."""
        self.hidden = self.product(layer, name, x)
        return relu_squared(self.hidden)

    def add_product(self, layer, name, x, y):
        """x plus the product of y and matrix `name`, with dropout; stores both pullbacks."""
        return self.add(x, self.product(layer, name, y))

    def add(self, x, change):
        """x plus `change`, with dropout of `change`; stores the dropout's pullback."""
        change, self.pull_drop = self.dropout(change)
        return x + change


def vjp_from_start(cut, layer, operator, *arrays, scale):
    """(result, pull) of `operator` on `arrays`, from the state 0 or from the layer's trained `start` [H, N, N].

    ``pull(do, grads)`` returns the gradients of the arrays and writes that of `start` to `grads.start`.
    """
    options = {}
    if hasattr(layer, "start"):
        options["initial_state"] = np.tile(layer.start, (len(arrays[0]), 1, 1, 1))
    o, pull_operator = cut.vjp_of(operator, *arrays, **options, scale=scale, layout="bthd")

    def pull(do, grads):
        gradients = pull_operator(do)
        if options:
            *gradients, dstart = gradients
            grads.start[...] = dstart.sum(axis=0)
        return gradients

    return o, pull


# -- functions with weights --------------------------------------------------------------------------------------------
def embedding(weights, tokens, products, eps):
    """LN(embedding of each token; ln0); ``pull(dx, grads)`` writes the gradients of the embedding and of ln0."""
    V, D = weights.embedding.shape
    table, pull_norm = layer_norm(weights.embedding[None].astype(weights.ln0.dtype, copy=False), weights.ln0, eps)

    def pull(dx, grads):
        # The gradient is a product with one-hot rows, which sums in a fixed order; atomic additions do not.
        one_hot = (tokens.reshape(-1, 1) == np.arange(V)).astype(dx.dtype)
        dtable = products.matmul(products.cast(one_hot).T, products.cast(dx).reshape(-1, D))
        grads.embedding[...] = pull_norm(dtable[None], grads.ln0)[0]

    return table[0][tokens], pull


def linear(x, w, products):
    """x w, for x [..., B, T, K] and w [..., K, M]."""
    shape, rows = x.shape, products.cast(x).reshape(*x.shape[:-3], -1, x.shape[-1])  # rows: [..., B * T, K]

    def pull(dy, out):
        dy = products.cast(dy).reshape(*rows.shape[:-1], w.shape[-1])
        products.matmul(rows.swapaxes(-1, -2), dy, out=out)
        return products.matmul(dy, w.swapaxes(-1, -2)).reshape(shape)

    return products.matmul(rows, w).reshape(*shape[:-1], w.shape[-1]), pull


def layer_norm(x, weight_and_bias, eps):
    """normalize(x) weight + bias, for `weight_and_bias` [2, D]; x may be a CuPy array."""
    weight, bias = weight_and_bias
    normed, pull_normalize = normalize(x, eps)

    def pull(dy, out):
        out[0], out[1] = sum_over_tokens(dy * normed), sum_over_tokens(dy)
        return pull_normalize(dy * weight)

    return normed * weight + bias, pull


# -- functions without weights -----------------------------------------------------------------------------------------
def normalize(x, eps):
    """(x - mean) / sqrt(variance + eps) along the last axis."""
    scale = 1 / np.sqrt(x.var(-1, keepdims=True) + eps)
    normed = (x - x.mean(-1, keepdims=True)) * scale

    def pull(dy):
        return scale * (dy - dy.mean(-1, keepdims=True) - normed * (dy * normed).mean(-1, keepdims=True))

    return normed, pull


def token_shift(x, cut):
    """x_{t-1} - x_t; x before a sequence's first token is 0, or the last one of the previous rank's part of it."""
    d = -x
    d[:, 1:] += x[:, :-1]
    if (before := cut.from_previous_rank(x[:, -1])) is not None:
        d[:, 0] += before

    def pull(dd):
        dx = -dd
        dx[:, :-1] += dd[:, 1:]
        if (gradient_of_next_rank := cut.from_next_rank(dd[:, 0])) is not None:
            dx[:, -1] += gradient_of_next_rank
        return dx

    return d, pull


def cross_entropy(logits, targets):
    """(mean cross entropy, pull) for logits [B, T, V] and targets [B, T]; ``pull()`` returns the logits' gradient."""
    targets = targets[..., None]
    largest = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - largest).sum(-1, keepdims=True)) + largest
    value = (log_sum - np.take_along_axis(logits, targets, -1)).mean()

    def pull():
        one_hot = targets == np.arange(logits.shape[-1])
        return (np.exp(logits - log_sum) - one_hot) * (1 / targets.size)

    return value, pull


def sum_over_tokens(x):
    """The sum of x [..., B, T, D] over B and T, in two steps; a single one would use few of a GPU's cores."""
    return x.sum(-2).sum(-2)


# -- parts of the mixes' pullbacks; `y` is a function's result ---------------------------------------------------------
def tanh_vjp(dy, y):
    return dy * (1 - y * y)


def sigmoid_vjp(dy, y):
    return dy * y * (1 - y)


def relu_squared_vjp(dy, x):
    return 2 * dy * np.maximum(x, 0)


def mixes_vjp(ops, dmixed, maa, maa_out, norm_out):
    """The gradient of x through its norm, from the gradients `dmixed` [n, B, T, D] of `RecordingOperations.shift_mix`.

    maa_out, norm_out : the arrays for the gradients of `maa` [n, D] and of the norm's weight and bias
    """
    maa_out[...] = sum_over_tokens(dmixed * ops.d)
    dd = (dmixed * maa[:, None, None]).sum(axis=0)
    return ops.pull_norm(dmixed.sum(axis=0) + ops.pull_shift(dd), norm_out)
