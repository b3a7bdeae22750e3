"""RWKV-7's steps on the GPU: a layer in eight launches, or on Hopper all layers of a single sequence in one."""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from ...backends.cupy import rwkv7_model_kernels as kernels
from ...backends.cupy.model_products import RELU_SQUARED, WRITE
from ...backends.cupy.rwkv6_model_kernels import Openings
from ..rwkv import cuda_decoder
from ..rwkv.cuda_weights import FLOAT32
from ..rwkv.version import Weight, linear, vector
from .cuda_prefill import MixOperations
from .names import VERSION
from .weights import LAYER

# Weights in the order in which the kernels read them, one array for several parameters. The six mixes are w a g v k r;
# the first four are multiplied by matrices of low rank, and v k r by full matrices. The first layer has no v1, v2 and
# v0: its v1 and v2 are zeros, and its v0 is -inf, so that its value stays as it is.
OWN = {
    "vkr": linear("att", "value", "key", "receptance"),
    "down": Weight(("att.w1", "att.a1", "att.g1", "att.v1"), matrix=True, inputs_first=True),
    "up": Weight(("att.w2", "att.a2", "att.g2", "att.v2"), matrix=True, inputs_first=True),
    "mix": vector(*(f"att.x_{x}" for x in "wagvkr")),
    "bases": vector("att.w0", "att.a0", "att.v0"),
}
SHARED = "output ffn_key ffn_value ln1 ln2 ln_x removal replacement bonus ffn_mix".split()


class DecodingStep(cuda_decoder.DecodingStep):
    """Makes the plan of a decoding step; see the base class."""

    def time_mix(self, layer, shift, wkv, added):
        decoder, buffers, B = self.decoder, self.buffers, self.decoder.batch
        D, H, N = (decoder.sizes[axis] for axis in "DHN")
        self.norm_shift(layer.ln1, buffers.mixed, layer.mix, shift, added, squares=True)
        self.matmul(
            layer,
            ("vkr", buffers.mixed[:, 3:], buffers.vkr, WRITE),
            ("down", buffers.mixed[:, :4], buffers.low, WRITE),
            early=True,
        )
        w, openings, (terms, _, _, _), X = buffers.w, buffers.openings, buffers.mixed.shape, buffers.mixed.dtype
        opening = Openings.of_step(decoder.dtype, X, B, terms, kernels.DOWNS)
        arrays = {"low": buffers.low, "up": layer.up, "bases": layer.bases, "w": w, "openings": openings}
        self.draft.launch(opening, opening.blocks(B, D), **arrays, R=decoder.rank)
        time_mix = kernels.TimeMixOfHeads if N == kernels.TimeMixOfHeads.N else kernels.TimeMixOfToken
        kernel = time_mix(buffers.y.dtype, decoder.state_dtype, buffers.y.shape[0])
        args = dict(zip("vkr", buffers.vkr)) | {"w": w, "openings": openings, "first": buffers.first_v}
        args |= {"removal": layer.removal, "replacement": layer.replacement, "bonus": layer.bonus}
        return self.launch_time_mix(kernel, B * H, layer, wkv, **args)

    def channel_mix(self, layer, shift, added):
        buffers = self.buffers
        self.norm_shift(layer.ln2, buffers.ffn_mixed, layer.ffn_mix, shift, added)
        self.matmul(layer, ("ffn_key", buffers.ffn_mixed, buffers.activated, RELU_SQUARED))
        return self.product_for_residual(layer, "ffn_value", buffers.activated)


class CudaDecoder(cuda_decoder.CudaDecoder):
    """Decodes RWKV-7 token after token. The single launch of all layers drops the last bit of the numbers that its
    blocks exchange, unless the matrices are float32."""

    version, step_class, operations = (
        replace(VERSION, layer={name: LAYER[name] for name in SHARED} | OWN),
        DecodingStep,
        MixOperations,
    )
    size_limits: ClassVar = {"D": 8192, "N": 256}

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        base_of_value = self.layers[0].bases[-1]
        self.device.copy(self.device.upload(np.full(base_of_value.shape, -np.inf, FLOAT32)), base_of_value)

    @property
    def rank(self) -> int:
        """The rank of the four low-rank products: the largest of the model's, to which the others are padded."""
        return self.all_layers.down.shape[2]

    def kernel_of_one(self):
        return kernels.DecodeOne.fitting(self.matrices, self.state_dtype, self.sizes, self.device)

    def version_buffers(self, terms, X):
        B, D, buffer = self.batch, self.sizes["D"], self.buffer
        room = {
            "mixed": buffer(terms, 6, B, D, dtype=X),
            "ffn_mixed": buffer(terms, 1, B, D, dtype=X),
            "vkr": buffer(3, B, D),
            "low": buffer(kernels.DOWNS, B, self.rank),
            "w": buffer(B, D),
            "openings": buffer(3, B, D),
            "first_v": buffer(B, D),
        }
        if not self.kernel:
            return room
        return room | self.words(low=(kernels.DOWNS, kernels.padded(self.rank, kernels.DecodeOne.ROWS)), vkr=(3, D))
