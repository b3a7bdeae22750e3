"""RWKV-6's two mixes and their gradients on the GPU."""

from functools import partial

from ...backends.cupy.rwkv6_training_kernels import HEADS
from ...ops.functions import rwkv6
from ..rwkv import cuda_grad
from ..rwkv.cuda_grad import Change, InputGradients, Mix, transposed
from ..rwkv.grad import vjp_from_start
from .names import VERSION


class TimeMix(Mix):
    """`math.time_mix` and its pullback."""

    NORM = "ln1"

    def __init__(self, ops, layer):
        super().__init__(ops, layer)
        if (N := layer.bonus.shape[1]) not in HEADS:
            VERSION.refuse(f"head size is {N}, expected one of {', '.join(map(str, HEADS))} for training on cuda")

    def forward(self, xx, previous_xx, site):
        ops, layer = self.ops, self.layer
        self.xx, self.previous_xx, self.mixed_x = xx, previous_xx, ops.mix(xx, previous_xx, layer.maa_x)
        self.low = ops.activated("Tanh", ops.product(self.mixed_x, layer.maa_down))
        self.m = ops.product(split_mixes(self.low), layer.maa_up)
        self.mixed = ops.mix(xx, previous_xx, layer.maa, self.m)
        self.decay_low = ops.activated("Tanh", ops.product(self.mixed[0], layer.decay_down))
        self.w = ops.log_decay(ops.product(self.decay_low, layer.decay_up), layer.decay)
        k, v, r, self.gate = ops.product(self.mixed[1:], layer.kvrg)
        heads = (-1, ops.context, *layer.bonus.shape)
        r, k, v, w = (array.reshape(heads) for array in (r, k, v, self.w))
        o, self.pull_recurrence = vjp_from_start(ops.cut, layer, rwkv6, r, k, v, w, layer.bonus, scale=ops.scale)
        self.o = o.reshape(ops.tokens, -1)
        self.y = ops.gated_norm(self.o, self.gate, layer.ln_x, layer.bonus.shape[1])
        return Change("Added", ops.product(self.y, layer.output), site=site)

    def pull(self, dchange, grads):
        ops, layer = self.ops, self.layer
        (dchange,) = dchange
        ops.gradient(self.y, dchange, grads.output)
        dy = ops.product(dchange, transposed(layer.output))
        dout, dgate = ops.gated_norm_backward(dy, self.o, self.gate, layer.ln_x, layer.bonus.shape[1], grads.ln_x)
        dr, dk, dv, dw, du = self.pull_recurrence(dout.reshape(-1, ops.context, *layer.bonus.shape), grads)
        grads.bonus[...] = du
        dr, dk, dv, dw = (array.reshape(ops.tokens, -1) for array in (dr, dk, dv, dw))

        dmixed = ops.empty(5, ops.tokens, ops.D)
        dlow = ops.log_decay_backward(dw, self.w, grads.decay)
        ops.gradient(self.decay_low, dlow, grads.decay_up)
        dlow = ops.activation_backward("Tanh", ops.product(dlow, transposed(layer.decay_up)), self.decay_low)
        ops.gradient(self.mixed[0], dlow, grads.decay_down)
        ops.product(dlow, transposed(layer.decay_down), dmixed[0])
        for n, gradient in enumerate((dk, dv, dr, dgate)):
            ops.gradient(self.mixed[1 + n], gradient, grads.kvrg[n])
            ops.product(gradient, transposed(layer.kvrg[n]), dmixed[1 + n])

        dm, dxx, dd = ops.mix_backward(dmixed, self.m, layer.maa, self.xx, self.previous_xx, grads.maa)
        ops.gradient(split_mixes(self.low), dm, grads.maa_up)
        dlow = ops.empty(*self.low.shape)
        ops.product(dm, transposed(layer.maa_up), split_mixes(dlow))
        ops.activation_backward("Tanh", dlow, self.low)
        ops.gradient(self.mixed_x, dlow, grads.maa_down)
        return InputGradients(
            dxx, dd, ops.product(dlow, transposed(layer.maa_down)), layer.maa_x, grads.maa_x, self.previous_xx
        )


class ChannelMix(Mix):
    """`math.channel_mix` and its pullback."""

    NORM = "ln2"

    def forward(self, xx, previous_xx, site):
        ops, layer = self.ops, self.layer
        self.mixed = ops.mix(xx, previous_xx, layer.ffn_maa)
        self.previous_xx = previous_xx
        self.hidden = ops.activated("ReluSquared", ops.product(self.mixed[0], layer.ffn_key))
        gate = ops.product(self.mixed[1], layer.ffn_receptance)
        return Change("Gated", gate, ops.product(self.hidden, layer.ffn_value), site)

    def pull(self, dchange, grads):
        ops, layer = self.ops, self.layer
        dgate, dvalue = dchange
        ops.gradient(self.hidden, dvalue, grads.ffn_value)
        dhidden = ops.product(dvalue, transposed(layer.ffn_value))
        ops.activation_backward("ReluSquared", dhidden, self.hidden)
        ops.gradient(self.mixed[0], dhidden, grads.ffn_key)
        ops.gradient(self.mixed[1], dgate, grads.ffn_receptance)
        dmixed = ops.empty(2, ops.tokens, ops.D)
        ops.product(dhidden, transposed(layer.ffn_key), dmixed[0])
        ops.product(dgate, transposed(layer.ffn_receptance), dmixed[1])
        return InputGradients(dmixed=dmixed, maa=layer.ffn_maa, maa_out=grads.ffn_maa, previous_xx=self.previous_xx)


def split_mixes(low):
    """`low` [tokens, 5 A], the low-rank products of the five mixes w k v r g, as [5, tokens, A]."""
    return low.reshape(len(low), 5, -1).swapaxes(0, 1)


loss = partial(cuda_grad.loss, VERSION, (TimeMix, ChannelMix))
