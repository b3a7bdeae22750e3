"""RWKV-6's steps on the GPU: a layer in nine launches, or on Hopper all layers of a single sequence in one."""

from typing import ClassVar

from ...backends.cupy import rwkv6_model_kernels as kernels
from ...backends.cupy.model_products import RELU_SQUARED, WRITE, NarrowProduct
from ..rwkv import cuda_decoder
from ..rwkv.cuda_decoder import matrix_of
from .cuda_prefill import MixOperations
from .names import VERSION


class DecodingStep(cuda_decoder.DecodingStep):
    """Makes the plan of a decoding step; see the base class."""

    def time_mix(self, layer, shift, wkv, added):
        decoder, buffers, B = self.decoder, self.buffers, self.decoder.batch
        T, X, (H, N, W) = decoder.dtype, buffers.mixed.dtype, (decoder.sizes[axis] for axis in "HNW")
        terms = buffers.mixed.shape[0]
        self.norm_shift(layer.ln1, buffers.mixed_x, layer.maa_x, shift, added, squares=True, xx=buffers.xx)
        self.data_mix(layer)
        state_dtype, batch = decoder.state_dtype, None
        if not decoder.by_rows:
            batch = kernels.TimeMixBatch.fitting(T, state_dtype, terms, B, H, N, W, decoder.device)
        kernel, more_shared = batch or (kernels.TimeMixStep(T, X, state_dtype, terms), 0)
        parts = self.products_in_parts(
            layer,
            kernel.parts,
            ("kvrg", buffers.mixed[:, 1:], buffers.kvrg),
            ("decay_down", buffers.mixed[:, :1], buffers.decay_low),
            early=True,
        )
        args = dict(zip(("k", "v", "r", "gate"), buffers.kvrg[0])) | ({"P": parts} if batch else {})
        args |= {"low": buffers.decay_low, "up": layer.decay_up, "decay": layer.decay, "u": layer.bonus}
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
        """Adds the five mixes of the time mix, whose weights depend on the data: a product of low rank, and a
        kernel."""
        decoder, buffers, D, B = self.decoder, self.buffers, self.decoder.sizes["D"], self.decoder.batch
        X, terms = buffers.mixed.dtype, buffers.mixed.shape[0]
        arrays = {"low": buffers.low, "up": layer.maa_up, "maa": layer.maa, "xx": buffers.xx, "d": buffers.d}
        arrays["mixed"] = buffers.mixed
        if mixes := kernels.FiveMixes.fitting(decoder.matrices, X, B, decoder.sizes["A"], decoder.device):
            w, scales = matrix_of(layer, "maa_down")
            product, M = NarrowProduct.fitting(decoder.matrices, B), 5 * decoder.sizes["A"]
            operands = {"w": w, "scales": scales, "x": buffers.mixed_x, "y": buffers.low}
            self.draft.launch(product, product.blocks(B, M), **operands, K=D, M=M)
            self.draft.launch(mixes, mixes.blocks(B, D), **arrays)
            return
        mix = kernels.DataMix.of_step(decoder.dtype, X, B, terms)
        parts = self.products_in_parts(layer, buffers.low.shape[0], ("maa_down", buffers.mixed_x, buffers.low))
        self.draft.launch(mix, mix.blocks(B, D), **arrays, P=parts)


class CudaDecoder(cuda_decoder.CudaDecoder):
    """Decodes RWKV-6 token after token. The single launch of all layers drops the last bit of the numbers that its
    blocks exchange, unless the matrices are float32."""

    version, step_class, operations = VERSION, DecodingStep, MixOperations
    size_limits: ClassVar = {"D": 8192, "N": 256, "W": 512}

    def kernel_of_one(self):
        return kernels.DecodeFew.fitting(self.matrices, self.state_dtype, self.sizes, self.device)

    def version_buffers(self, terms, X):
        B, (D, A, W), buffer = self.batch, (self.sizes[axis] for axis in "DAW"), self.buffer
        parts = 1 if self.by_rows else kernels.TimeMixBatch.MOST_PARTS
        low_parts = 1 if self.by_rows else kernels.DataMix.of_step(self.dtype, X, B, terms).most_parts
        if kernels.FiveMixes.fitting(self.matrices, X, B, A, self.device):
            low_parts = NarrowProduct.PARTS
        room = {
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
        if not self.kernel:
            return room
        return room | self.words(low=(5 * A,), mixed=(5, D), kvrg=(4, D), decay_low=(W,), gate=(D,))
