"""RWKV-6's steps on the GPU: a layer in nine launches, or on Hopper all layers of a single sequence in one."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ...backends.cupy import rwkv6_model_kernels as kernels
from ...backends.cupy.model_products import RELU_SQUARED, WRITE, NarrowProduct
from ..rwkv import cuda_decoder
from ..rwkv.cuda_decoder import INT64, matrix_of
from ..rwkv.cuda_weights import FLOAT32, SCALES
from .cuda_prefill import Pieces
from .names import VERSION

UINT32 = np.dtype(np.uint32)
PHASES = 7  # of a layer in decode_few
PHASE_BLOCKS = 16  # that share a phase where each is a launch of its own


class Step(cuda_decoder.Step):
    """Draws the plan of one token."""

    def all_at_once(self, layers, greedy):
        """All layers and the head, in one launch if all blocks can run at the same time, else in one a phase."""
        kernel, more_shared = self.my.kernel
        buffers = vars(self.buffers) | {"kvrg_out": self.buffers.kvrg} | vars(self.layers) | vars(self.state)
        tokens = self.tokens if greedy else None
        found = buffers | vars(self.model) | {"slots": self.slots, "tokens": tokens}
        names = [member.name for member in kernel.arguments if member.kind == "pointer"]
        fields = {name: found.get(name) if name.endswith(SCALES) else found[name] for name in names}
        count = layers * PHASES + 1
        for first, last in [(0, count)] if self.device.cooperative else [(n, n + 1) for n in range(count)]:
            self.draft.launch(
                kernel,
                self.device.multiprocessors if self.device.cooperative else PHASE_BLOCKS,
                more_shared=more_shared,
                together=self.device.cooperative,
                **fields,
                L=layers,
                P=self.state.wkv.shape[1],
                staged=kernel.staged(more_shared),
                first=first,
                last=last,
                eps=self.my.layer_eps,
                group_eps=self.my.group_eps,
            )

    def time_mix(self, layer, shift, wkv, added):
        my, buffers, B = self.my, self.buffers, self.my.batch
        T, X, (H, N, W) = my.dtype, buffers.mixed.dtype, (my.sizes[axis] for axis in "HNW")
        terms = buffers.mixed.shape[0]
        self.norm_shift(layer.ln1, buffers.mixed_x, layer.maa_x, shift, added, squares=True, xx=buffers.xx)
        self.data_mix(layer)
        batch = None if my.by_rows else kernels.TimeMixBatch.fitting(T, my.state_dtype, terms, B, H, N, W, my.device)
        kernel, more_shared = batch or (kernels.TimeMixStep(T, X, my.state_dtype, terms), 0)
        parts = self.in_parts(
            layer,
            kernel.parts,
            ("kvrg", buffers.mixed[:, 1:], buffers.kvrg),
            ("decay_down", buffers.mixed[:, :1], buffers.decay_low),
            early=True,
        )
        k, v, r, gate = buffers.kvrg[0]
        self.draft.launch(
            kernel,
            kernel.blocks(B, H),
            more_shared=more_shared,
            k=k,
            v=v,
            r=r,
            gate=gate,
            low=buffers.decay_low,
            up=layer.decay_up,
            decay=layer.decay,
            u=layer.bonus,
            **kernels.affine(layer.ln_x),
            state=wkv,
            slots=self.slots,
            y=buffers.y,
            **({"P": parts} if batch else {}),
            eps=my.group_eps,
        )
        return self.addend(layer, "output", buffers.y, buffers.x)

    def channel_mix(self, layer, shift, added):
        buffers = self.buffers
        self.norm_shift(layer.ln2, buffers.ffn_mixed, layer.ffn_maa, shift, added)
        self.matmul(
            layer,
            ("ffn_key", buffers.ffn_mixed[:, :1], buffers.activated, RELU_SQUARED),
            ("ffn_receptance", buffers.ffn_mixed[:, 1:], buffers.gate, WRITE),
        )
        return self.addend(layer, "ffn_value", buffers.activated)

    def data_mix(self, layer):
        my, buffers, D, B = self.my, self.buffers, self.my.sizes["D"], self.my.batch
        X, terms = buffers.mixed.dtype, buffers.mixed.shape[0]
        arrays = {"low": buffers.low, "up": layer.maa_up, "maa": layer.maa, "xx": buffers.xx, "d": buffers.d}
        arrays["mixed"] = buffers.mixed
        if mixes := kernels.FiveMixes.fitting(my.matrices, X, B, my.sizes["A"], my.device):
            w, scales = matrix_of(layer, "maa_down")
            down, M = NarrowProduct.fitting(my.matrices, B), 5 * my.sizes["A"]
            given = {"w": w, "scales": scales, "x": buffers.mixed_x, "y": buffers.low}
            self.draft.launch(down, down.blocks(B, M), **given, K=D, M=M)
            self.draft.launch(mixes, mixes.blocks(B, D), **arrays)
            return
        mix = kernels.DataMix.of_step(my.dtype, X, B, terms)
        parts = self.in_parts(layer, buffers.low.shape[0], ("maa_down", buffers.mixed_x, buffers.low))
        self.draft.launch(mix, mix.blocks(B, D), **arrays, P=parts)


class CudaDecoder(cuda_decoder.CudaDecoder):
    """Decodes token after token; the single launch of all layers drops the last bit of the numbers that it writes for
    itself, unless weights are float32."""

    version, drawing, pieces = VERSION, Step, Pieces
    most: ClassVar = {"D": 8192, "N": 256, "W": 512}

    def kernel_of_layers(self, batch):
        if batch == 1 and self.device.capability == 90:
            return kernels.DecodeFew.fitting(self.matrices, self.state_dtype, self.sizes, self.device)
        return None

    def own_room(self, terms, X):
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
        return room | self.words() if self.kernel else room

    def words(self) -> dict:
        """The arrays by which the blocks of `DecodeFew` exchange numbers: numbers as words, each with the epoch in
        which it was written (0 before the first); the blocks' own epochs; and the likeliest token's place."""
        D, F, A, W = (self.sizes[axis] for axis in "DFAW")
        shapes = {"xx": (6, D), "low": (5 * A,), "mixed": (5, D), "kvrg": (4, D), "decay_low": (W,)}
        shapes |= {"y": (D,), "activated": (F,), "gate": (D,)}
        blocks = max(self.device.multiprocessors, PHASE_BLOCKS)
        narrow = INT64 if self.dtype == FLOAT32 else UINT32  # the last x takes two of these
        words = {name: self.device.zeros(shape, narrow) for name, shape in shapes.items()}
        words |= {name: self.device.zeros((count,), UINT32) for name, count in (("arrived", blocks), ("brought", 1))}
        return words | {"likeliest": self.device.zeros((1,), INT64)}
