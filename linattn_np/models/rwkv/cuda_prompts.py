"""Prompts of RWKV models on the GPU, all tokens in parallel.

Prompts with the same lengths share three plans: of the embedding, of a layer and of the head. The layers read and write
one allocation, into which the state is copied before and from which it is copied after the call. All addresses depend
on the allocation's. A call that gets an address for the second time captures the launches of the first call in a CUDA
graph, which later calls launch, too: this takes the host very little time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...backends.cupy import rwkv6_model_kernels as kernels
from ...backends.cupy.execute import CompiledPlan, in_one_allocation
from ...backends.cupy.kernel import INT8
from ...backends.cupy.plan import Array, Buffer, Draft, Plan, caller_array, describe_parts
from ...varlen import Spans
from .cuda_weights import FLOAT32, SCALES, widened
from .state import STATE, State, shapes_and_dtypes
from .version import output_scale

PLACES = 4  # addresses for which launches, or a graph of them, are kept


class Prompts:
    """Computes prompts of the lengths in `rows` with a decoder's weights.

    last : whether the result has a row for last tokens only
    hidden : whether a row is what the head reads, D numbers, and not V logits
    """

    def __init__(self, decoder, rows, last: bool, hidden: bool):
        self.my, self.device, self.bounds = decoder, decoder.device, rows.bounds
        self.wanted = rows.last if last else np.arange(rows.bounds[-1])
        parts = shapes_and_dtypes(decoder.sizes, len(rows.first), FLOAT32)
        self.state = {f"{name}_{when}": shape[1:] for when in ("before", "after") for name, (shape, _) in parts.items()}
        self.x = caller_array("x", (int(rows.bounds[-1]), decoder.sizes["D"]), FLOAT32)
        self.carried = decoder.pieces.carried(decoder, self.x.shape[0])
        given = {name: caller_array(name, shape, FLOAT32) for name, shape in self.state.items()}
        given |= {name: caller_array(name, *array) for name, array in self.carried.items()}
        tokens = caller_array("tokens", self.x.shape[:1], np.dtype(np.int64))
        self.result = (len(self.wanted), decoder.sizes["D" if hidden else "V"])
        result = caller_array("result", self.result, FLOAT32)
        whole = vars(decoder.whole)
        self.start = self.compiled(self.draw_start, {"tokens": tokens, "x": self.x, **whole})
        draw_end = self.draw_last_norm if hidden else self.draw_head
        self.end = self.compiled(draw_end, {"x": self.x, "result": result, **whole})
        self.layer = self.compiled(self.draw_layer, {"x": self.x, **given, **vars(decoder.layers[0])})
        self.launches: dict[int, list] = {}  # address of the layers' memory -> the launches of all layers

    def __call__(self, tokens, state: State, slots):
        """Rows of the tokens; `state` is updated in place, in the rows `slots` (None: all)."""
        my, device, L = self.my, self.device, len(self.my.layers)
        slots = None if slots is None else device.upload(slots)
        layer_arrays = [buffer(self.x.shape), *(buffer((L, *shape)) for shape in self.state.values())]
        other_buffers = [*(buffer(*array) for array in self.carried.values()), *self.layer.plan.buffers]
        memory = in_one_allocation([*layer_arrays, *other_buffers], device)
        (x, *states), buffers = memory[: len(layer_arrays)], memory[len(layer_arrays) :]
        before, after = states[: len(STATE)], states[len(STATE) :]
        result = device.empty(self.result, FLOAT32)

        for array, copy in zip(state.arrays, before):
            if array.dtype == FLOAT32:
                device.copy(gathered(array, slots), copy)
            else:
                copy[...] = gathered(array, slots)
        self.start([device.upload(tokens), x, *vars(my.whole).values()])
        self.run_layers(x, states, buffers)
        self.end([x, result, *vars(my.whole).values()])
        for array, changed in zip(state.arrays, after):
            if slots is None and array.flags.c_contiguous and array.dtype == FLOAT32:
                device.copy(changed, array)
            else:
                array[:, slice(None) if slots is None else slots] = changed
        return result

    def run_layers(self, x, states, buffers):
        """Runs all layers on this memory. The stored launches hold its address, but do not keep it allocated."""
        address = self.device.pointer(x)
        if address in self.launches:
            if len(self.launches[address]) > 1:  # several launches: not yet captured in a graph
                self.launches[address] = [self.device.captured(self.launches[address])]
            self.launches[address][0](None)
            return
        all_launches, (carried, buffers) = [], (buffers[: len(self.carried)], buffers[len(self.carried) :])
        for i, layer in enumerate(self.my.layers):  # the device computes a layer while the next one's launches are made
            arrays = [x, *(array[i] for array in states), *carried, *vars(layer).values(), *buffers]
            layer_launches = self.layer.commands(arrays)
            for launch in layer_launches:
                launch(None)
            all_launches += layer_launches
        if len(self.launches) >= PLACES:
            self.launches.clear()
        self.launches[address] = all_launches

    def compiled(self, draw, arrays: dict) -> CompiledPlan:
        """The compiled plan that the method `draw` makes for arrays with these shapes, strides and dtypes."""
        seen, given, _ = describe_parts(self.device, every=arrays)
        draft = Draft(**self.my.sizes, T=self.x.shape[0], tokens=self.x.shape[0])
        draw(draft, seen.every)
        return CompiledPlan(Plan(tuple(draft.buffers), tuple(draft.steps), None, given=given), self.device)

    # -- the plans: `seen` has an `Array` for each of the arrays -----------------------------------------------------
    def draw_start(self, draft: Draft, seen):
        """Adds the embedding and its norm."""
        kernels.ChosenNorm.launch(draft, seen.tokens, seen.embedding, seen.ln0, seen.x, self.my.layer_eps)

    def draw_layer(self, draft: Draft, seen):
        """Adds a layer's two mixes."""
        pieces = self.my.pieces(self.my, draft, self.bounds, seen)
        att_shift, wkv, ffn_shift = (
            Change(getattr(seen, f"{name}_before"), getattr(seen, f"{name}_after")) for name in STATE
        )
        pieces.channel_mix(seen, pieces.time_mix(seen, seen.x, att_shift, wkv), ffn_shift)

    def draw_head(self, draft: Draft, seen):
        """Adds the last norm and the head for the tokens whose logits are wanted."""
        normed = draft.empty((len(self.wanted), self.my.sizes["D"]), self.my.dtype)
        self.normed(draft, seen, normed)
        head = seen.head
        if head.dtype == INT8:
            head = widened(draft, head, seen.head_scales, draft.empty(head.shape, self.my.dtype), self.my.dtype)
        draft.product(head, normed[None], seen.result[None])

    def draw_last_norm(self, draft: Draft, seen):
        """Adds the last norm for the tokens that are wanted."""
        self.normed(draft, seen, seen.result)

    def normed(self, draft, seen, result):
        kernels.ChosenNorm.launch(draft, draft.table(self.wanted), seen.x, seen.ln_out, result, self.my.layer_eps)


