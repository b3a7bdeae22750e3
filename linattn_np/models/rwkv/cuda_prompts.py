"""Prompts of RWKV models on the GPU, all tokens in parallel.

A plan is a list of launches on described arrays, `plan.Array`s, which a `Draft` collects; a `CompiledPlan` runs it on
arrays of these descriptions. Calls with prompts of the same lengths share three plans: of the embedding, of a layer and
of the head. The embedding and all layers of a call read and write one allocation; tokens and the state are copied there
before these run, and the state back afterwards. Hence the address of the allocation decides all addresses of their
launches. The second call whose allocation has the same address captures these launches in a CUDA graph; later calls
launch the graph, which takes the host very little time.

Sizes: L layers, T tokens of all prompts, D channels, H heads, V tokens of the vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from ...backends.cupy import rwkv6_model_kernels as kernels
from ...backends.cupy.arithmetic import ceil_div
from ...backends.cupy.execute import CompiledPlan, OneAllocation, describe_parts
from ...backends.cupy.kernel import INT8
from ...backends.cupy.model_products import SquaredProduct
from ...backends.cupy.plan import Array, Buffer, Draft, Plan, caller_array
from ...varlen import Spans
from .cuda_weights import FLOAT32, SCALES, widened
from .state import STATE, State, shapes_and_dtypes
from .version import SQRELU, output_scale

MOST_ADDRESSES = 4  # of allocations for which launches, or a graph of them, are stored


class Prompts:
    """Computes prompts of given lengths with the weights of a `CudaDecoder`. Callers are inside `CudaLayers.turn`.

    sequences : a `state.CallSequences`, which has the lengths; its slots are not used
    last : whether the result has a row for the last token of each prompt only, else for every token
    hidden : whether a row of the result is the head's input, D numbers, instead of V logits
    """

    def __init__(self, decoder, sequences, last: bool, hidden: bool):
        self.decoder, self.device, self.bounds = decoder, decoder.device, sequences.bounds
        self.result_tokens = sequences.last_tokens if last else np.arange(sequences.bounds[-1])
        # {name: (shape, dtype)} of the parts of a new state, {name: shape} of a layer's state before and after the call
        parts = self.parts = shapes_and_dtypes(decoder.sizes, len(sequences.first_tokens), decoder.state_dtype)
        self.state = {f"{name}_{when}": shape[1:] for when in ("before", "after") for name, (shape, _) in parts.items()}
        self.x = caller_array("x", (int(sequences.bounds[-1]), decoder.sizes["D"]), FLOAT32)  # the residual
        self.carried = decoder.operations.carried(decoder, self.x.shape[0])
        layer_arrays = {name: caller_array(name, shape, FLOAT32) for name, shape in self.state.items()}
        layer_arrays |= {name: caller_array(name, *array) for name, array in self.carried.items()}
        tokens = caller_array("tokens", self.x.shape[:1], np.dtype(np.int64))
        self.result_shape = (len(self.result_tokens), decoder.sizes["D" if hidden else "V"])
        result = caller_array("result", self.result_shape, FLOAT32)
        model_weights = vars(decoder.model_weights)
        plan = partial(compiled, decoder, self.x.shape[0])
        self.embedding_plan = plan(self.add_embedding, {"tokens": tokens, "x": self.x, **model_weights})
        add_head = self.add_norm if hidden else self.add_head
        self.head_plan = plan(add_head, {"x": self.x, "result": result, **model_weights})
        self.layer_plan = plan(self.add_layer, {"x": self.x, **layer_arrays, **vars(decoder.layers[0])})
        states = [buffer((len(decoder.layers), *shape)) for shape in self.state.values()]
        self.memory = OneAllocation(
            self.device,
            tokens=[buffer(tokens.shape, tokens.dtype)],
            x=[buffer(self.x.shape)],
            before=states[: len(STATE)],
            after=states[len(STATE) :],
            carried=[buffer(*array) for array in self.carried.values()],
            buffers=self.layer_plan.plan.buffers,
        )
        # the tokens of a call on the host, which change once `copied`, an event, says that the device has copied them
        self.tokens, self.copied = self.device.pinned(*tokens.shape, tokens.dtype), None
        # a layer's new state, which all layers read
        self.zeros = [self.device.zeros(shape[1:], FLOAT32) for shape, _ in parts.values()]
        # of each address of `memory`, and whether the state is new: the launches of the embedding and all layers, or
        # what launches their graph
        self.launches: dict[tuple[int, bool], list] = {}
        self.graphs: dict[tuple[int, bool], Callable] = {}

    def __call__(self, tokens, state: State, slots):
        """The result for `tokens` [T], integers on the host. The rows `slots` (None: all) of `state` are updated. A
        state without arrays begins with zeros, and gets its arrays.

        Until the layers are enqueued the device has nothing to do: what can be done later comes later.
        """
        device, is_new = self.device, state.wkv is None
        memory = self.memory.allocated()
        if self.copied:
            device.finish(self.copied)
        self.tokens[...] = tokens
        device.write(self.tokens, *self.memory.arrays("tokens", memory))
        self.copied = device.record(self.copied)
        if not is_new:
            slots = None if slots is None else device.upload(slots)
            for array, copy in zip(state.arrays, self.memory.arrays("before", memory)):
                if array.dtype == FLOAT32:
                    device.copy(rows_of(array, slots), copy)
                else:
                    copy[...] = rows_of(array, slots)
        self.run_layers(memory, is_new)
        (x,), after = (self.memory.arrays(group, memory) for group in ("x", "after"))
        result = device.empty(self.result_shape, FLOAT32)
        self.head_plan([x, result, *vars(self.decoder.model_weights).values()])
        if is_new:
            for name, part in self.parts.items():
                setattr(state, name, device.empty(*part))
        for array, new_rows in zip(state.arrays, after):
            if slots is None and array.flags.c_contiguous and array.dtype == FLOAT32:
                device.copy(new_rows, array)
            else:
                array[:, slice(None) if slots is None else slots] = new_rows
        return result

    def __del__(self):
        """Waits until the device has copied the tokens. A model may be dropped before, and its host memory reused."""
        if getattr(self, "copied", None):
            self.device.finish(self.copied)

    def run_layers(self, memory, is_new):
        """Runs the embedding and all layers on arrays in `memory`. If the state `is_new`, all layers read `zeros` in
        place of that before the call. Stored launches contain the memory's address, but do not keep it allocated."""
        call = self.device.pointer(memory), is_new
        if call in self.launches:
            self.graphs[call] = self.device.captured(self.launches.pop(call))
        if call in self.graphs:
            self.graphs[call](None)  # None in place of arrays, which only copies and fills would read
            return
        groups = "tokens", "x", "before", "after", "carried", "buffers"
        (tokens,), (x,), before, after, carried, buffers = (self.memory.arrays(group, memory) for group in groups)
        all_launches = self.embedding_plan.commands([tokens, x, *vars(self.decoder.model_weights).values()])
        for launch in all_launches:
            launch(None)
        # A layer's launches are enqueued at once: the device computes the layer while the next one's launches are made.
        for i, layer in enumerate(self.decoder.layers):
            # in the order in which `layer_plan` was given its arrays; its buffers follow
            states = *(self.zeros if is_new else (array[i] for array in before)), *(array[i] for array in after)
            arrays = [x, *states, *carried, *vars(layer).values(), *buffers]
            layer_launches = self.layer_plan.commands(arrays)
            for launch in layer_launches:
                launch(None)
            all_launches += layer_launches
        if len(self.launches) + len(self.graphs) >= MOST_ADDRESSES:
            self.launches.clear()
            self.graphs.clear()
        self.launches[call] = all_launches

    # -- the steps of the plans: `arrays` is a namespace with a `plan.Array` by each name ------------------------------
    def add_embedding(self, draft: Draft, arrays):
        """Adds x = the normed embeddings of the tokens."""
        kernels.ChosenNorm.launch(draft, arrays.tokens, arrays.embedding, arrays.ln0, arrays.x, self.decoder.layer_eps)

    def add_layer(self, draft: Draft, arrays):
        """Adds the two mixes of a layer, which update x and write the state after the call."""
        operations = self.decoder.operations(self.decoder, draft, self.bounds, arrays)
        att_shift, wkv, ffn_shift = (
            StateArrays(getattr(arrays, f"{name}_before"), getattr(arrays, f"{name}_after")) for name in STATE
        )
        operations.channel_mix(arrays, operations.time_mix(arrays, arrays.x, att_shift, wkv), ffn_shift)

    def add_head(self, draft: Draft, arrays):
        """Adds the last norm and the head, for the tokens of the result."""
        normed = draft.empty((len(self.result_tokens), self.decoder.sizes["D"]), self.decoder.dtype)
        self.add_norm(draft, arrays, normed)
        add_logits(self.decoder, draft, arrays, normed)

    def add_norm(self, draft: Draft, arrays, normed=None):
        """Adds the last norm of the result's tokens; it goes to `normed`, or without it to the result."""
        chosen, normed = draft.table(self.result_tokens), arrays.result if normed is None else normed
        kernels.ChosenNorm.launch(draft, chosen, arrays.x, arrays.ln_out, normed, self.decoder.layer_eps)


