"""The loss of RWKV models and its gradients on NumPy or CuPy arrays, without a framework.

Most functions return (result, pull). The pullback ``pull(dy)`` or, for functions with weights, ``pull(dy, to)`` takes
the gradient of the result and returns that of the input; it writes those of the weights to `to`. Arrays are [B, T, D],
or [n, B, T, D] for n mixes of one input, each of which is multiplied by its own matrix of a stack.
"""

from ..array_math import affine, beside, fused, lerp, library_of, relu_squared
from ..single_process import WHOLE
from .version import LAYER_NORM_EPS


def loss(kind, weights, tokens, products, drop, cut=WHOLE):
    """``(value, pull)``: the mean cross entropy, in nats per token, of every token but the first, given those before
    it.

    ``pull(gradients, done)``, to be called once, writes the gradients to `gradients`, another `Layout.tree`, and calls
    done(i) as soon as layer i's part (`Layout.parts`) is complete.

    kind : a version's class of mixes: ``kind(products, drop, cut)`` has methods ``time_mix(layer, x)`` and
        ``channel_mix(layer, x)``, each of which returns (result, pull)
    weights : a `Layout.tree` of the model's parameters
    tokens : integers [B, T + 1], on the device of the weights
    products : the object that multiplies matrices, a `HostProducts`
    drop : ``drop(x)`` returns (x with dropout, pull)
    cut : how ranks share the tokens of sequences; WHOLE if they do not
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
        while pulls:  # a layer's stored arrays are freed after its pullback
            pull_layer, i = pulls.pop()
            dx = pull_layer(dx, gradients.layers[i])
            if i and pulls[-1][1] < i:
                done(i)
        pull_embedding(pull_drop(dx), gradients)
        done(0)

    return value, pull


# -- the operations of a mix -------------------------------------------------------------------------------------------
class Recorded:
    """The operations of mixes that all versions have in common (see `rwkv6.math.MixOperations`), with their pullbacks.

    Each mix of each layer has an object of its own. An operation stores its pullback in the object, that of a product
    in `pulls`, by the name of its matrix; a mix multiplies by each matrix once.
    """

    def __init__(self, products, drop, cut):
        self.products, self.drop, self.cut, self.pulls = products, drop, cut, {}

    def shift_mix(self, layer, norm, maa, x, shift):
        """(mixes xx + d maa, xx, d): xx is the normed x, d the difference from the previous token's xx."""
        xx, self.pull_norm = layer_norm(x, getattr(layer, norm))
        self.d, self.pull_shift = token_shift(xx, self.cut)
        return lerp(xx, self.d, beside(getattr(layer, maa), x)), xx, self.d

    def product(self, layer, name, x):
        """The product of x and matrix `name`; stores its pullback in `pulls`."""
        y, self.pulls[name] = linear(x, getattr(layer, name), self.products)
        return y

    def recurrence_of(self, layer, operator, *arrays):
        """The result of `operator`, by `vjp_from_start`; stores its pullback as `pull_recurrence`."""
        o, self.pull_recurrence = vjp_from_start(self.cut, layer, operator, *arrays, scale=1.0)
        return o

    def relu_squared(self, x):
        self.hidden = x
        return relu_squared(x)

    def add_product(self, layer, name, x, y):
        return self.add(x, self.product(layer, name, y))

    def add(self, x, change):
        """x plus a change, with dropout; stores the dropout's pullback."""
        change, self.pull_drop = self.drop(change)
        return x + change


def vjp_from_start(cut, layer, operator, *arrays, scale):
    """(result, pull) of `operator` on `arrays`, from the state 0 or from the layer's trained `start` [H, N, N].

    ``pull(do, to)`` returns the gradients of the arrays and writes that of `start` to `to.start`.
    """
    options = {}
    if hasattr(layer, "start"):
        options["initial_state"] = library_of(layer.start).tile(layer.start, (len(arrays[0]), 1, 1, 1))
    o, pull_operator = cut.vjp_of(operator, *arrays, **options, scale=scale, layout="bthd")

    def pull(do, to):
        gradients = pull_operator(do)
        if options:
            *gradients, dstart = gradients
            to.start[...] = dstart.sum(axis=0)
        return gradients

    return o, pull


# -- functions with weights --------------------------------------------------------------------------------------------
def embedding(weights, tokens, products):
    """LN(emb; ln0) of each token."""
    V, D = weights.embedding.shape
    table, pull_norm = layer_norm(weights.embedding[None].astype(weights.ln0.dtype, copy=False), weights.ln0)

    def pull(dx, to):
        # The gradient is a product with one-hot rows, which sums in a fixed order; atomic additions do not.
        one_hot = (tokens.reshape(-1, 1) == library_of(dx).arange(V)).astype(dx.dtype)
        dtable = products.matmul(products.cast(one_hot).T, products.cast(dx).reshape(-1, D))
        to.embedding[...] = pull_norm(dtable[None], to.ln0)[0]

    return table[0][tokens], pull


def linear(x, w, products):
    """x w, for x [..., B, T, K] and w [..., K, M]."""
    shape, rows = x.shape, products.cast(x).reshape(*x.shape[:-3], -1, x.shape[-1])  # stored for the pullback

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


# -- functions without weights -----------------------------------------------------------------------------------------
def normalize(x, eps):
    """(x - mean) / sqrt(variance + eps) along the last axis."""
    scale = 1 / library_of(x).sqrt(x.var(-1, keepdims=True) + eps)
    normed = centred(x, x.mean(-1, keepdims=True), scale)

    def pull(dy):
        return normalize_vjp(dy, normed, scale, dy.mean(-1, keepdims=True), (dy * normed).mean(-1, keepdims=True))

    return normed, pull


def token_shift(x, cut):
    """x_{t-1} - x_t, where x before a sequence's first token is 0."""
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


def cross_entropy(logits, wanted):
    """(mean cross entropy, pull); ``pull()`` returns the gradient of the logits."""
    xp, wanted = library_of(logits), wanted[..., None]
    largest = logits.max(-1, keepdims=True)
    log_sum = xp.log(xp.exp(logits - largest).sum(-1, keepdims=True)) + largest
    value = (log_sum - xp.take_along_axis(logits, wanted, -1)).mean()
    vocabulary = xp.arange(logits.shape[-1])
    return value, lambda: entropy_vjp(logits, log_sum, wanted, vocabulary, 1 / wanted.size)


def total(x):
    """The sum of x [..., B, T, D] over B and T, in two steps; a single one would use few of a GPU's cores."""
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
