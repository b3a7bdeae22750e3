"""The delta rule with one gate a head."""

from ..declarations import GATED_DELTA_RULE
from ..public_function import public_function


@public_function(GATED_DELTA_RULE)  # gives the function its parameters, its body, and the text on what operators share
def gated_delta_rule():
    """The delta rule on a state that decays, by one number a head and token: Gated DeltaNet's recurrence.

        S'_t = exp(g_t) S_{t-1},        S_t = S'_t + beta_t k_t (v_t - S'_t^T k_t)^T,        o_t = scale * q_t^T S_t

    (Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024, eq. 10 with
    alpha_t = exp g_t.)

    Parameters
    ----------
    q, k : [B, HK, T, K], v : [B, H, T, V]
        Query, key and value, as in `delta_rule`.
    g : [B, H, T] (``[B, T, H]`` with ``layout="bthd"``)
        The log of the decay, natural base, a gate of its own for every head of v: ``0`` keeps, ``-inf`` forgets.
    beta : [B, H, T]
        How strongly a token is written, as in `delta_rule`.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((2, 1, 2, 50, 8))
    >>> v, g, beta = rng.standard_normal((1, 4, 50, 6)), -rng.random((1, 4, 50)), rng.random((1, 4, 50))
    >>> o = linattn_np.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True)
    >>> q, k = (np.repeat(x, 2, axis=1) for x in (q, k))              # what heads of v that share a key stand for
    >>> bool(np.allclose(o, linattn_np.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True)))
    True
    """
