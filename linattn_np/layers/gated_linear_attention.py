"""The GLA layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..argument_checks import is_real
from ..autodiff import vjp
from ..errors import ContractTypeError
from ..ops.functions import gla
from ..ops.steps import gla_step
from ..typing import Integers
from .layer import Layer, Relu, Sigmoid, Swish, join_heads, sigmoid, split_heads, uniform

NORMS = ("g_norm_swish_gate.weight", "g_norm.weight")  # two names of one weight
SIZED = ("q_proj.weight", "o_proj.weight", "gk_proj.0.weight")
GATE = ("gk_proj.0.weight", "gk_proj.1.weight", "gk_proj.1.bias")
FUNCTIONS = {"relu": Relu, "sigmoid": Sigmoid, "swish": Swish, "silu": Swish}


class GatedLinearAttention(Layer):
    """The GLA layer: projections, a low-rank gate, `linattn_np.gla`, a norm of every head, a swish output gate.

        q_t = W_q x_t,   k_t = W_k x_t,   v_t = W_v x_t                              cut into heads of K and V
        alpha_t = sigmoid(W_2 W_1 x_t + b)^(1 / tau),       g_t = log alpha_t
        S_t = diag(alpha_t) S_{t-1} + k_t v_t^T,            o_t = K^(-1/2) S_t^T q_t            every head
        y_t = W_o (concat_h(RMSNorm(o_t; w)) * r_t),        r_t = swish(W_r x_t)

    (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2024, section 4.4, with the
    norm, the scale and the gate without a bias that flash-linear-attention's layer has.)

    Parameters
    ----------
    weights : mapping from flash-linear-attention's names to arrays of one library and device
        ``q_proj.weight`` [H K, D], ``k_proj.weight`` [G K, D], ``v_proj.weight`` [G V, D], W_1 ``gk_proj.0.weight``
        [R, D], W_2 ``gk_proj.1.weight`` [G K, R], b ``gk_proj.1.bias`` [G K], ``o_proj.weight`` [D, H V]; optional
        are W_r ``g_proj.weight`` [H V, D], without which there is no output gate, and w, [V] under the name
        ``g_norm_swish_gate.weight`` or ``g_norm.weight``. NumPy, CuPy or ``__dlpack__``, any float dtype; they are
        copied, as float64 if all are, else as float32, to be the layer's own `weights`, which may be written to.
    num_heads, num_kv_heads : H, and G where fewer keys, values and gates are shared, each by H / G heads
    feature_map : None, "relu", "sigmoid" or "swish" ("silu"), applied to q and k
    gate_fn : "swish" ("silu"), "sigmoid" or "relu", of the output gate
    gate_logit_normalizer : tau
    clamp_min : float, optional
        The least that g_t may be, in nats.
    norm_eps : of the norm, o / sqrt(mean(o^2) + eps)

    Raises
    ------
    ContractError
        Weights that are missing, unknown (the short convolutions are not supported) or of the wrong shape; arrays
        that do not fit. ContractTypeError for dtypes, and for arrays that are not where the weights are.

    Example
    -------
    >>> import numpy as np
    >>> from linattn_np.layers import GatedLinearAttention, random_weights
    >>> rng = np.random.default_rng(0)
    >>> layer = GatedLinearAttention(random_weights(rng, hidden_size=32, num_heads=2), num_heads=2)
    >>> x = rng.standard_normal((1, 50, 32), dtype=np.float32)
    >>> y, state = layer(x)
    >>> y.shape, state.shape
    ((1, 50, 32), (1, 2, 8, 16))
    >>> _, state = layer(x[:, :49])                     # a prompt, then a token
    >>> bool(np.allclose(layer.step(x[:, 49], state), y[:, 49], atol=1e-6))
    True
    >>> (y, state), pullback = layer.vjp(x)
    >>> dx, gradients = pullback(np.ones_like(y))
    >>> for name, gradient in gradients.items():
    ...     layer.weights[name] -= 0.01 * gradient
    """

    sized, required = SIZED, (*SIZED, "k_proj.weight", "v_proj.weight", *GATE[1:])
    norm_names = NORMS

    def __init__(
        self,
        weights: Mapping,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        gate_fn: str = "swish",
        gate_logit_normalizer: float = 16,
        clamp_min: float | None = None,
        norm_eps: float = 1e-5,
    ):
        self.heads = self.positive_int("num_heads", num_heads)
        self.kv_heads = self.heads if num_kv_heads is None else self.positive_int("num_kv_heads", num_kv_heads)
        if self.heads % self.kv_heads:
            self.refuse(f"num_kv_heads is {self.kv_heads}, expected a divisor of num_heads, {self.heads}")
        self.feature_map = None if feature_map is None else self.activation("feature_map", feature_map)
        self.gate_fn = self.activation("gate_fn", gate_fn)
        self.normalizer = self.positive_number("gate_logit_normalizer", gate_logit_normalizer)
        self.norm_eps = self.positive_number("norm_eps", norm_eps)
        if clamp_min is not None and not is_real(clamp_min):
            self.refuse(f"clamp_min is {clamp_min!r}, expected a number or None", ContractTypeError)
        self.clamp_min = clamp_min
        self.weights = self.checked_copies(weights)

    @property
    def value_heads(self):
        return self.kv_heads, "keys and values"

    def __call__(
        self, x: np.ndarray, state: np.ndarray | None = None, *, cu_seqlens: Integers | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """``(y, final state)`` of x [B, T, D], in its dtype; the state is [N, H, K, V], float32 (or float64).

        `state` is where the sequences start, zeros by default; it is not changed. `cu_seqlens` packs N sequences into
        one row, as in `gla`.
        """
        inputs = self.checked_input("x", x, 3)
        o, state = gla(
            *self.project(inputs)[0], layout="bthd", initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens
        )
        return self.output(inputs, o)[0].astype(x.dtype, copy=False), state

    def step(self, x: np.ndarray, state: np.ndarray) -> np.ndarray:
        """y [B, D] of one token x [B, D] of each sequence; `state` [B, H, K, V] is updated in place."""
        inputs = self.checked_input("x", x, 2)
        q, k, v, g = self.project(inputs)[0]
        o = gla_step(q, k, v, g, state)
        return self.output(inputs, o)[0].astype(x.dtype, copy=False)

    def vjp(
        self, x: np.ndarray, state: np.ndarray | None = None, *, cu_seqlens: Integers | None = None
    ) -> tuple[tuple[np.ndarray, np.ndarray], Callable[..., tuple]]:
        """``((y, final state), pullback)``, as `linattn_np.vjp` returns them.

        ``pullback(dy)``, or ``pullback(dy, dstate)`` with the gradient of the final state, returns the gradient of x,
        {name: gradient} of the weights, and, if a `state` was given, its gradient.
        """
        inputs = self.checked_input("x", x, 3)
        qkvg, pull_project = self.project(inputs)
        (o, final), pull_gla = vjp(
            gla, *qkvg, layout="bthd", initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens
        )
        y, pull_output = self.output(inputs, o)

        def pull_heads(do, dstate):
            dq, dk, dv, dg, *dstates = pull_gla(do, dstate)  # dstates: one gradient if a state was given, else none
            return *pull_project(dq, dk, dv, dg), *dstates

        return (y.astype(x.dtype, copy=False), final), self.pullback(x, y, pull_output, pull_heads)

    # -- before the operator ---------------------------------------------------------------------------------------
    def project(self, x):
        """((q, k, v, g), pullback) for x [..., D]; arrays are [..., H, K] or [..., H, V]."""
        H, G = self.heads, self.kv_heads
        (raw_q, pull_q), (raw_k, pull_k), (v, pull_v) = (self.linear(x, f"{name}_proj.weight") for name in "qkv")
        logits, pull_logits = self.linear(x, *GATE)
        raw_q = split_heads(raw_q, H)
        raw_k, v, logits = (split_heads(array, G) for array in (raw_k, v, logits))
        unclamped = -np.logaddexp(0, -logits) / self.normalizer
        g = unclamped if self.clamp_min is None else np.maximum(unclamped, self.clamp_min)
        q, k = (raw_q, raw_k) if self.feature_map is None else (self.feature_map.value(x) for x in (raw_q, raw_k))

        def pullback(dq, dk, dv, dg):
            dk, dv, dg = (self.sum_over_sharing_heads(d) for d in (dk, dv, dg))
            if self.feature_map is not None:
                dq, dk = dq * self.feature_map.slope(raw_q), dk * self.feature_map.slope(raw_k)
            if self.clamp_min is not None:
                dg = np.where(unclamped >= self.clamp_min, dg, 0)
            dlogits = dg * sigmoid(-logits) / self.normalizer
            pulls = ((pull_q, dq), (pull_k, dk), (pull_v, dv), (pull_logits, dlogits))
            pulled = [pull(join_heads(d)) for pull, d in pulls]
            weight_gradients = {name: dw for _, gradients in pulled for name, dw in gradients.items()}
            return sum(dx for dx, _ in pulled), weight_gradients

        return (q, *map(self.repeat_for_heads, (k, v, g))), pullback

    def repeat_for_heads(self, x):
        """x [..., G, K] as [..., H, K]: each head of x is repeated for the H / G heads that share it."""
        return x if self.heads == self.kv_heads else np.repeat(x, self.heads // self.kv_heads, axis=-2)

    def sum_over_sharing_heads(self, gradient):
        """The adjoint of `repeat_for_heads`: [..., H, K] summed to [..., G, K] over the heads that share one."""
        if self.heads == self.kv_heads:
            return gradient
        groups = self.kv_heads, self.heads // self.kv_heads
        return gradient.reshape(*gradient.shape[:-2], *groups, gradient.shape[-1]).sum(axis=-2)

    # -- checks ------------------------------------------------------------------------------------------------------
    def weight_shapes(self, given) -> dict:
        """As in `Layer`."""
        if convolutions := sorted(name for name in given if "conv1d" in name):
            self.refuse(
                f"{', '.join(convolutions)} is none of this layer's weights: short convolutions are not supported"
            )
        if set(NORMS) <= given.keys():
            self.refuse(f"{' and '.join(NORMS)} are two names of one weight, and both were given")
        (HK, D), (_, HV), (R, _) = (given[name].shape for name in SIZED)
        for name, size in (("q_proj.weight", HK), ("o_proj.weight", HV)):
            if not size or size % self.heads:
                self.refuse(f"{name} is {given[name].shape}, with {size} channels for num_heads={self.heads} to share")
        return weight_shapes(D, HK, HV, R, self.heads, self.kv_heads)

    @classmethod
    def activation(cls, argument, name):
        """The function of FUNCTIONS with this name; `argument`: the caller's name of it, for the error."""
        if name not in FUNCTIONS:
            cls.refuse(f"{argument} is {name!r}, expected one of {', '.join(map(repr, FUNCTIONS))}")
        return FUNCTIONS[name]


def weight_shapes(D, HK, HV, R, heads, kv_heads) -> dict:
    """The shapes of all possible weights by name; HK and HV are the channels of all heads together."""
    GK, GV = HK // heads * kv_heads, HV // heads * kv_heads
    return {
        "q_proj.weight": (HK, D),
        "k_proj.weight": (GK, D),
        "v_proj.weight": (GV, D),
        "g_proj.weight": (HV, D),
        "gk_proj.0.weight": (R, D),
        "gk_proj.1.weight": (GK, R),
        "gk_proj.1.bias": (GK,),
        **{name: (HV // heads,) for name in NORMS},
        "o_proj.weight": (D, HV),
    }


def random_weights(
    rng: np.random.Generator,
    hidden_size: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    expand_k: float = 0.5,
    expand_v: float = 1.0,
    gate_low_rank_dim: int = 16,
) -> dict[str, np.ndarray]:
    """Weights of a new layer, float32 on the host: uniform within 1 / sqrt(inputs), 1 for the norm.

    Example
    -------
    >>> import numpy as np
    >>> random_weights(np.random.default_rng(0), hidden_size=64, num_heads=4)["q_proj.weight"].shape
    (32, 64)
    """
    wanted = weight_shapes(
        hidden_size,
        int(hidden_size * expand_k),
        int(hidden_size * expand_v),
        gate_low_rank_dim,
        num_heads,
        num_kv_heads or num_heads,
    )
    weights = {}
    for name, shape in wanted.items():
        inputs = gate_low_rank_dim if name == "gk_proj.1.bias" else shape[-1]
        weights[name] = uniform(rng, shape, inputs)
    weights[NORMS[0]] = np.ones(wanted[NORMS[0]], np.float32)
    del weights[NORMS[1]]
    return weights
