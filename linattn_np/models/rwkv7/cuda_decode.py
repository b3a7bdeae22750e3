"""RWKV-7's steps on the GPU, a layer in eight launches."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from ...backends.cupy import rwkv7_model_kernels as kernels
from ...backends.cupy.model_products import RELU_SQUARED, WRITE
from ...backends.cupy.rwkv6_model_kernels import Openings, affine
from ..rwkv import cuda_decoder
from ..rwkv.cuda_weights import FLOAT32
from ..rwkv.version import Weight, linear, vector
from .cuda_prefill import Pieces
from .names import VERSION
from .weights import LAYER

# What the kernels take side by side: inputs mixed w a g v k r, of which the first four have matrices of low rank, and
# v k r those of a linear layer. What the first layer lacks is zeros there, and its `bases` of v are -inf.
OWN = {
    "vkr": linear("att", "value", "key", "receptance"),
    "down": Weight(("att.w1", "att.a1", "att.g1", "att.v1"), matrix=True, inputs_first=True),
    "up": Weight(("att.w2", "att.a2", "att.g2", "att.v2"), matrix=True, inputs_first=True),
    "mix": vector(*(f"att.x_{x}" for x in "wagvkr")),
    "bases": vector("att.w0", "att.a0", "att.v0"),
}
SHARED = "output ffn_key ffn_value ln1 ln2 ln_x removal replacement bonus ffn_mix".split()


class Step(cuda_decoder.Step):
    """Draws the plan of one token."""

    def time_mix(self, layer, shift, wkv, added):
        my, buffers, B, (D, H) = self.my, self.buffers, self.my.batch, (self.my.sizes[axis] for axis in "DH")
        self.norm_shift(layer.ln1, buffers.mixed, layer.mix, shift, added, squares=True)
        self.matmul(
            layer,
            ("vkr", buffers.mixed[:, 3:], buffers.vkr, WRITE),
            ("down", buffers.mixed[:, :4], buffers.low, WRITE),
        )
        opening, (w, openings) = Openings.of_step(my.dtype, kernels.DOWNS), (buffers.w, buffers.openings)
        arrays = {"low": buffers.low, "up": layer.up, "bases": layer.bases, "w": w, "openings": openings}
        self.draft.launch(opening, opening.blocks(B, D), **arrays, R=my.rank)
        v, k, r = buffers.vkr
        self.draft.launch(
            kernels.TimeMixOfToken(buffers.y.dtype, my.state_dtype, buffers.y.shape[0]),
            B * H,
            v=v,
            k=k,
            r=r,
            w=w,
            openings=openings,
            first=buffers.first,
            removal=layer.removal,
            replacement=layer.replacement,
            bonus=layer.bonus,
            **affine(layer.ln_x),
            state=wkv,
            slots=self.slots,
            y=buffers.y,
            eps=my.group_eps,
        )
        return self.addend(layer, "output", buffers.y, buffers.x)

    def channel_mix(self, layer, shift, added):
        buffers = self.buffers
        self.norm_shift(layer.ln2, buffers.ffn_mixed, layer.ffn_mix, shift, added)
        self.matmul(layer, ("ffn_key", buffers.ffn_mixed, buffers.activated, RELU_SQUARED))
        return self.addend(layer, "ffn_value", buffers.activated)


class CudaDecoder(cuda_decoder.CudaDecoder):
    """Decodes token after token."""

    version, drawing, pieces = replace(VERSION, layer={name: LAYER[name] for name in SHARED} | OWN), Step, Pieces
    most: ClassVar = {"D": 8192, "N": 256}

    def __init__(self, *arguments, **how):
        super().__init__(*arguments, **how)
        of_values = self.layers[0].bases[-1]
        self.device.copy(self.device.upload(np.full(of_values.shape, -np.inf, FLOAT32)), of_values)

    @property
    def rank(self) -> int:
        """Of the matrices of low rank, which have so many rows side by side."""
        return self.all_layers.down.shape[2]

    def own_room(self, terms, X):
        B, D, buffer = self.batch, self.sizes["D"], self.buffer
        return {
            "mixed": buffer(terms, 6, B, D, dtype=X),
            "ffn_mixed": buffer(terms, 1, B, D, dtype=X),
            "vkr": buffer(3, B, D),
            "low": buffer(kernels.DOWNS, B, self.rank),
            "w": buffer(B, D),
            "openings": buffer(3, B, D),
            "first": buffer(B, D),
        }