def compiled(decoder, T, add_steps, arrays: dict) -> CompiledPlan:
    """A compiled plan for T tokens with the steps that the function `add_steps` adds. It is called with arrays of the
    shapes, strides and dtypes of `arrays`, {name: array}, in their order."""
    described, given, _ = describe_parts(decoder.device, arrays=arrays)
    # the sizes are arguments of kernels by these names; some call the number of tokens T, others `tokens`
    draft = Draft(**decoder.sizes, T=T, tokens=T)
    add_steps(draft, described.arrays)
    return CompiledPlan(Plan(tuple(draft.buffers), tuple(draft.steps), None, given=given), decoder.device)


def head_plan(decoder, rows) -> CompiledPlan:
    """The plan of logits [rows, V]. It is called with the head's input x [rows, D], the logits and the model's
    weights."""

    def add(draft, arrays):
        add_logits(decoder, draft, arrays, draft.cast(arrays.x, decoder.dtype))

    shapes = {"x": (rows, decoder.sizes["D"]), "result": (rows, decoder.sizes["V"])}
    arrays = {name: caller_array(name, shape, FLOAT32) for name, shape in shapes.items()}
    return compiled(decoder, rows, add, arrays | vars(decoder.model_weights))


def add_logits(decoder, draft: Draft, arrays, normed):
    """Adds the logits `arrays.result` of the head's input `normed` [n, D], in the decoder's dtype."""
    head = arrays.head
    if head.dtype == INT8:
        head = widened(draft, head, arrays.head_scales, draft.empty(head.shape, decoder.dtype), decoder.dtype)
    draft.product(head, normed[None], arrays.result[None])


