"""Gated linear attention with one gate a head."""

from ..declarations import SIMPLE_GLA
from ..public_function import public_function


@public_function(SIMPLE_GLA)  # gives the function its parameters, its body, and the text on what operators share
def simple_gla():
    """Linear attention with one scalar decay a head and token, the form that Mamba-2 takes.

        S_t = exp(g_t) S_{t-1} + k_t v_t^T,        o_t = scale * q_t^T S_t

    (Dao and Gu, "Transformers are SSMs", 2024, eq. 6 with a_t = exp g_t.)

    Parameters
    ----------
    q, k : [B, HK, T, K], v : [B, H, T, V]
        Query, key and value. H is a multiple of HK; head h of v takes the query and the key of head ``h // (H // HK)``,
        as Mamba-2's heads take C and B of their group. Where HK < H, Hopper's kernels for bfloat16 and up to 128
        channels read q and k as they are; others take copies for every head.
    g : [B, H, T] (``[B, T, H]`` with ``layout="bthd"``)
        The log of the decay, natural base, of every head of v. With HK heads, the heads of v that share a query and a
        key share the gate, too, and nothing is copied for it with ``layout="bthd"``.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 50, 8))
    >>> g = -rng.random((1, 2, 50))
    >>> full_gate = np.repeat(g[..., None], 8, axis=-1)
    >>> bool(np.allclose(linattn_np.simple_gla(q, k, v, g), linattn_np.gla(q, k, v, full_gate)))
    True
    >>> o = linattn_np.simple_gla(q[:, :1], k[:, :1], v, g)                # both heads share a query and a key
    >>> q, k = (np.repeat(x[:, :1], 2, axis=1) for x in (q, k))
    >>> bool(np.allclose(o, linattn_np.simple_gla(q, k, v, g)))
    True
    """
