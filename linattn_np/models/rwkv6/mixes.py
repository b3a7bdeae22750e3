"""RWKV-6's two mixes, written once.

`time_mix` and `channel_mix` call operations of an object `ops`, which computes them: with NumPy on the CPU, by steps of
a plan for prompts on the GPU, or with a pullback of each for gradients. Decoding does not use these functions. On the
GPU it takes fewer and larger kernels than there are operations (`cuda_decode`); on the CPU it is one loop of Numba's
(`numba_loops.step`).
"""

from typing import Protocol

from ..rwkv.mix_operations import CommonOperations


class MixOperations(CommonOperations, Protocol):
    """The operations of the mixes. `low` is the product of a mix and the first matrix, `_down`, of a low-rank pair."""

    def data_mix(self, layer, low, xx, d):
        """xx + d (maa + tanh(low) maa_up), [5, ..., D] for w k v r g."""

    def log_decay(self, layer, low):
        """-exp(decay + tanh(low) decay_up)."""

    def recurrence(self, layer, kvr, w, wkv):
        """`linattn_np.rwkv6` with scale 1 on heads."""

    def gated_norm(self, layer, o, gate):
        """GroupNorm_H(o; ln_x) silu(gate)."""

    def add_gated(self, x, gate, value):
        """x + sigmoid(gate) value; x may be written to."""


def time_mix(ops: MixOperations, layer, x, shift=None, wkv=None):
    """The residual after a layer's time mix. Operations for gradients need neither `shift` nor `wkv`."""
    (mixed_x,), xx, d = ops.shift_mix(layer, "ln1", "maa_x", x, shift)
    mixed = ops.data_mix(layer, ops.product(layer, "maa_down", mixed_x), xx, d)
    kvrg = ops.product(layer, "kvrg", mixed[1:])
    w = ops.log_decay(layer, ops.product(layer, "decay_down", mixed[0]))
    o = ops.recurrence(layer, kvrg[:3], w, wkv)
    return ops.add_product(layer, "output", x, ops.gated_norm(layer, o, kvrg[3]))


def channel_mix(ops: MixOperations, layer, x, shift=None):
    """The residual after a layer's channel mix."""
    (mixed_k, mixed_r), _, _ = ops.shift_mix(layer, "ln2", "ffn_maa", x, shift)
    k = ops.squared_product(layer, "ffn_key", mixed_k)
    gate = ops.product(layer, "ffn_receptance", mixed_r)
    return ops.add_gated(x, gate, ops.product(layer, "ffn_value", k))
