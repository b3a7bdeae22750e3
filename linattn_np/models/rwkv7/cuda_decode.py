"""RWKV-7's steps on the GPU: a layer in eight launches, or on Hopper all layers of a single sequence in one.

`rwkv.cuda_decoder` has what no version changes. Sizes: B sequences, D channels, H heads of N channels. An input of a
product is the sum of `terms` arrays of dtype X (`mixed`, `ffn_mixed`: their first axis). Buffers:

    mixed       the six mixes w a g v k r: w a g v are the inputs of `down`, v k r those of `vkr`
    vkr         value, key and receptance
    low         the products with `down`: `rank` numbers for each of w a g v
    w           the log of the decay
    openings    the learning rate, the gate, and the share of the first layer's value
    first_v     the first layer's value, which that layer writes and the others read
    ffn_mixed   the channel mix's input
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from ...backends.cupy import rwkv7_model_kernels as kernels
from ...backends.cupy.model_products import RELU_SQUARED, WRITE
from ...backends.cupy.rwkv6_model_kernels import ChosenNorm, Openings
from ..rwkv import cuda_decoder
from ..rwkv.cuda_weights import FLOAT32
from ..rwkv.version import Weight, linear, vector
from .cuda_prefill import MixOperations
from .names import VERSION
from .weights import LAYER

# A layer's arrays on the GPU: those of `LAYER` that UNCHANGED names, and STACKS, which the kernels read in place of the
# others. `down` and `up` are of low rank, `bases` is added to the products with `up`. The first layer has no v0, v1
# and v2: its v1 and v2 are zeros, and its v0 is -inf, by which the kernels know that layer. The orders LOW_RANK and v k
# r are those of `Opening` in rwkv7/decode_phases.cuh and of `Kind` in rwkv6/openings.cu; `LAYER`, for the CPU and for
# training, has k before v.
LOW_RANK, MIXES = "wagv", "wagvkr"  # the mixes that `down` multiplies; all, of which `vkr` multiplies v and those after
assert len(LOW_RANK) == kernels.DOWNS and MIXES.startswith(LOW_RANK)
STACKS = {
    "vkr": linear("att", "value", "key", "receptance"),
    "down": Weight(tuple(f"att.{x}1" for x in LOW_RANK), matrix=True, inputs_first=True),
    "up": Weight(tuple(f"att.{x}2" for x in LOW_RANK), matrix=True, inputs_first=True),
    "mix": vector(*(f"att.x_{x}" for x in MIXES)),
    "bases": vector("att.w0", "att.a0", "att.v0"),
}
UNCHANGED = "output ffn_key ffn_value ln1 ln2 ln_x removal replacement bonus ffn_mix".split()


class DecodingStep(cuda_decoder.DecodingStep):
    """Adds a layer's launches to the plan `draft` of a step. `layer` has the layer's arrays; `shift` and `wkv` are its
    part of the state: the previous tokens' normed channels, and the recurrent state. `added` is the result of the mix
    before, or None: parts of a product, which the norm that begins a mix adds to the residual. A mix returns its own.
    `matmul` takes (the matrix's name, x, y, WRITE for y = x w^T, or RELU_SQUARED for relu(x w^T)^2) of each product.

    From the base class: `norm_shift` adds the norm that begins a mix, and the mixes' inputs; `launch_time_mix` the
    recurrence and the product with the output matrix; `product_for_residual` a product that the residual must gain. The
    last two return the next `added`. `decoder.batch` is B; `decoder.dtype`, `decoder.state_dtype` and
    `decoder.matrix_dtype` are the dtypes of products, of the state and of the matrices in memory.
    """

    def time_mix(self, layer, shift, wkv, added):
        decoder, buffers, B = self.decoder, self.buffers, self.decoder.batch
        D, H, N = (decoder.sizes[axis] for axis in "DHN")
        terms, X = buffers.mixed.shape[0], buffers.mixed.dtype
        self.norm_shift(layer.ln1, buffers.mixed, layer.mix, shift, added, after_channel_mix=True)
        self.matmul(
            layer,
            ("vkr", buffers.mixed[:, kernels.DOWNS - 1 :], buffers.vkr, WRITE),  # v's mix is in both
            ("down", buffers.mixed[:, : kernels.DOWNS], buffers.low, WRITE),
            early=True,  # the product's kernel copies weights while the norm's runs
        )
        openings_kernel = Openings.of_step(decoder.dtype, X, B, terms, kernels.DOWNS)
        results = {"w": buffers.w, "openings": buffers.openings}
        arrays = {"low": buffers.low, "up": layer.up, "bases": layer.bases} | results
        self.draft.launch(openings_kernel, openings_kernel.blocks(B, D), **arrays, R=decoder.rank)
        kernel, more_shared = kernels.TimeMixOfToken(X, decoder.state_dtype, terms), 0
        if N == kernels.TimeMixOfHeads.N:
            kernel, more_shared = kernels.TimeMixOfHeads.fitting(X, decoder.state_dtype, terms, B * H, decoder.device)
        args = dict(zip("vkr", buffers.vkr)) | results | {"first": buffers.first_v}
        args |= {"removal": layer.removal, "replacement": layer.replacement, "bonus": layer.bonus}
        return self.launch_time_mix(kernel, B * H, layer, wkv, more_shared, **args)

    def channel_mix(self, layer, shift, added):
        buffers = self.buffers
        self.norm_shift(layer.ln2, buffers.ffn_mixed, layer.ffn_mix, shift, added)
        self.matmul(layer, ("ffn_key", buffers.ffn_mixed, buffers.activated, RELU_SQUARED))
        return self.product_for_residual(layer, "ffn_value", buffers.activated)


class CudaDecoder(cuda_decoder.CudaDecoder):
    """Decodes RWKV-7 token after token. In the single launch of all layers, blocks exchange *words*: `word_buffers`."""

    version = replace(VERSION, layer={name: LAYER[name] for name in UNCHANGED} | STACKS)
    step_class, operations, one_launch = DecodingStep, MixOperations, kernels.DecodeOne
    # the largest that the kernels take
    size_limits: ClassVar = {"D": ChosenNorm.MOST_CHANNELS, "N": kernels.TimeMixOfToken.MOST_N}
    default_sizes: ClassVar = {"Q": 1}  # a model of one layer has no v1 and v2; the kernels get zeros of this rank

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        base_of_value = self.layers[0].bases[-1]  # v0 of the first layer
        self.device.copy(self.device.upload(np.full(base_of_value.shape, -np.inf, FLOAT32)), base_of_value)

    @property
    def rank(self) -> int:
        """The rank of the four low-rank products: the largest of the model's, to which the others are padded."""
        return self.all_layers.down.shape[2]  # [L, DOWNS, rank, D]

    def version_buffers(self, terms, X):
        """The buffers that the top of this module lists. `buffer` makes a float32 array; DOWNS = 4 products `low`."""
        B, D, buffer = self.batch, self.sizes["D"], self.buffer
        buffers = {
            "mixed": buffer(terms, 6, B, D, dtype=X),
            "ffn_mixed": buffer(terms, 1, B, D, dtype=X),
            "vkr": buffer(3, B, D),
            "low": buffer(kernels.DOWNS, B, self.rank),
            "w": buffer(B, D),
            "openings": buffer(3, B, D),
            "first_v": self.device.zeros((B, D), FLOAT32),  # not left unwritten: the first layer loads it, too
        }
        rows = kernels.padded(self.rank, kernels.DecodeOne.ROWS)  # whole tiles of a product
        return buffers | self.word_buffers(low=(kernels.DOWNS, rows), vkr=(3, D))
