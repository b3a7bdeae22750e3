"""RWKV-6's two mixes and their gradients on the GPU."""

from __future__ import annotations

from functools import partial

from ...backends.cupy.rwkv6_training_kernels import HEADS
from ...ops.functions import rwkv6
from ..rwkv import cuda_grad
from ..rwkv.cuda_grad import Change, Mix, Pulled, transposed
from ..rwkv.grad import vjp_from_start
from .names import VERSION


class TimeMix(Mix):
    NORM = "ln1"

    def __init__(self, do, layer):
        super().__init__(do, layer)
        if (N := layer.bonus.shape[1]) not in HEADS:
            VERSION.refuse(f"head size is {N}, expected one of {', '.join(map(str, HEADS))} for training on cuda")

    def forward(self, xx, before, site):
        do, layer = self.do, self.layer
        self.xx, self.before, self.mixed_x = xx, before, do.mix(xx, before, layer.maa_x)
        self.low = do.activated("Tanh", do.product(self.mixed_x, layer.maa_down))
        self.m = do.product(five(self.low), layer.maa_up)
        self.mixed = do.mix(xx, before, layer.maa, self.m)
        self.decay_low = do.activated("Tanh", do.product(self.mixed[0], layer.decay_down))
        self.w = do.log_decay(do.product(self.decay_low, layer.decay_up), layer.decay)
        k, v, r, self.gate = do.product(self.mixed[1:], layer.kvrg)
        heads = (-1, do.context, *layer.bonus.shape)
        r, k, v, w = (array.reshape(heads) for array in (r, k, v, self.w))
        o, self.pull_recurrence = vjp_from_start(do.cut, layer, rwkv6, r, k, v, w, layer.bonus, scale=do.scale)
        self.o = o.reshape(do.tokens, -1)
        self.y = do.gated_norm(self.o, self.gate, layer.ln_x, layer.bonus.shape[1])
        return Change("Added", do.product(self.y, layer.output), site=site)

    def pull(self, dchange, to):
        do, layer = self.do, self.layer
        (dchange,) = dchange
        do.gradient(self.y, dchange, to.output)
        dy = do.product(dchange, transposed(layer.output))
        dout, dgate = do.gated_norm_backward(dy, self.o, self.gate, layer.ln_x, layer.bonus.shape[1], to.ln_x)
        dr, dk, dv, dw, du = self.pull_recurrence(dout.reshape(-1, do.context, *layer.bonus.shape), to)
        to.bonus[...] = du
        dr, dk, dv, dw = (array.reshape(do.tokens, -1) for array in (dr, dk, dv, dw))

        dmixed = do.empty(5, do.tokens, do.D)
        dlow = do.log_decay_backward(dw, self.w, to.decay)
        do.gradient(self.decay_low, dlow, to.decay_up)
        dlow = do.activation_backward("Tanh", do.product(dlow, transposed(layer.decay_up)), self.decay_low)
        do.gradient(self.mixed[0], dlow, to.decay_down)
        do.product(dlow, transposed(layer.decay_down), dmixed[0])
        for n, d in enumerate((dk, dv, dr, dgate)):
            do.gradient(self.mixed[1 + n], d, to.kvrg[n])
            do.product(d, transposed(layer.kvrg[n]), dmixed[1 + n])

        dm, dxx, dd = do.mix_backward(dmixed, self.m, layer.maa, self.xx, self.before, to.maa)
        do.gradient(five(self.low), dm, to.maa_up)
        dlow = do.empty(*self.low.shape)
        do.product(dm, transposed(layer.maa_up), five(dlow))
        do.activation_backward("Tanh", dlow, self.low)
        do.gradient(self.mixed_x, dlow, to.maa_down)
        return Pulled(dxx, dd, do.product(dlow, transposed(layer.maa_down)), layer.maa_x, to.maa_x, self.before)


class ChannelMix(Mix):
    NORM = "ln2"

    def forward(self, xx, before, site):
        do, layer = self.do, self.layer
        self.mixed = do.mix(xx, before, layer.ffn_maa)
        self.before = before
        self.hidden = do.activated("ReluSquared", do.product(self.mixed[0], layer.ffn_key))
        gate = do.product(self.mixed[1], layer.ffn_receptance)
        return Change("Gated", gate, do.product(self.hidden, layer.ffn_value), site)

    def pull(self, dchange, to):
        do, layer = self.do, self.layer
        dgate, dvalue = dchange
        do.gradient(self.hidden, dvalue, to.ffn_value)
        dhidden = do.product(dvalue, transposed(layer.ffn_value))
        do.activation_backward("ReluSquared", dhidden, self.hidden)
        do.gradient(self.mixed[0], dhidden, to.ffn_key)
        do.gradient(self.mixed[1], dgate, to.ffn_receptance)
        dmixed = do.empty(2, do.tokens, do.D)
        do.product(dhidden, transposed(layer.ffn_key), dmixed[0])
        do.product(dgate, transposed(layer.ffn_receptance), dmixed[1])
        return Pulled(dmixed=dmixed, maa=layer.ffn_maa, to=to.ffn_maa, before=self.before)


def five(low):
    """[tokens, 5 A] as [5, tokens, A]."""
    return low.reshape(len(low), 5, -1).swapaxes(0, 1)


loss = partial(cuda_grad.loss, VERSION, (TimeMix, ChannelMix))
