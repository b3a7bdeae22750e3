"""Gated linear attention with one gate a head."""

from ..declarations import SIMPLE_GLA
from ..public_function import public_function


@public_function(SIMPLE_GLA)
def simple_gla():
    """Linear attention with one scalar decay a head and token, the form that Mamba-2 takes.

        S_t = exp(g_t) S_{t-1} + k_t v_t^T,        o_t = scale * q_t^T S_t

    (Dao and Gu, "Transformers are SSMs", 2024, eq. 6 with a_t = exp g_t.)

    Parameters
    ----------
    q, k : [B, H, T, K], v : [B, H, T, V]
        Query, key and value.
    g : [B, H, T] (``[B, T, H]`` with ``layout="bthd"``)
        The log of the decay, natural base.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 50, 8))
    >>> g = -rng.random((1, 2, 50))
    >>> full_gate = np.repeat(g[..., None], 8, axis=-1)
    >>> bool(np.allclose(linattn_np.simple_gla(q, k, v, g), linattn_np.gla(q, k, v, full_gate)))
    True
    """
