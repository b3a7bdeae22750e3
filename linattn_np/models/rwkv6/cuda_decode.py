"""RWKV-6's steps on the GPU: a layer in nine launches, or on Hopper all layers of a single sequence in one.

`rwkv.cuda_decoder` has what no version changes. Sizes: B sequences, D channels, H heads of N channels; A and W are the
ranks of the low-rank products for the five mixes and for the decay. An input of a product is the sum of `terms` arrays
of dtype X (`mixed_x`, `mixed`, `ffn_mixed`). A product may leave *parts*, arrays whose sum it is (`low`, `kvrg`,
`decay_low`). These are the first axes. Buffers:

    xx, d       a token's normed channels; the previous token's less xx
    mixed_x     the static mix xx + d maa_x, from which the weights of the five mixes are computed
    low         mixed_x times maa_down: A numbers for each of the five mixes
    mixed       the five mixes w k v r g: the input of decay_down, and the four of kvrg
    kvrg        key, value, receptance and gate of the time mix
    decay_low   the decay's W numbers of low rank
    ffn_mixed   the channel mix's inputs: of ffn_key, of ffn_receptance
    gate        the channel mix's receptance, of which the next norm takes the sigmoid
"""

from typing import ClassVar

from ...backends.cupy import rwkv6_model_kernels as kernels
from ...backends.cupy.model_products import RELU_SQUARED, WRITE
from ..rwkv import cuda_decoder
from .cuda_prefill import MixOperations
from .names import VERSION


class DecodingStep(cuda_decoder.DecodingStep):
    """Adds a layer's launches to the plan `draft` of a step. `layer` has the layer's arrays; `shift` and `wkv` are its
    part of the state: the previous tokens' normed channels, and the recurrent state. `added` is the result of the mix
    before, or None: parts of a product, which the norm that begins a mix adds to the residual. A mix returns its own.
    `matmul` takes (the matrix's name, x, y, WRITE for y = x w^T, or RELU_SQUARED for relu(x w^T)^2) of each product.

    From the base class: `norm_shift` adds the norm that begins a mix, and the mixes' inputs; `products_in_parts` adds
    products that may leave parts, and returns how many; `launch_time_mix` adds the recurrence and the product with the
    output matrix, `product_for_residual` a product that the residual must gain: both return the next `added`.
    `decoder.batch` is B; `decoder.dtype`, `decoder.state_dtype` and `decoder.matrix_dtype` are the dtypes of products,
    of the state and of the matrices in memory; `decoder.by_rows`: whether products take float32 inputs, row by row.
    """

    def time_mix(self, layer, shift, wkv, added):
        decoder, buffers, B = self.decoder, self.buffers, self.decoder.batch
        terms, X, (H, N) = buffers.mixed.shape[0], buffers.mixed.dtype, (decoder.sizes[axis] for axis in "HN")
        self.norm_shift(layer.ln1, buffers.mixed_x, layer.maa_x, shift, added, after_channel_mix=True, xx=buffers.xx)
        self.data_mix(layer)
        batch_kernel = None  # (a `TimeMixBatch`, its bytes of shared memory beside those that it declares), if it fits
        if not decoder.by_rows:  # the products by rows take float32, and `TimeMixBatch` writes its y in `dtype`
            batch_kernel = kernels.TimeMixBatch.fitting(
                decoder.dtype, decoder.state_dtype, terms, B, H, N, decoder.sizes["W"], decoder.device
            )
        one_part_kernel = kernels.TimeMixStep(decoder.dtype, X, decoder.state_dtype, terms)
        kernel, more_shared = batch_kernel or (one_part_kernel, 0)
        parts = self.products_in_parts(  # how many parts there are: at most as many as the kernel adds up
            layer,
            kernel.parts,
            ("kvrg", buffers.mixed[:, 1:], buffers.kvrg),
            ("decay_down", buffers.mixed[:, :1], buffers.decay_low),
            early=True,  # the product's kernel copies weights while the mixes' runs
        )
        # the kernel gets the first part of each, and finds the others in the memory after it
        args = dict(zip(("k", "v", "r", "gate"), buffers.kvrg[0])) | ({"P": parts} if batch_kernel else {})
        args |= {"decay_low": buffers.decay_low, "decay_up": layer.decay_up}
        args |= {"decay_base": layer.decay, "bonus": layer.bonus}
        return self.launch_time_mix(kernel, kernel.blocks(B, H), layer, wkv, more_shared, **args)

    def channel_mix(self, layer, shift, added):
        buffers = self.buffers
        self.norm_shift(layer.ln2, buffers.ffn_mixed, layer.ffn_maa, shift, added)
        self.matmul(
            layer,
            ("ffn_key", buffers.ffn_mixed[:, :1], buffers.activated, RELU_SQUARED),
            ("ffn_receptance", buffers.ffn_mixed[:, 1:], buffers.gate, WRITE),
        )
        return self.product_for_residual(layer, "ffn_value", buffers.activated)

    def data_mix(self, layer):
        """Adds the five mixes of the time mix, whose weights depend on the data: the product with `maa_down`, and a
        kernel that multiplies by `maa_up` and mixes."""
        decoder, buffers, B = self.decoder, self.buffers, self.decoder.batch
        kernel = kernels.DataMix.of_step(decoder.dtype, buffers.mixed.dtype, B, buffers.mixed.shape[0])
        parts = self.products_in_parts(layer, buffers.low.shape[0], ("maa_down", buffers.mixed_x, buffers.low))
        arrays = {name: getattr(buffers, name) for name in ("low", "xx", "d", "mixed")}
        arrays |= {"up": layer.maa_up, "maa": layer.maa}
        self.draft.launch(kernel, kernel.blocks(B, decoder.sizes["D"]), **arrays, P=parts)


class CudaDecoder(cuda_decoder.CudaDecoder):
    """Decodes RWKV-6 token after token. In the single launch of all layers, blocks exchange *words*: `word_buffers`."""

    version, step_class, operations, one_launch = VERSION, DecodingStep, MixOperations, kernels.DecodeFew
    # the largest that the kernels take
    size_limits: ClassVar = {"D": kernels.ChosenNorm.MOST_CHANNELS, "N": kernels.GatedNorm.MOST_N}
    step_limits: ClassVar = {"N": kernels.TimeMixStep.MOST_N, "W": kernels.TimeMixStep.MOST_W}

    def version_buffers(self, terms, X):
        """The buffers that the top of this module lists. `buffer` makes a float32 array."""
        B, (D, A, W), buffer = self.batch, (self.sizes[axis] for axis in "DAW"), self.buffer
        low_parts = kernels.DataMix.of_step(self.dtype, X, B, terms).most_parts
        parts = 1 if self.by_rows else kernels.TimeMixBatch.MOST_PARTS  # the most that any kernel of the time mix takes
        buffers = {
            "xx": buffer(B, D),
            "d": buffer(B, D),
            "mixed_x": buffer(terms, 1, B, D, dtype=X),
            "low": buffer(low_parts, 1, B, 5 * A),
            "mixed": buffer(terms, 5, B, D, dtype=X),
            "kvrg": buffer(parts, 4, B, D),
            "decay_low": buffer(parts, 1, B, W),
            "ffn_mixed": buffer(terms, 2, B, D, dtype=X),
            "gate": buffer(1, B, D),
        }
        return buffers | self.word_buffers(low=(5 * A,), mixed=(5, D), kvrg=(4, D), decay_low=(W,), gate=(D,))
