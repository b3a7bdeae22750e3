"""The delta rule with a gate a channel."""

from ..declarations import KDA
from ..public_function import public_function


@public_function(KDA)  # gives the function its parameters, its body, and the text on what operators share
def kda():
    """The delta rule on a state of which every key channel decays by itself: Kimi Delta Attention.

        S'_t = diag(exp g_t) S_{t-1},       S_t = S'_t + beta_t k_t (v_t - S'_t^T k_t)^T,       o_t = scale * q_t^T S_t

    (Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025, arXiv:2510.26692, with
    alpha_t = exp g_t.)

    Parameters
    ----------
    q, k : [B, HK, T, K], v : [B, H, T, V]
        Query, key and value, as in `delta_rule`.
    g : [B, H, T, K]
        The log of the decay, natural base, a gate of its own for every head of v: ``0`` keeps, ``-inf`` forgets.
    beta : [B, H, T] (``[B, T, H]`` with ``layout="bthd"``)
        How strongly a token is written, as in `delta_rule`.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 50, 8))
    >>> g, beta = -rng.random((1, 2, 50)), rng.random((1, 2, 50))
    >>> channels = np.repeat(g[..., None], 8, axis=-1)
    >>> o = linattn_np.kda(q, k, v, channels, beta, qk_l2norm=True)
    >>> bool(np.allclose(o, linattn_np.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True)))
    True
    """
