"""RWKV-6's layers on the GPU: prompts all tokens at once, steps by `CudaDecoder`, both with one set of weights."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from ..backends.cupy import rwkv6 as kernels
from ..ops import rwkv6
from .rwkv6 import GROUP_NORM_EPS, LAYER_NORM_EPS, counted, layer_norm, one_of
from .rwkv6_cuda import DTYPES, FLOAT32, INT64, CudaDecoder, ceil_div, multiply, parts

KEPT = 8        # batch sizes whose buffers and graph are kept


class CudaLayers:
    """With float32, float16 or bfloat16 matrices, everything else in float32."""

    def __init__(self, weights, sizes, dtype, progress):
        loaded = counted(weights, progress)
        decoder = CudaDecoder(weights, dtype_of(weights, dtype), loaded=loaded)
        self.device, self.steps = decoder.device, {1: Steps(decoder)}
        self.zeros, self.asarray = self.device.zeros, self.device.upload
        self.Array = type(self.zeros((0,), FLOAT32))
        # Stored value by key; the state is key by value.
        tuned = [weights[name] for name in weights if name.endswith("time_state")]
        self.tuned = [self.asarray(array.astype(FLOAT32).swapaxes(1, 2)) for array in tuned]
        for array in tuned:
            loaded(array)

    def logits(self, tokens, state, rows, last):
        """[B * T, V], or [N, V] of each sequence's last token; all host integers."""
        if rows.single:
            return self.steps_of(len(tokens))(tokens, state, rows.slots)
        latest = next(reversed(self.steps.values()))
        return Prompt(latest.decoder, tokens, rows).logits(state, last)

    def steps_of(self, batch) -> Steps:
        """Those of `batch` sequences, for which the ones that were not wanted for longest make room."""
        steps = self.steps.pop(batch, None)
        if steps is None:
            latest = next(reversed(self.steps.values()))
            steps = Steps(latest.decoder.resized(batch))
        self.steps[batch] = steps
        if len(self.steps) > KEPT:
            del self.steps[next(iter(self.steps))]
        return steps


class Steps:
    """The steps of one number of sequences: captured in a graph as soon as the same state comes again.

    The latest state stays alive with it: the graph has its address.
    """

    def __init__(self, decoder):
        self.decoder, self.arrays, self.captured = decoder, (), False
        self.tokens, self.slots = decoder.device.empty((2, decoder.batch), INT64)

    def __call__(self, tokens, state, slots):
        """Logits [B, V], for the caller to keep; `tokens` and `slots` are on the host."""
        self.tokens[...] = self.decoder.device.upload(tokens)
        if slots is not None:
            self.slots[...] = self.decoder.device.upload(slots)
            slots = self.slots
        return self.run(state, slots).copy()

    def run(self, state, slots):
        arrays = *parts(state), slots
        if not self.arrays or any(new is not old for new, old in zip(arrays, self.arrays)):
            self.arrays, self.captured = arrays, False
            return self.decoder.step(self.tokens, state, slots)
        if not self.captured:
            self.decoder.capture(self.tokens, state, slots)
            self.captured = True
        return self.decoder.replay()