def buffer(shape, dtype=FLOAT32) -> Buffer:
    """A buffer in C order."""
    return Buffer(shape, dtype, tuple(range(len(shape))))


def rows_of(array, slots):
    """The rows `slots` (None: all) of an array [L, P, ...], contiguous."""
    rows = array if slots is None else array[:, slots]
    return rows if rows.flags.c_contiguous else rows.copy()


class StateArrays(NamedTuple):
    """One part of a layer's state: the array before the call, and the one to which the call writes it."""

    before: Array
    after: Array


class MixOperations:
    """The operations of mixes that all RWKV versions have in common, added as steps to a layer's plan; x is [T, D].

    Inputs of matrix products, and products that a recurrence or an activation reads, have the matrices' dtype. Decays,
    the state, the residual and sums are float32.

    mixes : {name of a norm: arrays for (its C mixes [C, T, D], its output xx or None, d = previous xx - xx or None)}
    results : {name of a matrix: the array [.., T, M] for its product}

    A version's `__init__` sets both. `arrays`: a namespace with the arrays of the layer, of its state and of `carried`.
    `scale`: the factor that the recurrence's o has in float16, until the group norm.
    """

    mixes: dict[str, tuple[Array, Array | None, Array | None]]
    results: dict[str, Array]

    def __init__(self, decoder, draft: Draft, bounds, arrays):
        self.draft, self.device, self.dtype, self.sizes = draft, decoder.device, decoder.dtype, decoder.sizes
        self.scale, self.arrays = output_scale(self.dtype), arrays
        self.layer_eps, self.group_eps, self.hidden_act = decoder.layer_eps, decoder.group_eps, decoder.hidden_act
        self.spans, self.T = Spans(bounds), int(bounds[-1])
        self.wide = None  # the buffer for one int8 matrix converted to `dtype`, of `widest` elements
        self.widest = decoder.widest(decoder.layers[0]) if decoder.matrix_dtype == INT8 else 0
        lengths = np.diff(bounds)
        starts, ends = np.full((2, self.T), -1)
        starts[bounds[:-1]] = ends[bounds[1:] - 1] = np.arange(len(lengths))
        # for each token, the number of the sequence of which it is the first, or the last, token; else -1
        self.starts, self.ends = draft.table(starts), draft.table(ends)

    @staticmethod
    def carried(decoder, T) -> dict:
        """{name: (shape, dtype)} of the arrays, besides x, that a layer passes to the next one."""
        return {}

    def time_mix(self, layer, x, shift, wkv):
        """Adds a version's time mix; returns the residual x."""
        raise NotImplementedError

    def channel_mix(self, layer, x, shift):
        """Adds a version's channel mix; returns the residual x."""
        raise NotImplementedError

    def shift_mix(self, layer, norm, maa, x, shift):
        """Adds a layer norm, the token shift and the mixes; returns (mixes xx + d maa, xx, d): xx is the normed x, d
        the previous token's xx minus xx."""
        (T, D), (mixed, xx, d) = x.shape, self.mixes[norm]
        kernel, tokens_per_block = kernels.ShiftMix.fitting(mixed.dtype, D, T, self.device.multiprocessors)
        self.draft.launch(
            kernel,
            ceil_div(T, tokens_per_block),
            x=x,
            **kernels.affine(getattr(layer, norm)),  # its weight and bias
            maa=getattr(layer, maa),
            before=shift.before,
            shift=shift.after,
            starts=self.starts,
            ends=self.ends,
            xx=xx,
            d=d,
            mixed=mixed,
            C=mixed.shape[0],
            tokens_per_block=tokens_per_block,
            eps=self.layer_eps,
        )
        return mixed, xx, d

    def matrix(self, layer, name):
        """Matrix `name` in `dtype`. An int8 matrix is converted to it, into a buffer that the next one overwrites."""
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

    def squared_product(self, layer, name, x):
        """Adds relu of the product of x and matrix `name`, squared, or the model's other activation; returns it."""
        w, y = self.matrix(layer, name)[0], self.results[name][0]
        if self.hidden_act != SQRELU:
            self.draft.product(w[None], x[None], y[None])
            activation = kernels.HiddenActivation(y.dtype, kernels.HiddenActivation.NAMES[self.hidden_act])
            self.draft.launch(activation, activation.blocks(y.size), y=y, count=y.size)
        elif squares := SquaredProduct.fitting(w, x, self.device):
            squares.launch(self.draft, w, x, y, self.device)
        else:
            self.draft.product(w[None], x[None], y[None])
            kernel = kernels.ReluSquared(y.dtype, y.dtype)
            self.draft.launch(kernel, kernel.blocks(y.size), x=y, y=y, count=y.size)
        return y

    def gated_norm_to(self, y, layer, o, gate, **bonus):
        """Adds y [T, D] = the group norm of o over each head, times silu(gate); returns y. `bonus`: the arrays r, k, v
        and bonus, for the norm with RWKV-7's bonus and gate (see `kernels.GatedNorm`)."""
        kernel = kernels.GatedNorm.fitting(self.dtype, self.sizes["N"], BONUS=bool(bonus))
        H = self.sizes["H"]
        arrays = {"o": o, "gate": gate, "y": y} | bonus | kernels.affine(layer.ln_x)  # its weight and bias
        eps = self.group_eps * self.scale**2  # o has the factor `scale`, which the norm removes
        self.draft.launch(kernel, kernel.blocks(self.T, H), **arrays, rows=self.T * H, eps=eps)
        return y

    def add_gated(self, x, gate, value):
        """Adds x += sigmoid(gate) value, or x += value if `gate` is None; returns x. The kernel multiplies `value`, a
        product of squares, by `version.unit_of_squares`, by which `squared_product` has divided these."""
        kernel = kernels.GatedAdd(self.dtype)
        self.draft.launch(kernel, kernel.blocks(x.size), x=x, gate=gate, value=value, count=x.size)
        return x

    def add_product(self, layer, name, x, y):
        """Adds the product of y and matrix `name` to the residual x, in place."""
        self.draft.product(self.matrix(layer, name), y[None], x[None], add=True)
        return x

    def recurrent(self, op, token_arrays: dict, wkv, o, other_arrays: dict | None = None, **options):
        """Adds the operator `op`. `token_arrays`: its arrays with tokens by name, each [T, D], which are divided into
        heads; `other_arrays`: those without tokens. The output goes to `o` [T, D]. `options`: of its planner."""
        arrays = {name: self.in_heads(x) for name, x in token_arrays.items()} | (other_arrays or {})
        o = self.in_heads(o)
        kernels.recurrence(self.draft, self.device, op, arrays, o, wkv, self.spans, self.scale, **options)

    def in_heads(self, x):
        """A view [1, H, T, N] of x [T, D]."""
        return x.in_heads(self.sizes["H"])[None].swapaxes(1, 2)
