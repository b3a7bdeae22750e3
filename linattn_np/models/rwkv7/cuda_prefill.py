"""RWKV-7's mixes for prompts on the GPU, as steps of a plan.

Sizes: T tokens, D channels, F channels of the channel mix, H heads of N channels. X is the matrices' dtype, that of
their inputs. `draft` collects the launches, which run in this order: a launch may overwrite what no later one reads.
"""

from functools import partial
from math import prod

import numpy as np

from ...backends.cupy import rwkv7_model_kernels as kernels
from ...backends.cupy.delta_segments import makes_keys
from ...backends.cupy.plan import FLOAT32
from ...backends.cupy.rwkv6_model_kernels import LowActivations
from ...declarations import RWKV7
from ..rwkv import cuda_prompts


class MixOperations(cuda_prompts.MixOperations):
    """The two mixes as launches in a plan. The four low-rank products, of the decay, the learning rate, the output gate
    and the share of the first layer's value, are two batches: `low` is the result of the first matrices (`down`), with
    its activations, `high` that of the second ones (`up`): the gate, and logits of the other three.

    From the base class: `T`, `dtype` (X) and `sizes`; `mixes`: for a norm the arrays to which `shift_mix` writes (the
    mixes; the normed x, and the previous token's minus it, None here: not kept); `results`: for a matrix the array of
    its `product`, or of relu(product)^2 (`squared_product`); `arrays`, those of the layer, of its state and of
    `carried`, by name; `recurrent`, which adds an operator, and `gated_norm_to`, a group norm, the bonus and the gate.
    `shift` and `wkv`, parts of the state: launches read their arrays `before`, and write those `after`.
    """

    def __init__(self, decoder, *arguments):
        super().__init__(decoder, *arguments)
        T, X, (D, F), empty = self.T, self.dtype, (self.sizes[axis] for axis in "DF"), self.draft.empty
        # The channel mix's hidden layer takes the memory of the time mix's inputs, which are no longer needed then: the
        # L2 cache need not write to memory what is overwritten there.
        memory = empty((T * max(6 * D, F),), X)
        self.mixed, hidden = (
            memory[: prod(shape)].view(lambda x, shape=shape: x.reshape(shape)) for shape in ((6, T, D), (1, T, F))
        )
        self.mixes = {"ln1": (self.mixed, None, None), "ln2": (empty((1, T, D), X), None, None)}
        self.results = {
            "vkr": empty((3, T, D), X),
            "down": empty((kernels.DOWNS, T, decoder.rank), X),  # DOWNS = 4; `rank`: of all four, padded to the largest
            "ffn_key": hidden,
            "ffn_value": empty((1, T, D), FLOAT32),
        }

    @staticmethod
    def carried(decoder, T):
        """`first_v`: the first layer's value, which that layer writes and the others read."""
        return {"first_v": ((T, decoder.sizes["D"]), decoder.dtype)}

    def time_mix(self, layer, x, shift, wkv):
        T, (H, N) = self.T, (self.sizes[axis] for axis in "HN")
        # mixed: w a g v k r, in the order of `cuda_decode.STACKS`; v's is an input of both products, `down` and `vkr`
        mixed, downs = self.shift_mix(layer, "ln1", "mix", x, shift)[0], kernels.DOWNS
        v, k, r = self.product(layer, "vkr", mixed[downs - 1 :])
        low = self.product(layer, "down", mixed[:downs])
        # as one row: tanh of w's numbers, which come first, and the sigmoid of g's, which come third
        activations, size = LowActivations(self.dtype), low[0].size
        columns = {"columns": low.size, "tanh_end": size, "sigmoid_begin": 2 * size, "sigmoid_end": 3 * size}
        self.draft.launch(activations, activations.blocks(low.size), y=low, count=low.size, **columns)
        high, o = mixed[:downs], mixed[downs]  # in the memory of mixes that both products have read by now
        self.draft.product(layer.up.swapaxes(1, 2), low, high)
        # The recurrence's w, a and b are made of the logits of the decay, the rate and the share: high is w a g v, and
        # v's part, the share's logits, becomes b. Keys, which depend on the rate, take the place of k; values, which
        # depend on the share, that of v. bases: w0, a0 and v0, which are added to the logits; removal, replacement and
        # bonus: `weights.LAYER`
        (w, a, gate, b), first_v = high, self.arrays.first_v
        recurrent = partial(self.recurrent, RWKV7, {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}, wkv, o)
        weights = {name: getattr(layer, name) for name in ("bases", "removal", "replacement")}
        if makes_keys(self.dtype, N):
            rows = {name: x.in_heads(H)[:, 0].swapaxes(1, 2) for name, x in weights.items()}  # [3 or 1, H, 1, N]
            recurrent(logits={"key": self.in_heads(k), "first_v": self.in_heads(first_v)} | rows)
        else:  # `Keys`, an instance by N, makes them in place
            keys, made = kernels.Keys.fitting(self.dtype, N), {"w": w, "key": k, "mixed_v": v, "a": a, "b": b}
            logits = {"decay_logits": w, "icl_logits": a, "value_logits": b, "k": k, "v": v, "first_v": first_v}
            self.draft.launch(keys, keys.blocks(T, H), **logits, **made, **weights, token_heads=T * H)
            recurrent()
        self.gated_norm_to(o, layer, o, gate, r=r, k=k, v=v, bonus=layer.bonus)
        return self.add_product(layer, "output", x, o)

    def channel_mix(self, layer, x, shift):
        mixed = self.shift_mix(layer, "ln2", "ffn_mix", x, shift)[0]
        hidden = self.squared_product(layer, "ffn_key", mixed[0])
        if self.dtype != np.float16:
            return self.add_product(layer, "ffn_value", x, hidden)
        # `squared_product` divides float16's squares by `version.unit_of_squares`, by which `add_gated` multiplies
        return self.add_gated(x, None, self.product(layer, "ffn_value", hidden))
