"""The layers of Gated DeltaNet and Kimi Delta Attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from .. import varlen
from ..argument_checks import is_real
from ..autodiff import vjp
from ..gates import gdn_gate, kda_gate
from ..ops.functions import gated_delta_rule, kda
from ..ops.steps import gated_delta_rule_step, kda_step
from ..typing import Integers
from .layer import Layer, Sigmoid, Swish, join_heads, sigmoid, split_heads, uniform

SIZED = ("q_proj.weight", "v_proj.weight")
CONVOLVED = ("q_conv1d", "k_conv1d", "v_conv1d")
REQUIRED = (*SIZED, "k_proj.weight", "b_proj.weight", "A_log", "dt_bias", "o_norm.weight", "o_proj.weight")


class DeltaLayer(Layer):
    """The base of the layers of delta rules. A subclass defines the operator, its gate, and the gate of its output.

    Sizes: B rows, T tokens, D channels of the layer, H heads of q and k with K channels, HV heads of v with V, W tokens
    of a convolution, N sequences; C = 2 H K + HV V channels of the projections q, k and v, side by side. `conv_start`
    and `conv_end` [N, W - 1, C] are these projections of the last W - 1 tokens before a call and at its end.
    """

    required: ClassVar[tuple[str, ...]] = REQUIRED
    sized, norm_names = SIZED, ("o_norm.weight",)
    operator: ClassVar[Callable[..., Any]]
    operator_step: ClassVar[Callable[..., Any]]
    decay_names: ClassVar[tuple[str, ...]]  # the weights of the linear maps from whose result `gate` computes g
    low_rank: ClassVar[tuple[str, ...]]  # the weights whose number of rows is a rank

    def __init__(
        self,
        weights: Mapping,
        num_heads: int,
        *,
        num_v_heads: int | None = None,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
    ):
        self.heads = self.positive_int("num_heads", num_heads)
        self.v_heads = self.heads if num_v_heads is None else self.positive_int("num_v_heads", num_v_heads)
        if self.v_heads % self.heads:
            self.refuse(f"num_v_heads is {self.v_heads}, expected num_heads, {self.heads}, or a multiple of it")
        if not isinstance(allow_neg_eigval, (bool, np.bool_)):
            self.refuse(f"allow_neg_eigval is {allow_neg_eigval!r}, expected True or False")
        self.largest_beta = 2 if allow_neg_eigval else 1
        self.norm_eps = self.positive_number("norm_eps", norm_eps)
        self.weights = self.checked_copies(weights)
        self.window = self.weights["q_conv1d.weight"].shape[-1] if "q_conv1d.weight" in self.weights else 1

    @property
    def value_heads(self):
        return self.v_heads, "values"

    def __call__(
        self, x: np.ndarray, state: tuple | None = None, *, cu_seqlens: Integers | None = None
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """``(y, final state)`` for x [B, T, D]; y has the dtype of x.

        A state is a pair: the state of the recurrence [N, HV, K, V], float32 (or float64), and that of the
        convolutions [N, W - 1, C], the projections q, k and v, side by side, of the last W - 1 tokens. `state` is the
        initial state, by default zeros; it is not changed. `cu_seqlens` packs N sequences into one row, as in
        `gated_delta_rule`.
        """
        inputs = self.checked_input("x", x, 3)
        start, conv_start, sequences = self.starting_states(inputs, state, cu_seqlens)
        arrays, conv_end, _ = self.project(inputs, conv_start, sequences)
        o, final = self.operator(*arrays, **self.options(start, cu_seqlens))
        return self.output(inputs, o)[0].astype(x.dtype, copy=False), (final, conv_end)

    def step(self, x: np.ndarray, state: tuple) -> np.ndarray:
        """y [B, D] of one token x [B, D] of each sequence; both arrays of `state` are updated in place."""
        inputs = self.checked_input("x", x, 2)[:, None]
        start, conv_start, sequences = self.starting_states(inputs, state, None)
        arrays, conv_end, _ = self.project(inputs, conv_start, sequences)
        o = self.operator_step(*(x[:, 0] for x in arrays), start, qk_l2norm=True)
        state[1][...] = conv_end
        return self.output(inputs, o[:, None])[0][:, 0].astype(x.dtype, copy=False)

    def vjp(
        self, x: np.ndarray, state: tuple | None = None, *, cu_seqlens: Integers | None = None
    ) -> tuple[tuple[np.ndarray, tuple], Callable[..., tuple]]:
        """``((y, final state), pullback)``, as `linattn_np.vjp` returns them.

        ``pullback(dy)``, or ``pullback(dy, dstate)`` with a pair of gradients of the final state, returns the gradient
        of x, {name: gradient} of the weights, and, if a `state` was given, a pair of its gradients.
        """
        inputs = self.checked_input("x", x, 3)
        start, conv_start, sequences = self.starting_states(inputs, state, cu_seqlens)
        arrays, conv_end, pull_project = self.project(inputs, conv_start, sequences)
        (o, final), pull = vjp(self.operator, *arrays, **self.options(start, cu_seqlens))
        y, pull_output = self.output(inputs, o)

        def pull_heads(do, dstate):
            dfinal, dconv_end = (None, None) if dstate is None else self.pair("dstate", dstate)
            darrays = pull(do, dfinal)  # then the initial state's gradient, if a state was given
            dx, dconv_start, gradients = pull_project(darrays[: len(arrays)], dconv_end)
            return dx, gradients, *([] if state is None else [(*darrays[len(arrays) :], dconv_start)])

        return (y.astype(x.dtype, copy=False), (final, conv_end)), self.pullback(x, y, pull_output, pull_heads)

    def options(self, start, cu_seqlens) -> dict:
        """The keyword arguments of the operator."""
        options = {"layout": "bthd", "output_final_state": True, "qk_l2norm": True}
        return options | {"initial_state": start, "cu_seqlens": cu_seqlens}

    def starting_states(self, x, state, cu_seqlens):
        """(the initial state of the recurrence or None, conv_start, sequences), after checking state and cu_seqlens.

        `sequences` are [(slice of batch rows, slice of tokens, slice of rows of states)]: one for each packed sequence,
        or one for all rows of a batch.
        """
        sequences, count = [(slice(None), slice(None), slice(None))], len(x)
        if cu_seqlens is not None and len(x) == 1:  # the operator refuses others
            try:
                spans = varlen.parse(cu_seqlens, x.shape[1])
            except ValueError as error:
                self.refuse(f"cu_seqlens {error}")
            count = spans.count
            sequences = [(slice(None), slice(*span), slice(n, n + 1)) for n, span in enumerate(spans)]
        shape = (count, self.window - 1, sum(self.weights[f"{name}_proj.weight"].shape[0] for name in "qkv"))
        if state is None:
            return None, np.zeros_like(x, shape=shape), sequences
        start, conv_start = self.pair("state", state)
        self.check_floats("state[1]", conv_start)
        if conv_start.shape != shape:
            self.refuse(f"state[1] is {conv_start.shape}, expected [N, W - 1, C] = {shape}")
        return start, conv_start.astype(self.dtype, copy=False), sequences

    def pair(self, name, states):
        """The argument `states`, which must be a pair."""
        if not isinstance(states, tuple) or len(states) != 2:
            self.refuse(f"{name} is a {type(states).__name__}, expected a pair: of the recurrence, of the convolutions")
        return states

    # -- before the operator -----------------------------------------------------------------------------------------
    def project(self, x, conv_start, sequences):
        """((q, k, v, g, beta), conv_end, pullback) for x [B, T, D]; the arrays are [B, T, H, ...].

        ``pullback(gradients of the five arrays, dconv_end or None)`` returns the gradients of x and of conv_start, and
        {name: gradient} of the weights.
        """
        parts, pulls = zip(*(self.linear(x, f"{name}_proj.weight") for name in "qkv"))
        ends = np.cumsum([part.shape[-1] for part in parts])[:-1]
        raw, conv_end, pull_raw = self.convolved(np.concatenate(parts, axis=-1), conv_start, sequences)
        q, k, v = np.split(Swish.value(raw), ends, axis=-1)
        g, pull_g = self.decays(x)
        logits, pull_logits = self.linear(x, "b_proj.weight")
        beta = self.largest_beta * sigmoid(logits)

        def pullback(gradients, dconv_end):
            *dqkv, dg, dbeta = gradients
            draw = np.concatenate([*map(join_heads, dqkv)], -1) * Swish.slope(raw)
            dprojected, dconv_start, weight_gradients = pull_raw(draw, dconv_end)
            pulled = [pull(d) for pull, d in zip(pulls, np.split(dprojected, ends, axis=-1))]
            pulled += [pull_g(dg), pull_logits(dbeta * self.largest_beta * Sigmoid.slope(logits))]
            for _, gradients in pulled:
                weight_gradients |= gradients
            return sum(dx for dx, _ in pulled), dconv_start, weight_gradients

        arrays = split_heads(q, self.heads), split_heads(k, self.heads), split_heads(v, self.v_heads), g, beta
        return arrays, conv_end, pullback

    def convolved(self, x, conv_start, sequences):
        """(y [B, T, C], conv_end, pullback) for x [B, T, C]: y_t = b + sum_i w_i x_{t - W + 1 + i} in each channel."""
        names = [f"{name}.weight" for name in CONVOLVED if f"{name}.weight" in self.weights]
        biases = [f"{name}.bias" for name in CONVOLVED if f"{name}.bias" in self.weights]
        W, y, conv_end, inputs = self.window, np.empty_like(x), np.empty_like(conv_start), []
        w = np.concatenate([self.weights[name][:, 0] for name in names]) if names else np.ones_like(x[0, :1].T)
        b = np.concatenate([self.weights[name] for name in biases]) if biases else 0
        for row, tokens, n in sequences:
            extended = np.concatenate([conv_start[n], x[row, tokens]], axis=1)
            T = extended.shape[1] - (W - 1)
            y[row, tokens] = sum(w[:, i] * extended[:, i : i + T] for i in range(W)) + b
            conv_end[n] = extended[:, T:]
            inputs.append(extended)

        def pullback(dy, dconv_end):
            dx, dconv_start, dw = np.empty_like(x), np.zeros_like(conv_start), np.zeros_like(w)
            for (row, tokens, n), extended in zip(sequences, inputs):
                dextended, T, dy_part = np.zeros_like(extended), extended.shape[1] - (W - 1), dy[row, tokens]
                for i in range(W):
                    dextended[:, i : i + T] += w[:, i] * dy_part
                    dw[:, i] += (dy_part * extended[:, i : i + T]).sum(axis=(0, 1))
                if dconv_end is not None:
                    dextended[:, T:] += dconv_end[n]
                dconv_start[n], dx[row, tokens] = dextended[:, : W - 1], dextended[:, W - 1 :]
            ends = np.cumsum([self.weights[name].shape[0] for name in names])[:-1]
            gradients = {name: part[:, None] for name, part in zip(names, np.split(dw, ends))}
            return dx, dconv_start, gradients | dict(zip(biases, np.split(dy.sum(axis=(0, 1)), ends)))

        return y, conv_end, pullback

    def decays(self, x):
        """(g, pullback) for x [B, T, D]: g is [B, T, HV] or [B, T, HV, K]."""
        raw, pull_raw = self.linear(x, *self.decay_names)
        g, by_input, by_A_log = self.gate(raw)

        def pullback(dg):
            dA_log = dg * by_A_log
            draw = (dg * by_input).reshape(raw.shape)
            dx, gradients = pull_raw(draw)
            gradients["A_log"] = dA_log.sum(axis=(0, 1, *range(3, dA_log.ndim)))
            return dx, gradients | {"dt_bias": draw.sum(axis=(0, 1))}

        return g, pullback

    def gate(self, raw):
        """(g, its derivatives with respect to raw and to A_log), for raw [B, T, HV] or [B, T, HV K]."""
        raise NotImplementedError

    # -- weights -----------------------------------------------------------------------------------------------------
    def weight_shapes(self, given) -> dict:
        """As in `Layer`."""
        (HK, D), (HV, _) = (given[name].shape for name in SIZED)
        for name, size, heads in (("q_proj.weight", HK, self.heads), ("v_proj.weight", HV, self.v_heads)):
            if not size or size % heads:
                self.refuse(f"{name} is {given[name].shape}, with {size} channels for {heads} heads to share")
        convolutions, biases = ([x for x in CONVOLVED if f"{x}.{part}" in given] for part in ("weight", "bias"))
        if 0 < len(convolutions) < len(CONVOLVED):
            self.refuse(f"{', '.join(convolutions)} without the others, expected all of {', '.join(CONVOLVED)} or none")
        if biases not in ([], convolutions):
            names = ", ".join(f"{name}.bias" for name in biases)
            self.refuse(f"{names} without the others, expected a bias for each convolution or none")
        for name in (*self.low_rank, *(f"{name}.weight" for name in convolutions)):
            if name in given and not min(given[name].shape, default=0):
                self.refuse(f"{name} is {given[name].shape}, expected axes of 1 and more")
        window = given[f"{CONVOLVED[0]}.weight"].shape[-1] if convolutions else 1
        ranks = {name: given[name].shape[0] for name in self.low_rank if name in given}
        return self.shapes(D, self.heads, self.v_heads, HK // self.heads, HV // self.v_heads, window, ranks)

    @classmethod
    def shapes(cls, D, H, HV, K, V, window, ranks) -> dict:
        """The shapes of all possible weights by name."""
        channels = dict(zip(CONVOLVED, (H * K, H * K, HV * V)))
        return {
            "q_proj.weight": (H * K, D),
            "k_proj.weight": (H * K, D),
            "v_proj.weight": (HV * V, D),
            **{f"{name}.weight": (size, 1, window) for name, size in channels.items()},
            **{f"{name}.bias": (size,) for name, size in channels.items()},
            "b_proj.weight": (HV, D),
            **cls.gate_shapes(D, HV, K, V, ranks),
            "o_norm.weight": (V,),
            "o_proj.weight": (D, HV * V),
        }

    @classmethod
    def gate_shapes(cls, D, HV, K, V, ranks) -> dict:
        """The shapes of the weights of both gates, by name."""
        raise NotImplementedError

    @classmethod
    def random_weights(
        cls,
        rng: np.random.Generator,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int,
        num_v_heads: int | None = None,
        expand_v: float = 1.0,
        conv_size: int = 4,
    ) -> dict[str, np.ndarray]:
        """Weights of a new layer, float32 on the host: uniform from -1 / sqrt(inputs) to 1 / sqrt(inputs); exp(A_log)
        from 1 to 16, and softplus(dt_bias) from 0.001 to 0.1; 1 for the norm. Convolutions have no bias."""
        HV, V = num_v_heads or num_heads, int(head_dim * expand_v)
        ranks = dict.fromkeys(cls.low_rank, V)
        shapes = cls.shapes(hidden_size, num_heads, HV, head_dim, V, conv_size, ranks)
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith("conv1d.bias")}
        weights = {name: uniform(rng, shape, shape[-1]) for name, shape in shapes.items()}
        steps = np.exp(rng.uniform(np.log(0.001), np.log(0.1), shapes["dt_bias"]))
        weights["A_log"] = np.log(rng.uniform(1, 16, HV)).astype(np.float32)
        weights["dt_bias"] = np.log(np.expm1(steps)).astype(np.float32)  # the inverse of softplus
        weights["o_norm.weight"] = np.ones(V, np.float32)
        return weights


class GatedDeltaNet(DeltaLayer):
    """The layer of Gated DeltaNet: short convolutions, `linattn_np.gated_delta_rule`, a norm of every head, a swish
    output gate.

        q_t, k_t, v_t = swish(conv(W_q x)_t), swish(conv(W_k x)_t), swish(conv(W_v x)_t)
            with conv(z)_t = sum_i w_i z_{t - W + 1 + i}, each channel for itself
        g_t = -exp(A_log) softplus(W_a x_t + dt_bias),      beta_t = sigmoid(W_b x_t)       numbers of a head of values
        S_t, o_t: `gated_delta_rule` of q_t / |q_t|, k_t / |k_t|, v_t, g_t, beta_t
        y_t = W_o concat_h(RMSNorm(o_t; w) * swish(W_g x_t))

    (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, section 3.4.)

    Parameters
    ----------
    weights : mapping from flash-linear-attention's names to arrays of one library and device
        ``q_proj.weight``, ``k_proj.weight`` [H K, D], ``v_proj.weight`` [HV V, D], W_a ``a_proj.weight`` and W_b
        ``b_proj.weight`` [HV, D], ``A_log``, ``dt_bias`` [HV], w ``o_norm.weight`` [V], ``o_proj.weight`` [D, HV V];
        optional are W_g ``g_proj.weight`` [HV V, D], without which there is no output gate, and the convolutions
        ``q_conv1d.weight``, ``k_conv1d.weight``, ``v_conv1d.weight`` [channels, 1, W] with a ``.bias`` [channels] each.
        NumPy, CuPy or ``__dlpack__``, any float dtype; they are copied, as float64 if all are, else as float32, to be
        the layer's own `weights`, which may be written to.
    num_heads, num_v_heads : H, and HV where several heads of values share a head of queries and keys
    allow_neg_eigval : beta is twice as large, up to 2
    norm_eps : of the norm, o / sqrt(mean(o^2) + eps)

    Raises
    ------
    ContractError
        Weights that are missing, unknown or of the wrong shape; arrays that do not fit. ContractTypeError for dtypes,
        and for arrays that are not where the weights are.

    Example
    -------
    >>> import numpy as np
    >>> from linattn_np.layers import GatedDeltaNet
    >>> rng = np.random.default_rng(0)
    >>> layer = GatedDeltaNet(GatedDeltaNet.random_weights(rng, 32, 2, head_dim=8, expand_v=2), num_heads=2)
    >>> x = rng.standard_normal((1, 50, 32), dtype=np.float32)
    >>> y, (state, convolutions) = layer(x)
    >>> y.shape, state.shape, convolutions.shape
    ((1, 50, 32), (1, 2, 8, 16), (1, 3, 64))
    >>> _, states = layer(x[:, :49])                    # a prompt, then a token
    >>> bool(np.allclose(layer.step(x[:, 49], states), y[:, 49], atol=1e-6))
    True
    >>> (y, states), pullback = layer.vjp(x)
    >>> dx, gradients = pullback(np.ones_like(y))
    """

    required = (*REQUIRED, "a_proj.weight")
    operator, operator_step = staticmethod(gated_delta_rule), staticmethod(gated_delta_rule_step)
    decay_names, low_rank, gate_fn = ("a_proj.weight",), (), Swish

    def gate(self, raw):
        A_log, bias = self.weights["A_log"], self.weights["dt_bias"]
        g = gdn_gate(raw, A_log, bias)
        return g, -np.exp(A_log) * sigmoid(raw + bias), g

    @classmethod
    def gate_shapes(cls, D, HV, K, V, ranks):
        return {"a_proj.weight": (HV, D), "A_log": (HV,), "dt_bias": (HV,), "g_proj.weight": (HV * V, D)}


class KimiDeltaAttention(DeltaLayer):
    """The layer of Kimi Delta Attention: short convolutions, `linattn_np.kda`, a norm of every head, a sigmoid output
    gate.

        q_t, k_t, v_t = swish(conv(W_q x)_t), swish(conv(W_k x)_t), swish(conv(W_v x)_t)    as in `GatedDeltaNet`
        g_t = -exp(A_log) softplus(W_2 W_1 x_t + dt_bias)                                   a number every channel
            or lower_bound * sigmoid(exp(A_log) (W_2 W_1 x_t + dt_bias)),                   beta_t = sigmoid(W_b x_t)
        S_t, o_t: `kda` of q_t / |q_t|, k_t / |k_t|, v_t, g_t, beta_t
        y_t = W_o concat_h(RMSNorm(o_t; w) * sigmoid(W_4 W_3 x_t + b))

    (Kimi Team, "Kimi Linear", 2025, arXiv:2510.26692, section 4.)

    Parameters
    ----------
    weights : mapping from flash-linear-attention's names to arrays of one library and device
        As of `GatedDeltaNet` without ``a_proj``; W_1 ``f_proj.0.weight`` [R, D], W_2 ``f_proj.1.weight`` [HV K, R],
        ``A_log`` [HV], ``dt_bias`` [HV K], W_3 ``g_proj.0.weight`` [R', D], W_4 ``g_proj.1.weight`` [HV V, R'],
        b ``g_proj.1.bias`` [HV V].
    num_heads, num_v_heads, allow_neg_eigval, norm_eps : as of `GatedDeltaNet`
    lower_bound : float, optional
        What no gate is below, which chooses the second form of g_t: -5 in models that have it.

    Raises
    ------
    ContractError
        As `GatedDeltaNet` does.

    Example
    -------
    >>> import numpy as np
    >>> from linattn_np.layers import KimiDeltaAttention
    >>> rng = np.random.default_rng(0)
    >>> weights = KimiDeltaAttention.random_weights(rng, 32, 2, head_dim=8, num_v_heads=4)
    >>> layer = KimiDeltaAttention(weights, num_heads=2, num_v_heads=4)
    >>> y, (state, convolutions) = layer(rng.standard_normal((1, 50, 32), dtype=np.float32))
    >>> y.shape, state.shape, convolutions.shape
    ((1, 50, 32), (1, 4, 8, 8), (1, 3, 64))
    """

    gate_names = ("g_proj.0.weight", "g_proj.1.weight", "g_proj.1.bias")
    required = (*REQUIRED, "f_proj.0.weight", "f_proj.1.weight", *gate_names)
    operator, operator_step = staticmethod(kda), staticmethod(kda_step)
    decay_names, low_rank = ("f_proj.0.weight", "f_proj.1.weight"), ("f_proj.0.weight", "g_proj.0.weight")
    gate_fn = Sigmoid

    def __init__(self, weights: Mapping, num_heads: int, *, lower_bound: float | None = None, **options):
        if lower_bound is not None and (not is_real(lower_bound) or not -np.inf < lower_bound < 0):
            self.refuse(f"lower_bound is {lower_bound!r}, expected a number below 0, or None")
        self.lower_bound = lower_bound
        super().__init__(weights, num_heads, **options)

    def gate(self, raw):
        A_log, bias = self.weights["A_log"], self.weights["dt_bias"]
        z, rate = split_heads(raw + bias, self.v_heads), np.exp(A_log)[:, None]
        g = kda_gate(split_heads(raw, self.v_heads), A_log, bias, self.lower_bound)
        if self.lower_bound is None:
            return g, -rate * sigmoid(z), g
        slope = self.lower_bound * rate * Sigmoid.slope(rate * z)
        return g, slope, slope * z

    @classmethod
    def gate_shapes(cls, D, HV, K, V, ranks):
        return {
            "f_proj.0.weight": (ranks["f_proj.0.weight"], D),
            "f_proj.1.weight": (HV * K, ranks["f_proj.0.weight"]),
            "A_log": (HV,),
            "dt_bias": (HV * K,),
            "g_proj.0.weight": (ranks["g_proj.0.weight"], D),
            "g_proj.1.weight": (HV * V, ranks["g_proj.0.weight"]),
            "g_proj.1.bias": (HV * V,),
        }