class Prompt:
    """The tokens of packed prompts through all layers, x [1, T, D]; what stands between two products is a launch.

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
        x = layer_norm(my.embedding[0][self.device.upload(self.tokens)].astype(FLOAT32), my.ln0)[None]
        att_before, ffn_before = (shift[:, self.states].copy() for shift in (state.att_shift, state.ffn_shift))
        for i, layer in enumerate(my.layers):
            self.time_mix(x, layer, SimpleNamespace(before=att_before[i], after=state.att_shift[i]), state.wkv[i])
            self.channel_mix(x, layer, SimpleNamespace(before=ffn_before[i], after=state.ffn_shift[i]))
        x = layer_norm(x[:, self.last] if last else x, my.ln_out)
        return self.product(my.head, x.astype(my.dtype, copy=False))[0]

    def time_mix(self, x, layer, shift, wkv):
        my, at, T = self.my, self.at, self.T
        D, H, N, A, W = (my.sizes[axis] for axis in "DHNAW")
        mixed_x, mixed = self.room(1, T, D, dtype=my.dtype), self.room(5, T, D, dtype=my.dtype)
        xx, d, w = self.room(T, D), self.room(T, D), self.room(T, D)
        self.shift_mix(x, layer.ln1, layer.maa_x, shift, mixed_x, xx, d)
        low = self.product(layer.maa_down, mixed_x)
        blocks = ceil_div(T, kernels.PROMPT_TOKENS) * ceil_div(D, kernels.PROMPT_COLUMNS)
        self.launch(
            kernels.DataMix(my.dtype), 5 * blocks, low=at(low), up=at(layer.maa_up), maa=at(layer.maa), xx=at(xx),
            d=at(d), mixed=at(mixed), tokens=T, D=D, A=A)
        k, v, r, gate = self.product(layer.kvrg, mixed[1:], my.dtype)
        low = self.product(layer.decay_down, mixed[:1])
        self.launch(
            kernels.LogDecay(my.dtype), blocks, low=at(low), up=at(layer.decay_up), decay=at(layer.decay), w=at(w),
            tokens=T, D=D, W=W)
        r, k, v, w = (array.reshape(1, T, H, N) for array in (r, k, v, w))
        bonus = layer.bonus[0].astype(my.dtype, copy=False)
        o, wkv[self.states] = rwkv6(r, k, v, w, bonus, scale=1.0, layout="bthd", cu_seqlens=self.bounds,
                                    initial_state=wkv[self.states], output_final_state=True)
        y, (weight, bias), kernel = self.room(1, T, D, dtype=my.dtype), layer.ln_x, kernels.GatedNorm(my.dtype)
        self.launch(
            kernel, ceil_div(T * H * 32, kernel.threads), o=at(o), gate=at(gate), weight=at(weight), bias=at(bias),
            y=at(y), rows=T * H, H=H, N=N, eps=GROUP_NORM_EPS)
        multiply(layer.output)(layer.output, y, x, True)

    def channel_mix(self, x, layer, shift):
        my, at, T = self.my, self.at, self.T
        mixed, activated = (self.room(*shape, dtype=my.dtype) for shape in ((2, *x.shape[1:]), (1, T, my.sizes["F"])))
        self.shift_mix(x, layer.ln2, layer.ffn_maa, shift, mixed)
        hidden, kernel = self.product(layer.ffn_key, mixed[:1]), kernels.ReluSquared(my.dtype)
        self.launch(kernel, ceil_div(hidden.size, kernel.threads), x=at(hidden), y=at(activated), count=hidden.size)
        gate, value = self.product(layer.ffn_receptance, mixed[1:]), self.product(layer.ffn_value, activated)
        kernel = kernels.GatedAdd()
        self.launch(kernel, ceil_div(x.size, kernel.threads), x=at(x), gate=at(gate), value=at(value), count=x.size)

    def shift_mix(self, x, norm, maa, shift, mixed, xx=None, d=None):
        at, (weight, bias), (C, T, D) = self.at, norm, mixed.shape
        self.launch(
            kernels.ShiftMix(mixed.dtype), T, x=at(x), weight=at(weight), bias=at(bias), maa=at(maa),
            before=at(shift.before), shift=at(shift.after), starts=at(self.starts), ends=at(self.ends),
            xx=None if xx is None else at(xx), d=None if d is None else at(d), mixed=at(mixed), T=T, D=D, C=C,
            eps=LAYER_NORM_EPS)

    def product(self, w, x, dtype=FLOAT32):
        """x w^T [C, T, M], for w [C, M, K] and x [C, T, K] of its dtype."""
        y = self.room(len(w), x.shape[1], w.shape[1], dtype=dtype)
        multiply(w)(w, x, y, False)
        return y

    def room(self, *shape, dtype=FLOAT32):
        return self.device.empty(shape, dtype)

    def launch(self, kernel, blocks, **fields):
        self.device.launch(kernel, blocks, kernel.pack(**fields))


def dtype_of(weights, dtype):
    """`dtype`, or the weights' own if that is a half-precision one."""
    if dtype is not None:
        return one_of(dtype, DTYPES)
    own = weights["head.weight"].dtype
    return own if own in DTYPES else FLOAT32
