"""Prompts of RWKV models on the GPU, all tokens at once.

Prompts with the same lengths share their plans: of the embeddings, of a layer, of the head. The layers read and write a
single allocation, into which the state is copied and out of which it is copied back. Its address decides all others, so
launches are kept by it: a call that gets the same address again reuses the launches of all layers, first one by one,
from the second time on as a CUDA graph, which takes the host next to no time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...backends.cupy import rwkv6_model_kernels as kernels
from ...backends.cupy.execute import CompiledPlan, allocated
from ...backends.cupy.kernel import INT8
from ...backends.cupy.plan import Array, Buffer, Draft, Plan, contiguous, describe_parts
from ...varlen import Spans
from .cuda_weights import FLOAT32, SCALES, widened
from .state import STATE, State, shapes_and_dtypes
from .version import output_scale

PLACES = 4  # addresses for which launches, then a graph, are kept


class Prompts:
    """Prompts of these lengths on one decoder's weights, with the logits of all tokens or of each `last` one."""

    def __init__(self, decoder, rows, last: bool):
        self.my, self.device, self.bounds = decoder, decoder.device, rows.bounds
        self.wanted = rows.last if last else np.arange(rows.bounds[-1])
        parts = shapes_and_dtypes(decoder.sizes, len(rows.first), FLOAT32)
        self.state = {f"{name}_{when}": shape[1:] for when in ("before", "after") for name, (shape, _) in parts.items()}
        self.x = contiguous("x", (int(rows.bounds[-1]), decoder.sizes["D"]), FLOAT32)
        self.carried = decoder.pieces.carried(decoder, self.x.shape[0])
        given = {name: contiguous(name, shape, FLOAT32) for name, shape in self.state.items()}
        given |= {name: contiguous(name, *array) for name, array in self.carried.items()}
        tokens = contiguous("tokens", self.x.shape[:1], np.dtype(np.int64))
        logits = contiguous("logits", (len(self.wanted), decoder.sizes["V"]), FLOAT32)
        whole = vars(decoder.whole)
        self.start = self.compiled(self.draw_start, {"tokens": tokens, "x": self.x, **whole})
        self.head = self.compiled(self.draw_head, {"x": self.x, "logits": logits, **whole})
        self.layer = self.compiled(self.draw_layer, {"x": self.x, **given, **vars(decoder.layers[0])})
        self.launches: dict[int, list] = {}  # of all layers, by the address of their memory

    def __call__(self, tokens, state: State, slots):
        """Logits [T, V], or [N, V]; `state` is updated in place, in the rows `slots` (None: all)."""
        my, device, L = self.my, self.device, len(self.my.layers)
        slots = None if slots is None else device.upload(slots)
        own = [buffer(self.x.shape), *(buffer((L, *shape)) for shape in self.state.values())]
        more = [*(buffer(*array) for array in self.carried.values()), *self.layer.plan.buffers]
        memory = allocated([*own, *more], device)
        (x, *states), buffers = memory[: len(own)], memory[len(own) :]
        before, after = states[: len(STATE)], states[len(STATE) :]
        logits = device.empty((len(self.wanted), my.sizes["V"]), FLOAT32)

        for array, copy in zip(state.arrays, before):
            if array.dtype == FLOAT32:
                device.copy(gathered(array, slots), copy)
            else:
                copy[...] = gathered(array, slots)
        self.start([device.upload(tokens), x, *vars(my.whole).values()])
        self.run_layers(x, states, buffers)
        self.head([x, logits, *vars(my.whole).values()])
        for array, new in zip(state.arrays, after):
            if slots is None and array.flags.c_contiguous and array.dtype == FLOAT32:
                device.copy(new, array)
            else:
                array[:, slice(None) if slots is None else slots] = new
        return logits

    def run_layers(self, x, states, buffers):
        """Run all layers on this memory. The kept launches hold its address, but do not keep it allocated."""
        address = self.device.pointer(x)
        if address in self.launches:
            if len(self.launches[address]) > 1:  # not yet a graph, whose launch is one
                self.launches[address] = [self.device.captured(self.launches[address])]
            self.launches[address][0](None)
            return
        made, (carried, buffers) = [], (buffers[: len(self.carried)], buffers[len(self.carried) :])
        for i, layer in enumerate(self.my.layers):  # the device has a layer to do while the next one's are made
            arrays = [x, *(array[i] for array in states), *carried, *vars(layer).values(), *buffers]
            of_layer = self.layer.commands(arrays)
            for launch in of_layer:
                launch(None)
            made += of_layer
        if len(self.launches) >= PLACES:
            self.launches.clear()
        self.launches[address] = made

    def compiled(self, draw, arrays: dict) -> CompiledPlan:
        """The compiled plan that `draw` makes for arrays of these shapes, strides and dtypes."""
        seen, given, _ = describe_parts(self.device, every=arrays)
        draft = Draft(**self.my.sizes, T=self.x.shape[0], tokens=self.x.shape[0])
        draw(draft, seen.every)
        return CompiledPlan(Plan(tuple(draft.buffers), tuple(draft.steps), None, given=given), self.device)

    # -- the plans: `seen` has an `Array` for each of the arrays -----------------------------------------------------
    def draw_start(self, draft: Draft, seen):
        kernels.ChosenNorm.launch(draft, seen.tokens, seen.embedding, seen.ln0, seen.x, self.my.layer_eps)

    def draw_layer(self, draft: Draft, seen):
        do = self.my.pieces(self.my, draft, self.bounds, seen)
        att_shift, wkv, ffn_shift = (
            Change(getattr(seen, f"{name}_before"), getattr(seen, f"{name}_after")) for name in STATE
        )
        do.channel_mix(seen, do.time_mix(seen, seen.x, att_shift, wkv), ffn_shift)

    def draw_head(self, draft: Draft, seen):
        normed = draft.empty((1, len(self.wanted), self.my.sizes["D"]), self.my.dtype)
        wanted = draft.table(self.wanted)
        kernels.ChosenNorm.launch(draft, wanted, seen.x, seen.ln_out, normed, self.my.layer_eps)
        head = seen.head
        if head.dtype == INT8:
            head = widened(draft, head, seen.head_scales, draft.empty(head.shape, self.my.dtype), self.my.dtype)
        draft.product(head, normed, seen.logits[None])


