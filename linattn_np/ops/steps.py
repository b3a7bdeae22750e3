"""One token for B sequences, or a few of which some are taken back, the state updated in place: what decoding calls."""

from ..declarations import DELTA_RULE_STEP, GATED_DELTA_RULE_STEP, GLA_STEP, KDA_STEP, RWKV6_STEP, RWKV7_STEP
from ..dispatch import call_step
from ..public_function import public_function

__all__ = ["gla_step", "rwkv6_step", "delta_rule_step", "gated_delta_rule_step", "kda_step", "rwkv7_step"]


# `public_function` gives the function its parameters, its body, and the text that all share, with that of the arrays.
@public_function(GLA_STEP, call_step)
def gla_step():
    """One token of `gla` for B sequences; `state` is updated in place.

        S <- diag(exp g) S + k v^T,     o = scale * q^T S           (Yang et al., 2024, eq. 3)

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, g = rng.standard_normal((4, 1, 2, 9, 8))
    >>> g = -np.exp(g)
    >>> state = np.zeros((1, 2, 8, 8))
    >>> o = [linattn_np.gla_step(q[:, :, t], k[:, :, t], v[:, :, t], g[:, :, t], state) for t in range(9)]
    >>> bool(np.allclose(np.stack(o, axis=2), linattn_np.gla(q, k, v, g)))
    True

    Of four tokens that a draft model proposed, two are accepted; the state takes these, and meets the next three:

    >>> state, pending = np.zeros((1, 2, 8, 8)), np.empty((1, 2, 4, 24))
    >>> first = linattn_np.gla_step(*(x[:, :, :4] for x in (q, k, v, g)), state, pending=pending)
    >>> then = (x[:, :, 2:5] for x in (q, k, v, g))
    >>> o = linattn_np.gla_step(*then, state, pending=pending, accepted=np.array([2]))
    >>> bool(np.allclose(o, linattn_np.gla(q, k, v, g)[:, :, 2:5]))
    True
    """


@public_function(RWKV6_STEP, call_step)
def rwkv6_step():
    """One token of `rwkv6` for B sequences; `state` is updated in place.

        o = scale * r^T (S + diag(u) k v^T),    S <- diag(exp w) S + k v^T      (Peng et al., 2024, eq. 18-19)

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> r = k = w = np.zeros((1, 2, 8)); v = np.ones((1, 2, 4)); u = np.ones((2, 8))
    >>> linattn_np.rwkv6_step(r, k, v, w, u, np.ones((1, 2, 8, 4)), scale=1.0).shape
    (1, 2, 4)
    """


@public_function(DELTA_RULE_STEP, call_step)
def delta_rule_step():
    """One token of `delta_rule` for B sequences; `state` is updated in place.

        S <- S + beta k (v - S^T k)^T,      o = scale * q^T S           (Yang et al., 2024, eq. 3)

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> k, v = np.ones((1, 2, 4)) / 2, np.full((1, 2, 3), 5.0)
    >>> linattn_np.delta_rule_step(k, k, v, np.ones((1, 2)), np.ones((1, 2, 4, 3)), scale=1.0).max()
    np.float64(5.0)
    """


@public_function(GATED_DELTA_RULE_STEP, call_step)
def gated_delta_rule_step():
    """One token of `gated_delta_rule` for B sequences; `state` is updated in place.

        S' = exp(g) S,      S <- S' + beta k (v - S'^T k)^T,      o = scale * q^T S     (Yang et al., 2024, eq. 10)

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> q = k = np.zeros((1, 2, 8)); v = np.ones((1, 4, 4)); g = beta = np.zeros((1, 4))
    >>> linattn_np.gated_delta_rule_step(q, k, v, g, beta, np.ones((1, 4, 8, 4))).shape
    (1, 4, 4)
    """


@public_function(KDA_STEP, call_step)
def kda_step():
    """One token of `kda` for B sequences; `state` is updated in place.

        S' = diag(exp g) S,     S <- S' + beta k (v - S'^T k)^T,      o = scale * q^T S         (Kimi Team, 2025)

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, g = rng.standard_normal((4, 1, 2, 9, 8))
    >>> g, beta, state = -np.exp(g), rng.random((1, 2, 9)), np.zeros((1, 2, 8, 8))
    >>> tokens = [[x[:, :, t] for x in (q, k, v, g, beta)] for t in range(9)]
    >>> o = np.stack([linattn_np.kda_step(*token, state, qk_l2norm=True) for token in tokens], axis=2)
    >>> bool(np.allclose(o, linattn_np.kda(q, k, v, g, beta, qk_l2norm=True)))
    True
    """


@public_function(RWKV7_STEP, call_step)
def rwkv7_step():
    """One token of `rwkv7` for B sequences; `state` is updated in place.

        S <- diag(exp w) S + b (S^T a)^T + k v^T,       o = scale * r^T S       (Peng et al., 2025, eq. 17)

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> r = w = k = a = b = np.zeros((1, 2, 8)); v = np.ones((1, 2, 4))
    >>> linattn_np.rwkv7_step(r, w, k, v, a, b, np.ones((1, 2, 8, 4)), scale=1.0).shape
    (1, 2, 4)
    """
