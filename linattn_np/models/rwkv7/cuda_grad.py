"""RWKV-7's two mixes and their gradients on the GPU.

Between the mixed inputs and the output's matrix `grad` computes, in float32 but for what products and the operator
take; the rest is kernels.
"""

from functools import partial

import numpy as np

from ..dropout import keep
from ..rwkv import cuda_grad
from ..rwkv.cuda_grad import Change, InputGradients, Mix, transposed
from ..rwkv.version import unit_of_squares
from . import grad, math
from .names import VERSION


class TimeMix(Mix):
    NORM = "ln1"

    def forward(self, xx, before, site):
        ops, layer = self.ops, self.layer
        ops.shared = ops.shared or grad.Mixes(ops.products, keep, ops.cut)
        self.xx, self.before, self.recorded = xx, before, ops.shared.recorded()
        mixed = ops.mix(xx, before, layer.mix).reshape(6, -1, ops.context, ops.D)
        gated = math.gated(self.recorded, layer, mixed, None)
        self.gated = ops.products.cast(gated).reshape(ops.tokens, ops.D)
        return Change("Added", ops.product(self.gated, layer.output), site=site)

    def pull(self, dchange, to):
        ops, layer, (dchange,) = self.ops, self.layer, dchange
        ops.gradient(self.gated, dchange, to.output)
        dgated = ops.empty(*dchange.shape, dtype=np.float32)
        ops.product(dchange, transposed(layer.output), dgated)
        dmixed = ops.empty(6, ops.tokens, ops.D)
        gradients = grad.gated_vjp(self.recorded, layer, dgated.reshape(-1, ops.context, ops.D), to)
        for place, gradient in zip(dmixed, gradients):
            place[...] = gradient.reshape(place.shape)
        return InputGradients(dmixed=dmixed, maa=layer.mix, to=to.mix, before=self.before)


class ChannelMix(Mix):
    NORM = "ln2"

    def forward(self, xx, before, site):
        ops, layer = self.ops, self.layer
        self.before, self.mixed = before, ops.mix(xx, before, layer.ffn_mix)
        self.hidden = ops.activated("ReluSquared", ops.product(self.mixed, layer.ffn_key))
        return Change("Added", self.times_unit(ops.product(self.hidden, layer.ffn_value)), site=site)

    def pull(self, dchange, to):
        ops, layer, dvalue = self.ops, self.layer, self.times_unit(dchange[0])
        ops.gradient(self.hidden, dvalue, to.ffn_value)
        dhidden = ops.product(dvalue, transposed(layer.ffn_value))
        ops.activation_backward("ReluSquared", dhidden, self.hidden)
        ops.gradient(self.mixed, dhidden, to.ffn_key)
        dmixed = ops.product(dhidden, transposed(layer.ffn_key))
        return InputGradients(dmixed=dmixed, maa=layer.ffn_mix, to=to.ffn_mix, before=self.before)

    def times_unit(self, x):
        """`x`, in place, of a hidden layer in units that its dtype holds."""
        if (unit := unit_of_squares(x.dtype)) != 1:
            x *= x.dtype.type(unit)
        return x


loss = partial(cuda_grad.loss, VERSION, (TimeMix, ChannelMix))
