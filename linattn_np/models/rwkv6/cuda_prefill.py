"""Prompts of RWKV-6 on the GPU, all tokens at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...backends.cupy import rwkv6 as kernels
from ...ops import rwkv6
from . import math
from .cuda_decode import FLOAT32, ceil_div, multiply


HALF = ("kvrg", "ffn_key")  # products whose results are rounded to the dtype of the matrix


class Shift(NamedTuple):
    """A layer's part of a shift state: what was there before the call, and where the call leaves its last tokens."""

    before: object
    after: object


class Prompt:
    """The tokens of packed prompts through all layers, x [1, T, D]; every piece of `math.Pieces` is a launch.

    What meets a matrix is rounded to its dtype, and so are r, k, v and the gate, which come out of one; the decay,
    the state, the residual and the sums are float32.
    """

    def __init__(self, decoder, tokens, rows):
        self.my, self.device, self.at = decoder, decoder.device, decoder.device.pointer
        self.tokens, self.bounds, self.T = tokens, rows.bounds, len(tokens)
        starts, ends = np.full((2, self.T), -1)
        starts[rows.first] = np.arange(len(rows.first))
        ends[rows.last] = np.arange(len(rows.last)) if rows.slots is None else rows.slots
        self.starts, self.ends, self.last = map(self.device.upload, (starts, ends, rows.last))
        self.states = rows.states if rows.slots is None else self.device.upload(rows.slots)

    def logits(self, state, last):
        my = self.my
        x = math.layer_norm(my.embedding[0][self.device.upload(self.tokens)].astype(FLOAT32), my.ln0)[None]
        att_before, ffn_before = (shift[:, self.states].copy() for shift in (state.att_shift, state.ffn_shift))
        for i, layer in enumerate(my.layers):
            x = math.time_mix(self, layer, x, Shift(att_before[i], state.att_shift[i]), state.wkv[i])
            x = math.channel_mix(self, layer, x, Shift(ffn_before[i], state.ffn_shift[i]))
        x = math.layer_norm(x[:, self.last] if last else x, my.ln_out)
        return self.multiplied(my.head, x.astype(my.dtype, copy=False))[0]

    # -- the pieces of the mixes -------------------------------------------------------------------------------------
    def shift_mix(self, layer, norm, maa, x, shift):
        at, (weight, bias), maa = self.at, getattr(layer, norm), getattr(layer, maa)
        C, T, D = len(maa), self.T, x.shape[-1]
        mixed = self.empty(C, T, D, dtype=self.my.dtype)
        xx, d = (self.empty(T, D), self.empty(T, D)) if norm == "ln1" else (None, None)  # what `data_mix` reads
        self.launch(
            kernels.ShiftMix.fitting(mixed.dtype, D),
            T,
            x=at(x),
            weight=at(weight),
            bias=at(bias),
            maa=at(maa),
            before=at(shift.before),
            shift=at(shift.after),
            starts=at(self.starts),
            ends=at(self.ends),
            xx=None if xx is None else at(xx),
            d=None if d is None else at(d),
            mixed=at(mixed),
            T=T,
            D=D,
            C=C,
            eps=math.LAYER_NORM_EPS,
        )
        return mixed, xx, d

    def product(self, layer, name, x):
        """In float32, but for what the recurrence, the gate and the activation take."""
        w = getattr(layer, name)
        y = self.multiplied(w, x.reshape(-1, *x.shape[-2:]), self.my.dtype if name in HALF else FLOAT32)
        return y if x.ndim == 3 else y[0]

    def data_mix(self, layer, low, xx, d):
        at, T, D, A = self.at, self.T, self.my.sizes["D"], self.my.sizes["A"]
        mixed = self.empty(5, T, D, dtype=self.my.dtype)
        kernel = kernels.DataMix.of_prompt(self.my.dtype)
        self.launch(
            kernel,
            kernel.blocks(T, D),
            low=at(low),
            up=at(layer.maa_up),
            maa=at(layer.maa),
            xx=at(xx),
            d=at(d),
            mixed=at(mixed),
            tokens=T,
            D=D,
            A=A,
        )
        return mixed

    def log_decay(self, layer, low):
        at, T, D, W = self.at, self.T, self.my.sizes["D"], self.my.sizes["W"]
        w = self.empty(T, D)
        kernel = kernels.LogDecay(self.my.dtype)
        self.launch(
            kernel,
            kernel.blocks(T, D),
            low=at(low),
            up=at(layer.decay_up),
            decay=at(layer.decay),
            w=at(w),
            tokens=T,
            D=D,
            W=W,
        )
        return w

    def recurrence(self, layer, kvr, w, wkv):
        k, v, r, w = (array.reshape(1, self.T, self.my.sizes["H"], -1) for array in (*kvr, w))
        bonus = layer.bonus[0].astype(self.my.dtype, copy=False)
        o, wkv[self.states] = rwkv6(
            r,
            k,
            v,
            w,
            bonus,
            scale=1.0,
            layout="bthd",
            cu_seqlens=self.bounds,
            initial_state=wkv[self.states],
            output_final_state=True,
        )
        return o

    def gated_norm(self, layer, o, gate):
        at, T, H, N = self.at, self.T, self.my.sizes["H"], self.my.sizes["N"]
        y, (weight, bias) = self.empty(1, T, H * N, dtype=self.my.dtype), layer.ln_x
        kernel = kernels.GatedNorm(self.my.dtype)
        self.launch(
            kernel,
            ceil_div(T * H * 32, kernel.threads),
            o=at(o),
            gate=at(gate),
            weight=at(weight),
            bias=at(bias),
            y=at(y),
            rows=T * H,
            H=H,
            N=N,
            eps=math.GROUP_NORM_EPS,
        )
        return y

    def relu_squared(self, x):
        y, kernel = self.empty(*x.shape, dtype=self.my.dtype), kernels.ReluSquared(x.dtype, self.my.dtype)
        self.launch(kernel, kernel.blocks(x.size), x=self.at(x), y=self.at(y), count=x.size)
        return y

    def add_product(self, layer, name, x, y):
        w = getattr(layer, name)
        multiply(w)(w, y, x, True)
        return x

    def add_gated(self, x, gate, value):
        at, kernel = self.at, kernels.GatedAdd()
        self.launch(kernel, ceil_div(x.size, kernel.threads), x=at(x), gate=at(gate), value=at(value), count=x.size)
        return x

    # -- arrays and launches -----------------------------------------------------------------------------------------
    def multiplied(self, w, x, dtype=FLOAT32):
        """x w^T [C, T, M], for w [C, M, K] and x [C, T, K] of its dtype."""
        y = self.empty(len(w), x.shape[1], w.shape[1], dtype=dtype)
        multiply(w)(w, x, y, False)
        return y

    def empty(self, *shape, dtype=FLOAT32):
        return self.device.empty(shape, dtype)

    def launch(self, kernel, blocks, **fields):
        self.device.launch(kernel, blocks, kernel.pack(**fields))
