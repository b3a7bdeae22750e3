"""Layers around the operators, forwards and backwards, on NumPy or CuPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

import numpy as np

from . import accepted_arrays, array_kinds
from .argument_checks import is_int, is_real
from .autodiff import vjp
from .errors import ContractError, ContractTypeError
from .ops.functions import gla
from .ops.steps import gla_step
from .typing import Integers

NORMS = ("g_norm_swish_gate.weight", "g_norm.weight")  # two names of one weight
SIZED = ("q_proj.weight", "o_proj.weight", "gk_proj.0.weight")  # what the sizes are read from
REQUIRED = (*SIZED, "k_proj.weight", "v_proj.weight", "gk_proj.1.weight", "gk_proj.1.bias")


class GatedLinearAttention:
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
        self.heads = positive_int("num_heads", num_heads)
        self.kv_heads = self.heads if num_kv_heads is None else positive_int("num_kv_heads", num_kv_heads)
        if self.heads % self.kv_heads:
            refuse(f"num_kv_heads is {self.kv_heads}, expected a divisor of num_heads, {self.heads}")
        self.feature_map = None if feature_map is None else activation("feature_map", feature_map)
        self.gate_fn = activation("gate_fn", gate_fn)
        self.normalizer = positive_number("gate_logit_normalizer", gate_logit_normalizer)
        self.norm_eps = positive_number("norm_eps", norm_eps)
        if clamp_min is not None and not is_real(clamp_min):
            refuse(f"clamp_min is {clamp_min!r}, expected a number or None", ContractTypeError)
        self.clamp_min = clamp_min
        self.weights = self.loaded(weights)

    def __repr__(self):
        q, v = self.weights["q_proj.weight"], self.weights["v_proj.weight"]
        shared = f", {self.kv_heads} of keys and values" if self.kv_heads != self.heads else ""
        return (
            f"GatedLinearAttention({q.shape[1]} channels, {self.heads} heads of {q.shape[0] // self.heads} by "
            f"{v.shape[0] // self.kv_heads}{shared}, {q.dtype} on {'cpu' if isinstance(q, np.ndarray) else 'cuda'})"
        )

    def __call__(
        self, x: np.ndarray, state: np.ndarray | None = None, *, cu_seqlens: Integers | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """``(y, final state)`` of x [B, T, D], in its dtype; the state is [N, H, K, V], float32 (or float64).

        `state` is where the sequences start, zeros by default; it is not changed. `cu_seqlens` packs N sequences into
        one row, as in `gla`.
        """
        own = self.own("x", x, 3)
        o, state = gla(
            *self.project(own)[0], layout="bthd", initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens
        )
        return self.output(own, o)[0].astype(x.dtype, copy=False), state

    def step(self, x: np.ndarray, state: np.ndarray) -> np.ndarray:
        """y [B, D] of one token x [B, D] of each sequence; `state` [B, H, K, V] is updated in place."""
        own = self.own("x", x, 2)
        q, k, v, g = self.project(own)[0]
        o = gla_step(q, k, v, g, state)
        return self.output(own, o)[0].astype(x.dtype, copy=False)

    def vjp(
        self, x: np.ndarray, state: np.ndarray | None = None, *, cu_seqlens: Integers | None = None
    ) -> tuple[tuple[np.ndarray, np.ndarray], Callable[..., tuple]]:
        """``((y, final state), pullback)``, as `linattn_np.vjp` has it.

        ``pullback(dy)``, or ``pullback(dy, dstate)`` with the gradient of the final state, returns the gradient of x,
        a dict with those of the weights, and where a `state` was given, that of it.
        """
        own = self.own("x", x, 3)
        qkvg, pull_project = self.project(own)
        (o, final), pull_gla = vjp(
            gla, *qkvg, layout="bthd", initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens
        )
        y, pull_output = self.output(own, o)

        def pullback(dy, dstate=None):
            if dy.shape != y.shape:
                refuse(f"dy is {dy.shape}, expected {y.shape} like y")
            through_gate, do, gradients = pull_output(self.own("dy", dy, 3))
            (*dqkvg,) = pull_gla(do, dstate)
            through_heads, more = pull_project(*dqkvg[:4])
            dx = (through_gate + through_heads).astype(x.dtype, copy=False)
            return dx, {name: (gradients | more)[name] for name in self.weights}, *dqkvg[4:]

        return (y.astype(x.dtype, copy=False), final), pullback

    # -- the two sides of the operator: (results, pullback) ----------------------------------------------------------
    def project(self, x):
        """((q, k, v, g), pullback), [..., H, K] or [..., H, V] of x [..., D]."""
        w_q, w_k, w_v = (self.weights[f"{name}_proj.weight"] for name in "qkv")
        w_1, w_2, b = (self.weights[f"gk_proj.{name}"] for name in ("0.weight", "1.weight", "1.bias"))
        H, G = self.heads, self.kv_heads
        raw_q, raw_k, v = split(x @ w_q.T, H), split(x @ w_k.T, G), split(x @ w_v.T, G)
        low = x @ w_1.T
        logits = split(low @ w_2.T + b, G)
        free = -np.logaddexp(0, -logits) / self.normalizer
        g = free if self.clamp_min is None else np.maximum(free, self.clamp_min)
        q, k = (raw_q, raw_k) if self.feature_map is None else (self.feature_map.value(x) for x in (raw_q, raw_k))

        def pullback(dq, dk, dv, dg):
            dk, dv, dg = (self.summed(d) for d in (dk, dv, dg))
            if self.feature_map is not None:
                dq, dk = dq * self.feature_map.slope(raw_q), dk * self.feature_map.slope(raw_k)
            if self.clamp_min is not None:
                dg = np.where(free >= self.clamp_min, dg, 0)
            dq, dk, dv = map(join, (dq, dk, dv))
            dlogits = join(dg * sigmoid(-logits) / self.normalizer)
            dlow = dlogits @ w_2
            return dq @ w_q + dk @ w_k + dv @ w_v + dlow @ w_1, {
                "q_proj.weight": product(dq, x),
                "k_proj.weight": product(dk, x),
                "v_proj.weight": product(dv, x),
                "gk_proj.0.weight": product(dlow, x),
                "gk_proj.1.weight": product(dlogits, low),
                "gk_proj.1.bias": rows(dlogits).sum(axis=0),
            }

        return (q, *map(self.shared, (k, v, g))), pullback

    def output(self, x, o):
        """(y, pullback), y [..., D] of x [..., D] and o [..., H, V]."""
        w_o, w_r = self.weights["o_proj.weight"], self.weights.get("g_proj.weight")
        norm = next((name for name in NORMS if name in self.weights), None)
        scale = 1 / np.sqrt((o * o).mean(axis=-1, keepdims=True) + self.norm_eps)
        unit = o * scale
        normed = unit if norm is None else unit * self.weights[norm]
        gate = None if w_r is None else split(x @ w_r.T, self.heads)
        mixed = join(normed if gate is None else normed * self.gate_fn.value(gate))

        def pullback(dy):
            gradients, dnormed, dx = {"o_proj.weight": product(dy, mixed)}, split(dy @ w_o, self.heads), 0
            if gate is not None:
                dgate = join(dnormed * normed * self.gate_fn.slope(gate))
                gradients["g_proj.weight"], dx = product(dgate, x), dgate @ w_r
                dnormed = dnormed * self.gate_fn.value(gate)
            dunit = dnormed
            if norm is not None:
                gradients[norm], dunit = rows(dnormed * unit).sum(axis=0), dnormed * self.weights[norm]
            do = scale * (dunit - unit * (unit * dunit).mean(axis=-1, keepdims=True))
            return dx, do, gradients

        return mixed @ w_o.T, pullback

    def shared(self, x):
        """[..., G, K] -> [..., H, K], every head's copy of what its group shares."""
        return x if self.heads == self.kv_heads else np.repeat(x, self.heads // self.kv_heads, axis=-2)

    def summed(self, gradient):
        """The transpose of `shared`."""
        if self.heads == self.kv_heads:
            return gradient
        return gradient.reshape(*gradient.shape[:-2], self.kv_heads, -1, gradient.shape[-1]).sum(axis=-2)

    # -- checks ------------------------------------------------------------------------------------------------------
    def loaded(self, weights) -> dict:
        """The layer's own copies of `weights`, once every shape fits the others."""
        found = {}
        for name, x in weights.items():
            try:
                found[name], _ = accepted_arrays.accepted(name, x, "copied")
            except accepted_arrays.Refusal as refusal:
                refuse(f"{name} {refusal}", ContractTypeError)
        for name in SIZED:
            if name in found and found[name].ndim != 2:
                refuse(f"{name} is {found[name].shape}, expected two axes")
        wanted = self.weight_shapes(found)
        if unknown := sorted(found.keys() - wanted):
            refuse(
                f"{', '.join(unknown)} is none of this layer's weights: {', '.join(wanted)}"
                + ("; short convolutions are not supported" if "conv1d" in unknown[0] else "")
            )
        if set(NORMS) <= found.keys():
            refuse(f"{' and '.join(NORMS)} are two names of one weight, and both were given")
        for name, x in found.items():
            if x.shape != wanted[name]:
                refuse(f"{name} is {x.shape}, expected {wanted[name]}")
            if x.dtype not in array_kinds.FLOATS:
                refuse(f"{name} has dtype {x.dtype}, expected floats", ContractTypeError)
        homes = {array_kinds.home(x) for x in found.values()}
        if len(homes) > 1:
            refuse(f"the weights live on {' and '.join(sorted(homes))}, expected one place", ContractTypeError)
        (self.home,) = homes
        self.dtype = np.dtype(np.float64 if all(x.dtype == np.float64 for x in found.values()) else np.float32)
        return {name: found[name].astype(self.dtype, order="C") for name in wanted if name in found}

    def weight_shapes(self, found) -> dict:
        """What every weight's shape must be, by name."""
        if missing := [name for name in REQUIRED if name not in found]:
            refuse(f"{', '.join(missing)} missing from the weights")
        (HK, D), (_, HV), (R, _) = (found[name].shape for name in SIZED)
        for name, size in (("q_proj.weight", HK), ("o_proj.weight", HV)):
            if not size or size % self.heads:
                refuse(f"{name} is {found[name].shape}, with {size} channels for num_heads={self.heads} to share")
        return weight_shapes(D, HK, HV, R, self.heads, self.kv_heads)

    def own(self, name, x, ndim):
        """`x` in the layer's dtype, once it is an array [..., D] where the weights are."""
        if array_kinds.kind(x) not in ("numpy", "cupy"):
            refuse(
                f"{name} is a {type(x).__module__}.{type(x).__qualname__}, expected a NumPy or CuPy array",
                ContractTypeError,
            )
        if array_kinds.home(x) != self.home:
            refuse(f"{name} lives on {array_kinds.home(x)}, but the weights on {self.home}", ContractTypeError)
        if x.dtype not in array_kinds.FLOATS:
            refuse(f"{name} has dtype {x.dtype}, expected floats", ContractTypeError)
        D = self.weights["q_proj.weight"].shape[1]
        if x.ndim != ndim or x.shape[-1] != D:
            refuse(f"{name} is {x.shape}, expected [{'B, T, ' if ndim == 3 else 'B, '}D] with D={D}")
        return x.astype(self.dtype, copy=False)


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
        weights[name] = (rng.uniform(-1, 1, shape) * inputs**-0.5).astype(np.float32)
    weights[NORMS[0]] = np.ones(wanted[NORMS[0]], np.float32)
    del weights[NORMS[1]]
    return weights


# -- pieces ------------------------------------------------------------------------------------------------------------
def split(x, heads):
    """[..., H K] -> [..., H, K]"""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def join(x):
    """[..., H, K] -> [..., H K]"""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def rows(x):
    """[..., D] -> [tokens, D]"""
    return x.reshape(-1, x.shape[-1])


def product(dy, x):
    """The gradient of W where y = W x, [M, D] of dy [..., M] and x [..., D]."""
    return rows(dy).T @ rows(x)


def sigmoid(x):
    """1 / (1 + exp(-x)) without its overflow."""
    return 0.5 * np.tanh(0.5 * x) + 0.5


class Relu:
    value = staticmethod(lambda x: np.maximum(x, 0))
    slope = staticmethod(lambda x: (x > 0).astype(x.dtype))


class Sigmoid:
    value = staticmethod(sigmoid)
    slope = staticmethod(lambda x: sigmoid(x) * sigmoid(-x))


class Swish:
    value = staticmethod(lambda x: x * sigmoid(x))
    slope = staticmethod(lambda x: sigmoid(x) * (1 + x * sigmoid(-x)))


FUNCTIONS = {"relu": Relu, "sigmoid": Sigmoid, "swish": Swish, "silu": Swish}


def activation(argument, name):
    if name not in FUNCTIONS:
        refuse(f"{argument} is {name!r}, expected one of {', '.join(map(repr, FUNCTIONS))}")
    return FUNCTIONS[name]


def positive_int(argument, number) -> int:
    if not is_int(number) or number < 1:
        refuse(f"{argument} is {number!r}, expected a positive integer")
    return int(number)


def positive_number(argument, number) -> float:
    if not is_real(number) or not 0 < number < np.inf:
        refuse(f"{argument} is {number!r}, expected a positive number")
    return float(number)


def refuse(complaint, error=ContractError) -> NoReturn:
    raise error(f"GatedLinearAttention: {complaint}")
