"""Prompts of RWKV-6 on the GPU, all tokens at once.

Prompts that are packed alike share three plans: of the embeddings, of a layer, which is run for one after the other,
and of the head. Addresses come back from call to call, and with them the arguments that were made for them: the host
needs a tenth of the device's time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...backends.cupy import rwkv6 as kernels
from ...backends.cupy.execute import Compiled, allocated
from ...backends.cupy.plan import Array, Buffer, Draft, Plan, describe_parts
from ...varlen import Spans
from . import math
from .cuda_decode import FLOAT32
from .state import STATE, State

PLACES = 8  # that states may be at, among others, with a layer's arguments kept for each


class Prompts:
    """Prompts of these lengths on one decoder's weights, with the logits of all tokens or of each `last` one."""

    def __init__(self, decoder, rows, last: bool):
        self.my, self.device, self.bounds = decoder, decoder.device, rows.bounds
        self.wanted = rows.last if last else np.arange(rows.bounds[-1])
        self.plans: dict[str, Compiled] = {}

    def __call__(self, tokens, state: State, slots):
        """Logits [T, V], or [N, V]; `state` is updated in place, in the rows `slots` (None: all)."""
        my, device = self.my, self.device
        slots = None if slots is None else device.upload(slots)
        after, in_place = state, slots is None and all(array.flags.c_contiguous for array in state.arrays)
        if not in_place:
            after = State(*(array.copy() if slots is None else array[:, slots] for array in state.arrays))
        x, *before = allocated([buffer((len(tokens), my.sizes["D"])), *(buffer(x.shape) for x in after.arrays)], device)
        logits = device.empty((len(self.wanted), my.sizes["V"]), FLOAT32)
        befores = {f"{name}_before": array for name, array in zip(STATE, before)}
        afters = {f"{name}_after": getattr(after, name) for name in STATE}
        ends = {"tokens": device.upload(tokens), "x": x, "logits": logits, **vars(my.whole), **befores, **afters}

        self.compiled(self.start, ends)(ends.values())
        room = None
        for i, layer in enumerate(my.layers):
            arrays = {"x": x, **vars(layer), **{name: array[i] for name, array in (befores | afters).items()}}
            compiled = self.compiled(self.layer, arrays)
            room = room or allocated(compiled.plan.buffers, device)
            compiled.on([*arrays.values(), *room])
        self.compiled(self.head, ends)(ends.values())

        if not in_place:
            for array, new in zip(state.arrays, after.arrays):
                array[:, slice(None) if slots is None else slots] = new
        return logits

    def compiled(self, draw, arrays: dict) -> Compiled:
        """The plan that `draw` makes of arrays that lie like these."""
        name = draw.__name__
        if name not in self.plans:
            seen, given, _ = describe_parts(self.device, every=arrays)
            draft = Draft()
            draw(draft, seen.every)
            plan = Plan(tuple(draft.buffers), tuple(draft.steps), None, given=given)
            self.plans[name] = Compiled(plan, self.device, PLACES * len(self.my.layers))
        return self.plans[name]

    # -- the plans: `seen` has an `Array` for each of the arrays -----------------------------------------------------
    def start(self, draft: Draft, seen):
        """The embeddings, and the state before, as its memory is where the state after goes."""
        for name in STATE:
            draft.copy(getattr(seen, f"{name}_after"), getattr(seen, f"{name}_before"))
        self.norm(draft, seen.tokens, seen.embedding, seen.ln0, seen.x)

    def layer(self, draft: Draft, seen):
        do = Pieces(self.my, draft, self.bounds)
        att_shift, wkv, ffn_shift = (
            Change(getattr(seen, f"{name}_before"), getattr(seen, f"{name}_after")) for name in STATE
        )
        x = math.time_mix(do, seen, seen.x, att_shift, wkv)
        math.channel_mix(do, seen, x, ffn_shift)

    def head(self, draft: Draft, seen):
        normed = draft.empty((1, len(self.wanted), self.my.sizes["D"]), self.my.dtype)
        self.norm(draft, draft.table(self.wanted), seen.x, seen.ln_out, normed)
        draft.product(seen.head, normed, seen.logits[None])

    def norm(self, draft, chosen, x, norm, y):
        weight, bias = norm
        draft.launch(
            kernels.ChosenNorm(x.dtype, y.dtype),
            chosen.size,
            chosen=chosen,
            x=x,
            weight=weight,
            bias=bias,
            y=y,
            D=self.my.sizes["D"],
            eps=math.LAYER_NORM_EPS,
        )


def buffer(shape) -> Buffer:
    return Buffer(shape, FLOAT32, tuple(range(len(shape))))


class Change(NamedTuple):
    """A layer's part of a state: before the call, and where the call leaves it."""

    before: Array
    after: Array


