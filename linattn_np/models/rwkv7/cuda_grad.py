"""RWKV-7's two mixes and their gradients on the GPU.

Most of the time mix (`math.gated`: from its mixes to the input of the output matrix) is computed by array operations
of `grad`, in float32, except for the arguments of products and of the operator. All else are kernels.
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
    """`math.time_mix` and its pullback."""

    NORM = "ln1"

    def forward(self, xx, previous_xx, site):
        ops, layer = self.ops, self.layer
        ops.shared = ops.shared or grad.Mixes(ops.products, keep, ops.cut)  # `keep`: kernels apply the dropout
        self.xx, self.previous_xx, self.operations = xx, previous_xx, ops.shared.operations()
        mixed = ops.mix(xx, previous_xx, layer.mix).reshape(6, -1, ops.context, ops.D)
        gated = math.gated(self.operations, layer, mixed, None)
        self.gated = ops.products.cast(gated).reshape(ops.tokens, ops.D)
        return Change("Added", ops.product(self.gated, layer.output), site=site)

    def pull(self, dchange, grads):
        ops, layer, (dchange,) = self.ops, self.layer, dchange
        ops.gradient(self.gated, dchange, grads.output)
        dgated = ops.empty(*dchange.shape, dtype=np.float32)
        ops.product(dchange, transposed(layer.output), dgated)
        dmixed = ops.empty(6, ops.tokens, ops.D)
        gradients = grad.gated_vjp(self.operations, layer, dgated.reshape(-1, ops.context, ops.D), grads)
        for out, gradient in zip(dmixed, gradients):
            out[...] = gradient.reshape(out.shape)
        return InputGradients(dmixed=dmixed, maa=layer.mix, maa_out=grads.mix, previous_xx=self.previous_xx)


class ChannelMix(Mix):
    """`math.channel_mix` and its pullback."""

    NORM = "ln2"

    def forward(self, xx, previous_xx, site):
        ops, layer = self.ops, self.layer
        self.previous_xx, self.mixed = previous_xx, ops.mix(xx, previous_xx, layer.ffn_mix)
        self.hidden = ops.activated("ReluSquared", ops.product(self.mixed, layer.ffn_key))
        return Change("Added", self.times_unit(ops.product(self.hidden, layer.ffn_value)), site=site)

    def pull(self, dchange, grads):
        ops, layer, dvalue = self.ops, self.layer, self.times_unit(dchange[0])
        ops.gradient(self.hidden, dvalue, grads.ffn_value)
        dhidden = ops.product(dvalue, transposed(layer.ffn_value))
        ops.activation_backward("ReluSquared", dhidden, self.hidden)
        ops.gradient(self.mixed, dhidden, grads.ffn_key)
        dmixed = ops.product(dhidden, transposed(layer.ffn_key))
        return InputGradients(dmixed=dmixed, maa=layer.ffn_mix, maa_out=grads.ffn_mix, previous_xx=self.previous_xx)

    def times_unit(self, x):
        """Multiplies `x` in place by `unit_of_squares`, by which kernels have divided the hidden layer."""
        if (unit := unit_of_squares(x.dtype)) != 1:
            x *= x.dtype.type(unit)
        return x


loss = partial(cuda_grad.loss, VERSION, (TimeMix, ChannelMix))