def buffer(shape, dtype=FLOAT32) -> Buffer:
    return Buffer(shape, dtype, tuple(range(len(shape))))


def gathered(array, slots):
    """The rows `slots` of [L, P, ...] (None: all), contiguous."""
    found = array if slots is None else array[:, slots]
    return found if found.flags.c_contiguous else found.copy()


class Change(NamedTuple):
    """A layer's part of a state: before the call, and where the call leaves it."""

    before: Array
    after: Array


class Pieces:
    """Of the pieces of a version's mixes those that all versions have, as steps of a layer's plan, x [T, D].

    Vectors that a matrix multiplies are rounded to its dtype, and so are the products that a recurrence and an
    activation take; the decay, the state, the residual and the sums are float32.

    mixes : by norm, where its mixes [C, T, D] go, and the normed input and its token shift, or None
    results : by matrix, where its product goes
    """

    mixes: dict[str, tuple[Array, Array | None, Array | None]]
    results: dict[str, Array]

    def __init__(self, decoder, draft: Draft, bounds, seen):
        self.draft, self.device, self.dtype, self.sizes = draft, decoder.device, decoder.dtype, decoder.sizes
        self.scale, self.seen = output_scale(self.dtype), seen
        self.layer_eps, self.group_eps = decoder.layer_eps, decoder.group_eps
        self.spans, self.T = Spans(bounds), int(bounds[-1])
        self.wide = None  # the buffer for int8 matrices converted to `dtype`
        self.widest = decoder.widest(decoder.layers[0]) if decoder.matrices == INT8 else 0
        lengths = np.diff(bounds)
        starts, ends = np.full((2, self.T), -1)
        starts[bounds[:-1]] = ends[bounds[1:] - 1] = np.arange(len(lengths))
        self.starts, self.ends = draft.table(starts), draft.table(ends)

    @staticmethod
    def carried(decoder, T) -> dict:
        """Shapes and dtypes of what the layers hand on beside x, by name."""
        return {}

    def time_mix(self, layer, x, shift, wkv):
        raise NotImplementedError

    def channel_mix(self, layer, x, shift):
        raise NotImplementedError

    def shift_mix(self, layer, norm, maa, x, shift):
        (T, D), (mixed, xx, d) = x.shape, self.mixes[norm]
        self.draft.launch(
            kernels.ShiftMix.fitting(mixed.dtype, D),
            T,
            x=x,
            **kernels.affine(getattr(layer, norm)),
            maa=getattr(layer, maa),
            before=shift.before,
            shift=shift.after,
            starts=self.starts,
            ends=self.ends,
            xx=xx,
            d=d,
            mixed=mixed,
            C=mixed.shape[0],
            eps=self.layer_eps,
        )
        return mixed, xx, d

    def matrix(self, layer, name):
        """The matrix, converted to the library's dtype if it is int8."""
        w = getattr(layer, name)
        if w.dtype != INT8:
            return w
        if self.wide is None:
            self.wide = self.draft.empty((self.widest,), self.dtype)
        return widened(self.draft, w, getattr(layer, f"{name}{SCALES}"), self.wide, self.dtype)

    def product(self, layer, name, x):
        y, several = self.results[name], x.ndim == 3
        self.draft.product(self.matrix(layer, name), x if several else x[None], y)
        return y if several else y[0]

    def relu_squared(self, x):
        kernel = kernels.Activation("ReluSquared", x.dtype, x.dtype)
        self.draft.launch(kernel, kernel.blocks(x.size), x=x, y=x, count=x.size)
        return x

    def add_product(self, layer, name, x, y):
        self.draft.product(self.matrix(layer, name), y[None], x[None], add=True)
        return x

    def recurrent(self, op, tokens: dict, wkv, o, **more):
        """The operator `op` of `tokens` [T, D] and of `more`, on heads, to `o`."""
        *tokens_in_heads, o = (x.in_heads(self.sizes["H"])[None].swapaxes(1, 2) for x in (*tokens.values(), o))
        arrays = dict(zip(tokens, tokens_in_heads)) | more
        kernels.recurrence(self.draft, self.device, op, arrays, o, wkv, self.spans, self.scale)
