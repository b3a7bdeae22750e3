"""RWKV-7's two mixes, written once.

`time_mix` and `channel_mix` say which pieces follow each other; what computes the pieces is given to them: NumPy, or
Numba's loops, or a pullback with each for gradients. A single token on the CPU is one loop of Numba's
(`numba_loops.step`). On the GPU prompts and steps have fewer and larger kernels than there are pieces, and plans of
their own (`cuda_prefill`, `cuda_decode`).
"""

from __future__ import annotations

from typing import Protocol

DECAY = 0.6065306597126334  # exp(-1/2): the decay of a token is exp(-DECAY sigmoid(...)), from 0.545 to 1
LEAST_NORM = 1e-12  # of a removal key, by which it is divided


class Pieces(Protocol):
    """What the mixes are made of. `layer` has the arrays of `weights.LAYER`; a piece is told the names of its own.

    x and what becomes of it are rows of tokens [..., D]; a leading axis counts what lies side by side. `shift` and
    `wkv` are a layer's part of the state, which only the pieces that update it look at.
    """

    def shift_mix(self, layer, norm: str, maa: str, x, shift):
        """``(xx + d maa [n, ..., D], xx, d)`` with xx = LN(x) and d = xx_{t-1} - xx_t."""

    def product(self, layer, name: str, x):
        """x W^T."""

    def log_decay(self, layer, low):
        """-exp(-1/2) sigmoid(decay + tanh(low) decay_up)."""

    def learning_rate(self, layer, low):
        """sigmoid(icl + low icl_up)."""

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

    def relu_squared(self, x):
        """relu(x)^2."""

    def add_product(self, layer, name: str, x, y):
        """x + y W^T; x may be written to."""


def time_mix(do: Pieces, layer, x, shift, wkv):
    mixed, _, _ = do.shift_mix(layer, "ln1", "mix", x, shift)
    return do.add_product(layer, "output", x, gated(do, layer, mixed, wkv))


def gated(do: Pieces, layer, mixed, wkv):
    """What the output's matrix takes, of the six mixed inputs."""
    x_w, x_a, x_g, _, x_v, _ = mixed
    k, v, r = do.product(layer, "kvr", mixed[3:])
    w = do.log_decay(layer, do.product(layer, "decay_down", x_w))
    icl = do.learning_rate(layer, do.product(layer, "icl_down", x_a))
    gate = do.output_gate(layer, do.product(layer, "gate_down", x_g))
    if hasattr(layer, "value"):
        v = do.residual_value(layer, v, do.product(layer, "value_down", x_v))
    else:
        v = do.first_value(v)
    kappa, k = do.keys(layer, k, icl)
    o = do.recurrence(layer, r, w, k, v, kappa, icl, wkv)
    return do.bonus_norm(layer, o, r, k, v, gate)


def channel_mix(do: Pieces, layer, x, shift):
    (mixed_k,), _, _ = do.shift_mix(layer, "ln2", "ffn_mix", x, shift)
    return do.add_product(layer, "ffn_value", x, do.relu_squared(do.product(layer, "ffn_key", mixed_k)))
