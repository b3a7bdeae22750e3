"""RWKV-7's time mixing."""

from ..declarations import RWKV7
from ..public_function import public_function


@public_function(RWKV7)  # gives the function its parameters, its body, and the text on what operators share
def rwkv7():
    """RWKV-7's recurrence: the transition of a token is a diagonal matrix plus one of rank one.

        S_t = diag(exp w_t) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T,        o_t = scale * r_t^T S_t

    (Peng et al., "RWKV-7 'Goose' with Expressive Dynamic State Evolution", 2025, arXiv:2503.14456, eq. 17, whose states
    are the transposed of these.) a reads the state before it decays. A model passes ``a = -kappa`` and
    ``b = kappa * icl``: kappa, the key of what is removed, has length 1, and icl is the in-context learning rate.

    Parameters
    ----------
    r : [B, H, T, K]
        Receptance.
    w : [B, H, T, K]
        The log of the decay, natural base; a model's ``-exp(-0.5) * sigmoid(...)`` goes in as it is.
    k : [B, H, T, K], v : [B, H, T, V]
        Key and value.
    a, b : [B, H, T, K]
        The two vectors of the transition.
    scale : float, optional
        ``K ** -0.5`` by default as everywhere here; RWKV-7 models pass ``scale=1.0``.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> r, k, v, w = rng.standard_normal((4, 1, 2, 50, 8))
    >>> w, icl = -np.exp(w), rng.random((1, 2, 50, 1))
    >>> k /= np.linalg.norm(k, axis=-1, keepdims=True)
    >>> o = linattn_np.rwkv7(r, w, icl * k, v, -np.exp(w) * k, icl * k)    # kda's k reads the decayed state
    >>> bool(np.allclose(o, linattn_np.kda(r, k, v, w, icl[..., 0])))
    True
    """
