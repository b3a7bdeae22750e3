"""A model's layers on the GPU: `Prompts` computes all tokens in parallel, a `CudaDecoder` one token per sequence."""

from __future__ import annotations

import numpy as np

from ..devices import NotCopied
from ..locks import Turns
from .cuda_decoder import DTYPES, FLOAT32, INT64, CudaDecoder
from .cuda_prompts import Prompts
from .version import initial_states

MOST_CACHED = 8  # the most batch sizes with stored buffers, and the most sets of prompts' lengths with stored plans
MOST_STATES = 16  # the most states for which a batch size has stored graphs


class CudaLayers(NotCopied):
    """Layers with matrices in float32, float16, bfloat16 or int8, the state in `state_dtype`, all else in float32."""

    def __init__(self, kind: type[CudaDecoder], weights, sizes, dtype, state_dtype, loaded):
        self.dtype = dtype_of(kind.version, weights, dtype)
        # A decoder of one sequence; those of other batch sizes share its weights.
        self.decoder = kind(weights, self.dtype, loaded=loaded, state_dtype=state_dtype)
        self.state_dtype = self.decoder.state_dtype
        self.device, self.steps = self.decoder.device, {1: Steps(self.decoder)}
        self.prompts: dict[tuple, Prompts] = {}
        self.decoder.compile()  # in the background, as compiling takes long and most calls begin with a prompt
        self.zeros, self.asarray = self.device.zeros, self.device.upload
        self.Array = type(self.zeros((0,), FLOAT32))
        self.tuned = [self.asarray(array.astype(FLOAT32)) for array in initial_states(weights)]
        for array in initial_states(weights):
            loaded(array)
        self.turn = Turns(self.device)

    def __repr__(self):
        return f"CudaLayers({self.decoder.sizes['L']} layers, {self.dtype})"

    def logits(self, tokens, state, rows, last):
        """Logits [B * T, V], or [N, V] for the last tokens only; `tokens` are host integers."""
        with self.turn():
            if rows.single:
                return self.steps_of(len(tokens))(tokens, state, rows.slots)
            return self.by_prompts(tokens, state, rows, last)

    def hidden(self, tokens, state, rows, last):
        """What the head reads, float32 [B * T, D], or [N, D] of the last tokens only."""
        with self.turn():
            return self.by_prompts(tokens, state, rows, last, hidden=True)

    def by_prompts(self, tokens, state, rows, last, hidden=False):
        """`logits` or, if `hidden`, `hidden`, by the computation of all tokens in parallel."""
        slots = rows.slots
        if slots is not None and np.array_equal(slots, np.arange(state.wkv.shape[1])):
            slots = None  # all rows in order need no gathering
        key = rows.bounds.tobytes(), last, hidden
        prompts = cached(self.prompts, key, lambda: Prompts(self.decoder, rows, last, hidden), self.turn.wait)
        return prompts(tokens, state, slots)

    def steps_of(self, batch) -> Steps:
        return cached(self.steps, batch, lambda: Steps(self.decoder.resized(batch)), self.turn.wait)


def cached(cache, key, make, before_dropping=lambda: None, most=MOST_CACHED):
    """The value of `key` in the dictionary `cache`, made by `make()` if missing. If there are then more than `most`
    values, the least recently used one is dropped, after `before_dropping()`."""
    value = cache.pop(key, None)
    cache[key] = make() if value is None else value
    if len(cache) > most:
        before_dropping()
        del cache[next(iter(cache))]
    return cache[key]


class Steps:
    """The decoding steps for one number of sequences. The second call with a state at the same address captures a CUDA
    graph, which later calls launch."""

    def __init__(self, decoder):
        self.decoder, self.decoders = decoder, {}  # decoders: one for each state, by address
        self.tokens_and_slots = decoder.device.empty((2, decoder.batch), INT64)
        self.tokens, self.slots = self.tokens_and_slots

    def __call__(self, tokens, state, slots):
        """Logits [B, V] in new memory; `tokens` and `slots` are on the host."""
        device = self.decoder.device
        if slots is None:
            device.copy(device.upload(tokens), self.tokens)
        else:
            device.copy(device.upload(np.stack((tokens, slots))), self.tokens_and_slots)
            slots = self.slots
        logits = device.empty(self.decoder.logits.shape, FLOAT32)
        device.copy(self.run(state, slots), logits)
        return logits

    def run(self, state, slots):
        """Runs a step on the device's tokens: by launches the first time for a state, then by a graph."""
        key = slots is None, self.decoder.addresses_of(*state.arrays)
        decoder = cached(self.decoders, key, self.decoder.with_own_graph, most=MOST_STATES)
        if not decoder.bound_key:
            return decoder.step(self.tokens, state, slots)
        if not decoder.graph:
            decoder.capture(self.tokens, state, slots)
        return decoder.replay()


def dtype_of(version, weights, dtype):
    """The matrices' dtype: `dtype`, or by default the dtype of the weights if it is one of DTYPES, else float32."""
    if dtype is not None:
        return version.checked_dtype(dtype, DTYPES)
    dtype_of_weights = weights["head.weight"].dtype
    return dtype_of_weights if dtype_of_weights in DTYPES else FLOAT32