def buffer(shape, dtype=FLOAT32) -> Buffer:
    return Buffer(shape, dtype, tuple(range(len(shape))))


def gathered(array, slots):
    """The rows `slots` (None: all) of an array [L, P, ...], contiguous."""
    rows = array if slots is None else array[:, slots]
    return rows if rows.flags.c_contiguous else rows.copy()


class Change(NamedTuple):
    """A part of a layer's state: the array before the call, and the one that the call writes."""

    before: Array
    after: Array


class Pieces:
    """The operations of mixes that all RWKV versions have in common, added as steps to a layer's plan; x is [T, D].

    Vectors that matrices multiply, and products that a recurrence or an activation reads, have the matrices' dtype.
    Decays, the state, the residual and sums are float32.

    mixes : {norm: memory for (its mixes [C, T, D], the normed input or None, its token shift or None)}
    results : {matrix: memory for its product}
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
        """{name: (shape, dtype)} of the arrays, beside x, that a layer passes to the next one."""
        return {}

    def time_mix(self, layer, x, shift, wkv):
        """Adds a version's time mix; returns the residual x."""
        raise NotImplementedError

    def channel_mix(self, layer, x, shift):
        """Adds a version's channel mix; returns the residual x."""
        raise NotImplementedError

    def shift_mix(self, layer, norm, maa, x, shift):
        """(mixes xx + d maa, xx, d): xx is the normed x, d the difference from the previous token's xx."""
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
        """A matrix in `dtype`; int8 matrices are converted to it."""
        w = getattr(layer, name)
        if w.dtype != INT8:
            return w
        if self.wide is None:
            self.wide = self.draft.empty((self.widest,), self.dtype)
        return widened(self.draft, w, getattr(layer, f"{name}{SCALES}"), self.wide, self.dtype)

    def product(self, layer, name, x):
        """Adds the product of x and matrix `name`; returns it."""
        y, is_stack = self.results[name], x.ndim == 3
        self.draft.product(self.matrix(layer, name), x if is_stack else x[None], y)
        return y if is_stack else y[0]

    def relu_squared(self, x):
        kernel = kernels.Activation("ReluSquared", x.dtype, x.dtype)
        self.draft.launch(kernel, kernel.blocks(x.size), x=x, y=x, count=x.size)
        return x

    def add_product(self, layer, name, x, y):
        """Adds the product of y and matrix `name` to the residual x, in place."""
        self.draft.product(self.matrix(layer, name), y[None], x[None], add=True)
        return x

    def recurrent(self, op, tokens: dict, wkv, o, **more):
        """Adds operator `op` on the arrays `tokens` [T, D], divided into heads, and on `more`; the result is `o`."""
        *tokens_in_heads, o = (x.in_heads(self.sizes["H"])[None].swapaxes(1, 2) for x in (*tokens.values(), o))
        arrays = dict(zip(tokens, tokens_in_heads)) | more
        kernels.recurrence(self.draft, self.device, op, arrays, o, wkv, self.spans, self.scale)