class Pieces:
    """`math.Pieces` that draw a layer's plan, x [T, D].

    What meets a matrix is rounded to its dtype, and so are r, k, v, the gate and the channel mix's keys, which come
    out of one; the decay, the state, the residual and the sums are float32.
    """

    def __init__(self, decoder, draft: Draft, bounds):
        self.draft, self.device, self.dtype, self.sizes = draft, decoder.device, decoder.dtype, decoder.sizes
        self.spans, self.T, empty = Spans(bounds), int(bounds[-1]), draft.empty
        lengths = np.diff(bounds)
        starts, ends = np.full((2, self.T), -1)
        starts[bounds[:-1]] = ends[bounds[1:] - 1] = np.arange(len(lengths))
        self.starts, self.ends = draft.table(starts), draft.table(ends)
        T, X, (D, F, A, W) = self.T, self.dtype, (self.sizes[axis] for axis in "DFAW")
        self.xx, self.d, self.w, self.o = (
            empty((T, D), FLOAT32),
            empty((T, D), FLOAT32),
            empty((T, D), FLOAT32),
            empty((T, D), X),
        )
        self.mixed, self.normed = empty((5, T, D), X), empty((1, T, D), X)
        self.results = {  # of products; the channel mix takes the memory that the time mix has left
            "maa_down": empty((1, T, 5 * A), FLOAT32),
            "decay_down": empty((1, T, W), FLOAT32),
            "kvrg": empty((4, T, D), X),
            "ffn_key": empty((1, T, F), X),
            "ffn_receptance": self.xx[None],
            "ffn_value": self.d[None],
        }

    def shift_mix(self, layer, norm, maa, x, shift):
        (weight, bias), maa, (T, D) = getattr(layer, norm), getattr(layer, maa), x.shape
        first = norm == "ln1"
        mixed = self.normed if first else self.mixed[:2]
        xx, d = (self.xx, self.d) if first else (None, None)  # what `data_mix` reads
        self.draft.launch(
            kernels.ShiftMix.fitting(mixed.dtype, D),
            T,
            x=x,
            weight=weight,
            bias=bias,
            maa=maa,
            before=shift.before,
            shift=shift.after,
            starts=self.starts,
            ends=self.ends,
            xx=xx,
            d=d,
            mixed=mixed,
            T=T,
            D=D,
            C=mixed.shape[0],
            eps=math.LAYER_NORM_EPS,
        )
        return mixed, xx, d

    def product(self, layer, name, x):
        y, several = self.results[name], x.ndim == 3
        self.draft.product(getattr(layer, name), x if several else x[None], y)
        return y if several else y[0]

    def data_mix(self, layer, low, xx, d):
        kernel, (T, D) = kernels.DataMix.of_prompt(self.dtype), xx.shape
        self.draft.launch(
            kernel,
            kernel.blocks(T, D),
            low=low,
            up=layer.maa_up,
            maa=layer.maa,
            xx=xx,
            d=d,
            mixed=self.mixed,
            tokens=T,
            D=D,
            A=self.sizes["A"],
        )
        return self.mixed

    def log_decay(self, layer, low):
        kernel, (T, D) = kernels.LogDecay(self.dtype), self.w.shape
        self.draft.launch(
            kernel,
            kernel.blocks(T, D),
            low=low,
            up=layer.decay_up,
            decay=layer.decay,
            w=self.w,
            tokens=T,
            D=D,
            W=self.sizes["W"],
        )
        return self.w

    def recurrence(self, layer, kvr, w, wkv):
        k, v, r, w, o = (x.in_heads(self.sizes["H"]) for x in (*kvr, w, self.o))
        kernels.recurrence(self.draft, self.device, r, k, v, w, layer.bonus[0], o, wkv, self.spans)
        return self.o

    def gated_norm(self, layer, o, gate):
        (weight, bias), (H, N) = layer.ln_x, (self.sizes["H"], self.sizes["N"])
        kernel = kernels.GatedNorm.fitting(self.dtype, N)
        self.draft.launch(
            kernel,
            kernel.blocks(self.T * H),
            o=o,
            gate=gate,
            weight=weight,
            bias=bias,
            y=self.normed,
            rows=self.T * H,
            H=H,
            N=N,
            eps=math.GROUP_NORM_EPS,
        )
        return self.normed[0]

    def relu_squared(self, x):
        kernel = kernels.ReluSquared(x.dtype, x.dtype)
        self.draft.launch(kernel, kernel.blocks(x.size), x=x, y=x, count=x.size)
        return x

    def add_product(self, layer, name, x, y):
        self.draft.product(getattr(layer, name), y[None], x[None], add=True)
        return x

    def add_gated(self, x, gate, value):
        kernel = kernels.GatedAdd()
        self.draft.launch(kernel, kernel.blocks(x.size), x=x, gate=gate, value=value, count=x.size)
        return x
