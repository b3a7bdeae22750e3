"""RWKV-7's two mixes, written once.

`time_mix` and `channel_mix` call operations of an object `ops`, which computes them: with NumPy, with Numba's loops, or
with a pullback of each for gradients. Decoding on the CPU does not use these functions: it is one loop of Numba's
(`numba_loops.step`). Nor does the GPU, which takes fewer and larger kernels than there are operations (`cuda_prefill`
for prompts, `cuda_decode`).
"""

from typing import Protocol

from ..rwkv.mix_operations import CommonOperations

DECAY = 0.6065306597126334  # exp(-1/2): the decay of a token is exp(-DECAY sigmoid(...)), from 0.545 to 1
LEAST_NORM = 1e-12  # a removal key is divided by its norm, or by this if the norm is less


class MixOperations(CommonOperations, Protocol):
    """The operations of the mixes. `low` is the product of a mix and the first matrix, `_down`, of a low-rank pair."""

    def log_decay(self, layer, low):
        """-exp(-1/2) sigmoid(decay + tanh(low) decay_up)."""

    def learning_rate(self, layer, low):
        """The in-context learning rate icl = sigmoid(icl + low icl_up)."""

    def output_gate(self, layer, low):
        """sigmoid(low) gate_up."""

    def first_value(self, v):
        """v itself, of the first layer; `residual_value` of the others reads it."""

    def residual_value(self, layer, v, low):
        """v + (the first layer's v - v) sigmoid(value + low value_up)."""

    def keys(self, layer, k, icl):
        """``(kappa, key)``: k removal over its norm, head by head, and k (1 + (icl - 1) replacement)."""

    def recurrence(self, layer, r, w, k, v, kappa, icl, wkv):
        """`linattn_np.rwkv7` with scale 1 on heads, a = -kappa, b = kappa icl."""

    def bonus_norm(self, layer, o, r, k, v, gate):
        """(GroupNorm_H(o; ln_x) + (sum_N r k bonus) v) gate."""


def time_mix(ops: MixOperations, layer, x, shift=None, wkv=None):
    """The residual after a layer's time mix. Operations for gradients need neither `shift` nor `wkv`."""
    mixed, _, _ = ops.shift_mix(layer, "ln1", "mix", x, shift)
    return ops.add_product(layer, "output", x, gated(ops, layer, mixed, wkv))


def gated(ops: MixOperations, layer, mixed, wkv):
    """The input of the time mix's output matrix, from its six mixes w a g k v r."""
    x_w, x_a, x_g, _, x_v, _ = mixed
    k, v, r = ops.product(layer, "kvr", mixed[3:])
    w = ops.log_decay(layer, ops.product(layer, "decay_down", x_w))
    icl = ops.learning_rate(layer, ops.product(layer, "icl_down", x_a))
    gate = ops.output_gate(layer, ops.product(layer, "gate_down", x_g))
    if hasattr(layer, "value"):
        v = ops.residual_value(layer, v, ops.product(layer, "value_down", x_v))
    else:
        v = ops.first_value(v)
    kappa, k = ops.keys(layer, k, icl)
    o = ops.recurrence(layer, r, w, k, v, kappa, icl, wkv)
    return ops.bonus_norm(layer, o, r, k, v, gate)


def channel_mix(ops: MixOperations, layer, x, shift=None):
    """The residual after a layer's channel mix."""
    (mixed_k,), _, _ = ops.shift_mix(layer, "ln2", "ffn_mix", x, shift)
    return ops.add_product(layer, "ffn_value", x, ops.squared_product(layer, "ffn_key", mixed_k))
