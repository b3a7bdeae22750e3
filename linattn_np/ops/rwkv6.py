"""RWKV-6's time mixing."""

from ..declarations import RWKV6
from ..public_function import public_function


@public_function(RWKV6)  # gives the function its parameters, its body, and the text on what operators share
def rwkv6():
    """RWKV-6's recurrence: a decay for every key channel, the state read before the write, a bonus for the present.

        o_t = scale * r_t^T (S_{t-1} + diag(u) k_t v_t^T),      S_t = diag(exp w_t) S_{t-1} + k_t v_t^T

    (Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024, eq. 18-19.)

    Parameters
    ----------
    r, k : [B, H, T, K], v : [B, H, T, V]
        Receptance, key and value.
    w : [B, H, T, K]
        The log of the decay, natural base; a model's ``-exp(time_decay + ...)`` goes in as it is.
    u : [H, K]
        The bonus of the present token.
    scale : float, optional
        ``K ** -0.5`` by default as everywhere here; RWKV-6 models pass ``scale=1.0``.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> r, k, v, w = rng.standard_normal((4, 1, 2, 50, 8))
    >>> u = rng.standard_normal((2, 8))
    >>> o = linattn_np.rwkv6(r, k, v, -np.exp(w), u, scale=1.0)
    >>> bool(np.allclose(o[0, 0, 0], (r[0, 0, 0] * u[0] * k[0, 0, 0]).sum() * v[0, 0, 0]))
    True
    """
