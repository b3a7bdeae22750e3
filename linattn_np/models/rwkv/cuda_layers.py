"""A model's layers on the GPU: `Prompts` computes all tokens in parallel, a `CudaDecoder` one token per sequence."""

from __future__ import annotations

import numpy as np

from ...backends.cupy.execute import CompiledPlan
from ..devices import NotCopied
from ..locks import Turns
from .cuda_decoder import DTYPES, FLOAT32, INT64, CudaDecoder
from .cuda_prompts import Prompts, head_plan
from .version import initial_states

# The most batch sizes with stored buffers, the most sets of prompts' lengths with stored plans, and the most of `heads`
MOST_CACHED = 8
MOST_STATES = 16  # the most states for which a batch size has stored graphs


class CudaLayers(NotCopied):
    """Layers with matrices in float32, float16, bfloat16 or int8, the state in `state_dtype`, all else in float32.

    The arguments are the version's decoder class and those that `Model.layers_on` describes. Methods take the arguments
    of `NumpyLayers`'; `turn` lets one thread in at a time.
    """

    def __init__(self, decoder_class: type[CudaDecoder], weights, sizes, dtype, state_dtype, loaded):
        self.dtype = dtype_of(decoder_class.version, weights, dtype)
        # A decoder of one sequence; those of other batch sizes share its weights.
        self.decoder = decoder_class(weights, self.dtype, loaded=loaded, state_dtype=state_dtype)
        self.state_dtype = self.decoder.state_dtype
        self.device, self.steps = self.decoder.device, {1: Steps(self.decoder)}
        self.prompts: dict[tuple, Prompts] = {}
        self.heads: dict[int, CompiledPlan] = {}  # by the number of rows
        if self.decoder.has_steps:
            self.decoder.compile()  # in the background, as compiling takes long and most calls begin with a prompt
        self.zeros, self.asarray = self.device.zeros, self.device.upload
        self.Array = type(self.zeros((0,), FLOAT32))  # the class of arrays on this device
        self.initial_wkv = [self.asarray(array.astype(FLOAT32)) for array in initial_states(weights)]
        for array in initial_states(weights):
            loaded(array)
        self.makes_states = not self.initial_wkv  # whether `by_prompts` makes the arrays of a state that lacks them
        self.turn = Turns(self.device)

    def __repr__(self):
        return f"CudaLayers({self.decoder.sizes['L']} layers, {self.dtype})"

    def logits(self, tokens, state, sequences, last):
        """Logits [B * T, V], or [N, V] for the last tokens only; `tokens` are host integers."""
        with self.turn():
            if sequences.one_token_each and self.decoder.has_steps:
                return self.steps_of(len(tokens))(tokens, state, sequences.slots)
            return self.by_prompts(tokens, state, sequences, last)

    def hidden(self, tokens, state, sequences, last):
        """The head's input, float32 [B * T, D], or [N, D] for the last tokens only."""
        with self.turn():
            return self.by_prompts(tokens, state, sequences, last, hidden=True)

    def head(self, x):
        """Logits [n, V] of rows of the head's input, float32 x [n, D]."""
        with self.turn():
            logits = self.device.empty((len(x), self.decoder.sizes["V"]), FLOAT32)
            plan = cached(self.heads, len(x), lambda: head_plan(self.decoder, len(x)), self.turn.wait)
            plan([x, logits, *vars(self.decoder.model_weights).values()])
            return logits

    def by_prompts(self, tokens, state, sequences, last, hidden=False):
        """The result of `logits`, or of `hidden`, with all tokens in parallel."""
        slots = sequences.slots
        if slots is not None and np.array_equal(slots, np.arange(state.wkv.shape[1])):
            slots = None  # all rows in order need no gathering
        key = sequences.bounds.tobytes(), last, hidden
        prompts = cached(self.prompts, key, lambda: Prompts(self.decoder, sequences, last, hidden), self.turn.wait)
        return prompts(tokens, state, slots)

    def steps_of(self, batch) -> Steps:
        """The `Steps` for this number of sequences."""
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
    graph, which later calls launch. Callers are inside `CudaLayers.turn`."""

    def __init__(self, decoder):
        self.decoder, self.decoders = decoder, {}  # {key of a state: a decoder with a graph of its own}
        self.tokens_and_slots = decoder.device.empty((2, decoder.batch), INT64)  # one copy moves both to the device
        self.tokens, self.slots = self.tokens_and_slots

    def __call__(self, tokens, state, slots):
        """Logits [B, V] in new memory; `tokens` [B] and `slots` [B] or None are on the host."""
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
        """The decoder's logits after a step on `self.tokens`: by launches the first time for a state (its decoder has
        no `bound_key` yet), then by a graph. The next step overwrites them."""
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
