"""RWKV-6's two mixes and their gradients on the GPU. `rwkv.cuda_grad.loss` calls `forward`, and later `pull`.

Arrays are [tokens, D], or [n, tokens, D] for n mixes or products. `step.product(x, w)` is x w, and
``step.product_backward(dy, x, w, dw)`` its pullback, which writes the gradient of w to `dw`. A name with d, such as dk,
is the gradient of the loss with respect to k. `grads` has the fields of `layer`, for the weights' gradients.

From `rwkv.cuda_grad`: `step` is the `TrainingStep`, which launches kernels; a `Change` is what a mix adds to the
residual, "Added" an array, "Gated" sigmoid(an array) times another one; `site` is the index of its dropout.
`InputGradients` are those of a mix's inputs: of xx, of d = (previous token's xx) - xx, and of the mixes xx + d maa.
"""

from functools import partial

from ...ops.functions import rwkv6
from ..rwkv import cuda_grad
from ..rwkv.cuda_grad import Change, InputGradients, Mix
from ..rwkv.grad import vjp_from_start
from .names import VERSION


class TimeMix(Mix):
    """`mixes.time_mix` and its pullback.

    xx, previous_xx : the normed input, and the result of `TrainingStep.previous_rank_xx`
    mixed_x, low, m : the static mix; tanh of its product with maa_down, [tokens, 5 A]; the products with maa_up
    mixed : the five mixes w k v r g [5, tokens, D], with the weights maa + m
    decay_low, w : tanh of the product with decay_down; the log decays
    o, gate, y : the recurrence's result, the gate, and the gated group norm of o
    """

    NORM, MIX, TAKES = "ln1", "maa_x", 1

    def forward(self, mixed, xx, previous_xx, site):
        step, layer = self.step, self.layer
        self.xx, self.previous_xx, self.mixed_x = xx, previous_xx, mixed
        self.low = step.low_activations(step.product(self.mixed_x, layer.maa_down))
        self.m = step.product(split_mixes(self.low), layer.maa_up)
        self.mixed = step.mix(xx, previous_xx, layer.maa, self.m)
        self.decay_low = step.low_activations(step.product(self.mixed[0], layer.decay_down))
        self.w = step.log_decay(step.product(self.decay_low, layer.decay_up), layer.decay)
        k, v, r, self.gate = step.product(self.mixed[1:], layer.kvrg)
        heads = (-1, step.context, *layer.bonus.shape)
        r, k, v, w = (array.reshape(heads) for array in (r, k, v, self.w))
        o, self.pull_recurrence = vjp_from_start(step.cut, layer, rwkv6, r, k, v, w, layer.bonus, scale=step.scale)
        self.o = o.reshape(step.tokens, -1)
        self.y = step.gated_norm(*self.norm_arguments())
        return Change("Added", step.product(self.y, layer.output), site=site)

    def pull(self, dchange, grads):
        step, layer = self.step, self.layer
        (dchange,) = dchange
        dy = step.product_backward(dchange, self.y, layer.output, grads.output)
        do, dgate, _ = step.gated_norm_backward(dy, *self.norm_arguments(), grads.ln_x)
        dr, dk, dv, dw, du = self.pull_recurrence(do.reshape(-1, step.context, *layer.bonus.shape), grads)
        grads.bonus[...] = du
        dr, dk, dv, dw = (array.reshape(step.tokens, -1) for array in (dr, dk, dv, dw))

        dmixed = step.empty(5, step.tokens, step.D)
        ddecay = step.log_decay_backward(dw, self.w, grads.decay)  # of the product with decay_up
        dlow = step.product_backward(ddecay, self.decay_low, layer.decay_up, grads.decay_up)
        step.low_activations(self.decay_low, dlow)
        step.product_backward(dlow, self.mixed[0], layer.decay_down, grads.decay_down, dmixed[0])
        for n, gradient in enumerate((dk, dv, dr, dgate)):
            step.product_backward(gradient, self.mixed[1 + n], layer.kvrg[n], grads.kvrg[n], dmixed[1 + n])

        dm, dxx, dd = step.mix_backward(dmixed, self.m, layer.maa, self.xx, self.previous_xx, grads.maa)
        dlow = step.empty(*self.low.shape)
        step.product_backward(dm, split_mixes(self.low), layer.maa_up, grads.maa_up, split_mixes(dlow))
        step.low_activations(self.low, dlow)
        dmixed_x = step.product_backward(dlow, self.mixed_x, layer.maa_down, grads.maa_down)
        return InputGradients(dxx, dd, dmixed_x, layer.maa_x, grads.maa_x, self.previous_xx)

    def norm_arguments(self):
        """The arguments of `TrainingStep.gated_norm`; o has the factor `step.scale`, which the norm removes."""
        eps = self.step.group_eps * self.step.scale**2
        return self.o, self.gate, self.layer.ln_x, eps, self.layer.bonus.shape[1]


class ChannelMix(Mix):
    """`mixes.channel_mix` and its pullback; `hidden` is relu(k)^2, `mixed` the two mixes k r."""

    NORM, MIX = "ln2", "ffn_maa"

    def forward(self, mixed, xx, previous_xx, site):
        step, layer = self.step, self.layer
        self.previous_xx, self.mixed = previous_xx, mixed
        self.hidden = step.squared_product(self.mixed[0], layer.ffn_key)
        gate = step.product(self.mixed[1], layer.ffn_receptance)
        return Change("Gated", gate, step.product(self.hidden, layer.ffn_value), site)

    def pull(self, dchange, grads):
        step, layer = self.step, self.layer
        dgate, dvalue = dchange
        dhidden = step.product_backward(dvalue, self.hidden, layer.ffn_value, grads.ffn_value)
        step.relu_squared(self.hidden, dhidden)
        dmixed = step.empty(2, step.tokens, step.D)
        step.product_backward(dhidden, self.mixed[0], layer.ffn_key, grads.ffn_key, dmixed[0])
        step.product_backward(dgate, self.mixed[1], layer.ffn_receptance, grads.ffn_receptance, dmixed[1])
        return InputGradients(dmixed=dmixed, maa=layer.ffn_maa, maa_out=grads.ffn_maa, previous_xx=self.previous_xx)


def split_mixes(low):
    """`low` [tokens, 5 A], the low-rank products of the five mixes w k v r g, as [5, tokens, A]."""
    return low.reshape(len(low), 5, -1).swapaxes(0, 1)


loss = partial(cuda_grad.loss, VERSION, (TimeMix, ChannelMix))
