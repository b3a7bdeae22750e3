"""The base of layers: weights by name, linear maps, and the norm and gate after an operator, each with its pullback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import numpy as np

from .. import accepted_arrays, array_kinds
from ..argument_checks import is_int, is_real
from ..errors import ContractError, ContractTypeError
from ..gates import ARRAYS


class Layer:
    """The base of layers. Its weights are checked, and have one dtype and device. Methods do not change a layer, so
    several threads may call them. A subclass defines:

    required : the names of the weights that must be given
    sized : the names of the weights, with two axes each, from whose shapes `weight_shapes` finds all shapes
    norm_names : the possible names of the weight of the norm, which is applied to each head of the operator's output
    gate_names, gate_fn : the weights and the function of the gate that multiplies the normed output
    """

    heads: int  # of queries
    value_heads: tuple[int, str]  # (the number of heads of v, what they are heads of, for `repr`)
    required: ClassVar[tuple[str, ...]]
    sized: ClassVar[tuple[str, ...]]
    norm_names: ClassVar[tuple[str, ...]]
    gate_names: ClassVar[tuple[str, ...]] = ("g_proj.weight",)
    gate_fn: Any
    norm_eps: float
    weights: dict[str, np.ndarray]

    def __repr__(self):
        q, v, (count, heads_of) = self.weights["q_proj.weight"], self.weights["v_proj.weight"], self.value_heads
        other_heads = f", {count} of {heads_of}" if count != self.heads else ""
        return (
            f"{type(self).__name__}({q.shape[1]} channels, {self.heads} heads of {q.shape[0] // self.heads} by "
            f"{v.shape[0] // count}{other_heads}, {q.dtype} on {'cpu' if isinstance(q, np.ndarray) else 'cuda'})"
        )

    def weight_shapes(self, given) -> dict:
        """{name: shape} of all possible weights, from the given ones, {name: array} with two axes for those of `sized`.
        ContractError if these do not fit the layer's heads."""
        raise NotImplementedError

    # -- parts, each with its pullback -------------------------------------------------------------------------------
    def linear(self, x, *names):
        """(y, pullback): x [..., D] is multiplied by each named matrix W, x W^T, or gets each bias b, x + b, in order.

        ``pullback(dy)`` returns the gradient of x, and {name: gradient} of the weights.
        """
        inputs = []
        for name in names:
            w = self.weights[name]
            inputs.append((name, w, x))
            x = x + w if w.ndim == 1 else x @ w.T

        def pullback(dy):
            gradients = {}
            for name, w, x in reversed(inputs):
                gradients[name] = token_rows(dy).sum(axis=0) if w.ndim == 1 else token_rows(dy).T @ token_rows(x)
                dy = dy if w.ndim == 1 else dy @ w
            return dy, gradients

        return x, pullback

    def output(self, x, o):
        """(y [..., D], pullback) for the layer's input x [..., D] and the operator's output o [..., H, V].

        ``pullback(dy)`` returns the gradient of x through the gate (0 without a gate), that of o, and {name: gradient}
        of the weights.
        """
        norm = next((name for name in self.norm_names if name in self.weights), None)
        scale = 1 / np.sqrt((o * o).mean(axis=-1, keepdims=True) + self.norm_eps)
        unit = o * scale
        normed = unit if norm is None else unit * self.weights[norm]
        gated = self.gate_names[0] in self.weights
        if gated:
            raw, pull_gate = self.linear(x, *self.gate_names)
            raw = raw.reshape(o.shape)
        y, pull_y = self.linear(join_heads(normed * self.gate_fn.value(raw) if gated else normed), "o_proj.weight")

        def pullback(dy):
            dmixed, gradients = pull_y(dy)
            dnormed, dx = dmixed.reshape(o.shape), 0
            if gated:
                dx, gate_gradients = pull_gate(join_heads(dnormed * normed * self.gate_fn.slope(raw)))
                dnormed, gradients = dnormed * self.gate_fn.value(raw), gradients | gate_gradients
            dunit = dnormed
            if norm is not None:
                gradients[norm], dunit = token_rows(dnormed * unit).sum(axis=0), dnormed * self.weights[norm]
            do = scale * (dunit - unit * (unit * dunit).mean(axis=-1, keepdims=True))
            return dx, do, gradients

        return y, pullback

    def pullback(self, x, y, pull_output, pull_heads):
        """The pullback that a layer's `vjp` returns, for its input x and output y. `pull_output`: that of `output`.
        pull_heads(do, gradient of the final state or None) returns the gradient of x through the operator's arrays,
        {name: gradient} of weights, and that of the initial state if one was given."""

        def pull(dy, dstate=None):
            if dy.shape != y.shape:
                self.refuse(f"dy is {dy.shape}, expected {y.shape} like y")
            through_gate, do, gradients = pull_output(self.checked_input("dy", dy, 3))
            through_heads, more_gradients, *state_gradients = pull_heads(do, dstate)
            gradients |= more_gradients
            dx = (through_gate + through_heads).astype(x.dtype, copy=False)
            return dx, {name: gradients[name] for name in self.weights}, *state_gradients

        return pull

    # -- checks ------------------------------------------------------------------------------------------------------
    def checked_copies(self, weights: Mapping) -> dict:
        """Copies of `weights` in the layer's dtype, after checking them; sets `home` and `dtype`."""
        given = {}
        for name, x in weights.items():
            try:
                given[name], _ = accepted_arrays.accepted(name, x, "copied")
            except accepted_arrays.Refusal as refusal:
                self.refuse(f"{name} {refusal}", ContractTypeError)
        if missing := [name for name in self.required if name not in given]:
            self.refuse(f"{', '.join(missing)} missing from the weights")
        for name in self.sized:
            if given[name].ndim != 2:
                self.refuse(f"{name} is {given[name].shape}, expected two axes")
        wanted = self.weight_shapes(given)
        if unknown := sorted(given.keys() - wanted):
            self.refuse(f"{', '.join(unknown)} is none of this layer's weights: {', '.join(wanted)}")
        for name, x in given.items():
            if x.shape != wanted[name]:
                self.refuse(f"{name} is {x.shape}, expected {wanted[name]}")
            if x.dtype not in array_kinds.FLOATS:
                self.refuse(f"{name} has dtype {x.dtype}, expected floats", ContractTypeError)
        homes = {array_kinds.home(x) for x in given.values()}
        if len(homes) > 1:
            self.refuse(f"the weights live on {' and '.join(sorted(homes))}, expected one place", ContractTypeError)
        (self.home,) = homes
        self.dtype = np.dtype(np.float64 if all(x.dtype == np.float64 for x in given.values()) else np.float32)
        return {name: given[name].astype(self.dtype, order="C") for name in wanted if name in given}

    def checked_input(self, name, x, ndim):
        """`x` in the dtype of the layer, after checking its axes [..., D], `ndim` of them, and its device."""
        self.check_floats(name, x)
        D = self.weights["q_proj.weight"].shape[1]
        if x.ndim != ndim or x.shape[-1] != D:
            self.refuse(f"{name} is {x.shape}, expected [{'B, T, ' if ndim == 3 else 'B, '}D] with D={D}")
        return x.astype(self.dtype, copy=False)

    def check_floats(self, name, x):
        """ContractTypeError unless x is a plain array of floats on the device of the weights."""
        if array_kinds.kind(x) not in ("numpy", "cupy"):
            self.refuse(
                f"{name} is a {type(x).__module__}.{type(x).__qualname__}, expected a NumPy or CuPy array",
                ContractTypeError,
            )
        if refusal := accepted_arrays.REFUSALS[array_kinds.kind(x)](x, "computed", None):
            self.refuse(f"{name} {refusal}", ContractTypeError)
        if array_kinds.home(x) != self.home:
            self.refuse(f"{name} lives on {array_kinds.home(x)}, but the weights on {self.home}", ContractTypeError)
        if x.dtype not in array_kinds.FLOATS:
            self.refuse(f"{name} has dtype {x.dtype}, expected floats", ContractTypeError)

    @classmethod
    def positive_int(cls, argument, number) -> int:
        """`number`, after checking that it is a positive integer."""
        if not is_int(number) or number < 1:
            cls.refuse(f"{argument} is {number!r}, expected a positive integer")
        return int(number)

    @classmethod
    def positive_number(cls, argument, number) -> float:
        """`number`, after checking that it is a positive number."""
        if not is_real(number) or not 0 < number < np.inf:
            cls.refuse(f"{argument} is {number!r}, expected a positive number")
        return float(number)

    @classmethod
    def refuse(cls, complaint, error=ContractError) -> NoReturn:
        raise error(f"{cls.__name__}: {complaint}")


# -- functions of layers -----------------------------------------------------------------------------------------------
sigmoid = ARRAYS.sigmoid


def split_heads(x, heads):
    """x [..., H K] as [..., H, K]"""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def join_heads(x):
    """x [..., H, K] as [..., H K]"""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def token_rows(x):
    """x [..., D] as [tokens, D]"""
    return x.reshape(-1, x.shape[-1])


def uniform(rng, shape, inputs):
    """New weights: float32 numbers from -1 / sqrt(inputs) to 1 / sqrt(inputs)."""
    return (rng.uniform(-1, 1, shape) * inputs**-0.5).astype(np.float32)


# Functions of gates and of features: `value(x)` is the function, `slope(x)` its derivative at x.
class Relu:
    value = staticmethod(lambda x: np.maximum(x, 0))
    slope = staticmethod(lambda x: (x > 0).astype(x.dtype))


class Sigmoid:
    value = staticmethod(sigmoid)
    slope = staticmethod(lambda x: sigmoid(x) * sigmoid(-x))


class Swish:
    value = staticmethod(lambda x: x * sigmoid(x))
    slope = staticmethod(lambda x: sigmoid(x) * (1 + x * sigmoid(-x)))
