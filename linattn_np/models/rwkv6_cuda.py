"""One token of an RWKV-6 model on the GPU for B sequences, at close to the speed its weights can be read.

Nine launches a layer up to eight sequences, each of which reads its weights once; beyond that cuBLAS multiplies.
Every array of a step is allocated once, and a step neither allocates nor waits, so a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from ..arrays import BFLOAT16
from ..backends.cupy import tiles
from ..backends.cupy.build import pack
from ..contract import ContractTypeError
from .rwkv6 import GROUP_NORM_EPS, LAYER_NORM_EPS, State, check_parameters, refuse

FLOAT32, INT64 = np.dtype(np.float32), np.dtype(np.int64)
DTYPES = (FLOAT32, np.dtype(np.float16), BFLOAT16)
MOST = {"D": 8192, "N": 256, "W": 512}      # what the kernels keep in registers and shared memory
WRITE, ADD, RELU_SQUARED = range(3)         # matvec's `Finish`
AHEAD = 8 << 20         # bytes of later weights that a small kernel asks for: what the memory gives while it runs
PIECE = 4096            # bytes a request of decode.cuh
SPARE_BLOCKS = 128      # that ask, about one a multiprocessor


class CudaDecoder:
    """Decodes token after token on the current CUDA device; the equations are `RWKV6`'s.

    Weights are kept in `dtype`, norms, mixes, decay and bonus in float32; state, sums and, up to eight sequences, all
    that passes between kernels are float32. Beyond eight the inputs of a product are rounded to `dtype`.

    Parameters
    ----------
    weights : mapping from official names to arrays, on the host or on the device
    dtype : float32, float16 or bfloat16
        Of the weights on the device.
    batch : int
        B, the sequences that every step advances.
    device
        What allocates and launches; the current CUDA device by default.

    Raises
    ------
    ContractError
        A parameter that `RWKV6` refuses; D or F that is no multiple of 8; sizes beyond the kernels' limits.

    Example
    -------
    >>> decoder = CudaDecoder(weights, np.float16)                          # doctest: +SKIP
    >>> tokens, state = cupy.array([510]), decoder.initial_state()          # doctest: +SKIP
    >>> decoder.capture(tokens, state, greedy=True)                         # doctest: +SKIP
    >>> for _ in range(100): decoder.replay()                               # tokens holds the last   # doctest: +SKIP
    """

    def __init__(self, weights: Mapping, dtype, batch: int = 1, device=None):
        self.device = device = device or current_device()
        self.sizes = sizes = fitting(check_parameters(weights))
        self.dtype, self.batch = np.dtype(dtype), batch
        if self.dtype not in DTYPES:
            refuse(f"dtype is {self.dtype}, expected {', '.join(map(str, DTYPES))}", ContractTypeError)
        self.few = batch <= tiles.MATVEC_COLUMNS
        X = FLOAT32 if self.few else self.dtype             # of what products take

        load = partial(stacked, device, weights)
        L, D, F, V, A, W = (sizes[axis] for axis in "LDFVAW")
        self.embedding, self.head = load(self.dtype, "emb.weight"), load(self.dtype, "head.weight")
        self.ln0, self.ln_out = load(FLOAT32, *affine("blocks.0.ln0")), load(FLOAT32, *affine("ln_out"))
        self.layers = [Layer(load, self.dtype, f"blocks.{i}") for i in range(L)]

        def room(*shape, dtype=FLOAT32):
            return device.empty(shape, dtype)

        B = batch
        self.x, self.xx, self.d = room(B, D), room(B, D), room(B, D)
        self.mixed_x, self.low = room(1, B, D, dtype=X), room(1, B, 5 * A)
        self.mixed, self.kvrg, self.decay_low = room(5, B, D, dtype=X), room(4, B, D), room(1, B, W)
        self.y = room(1, B, D, dtype=X)
        self.ffn_mixed, self.hidden, self.activated = room(2, B, D, dtype=X), room(1, B, F), room(1, B, F, dtype=X)
        self.gate, self.value = room(1, B, D), room(1, B, D)
        self.normed, self._logits = room(1, B, D, dtype=X), room(1, B, V)
        self.bound, self.program, self.graph = None, [], None

    @property
    def logits(self):
        """[B, V] float32, of the latest step."""
        return self._logits[0]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step must read: all but the embedding, of which it reads B rows."""
        arrays = [self.head, self.ln0, self.ln_out] + [array for layer in self.layers for array in vars(layer).values()]
        return sum(array.nbytes for array in arrays) + self.batch * self.embedding[0, 0].nbytes

    def initial_state(self, rows: int | None = None) -> State:
        """The state before the first token; `rows` of it for a pool, by default one a sequence."""
        L, D, H, N = (self.sizes[axis] for axis in "LDHN")
        P, zeros = self.batch if rows is None else rows, self.device.zeros
        return State(zeros((L, P, D), FLOAT32), zeros((L, P, H, N, N), FLOAT32), zeros((L, P, D), FLOAT32))

    def step(self, tokens, state, slots=None, greedy: bool = False):
        """``logits`` [B, V] after `tokens`; `state` is updated in place, all of it enqueued on the current stream.

        tokens : int64 [B] on the device, each below V; with `greedy` they become the likeliest next ones.
        state : `State` of P rows on the device, contiguous float32.
        slots : int64 [B] on the device, all different, or None
            The row of the state that each sequence has; without them P = B.

        The result is the decoder's own buffer, which the next step overwrites.
        """
        for launch in self.bind(tokens, state, slots, greedy):
            launch()
        return self.logits

    def capture(self, tokens, state, slots=None, greedy: bool = False):
        """Make a CUDA graph of `step` for `replay`; nothing is decoded yet. Returns the `logits` to come.

        The arrays are those that every replay reads and writes: change their values, not the arrays.
        """
        import cupy

        L, P = 1, self.batch
        first = State(*(self.device.zeros((L, P, *array.shape[2:]), FLOAT32) for array in parts(state)))
        zero = self.device.zeros((self.batch,), INT64)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:                        # every kernel once on one layer: what is loaded now is not in the graph
            cupy.cuda.runtime.deviceSynchronize()
            for launch in self.enqueued(zero, first, None, greedy, self.layers[:1]):
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

    # -- what a step launches ----------------------------------------------------------------------------------------
    def bind(self, tokens, state, slots, greedy):
        """The launches of a step on these arrays; made anew only where an array is another."""
        arrays = (tokens, *parts(state), *(() if slots is None else (slots,)))
        bound = (greedy, slots is None, *((self.device.pointer(array), array.shape) for array in arrays))
        if bound != self.bound:
            self.check(tokens, state, slots)
            self.program, self.bound = self.enqueued(tokens, state, slots, greedy, self.layers), bound
        return self.program

    def check(self, tokens, state, slots):
        B, (L, D, H, N) = self.batch, (self.sizes[axis] for axis in "LDHN")
        P = state.wkv.shape[1] if slots is not None else B
        wanted = {"tokens": (tokens, (B,), INT64), "slots": (slots, (B,), INT64),
                  "state.att_shift": (state.att_shift, (L, P, D), FLOAT32),
                  "state.wkv": (state.wkv, (L, P, H, N, N), FLOAT32),
                  "state.ffn_shift": (state.ffn_shift, (L, P, D), FLOAT32)}
        for name, (array, shape, dtype) in wanted.items():
            if array is None:
                continue
            if array.dtype != dtype:
                refuse(f"{name} has dtype {array.dtype}, expected {dtype}", ContractTypeError)
            if array.shape != shape or not array.flags.c_contiguous:
                refuse(f"{name} is {array.shape} with strides {array.strides}, expected {shape}, contiguous")

    def enqueued(self, tokens, state, slots, greedy, layers) -> list:
        """The launches of a step, in order."""
        B, (D, F, H, N, A, W, V) = self.batch, (self.sizes[axis] for axis in "DFHNAWV")
        T, X, at, launches = self.dtype, self.mixed.dtype, self.pointer, []

        def launch(kernel, blocks, ahead=None, offset=0, **fields):
            if not ahead_of(kernel):
                launches.append(partial(self.device.launch, kernel, blocks, pack(**fields), tiles.shared_bytes(kernel)))
                return
            size = 0 if ahead is None or not self.few else max(0, min(AHEAD, ahead.nbytes - offset))
            spare = min(SPARE_BLOCKS, -(-size // PIECE))
            fields |= {"ahead": at(ahead) + offset if size else None, "ahead_bytes": size}
            launches.append(partial(self.device.launch, kernel, blocks + spare, pack(**fields),
                                    tiles.shared_bytes(kernel)))

        def matmul(*products, finish=WRITE):
            launches.extend(self.matmul(products, finish))

        def norm_shift(norm, mixed, maa=None, shift=None, value=None, xx=None, ahead=None):
            launch(tiles.norm_shift(X), B, ahead, x=at(self.x), value=at(value),
                   gate=at(None if value is None else self.gate), weight=at(norm[0]), bias=at(norm[1]), maa=at(maa),
                   shift=at(shift), slots=at(slots), xx=at(xx), d=at(None if xx is None else self.d), mixed=at(mixed),
                   B=B, D=D, C=len(mixed), eps=LAYER_NORM_EPS)

        launch(tiles.embed(T), B, tokens=at(tokens), embedding=at(self.embedding), weight=at(self.ln0[0]),
               bias=at(self.ln0[1]), x=at(self.x), D=D, eps=LAYER_NORM_EPS)
        value = None                        # of the layer below, not yet added to x
        for i, layer in enumerate(layers):
            norm_shift(layer.ln1, self.mixed_x, layer.maa_x, state.att_shift[i], value, self.xx, layer.kvrg)
            matmul((layer.maa_down, self.mixed_x, self.low))
            groups = -(-B // tiles.MATVEC_COLUMNS)
            launch(tiles.mix(T, X), groups * 5 * -(-D // tiles.MIX_COLUMNS), layer.kvrg, AHEAD, low=at(self.low),
                   up=at(layer.maa_up), maa=at(layer.maa), xx=at(self.xx), d=at(self.d), mixed=at(self.mixed),
                   B=B, D=D, A=A)
            matmul((layer.kvrg, self.mixed[1:], self.kvrg), (layer.decay_down, self.mixed[:1], self.decay_low))
            k, v, r, gate = map(at, self.kvrg)
            launch(tiles.time_mix_step(T, X), B * H, layer.output, k=k, v=v, r=r, gate=gate, low=at(self.decay_low),
                   up=at(layer.decay_up), decay=at(layer.decay), u=at(layer.bonus), weight=at(layer.ln_x[0]),
                   bias=at(layer.ln_x[1]), state=at(state.wkv[i]), slots=at(slots), y=at(self.y), B=B, H=H, N=N, W=W,
                   eps=GROUP_NORM_EPS)
            matmul((layer.output, self.y, self.x[None]), finish=ADD)
            norm_shift(layer.ln2, self.ffn_mixed, layer.ffn_maa, state.ffn_shift[i], ahead=layer.ffn_key)
            self.channel_mix(layer, matmul, launch)
            value = self.value
        norm_shift(self.ln_out, self.normed, value=value, ahead=self.head)
        matmul((self.head, self.normed, self._logits))
        if greedy:
            launch(tiles.argmax(), B, logits=at(self._logits), tokens=at(tokens), V=V)
        return launches
