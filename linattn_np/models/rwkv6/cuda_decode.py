"""One token of an RWKV-6 model on the GPU for B sequences, at close to the speed its weights can be read.

Up to eight sequences each weight is read once: on Hopper cards all layers are one launch, elsewhere a layer is nine.
Beyond that cuBLAS multiplies. All arrays of a step are allocated once, and a step neither allocates nor waits, so a
CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import partial
from types import SimpleNamespace

import numpy as np

from ...arrays import BFLOAT16
from ...backends.cupy import rwkv6 as kernels
from ...errors import ContractTypeError
from . import weights as table
from .checks import refuse
from .math import GROUP_NORM_EPS, LAYER_NORM_EPS
from .names import parameters
from .state import STATE, State, check_state

FLOAT32, INT64 = np.dtype(np.float32), np.dtype(np.int64)
DTYPES = (FLOAT32, np.dtype(np.float16), BFLOAT16)
MOST = {"D": 8192, "N": 256, "W": 512}  # what the kernels keep in registers and shared memory
AS_STORED = ("embedding", "maa_up", "decay_up")  # which kernels read row by row, as files have them
WRITE, ADD, RELU_SQUARED = range(3)  # matvec's `Finish`
PHASES = 7  # of a layer in decode_step
PHASE_BLOCKS = 16  # that share a phase where each is a launch of its own


class CudaDecoder:
    """Decodes token after token on the current CUDA device; the equations are `RWKV6`'s.

    Weights are kept in `dtype`, but norms, mixes, decay and bonus in float32. State, sums and all that passes
    between kernels are float32; only beyond eight sequences the inputs of a product are rounded to `dtype`.

    Parameters
    ----------
    weights : mapping from official names to arrays, on the host or on the device
    dtype : float32, float16 or bfloat16
        Of the weights on the device.
    batch : int
        B, the sequences that every step advances.
    device
        What allocates and launches; the current CUDA device by default.
    loaded : function of an array of `weights`
        Called with each that is on the device.

    Raises
    ------
    ContractError
        A parameter that `RWKV6` refuses; D or F that is no multiple of 8; sizes beyond the kernels' limits.

    Example
    -------
    >>> decoder = CudaDecoder(weights, np.float16)                          # doctest: +SKIP
    >>> tokens, state = cupy.array([510]), decoder.initial_state()          # doctest: +SKIP
    >>> decoder.capture(tokens, state, greedy=True)                         # doctest: +SKIP
    >>> for _ in range(100):                                                # doctest: +SKIP
    ...     decoder.replay()
    """

    def __init__(self, weights: Mapping, dtype, batch: int = 1, device=None, loaded=lambda array: None):
        self.device = device = device or current_device()
        weights, sizes = parameters(weights)
        self.sizes, self.dtype = fitting(sizes), np.dtype(dtype)
        if self.dtype not in DTYPES:
            refuse(f"dtype is {self.dtype}, expected {', '.join(map(str, DTYPES))}", ContractTypeError)
        load = partial(stacked, device, weights, loaded)
        whole = table.whole(lambda *weight: array_of(load, self.dtype, *weight)[0])
        self.embedding, self.head, self.ln0, self.ln_out = whole.embedding, whole.head, whole.ln0, whole.ln_out
        self.all_layers = table.layer("", partial(array_of, partial(load, blocks=sizes["L"]), self.dtype))
        self.layers = [
            SimpleNamespace(**{name: array[i] for name, array in vars(self.all_layers).items()})
            for i in range(sizes["L"])
        ]
        self.make_room(batch)

    def resized(self, batch: int) -> CudaDecoder:
        """A decoder of `batch` sequences with the same weights."""
        other = copy(self)
        other.make_room(batch)
        return other

    def make_room(self, batch):
        """The arrays of a step of `batch` sequences."""

        def room(*shape, dtype=FLOAT32):
            return self.device.empty(shape, dtype)

        self.batch, self.few = batch, batch <= kernels.Matvec.COLUMNS
        self.kernel = None
        if self.device.capability == 90:
            self.kernel = kernels.DecodeStep.fitting(self.dtype, batch, self.sizes["D"], self.sizes["F"], self.device)
        X = FLOAT32 if self.few else self.dtype  # of what products take
        B, (D, F, V, A, W) = batch, (self.sizes[axis] for axis in "DFVAW")
        self.x, self.xx, self.d = room(1, B, D), room(B, D), room(B, D)
        self.mixed_x, self.low, self.mixed = room(1, B, D, dtype=X), room(1, B, 5 * A), room(5, B, D, dtype=X)
        self.kvrg, self.decay_low, self.y = room(4, B, D), room(1, B, W), room(1, B, D, dtype=X)
        self.ffn_mixed, self.activated = room(2, B, D, dtype=X), room(1, B, F, dtype=X)
        self.hidden = None if self.few else room(1, B, F)
        self.gate, self.value = room(1, B, D), room(1, B, D)
        self.normed, self.all_logits = room(1, B, D, dtype=X), room(1, B, V)
        self.arrived = self.device.zeros((1,), INT64)
        self.bound, self.held, self.launches, self.graph = None, None, (), None

    @property
    def logits(self):
        """[B, V] float32, after the latest step."""
        return self.all_logits[0]

    @property
    def weight_bytes(self) -> int:
        """Bytes that a step must read of the weights: all but the embedding, of which it reads B rows."""
        arrays = self.head, self.ln0, self.ln_out, *vars(self.all_layers).values()
        return sum(array.nbytes for array in arrays) + self.batch * self.embedding[0, 0].nbytes

    def initial_state(self, rows: int | None = None) -> State:
        """The state before the first token: `rows` for a pool, otherwise one a sequence."""
        L, D, H, N = (self.sizes[axis] for axis in "LDHN")
        P, zeros = self.batch if rows is None else rows, self.device.zeros
        return State(*(zeros((L, P, *shape), FLOAT32) for shape in ((D,), (H, N, N), (D,))))

    def step(self, tokens, state: State, slots=None, greedy: bool = False):
        """``logits`` [B, V] after `tokens`, enqueued on the current stream; `state` is updated in place.

        tokens : int64 [B] on the device, each below V; with `greedy` the likeliest next take their place.
        state : P rows on the device, contiguous float32.
        slots : int64 [B] on the device, all different, or None
            The row of the state that each sequence has; without them P = B and sequence b has row b.

        The result is the decoder's own buffer, which the next step overwrites. ContractError for arrays of
        another shape or dtype; the values of tokens and slots are not looked at.
        """
        for launch in self.bind(tokens, state, slots, greedy):
            launch()
        return self.logits

    def capture(self, tokens, state: State, slots=None, greedy: bool = False):
        """Make a CUDA graph of `step` for `replay`, and decode nothing yet; returns the `logits` to come.

        Every replay reads and writes these arrays: change what they hold, not where they are.
        """
        import cupy

        zeros = self.device.zeros
        small = State(*(zeros((1, self.batch, *array.shape[2:]), FLOAT32) for array in state.arrays))
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
        with stream:  # every kernel is loaded before the graph: one layer has them all
            token = zeros((self.batch,), INT64)
            for launch in Step(self, token, small, None, greedy, 1).launches:
                launch()
            stream.synchronize()
            stream.begin_capture()
            self.step(tokens, state, slots, greedy)
            self.graph = stream.end_capture()
        return self.logits

    def replay(self):
        """Run the captured step on the current stream."""
        self.graph.launch()
        return self.logits

    def bind(self, tokens, state, slots, greedy):
        """The launches of a step on these arrays, made anew only where an array is another."""
        arrays = (tokens, *state.arrays, *(() if slots is None else (slots,)))
        bound = (greedy, *((self.device.pointer(array), array.shape) for array in arrays))
        if bound != self.bound:
            self.check(tokens, state, slots)
            self.launches = Step(self, tokens, state, slots, greedy, self.sizes["L"]).launches
            self.bound, self.held = bound, arrays
        return self.launches

    def check(self, tokens, state, slots):
        B = self.batch
        rows = {} if slots is not None else {"B": B}
        check_state(state, {axis: self.sizes[axis] for axis in "LDHN"} | rows)
        for name, array in (("tokens", tokens), ("slots", slots)):
            if array is not None and array.dtype != INT64:
                refuse(f"{name} has dtype {array.dtype}, expected {INT64}", ContractTypeError)
            if array is not None and array.shape != (B,):
                refuse(f"{name} is {array.shape}, expected contiguous {(B,)}")
        states = {f"state.{name}": getattr(state, name) for name in STATE}
        for name, array in {"tokens": tokens, "slots": slots, **states}.items():
            if array is not None and not array.flags.c_contiguous:
                refuse(f"{name} is {array.shape}, not contiguous, expected contiguous {array.shape}")


class Step:
    """The launches of one token through `layers`, in order, bound to the arrays that they read and write."""

    def __init__(self, decoder, tokens, state, slots, greedy, layers):
        self.decoder, self.launches = decoder, []
        self.at = decoder.device.pointer
        self.slots = self.pointer(slots)
        my, at, B = decoder, self.at, decoder.batch
        weight, bias = map(at, my.ln0)
        self.launch(
            kernels.Embed(my.dtype),
            B,
            tokens=at(tokens),
            embedding=at(my.embedding),
            weight=weight,
            bias=bias,
            x=at(my.x),
            D=my.sizes["D"],
            eps=LAYER_NORM_EPS,
        )
        if my.kernel:
            self.every_phase(state, layers)
        else:
            self.every_product(state, my.layers[:layers])
        if greedy:
            self.launch(kernels.Argmax(), B, logits=at(my.logits), tokens=at(tokens), V=my.sizes["V"])

    def every_phase(self, state, layers):
        """All layers and the head: one launch where all blocks can be at work at once, otherwise one a phase."""
        my, at, every = self.decoder, self.at, self.decoder.all_layers
        kernel, room = my.kernel

        def fields_of(where, names):
            return {name: at(getattr(where, name)) for name in names.split()}

        fields = {
            **fields_of(every, "maa_down maa_up decay_down decay_up kvrg output ffn_key ffn_receptance ffn_value"),
            **fields_of(my, "head"),
            **fields_of(every, "ln1 ln2 ln_x"),
            **fields_of(my, "ln_out"),
            **fields_of(every, "maa_x maa ffn_maa decay bonus"),
            **fields_of(state, "att_shift wkv ffn_shift"),
            "slots": self.slots,
            **fields_of(my, "x xx low mixed decay_low y activated gate arrived"),
            "kvrg_out": at(my.kvrg),
            "logits": at(my.all_logits),
            "L": layers,
            "B": my.batch,
            "P": state.wkv.shape[1],
            **{axis: my.sizes[axis] for axis in "DHNAWFV"},
            "staged": int(room >= 4 * my.batch * my.sizes["F"]),
        }
        count = layers * PHASES + 1
        smem = kernel.shared_bytes + room
        together = getattr(my.device, "launch_together", None)
        for first, last in [(0, count)] if together else [(n, n + 1) for n in range(count)]:
            args = kernel.pack(**fields, first=first, last=last, eps=LAYER_NORM_EPS, group_eps=GROUP_NORM_EPS)
            launch = together or partial(my.device.launch, blocks=PHASE_BLOCKS)
            self.launches.append(partial(launch, kernel, args=args, smem=smem))

    def every_product(self, state, layers):
        my, value = self.decoder, None  # value: of the layer below, which the next norm adds to x
        for i, layer in enumerate(layers):
            self.time_mix(layer, state.att_shift[i], state.wkv[i], value)
            self.channel_mix(layer, state.ffn_shift[i])
            value = my.value
        self.norm_shift(my.ln_out, my.normed, value=value)
        self.matmul((my.head, my.normed, my.all_logits, WRITE))

    def time_mix(self, layer, shift, wkv, value):
        my, at, B = self.decoder, self.at, self.decoder.batch
        T, X, (D, H, N, A, W) = my.dtype, my.mixed.dtype, (my.sizes[axis] for axis in "DHNAW")
        self.norm_shift(layer.ln1, my.mixed_x, layer.maa_x, shift, value, xx=my.xx)
        self.matmul((layer.maa_down, my.mixed_x, my.low, WRITE))
        mix = kernels.DataMix.of_step(T, X)
        self.launch(
            mix,
            mix.blocks(B, D),
            low=at(my.low),
            up=at(layer.maa_up),
            maa=at(layer.maa),
            xx=at(my.xx),
            d=at(my.d),
            mixed=at(my.mixed),
            tokens=B,
            D=D,
            A=A,
        )
        self.matmul((layer.kvrg, my.mixed[1:], my.kvrg, WRITE), (layer.decay_down, my.mixed[:1], my.decay_low, WRITE))
        (k, v, r, gate), (weight, bias) = map(at, my.kvrg), map(at, layer.ln_x)
        self.launch(
            kernels.TimeMixStep(T, X),
            B * H,
            k=k,
            v=v,
            r=r,
            gate=gate,
            low=at(my.decay_low),
            up=at(layer.decay_up),
            decay=at(layer.decay),
            u=at(layer.bonus),
            weight=weight,
            bias=bias,
            state=at(wkv),
            slots=self.slots,
            y=at(my.y),
            B=B,
            H=H,
            N=N,
            W=W,
            eps=GROUP_NORM_EPS,
        )
        self.matmul((layer.output, my.y, my.x, ADD))

    def channel_mix(self, layer, shift):
        my = self.decoder
        self.norm_shift(layer.ln2, my.ffn_mixed, layer.ffn_maa, shift)
        self.matmul(
            (layer.ffn_key, my.ffn_mixed[:1], my.activated, RELU_SQUARED),
            (layer.ffn_receptance, my.ffn_mixed[1:], my.gate, WRITE),
        )
        self.matmul((layer.ffn_value, my.activated, my.value, WRITE))

    def norm_shift(self, norm, mixed, maa=None, shift=None, value=None, xx=None):
        my, at = self.decoder, self.pointer
        weight, bias = norm
        C, B, D = mixed.shape
        self.launch(
            kernels.NormShift(mixed.dtype),
            B,
            x=at(my.x),
            value=at(value),
            gate=at(None if value is None else my.gate),
            weight=at(weight),
            bias=at(bias),
            maa=at(maa),
            shift=at(shift),
            slots=self.slots,
            xx=at(xx),
            d=at(None if xx is None else my.d),
            mixed=at(mixed),
            B=B,
            D=D,
            C=C,
            eps=LAYER_NORM_EPS,
        )

    def matmul(self, *products):
        """Products (w [C, M, K], x [C, B, K], y [C, B, M], finish) that have B and K in common."""
        my, at = self.decoder, self.at
        if not my.few:
            for w, x, y, finish in products:
                to = my.hidden if finish == RELU_SQUARED else y
                self.launches.append(partial(multiply(w), w, x, to, finish == ADD))
                if finish == RELU_SQUARED:
                    kernel = kernels.ReluSquared(to.dtype, y.dtype)
                    self.launch(kernel, kernel.blocks(y.size), x=at(to), y=at(y), count=y.size)
            return
        each = [(*matrices, finish) for *stacks, finish in products for matrices in zip(*stacks)]
        each += [(None, None, None, WRITE)] * (kernels.Matvec.PRODUCTS - len(each))
        listed = [
            {
                "w": self.pointer(w),
                "x": self.pointer(x),
                "y": self.pointer(y),
                "M": 0 if w is None else len(w),
                "finish": finish,
            }
            for w, x, y, finish in each
        ]
        blocks = sum(ceil_div(product["M"], kernels.Matvec.ROWS) for product in listed)
        _, B, K = products[0][1].shape
        kernel = kernels.Matvec.fitting(my.dtype, blocks, my.device)
        self.launch(kernel, blocks, products=listed, B=B, K=K)

    def launch(self, kernel, blocks, **fields):
        self.launches.append(partial(self.decoder.device.launch, kernel, blocks, kernel.pack(**fields)))

    def pointer(self, array):
        return None if array is None else self.at(array)


def array_of(load, dtype, field, weight, names):
    """A weight on the device; matrices that products take are (out, in), with rows to spare."""
    if not weight.matrix:
        return load(FLOAT32, names)
    if field in AS_STORED:
        return load(dtype, names)
    return load(dtype, names, weight.inputs_first, kernels.DecodeStep.ROWS)


def stacked(device, weights, loaded, dtype, names, transposed=False, rows=1, blocks=None):
    """The named weights on the device, [L, len(names), ...], of `blocks` blocks; without, L = 1 and names are whole.

    The first axis of each is a view of a multiple of `rows`, zeros at the end, so that kernels may read
    tiles of so many.
    """
    prefixes = [""] if blocks is None else [f"blocks.{i}." for i in range(blocks)]
    shape = weights[prefixes[0] + names[0]].shape
    first, *others = shape[::-1] if transposed else shape
    room = device.zeros((len(prefixes), len(names), ceil_div(first, rows) * rows, *others), dtype)
    stack = room[:, :, :first]
    for layer, prefix in zip(stack, prefixes):
        for slot, name in zip(layer, names):
            array = weights[prefix + name]
            slot[...] = device.upload((array.T if transposed else array).astype(dtype, copy=False))
            loaded(array)
    return stack


def multiply(w):
    """What computes y = x w^T, or adds it to y, where `w` lives."""
    if isinstance(w, np.ndarray):
        return multiply_on_host
    from ...backends.cupy import blas

    return blas.handle(w.device.id).matmul


def multiply_on_host(w, x, y, add):
    product = x.astype(FLOAT32) @ w.astype(FLOAT32).swapaxes(1, 2)
    y[...] = y + product if add else product


def fitting(sizes):
    """`sizes`, once the kernels can take them."""
    for axis in "DF":
        if sizes[axis] % 8:
            refuse(f"{axis} is {sizes[axis]}, expected a multiple of 8 on the GPU")
    if sizes["N"] % 4:
        refuse(f"N is {sizes['N']}, expected a multiple of 4 on the GPU")
    for axis, most in MOST.items():
        if sizes[axis] > most:
            refuse(f"{axis} is {sizes[axis]}, expected at most {most} on the GPU")
    return sizes


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def current_device():
    from ...backends.cupy.device import best_device

    return best_device()
