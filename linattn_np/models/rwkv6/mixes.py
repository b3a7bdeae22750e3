"""RWKV-6's two mixes, written once.

`time_mix` and `channel_mix` call operations of an object `ops`, which computes them: with NumPy on the CPU, by steps of
a plan for prompts on the GPU, or with a pullback of each for gradients (`grad`, whose pullbacks follow the order of the
calls here). Three modules have the formulas once more: `cuda_grad`; `cuda_decode`, in fewer and larger kernels than
there are operations; and `numba_loops.step`, one loop of Numba's that decodes on the CPU.
"""

from typing import Protocol

from ..rwkv.mix_operations import CommonOperations


class MixOperations(CommonOperations, Protocol):
    """The operations of the mixes. `low` is the product of a mixed input and the first matrix, `_down`, of a low-rank
    pair; the formulas multiply by the second, `_up`. xx is the normed input, d the previous token's xx less xx."""

    def data_mix(self, layer, low, xx, d):
        """xx + d (maa + tanh(low) maa_up), [5, ..., D], in the order w k v r g of `weights.LAYER`'s maa."""

    def log_decay(self, layer, low):
        """-exp(decay + tanh(low) decay_up)."""

    def recurrence(self, layer, kvr, w, wkv):
        """`linattn_np.rwkv6` with scale 1 on heads."""

    def gated_norm(self, layer, o, gate):
        """GroupNorm_H(o; ln_x) silu(gate)."""

    def add_gated(self, x, gate, value):
        """x + sigmoid(gate) value; x may be written to."""


def time_mix(ops: MixOperations, layer, x, shift=None, wkv=None):
    """The residual x plus a layer's time mix. x may be written to; `shift` and `wkv`, the layer's state, are updated.
    Operations for gradients need neither."""
    (mixed_x,), xx, d = ops.shift_mix(layer, "ln1", "maa_x", x, shift)
    mixed = ops.data_mix(layer, ops.product(layer, "maa_down", mixed_x), xx, d)  # w k v r g
    kvrg = ops.product(layer, "kvrg", mixed[1:])
    w = ops.log_decay(layer, ops.product(layer, "decay_down", mixed[0]))
    o = ops.recurrence(layer, kvrg[:3], w, wkv)
    return ops.add_product(layer, "output", x, ops.gated_norm(layer, o, kvrg[3]))


def channel_mix(ops: MixOperations, layer, x, shift=None):
    """x plus a layer's channel mix, sigmoid(mixed_r W_receptance^T) (relu(mixed_k W_key^T)^2 W_value^T). x and `shift`
    as in `time_mix`."""
    (mixed_k, mixed_r), _, _ = ops.shift_mix(layer, "ln2", "ffn_maa", x, shift)
    k = ops.squared_product(layer, "ffn_key", mixed_k)
    gate = ops.product(layer, "ffn_receptance", mixed_r)
    return ops.add_gated(x, gate, ops.product(layer, "ffn_value", k))
