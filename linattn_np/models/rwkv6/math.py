"""RWKV-6's two mixes, written once.

`time_mix` and `channel_mix` say which pieces follow each other; what computes the pieces is given to them: NumPy for
the CPU, steps of a plan for prompts on the GPU, and a pullback with each for gradients. A single token on the GPU has
fewer and larger kernels than there are pieces, and a plan of its own (`cuda_decode`); on the CPU it is one loop of
Numba's (`numba_loops.step`).
"""

from __future__ import annotations

from typing import Protocol


class Pieces(Protocol):
    """What the mixes are made of. `layer` has the arrays of `weights.LAYER`; a piece is told the names of its own.

    x and what becomes of it are rows of tokens [..., D]; a leading axis counts what lies side by side. `shift` and
    `wkv` are a layer's part of the state, which only the pieces that update it look at.
    """

    def shift_mix(self, layer, norm: str, maa: str, x, shift):
        """``(xx + d maa [n, ..., D], xx, d)`` with xx = LN(x) and d = xx_{t-1} - xx_t."""

    def product(self, layer, name: str, x):
        """x W^T."""

    def data_mix(self, layer, low, xx, d):
        """xx + d (maa + tanh(low) maa_up), [5, ..., D] for w k v r g."""

    def log_decay(self, layer, low):
        """-exp(decay + tanh(low) decay_up)."""

    def recurrence(self, layer, kvr, w, wkv):
        """`linattn_np.rwkv6` with scale 1 on heads."""

    def gated_norm(self, layer, o, gate):
        """GroupNorm_H(o; ln_x) silu(gate)."""

    def relu_squared(self, x):
        """relu(x)^2."""

    def add_product(self, layer, name: str, x, y):
        """x + y W^T; x may be written to."""

    def add_gated(self, x, gate, value):
        """x + sigmoid(gate) value; x may be written to."""


def time_mix(do: Pieces, layer, x, shift, wkv):
    (mixed_x,), xx, d = do.shift_mix(layer, "ln1", "maa_x", x, shift)
    mixed = do.data_mix(layer, do.product(layer, "maa_down", mixed_x), xx, d)
    kvrg = do.product(layer, "kvrg", mixed[1:])
    w = do.log_decay(layer, do.product(layer, "decay_down", mixed[0]))
    o = do.recurrence(layer, kvrg[:3], w, wkv)
    return do.add_product(layer, "output", x, do.gated_norm(layer, o, kvrg[3]))


def channel_mix(do: Pieces, layer, x, shift):
    (mixed_k, mixed_r), _, _ = do.shift_mix(layer, "ln2", "ffn_maa", x, shift)
    k = do.relu_squared(do.product(layer, "ffn_key", mixed_k))
    gate = do.product(layer, "ffn_receptance", mixed_r)
    return do.add_gated(x, gate, do.product(layer, "ffn_value", k))
