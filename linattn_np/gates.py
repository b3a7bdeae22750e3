"""The gates of trained models: natural logs of decays, from what their projections give.

Functions of NumPy and CuPy arrays. `linattn_np.interop.torch` and `linattn_np.interop.jax` have them by the same names,
differentiable by their frameworks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getdoc
from typing import Any, NoReturn

import numpy as np

from .argument_checks import is_real
from .array_kinds import kind
from .errors import ContractError, ContractTypeError
from .messages import kind_of, shown
from .typing import Array


@dataclass(frozen=True)
class Gates:
    """The gates by the functions of one library, for arrays of `kinds`. `single` makes float32 of half precision."""

    kinds: tuple[str, ...]
    exp: Callable[[Any], Any]
    softplus: Callable[[Any], Any]
    sigmoid: Callable[[Any], Any]
    single: Callable[[Any], Any]

    def gdn_gate(self, x, A_log, dt_bias=None):
        x, A_log = self.checked("gdn_gate", x, A_log, dt_bias, "H")
        return -self.exp(A_log) * self.softplus(x)

    def kda_gate(self, x, A_log, dt_bias=None, lower_bound=None):
        if lower_bound is not None and (not is_real(lower_bound) or not -np.inf < lower_bound < 0):
            refuse("kda_gate", "lower_bound", f"is {shown(lower_bound)}, expected a number below 0, or None")
        x, A_log = self.checked("kda_gate", x, A_log, dt_bias, "H K")
        rate = self.exp(A_log)[:, None]
        return -rate * self.softplus(x) if lower_bound is None else lower_bound * self.sigmoid(rate * x)

    def rwkv7_gate(self, w):
        return -float(np.exp(-0.5)) * self.sigmoid(self.converted("rwkv7_gate", "w", w))

    def checked(self, gate, x, A_log, dt_bias, axes):
        """(x + dt_bias, A_log) in float32 at least, after checking x [..., *axes], A_log [H] and dt_bias [*axes]."""
        x, A_log, wanted = self.converted(gate, "x", x), self.converted(gate, "A_log", A_log), axes.split()
        if x.ndim < len(wanted):
            refuse(gate, "x", f"is {tuple(x.shape)}, expected [..., {', '.join(wanted)}]")
        H, *_ = sizes = tuple(x.shape[-len(wanted) :])
        if tuple(A_log.shape) != (H,):
            refuse(gate, "A_log", f"is {tuple(A_log.shape)}, expected [H] = ({H},)")
        if dt_bias is None:
            return x, A_log
        bias = self.converted(gate, "dt_bias", dt_bias)
        if tuple(bias.shape) not in (sizes, (int(np.prod(sizes)),)):
            refuse(gate, "dt_bias", f"is {tuple(bias.shape)}, expected [{', '.join(wanted)}] = {sizes}")
        return x + bias.reshape(sizes), A_log

    def converted(self, gate, name, x):
        """The argument `name` in float32 at least; ContractTypeError if it is no array of the library."""
        if kind(x) not in self.kinds:
            ways = " or ".join(self.kinds)
            refuse(gate, name, f"is a {kind_of(x)}, expected an array of {ways}", ContractTypeError)
        return self.single(x)


def refuse(gate, name, complaint, error=ContractError) -> NoReturn:
    raise error(f"{gate}: {name} {complaint}")


ARRAYS = Gates(
    kinds=("numpy", "cupy"),
    exp=np.exp,
    softplus=lambda x: np.logaddexp(x.dtype.type(0), x),
    # Small values keep all digits; computed by tanh, they do not.
    sigmoid=lambda x: np.exp(-np.logaddexp(x.dtype.type(0), -x)),
    single=lambda x: x if x.dtype.itemsize > 2 else x.astype(np.float32),
)


def gdn_gate(x: Array, A_log: Array, dt_bias: Array | None = None) -> Any:
    """Gated DeltaNet's gate, which is Mamba-2's: for `gated_delta_rule` and `simple_gla`.

        g = -exp(A_log) softplus(x + dt_bias)

    (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, section 3.4; Dao and Gu, "Transformers are SSMs", 2024.)

    Parameters
    ----------
    x : [..., H]
        What the projection gives; its heads are last, so that g goes to an operator with ``layout="bthd"``.
    A_log, dt_bias : [H]
        The layer's parameters; without dt_bias it is 0.

    Returns
    -------
    g : [..., H], the natural log of the decay, in float32 at least

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> linattn_np.gdn_gate(np.zeros((1, 5, 2)), np.zeros(2), np.zeros(2))[0, 0]
    array([-0.69314718, -0.69314718])
    """
    return ARRAYS.gdn_gate(x, A_log, dt_bias)


def kda_gate(x: Array, A_log: Array, dt_bias: Array | None = None, lower_bound: float | None = None) -> Any:
    """Kimi Delta Attention's gate, a number a channel.

        g = -exp(A_log) softplus(x + dt_bias),      or      g = lower_bound * sigmoid(exp(A_log) (x + dt_bias))

    (Kimi Team, "Kimi Linear", 2025, arXiv:2510.26692; the second form is flash-linear-attention's `safe_gate`.)

    Parameters
    ----------
    x : [..., H, K]
        What the projection gives; g goes to `kda` with ``layout="bthd"``.
    A_log : [H], dt_bias : [H, K], or flat, [H * K]
        The layer's parameters; without dt_bias it is 0.
    lower_bound : float, optional
        What no gate is below: -5 in models that have it.

    Returns
    -------
    g : [..., H, K], the natural log of the decay, in float32 at least

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> float(linattn_np.kda_gate(np.zeros((1, 5, 2, 4)), np.zeros(2), lower_bound=-5.0)[0, 0, 0, 0])
    -2.5
    """
    return ARRAYS.kda_gate(x, A_log, dt_bias, lower_bound)


def rwkv7_gate(w: Array) -> Any:
    """RWKV-7's gate: decays lie between exp(-exp(-0.5)) = 0.545 and 1.

        log decay = -exp(-0.5) sigmoid(w)

    (Peng et al., "RWKV-7 'Goose'", 2025, arXiv:2503.14456, section 4.)

    Parameters
    ----------
    w : any shape
        What the model's low-rank projection gives, before its activation.

    Returns
    -------
    The natural log of the decay, in float32 at least: the w of `rwkv7`.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> float(linattn_np.rwkv7_gate(np.zeros(3))[0].round(4))
    -0.3033
    """
    return ARRAYS.rwkv7_gate(w)


def of_library(gates: Gates) -> dict[str, Callable[..., Any]]:
    """The functions above by the functions of another library."""

    def function(documented):
        def public(*arguments, **named):
            return getattr(gates, documented.__name__)(*arguments, **named)

        public.__name__ = public.__qualname__ = documented.__name__
        public.__doc__ = getdoc(documented) and getdoc(documented).partition("\nExample\n")[0]  # NumPy's arrays
        return public

    return {documented.__name__: function(documented) for documented in (gdn_gate, kda_gate, rwkv7_gate)}
