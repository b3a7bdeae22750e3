"""RWKV-7's two mixes and their gradients on the GPU.

Between the mixed inputs and the output's matrix `grad` computes, in float32 but for what products and the operator
take; the rest is kernels.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ..dropout import keep
from ..rwkv import cuda_grad
from ..rwkv.cuda_grad import Change, Mix, Pulled, transposed
from ..rwkv.version import unit_of_squares
from . import grad, math
from .names import VERSION


class TimeMix(Mix):
    NORM = "ln1"

    def forward(self, xx, before, site):
        do, layer = self.do, self.layer
        do.shared = do.shared or grad.Mixes(do.products, keep, do.cut)
        self.xx, self.before, self.recorded = xx, before, do.shared.recorded()
        mixed = do.mix(xx, before, layer.mix).reshape(6, -1, do.context, do.D)
        gated = math.gated(self.recorded, layer, mixed, None)
        self.gated = do.products.cast(gated).reshape(do.tokens, do.D)
        return Change("Added", do.product(self.gated, layer.output), site=site)

    def pull(self, dchange, to):
        do, layer, (dchange,) = self.do, self.layer, dchange
        do.gradient(self.gated, dchange, to.output)
        dgated = do.empty(*dchange.shape, dtype=np.float32)
        do.product(dchange, transposed(layer.output), dgated)
        dmixed = do.empty(6, do.tokens, do.D)
        gradients = grad.gated_vjp(self.recorded, layer, dgated.reshape(-1, do.context, do.D), to)
        for place, gradient in zip(dmixed, gradients):
            place[...] = gradient.reshape(place.shape)
        return Pulled(dmixed=dmixed, maa=layer.mix, to=to.mix, before=self.before)


class ChannelMix(Mix):
    NORM = "ln2"

    def forward(self, xx, before, site):
        do, layer = self.do, self.layer
        self.before, self.mixed = before, do.mix(xx, before, layer.ffn_mix)
        self.hidden = do.activated("ReluSquared", do.product(self.mixed, layer.ffn_key))
        return Change("Added", self.times_unit(do.product(self.hidden, layer.ffn_value)), site=site)

    def pull(self, dchange, to):
        do, layer, dvalue = self.do, self.layer, self.times_unit(dchange[0])
        do.gradient(self.hidden, dvalue, to.ffn_value)
        dhidden = do.product(dvalue, transposed(layer.ffn_value))
        do.activation_backward("ReluSquared", dhidden, self.hidden)
        do.gradient(self.mixed, dhidden, to.ffn_key)
        dmixed = do.product(dhidden, transposed(layer.ffn_key))
        return Pulled(dmixed=dmixed, maa=layer.ffn_mix, to=to.ffn_mix, before=self.before)

    def times_unit(self, x):
        """`x`, in place, of a hidden layer in units that its dtype holds."""
        if (unit := unit_of_squares(x.dtype)) != 1:
            x *= x.dtype.type(unit)
        return x


loss = partial(cuda_grad.loss, VERSION, (TimeMix, ChannelMix))
