"""Gated linear attention."""

from ..declarations import GLA
from ..public_function import public_function


@public_function(GLA)  # gives the function its parameters, its body, and the text on what operators share
def gla():
    """Gated linear attention with a decay for every key channel.

        S_t = diag(exp g_t) S_{t-1} + k_t v_t^T,        o_t = scale * q_t^T S_t

    (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2024, eq. 3 with
    alpha_t = exp g_t; the chunked form is section 4 there.) With `gv` every value channel decays too, by the outer
    product of two gates (section 4.1 there, G_t = alpha_t^T beta_t with beta_t = exp gv_t):

        S_t = (exp g_t exp gv_t^T) * S_{t-1} + k_t v_t^T,       * element by element

    Parameters
    ----------
    q, k : [B, H, T, K], v : [B, H, T, V]
        Query, key and value.
    g : [B, H, T, K]
        The log of the decay, natural base, usually <= 0: ``0`` keeps, ``-inf`` forgets. Values above 0 are computed as
        given: the state overflows float32 once a channel's gates since the last strong decay sum to more than about 88,
        and on CuPy chunks with a gate above 1 take up to a hundred times as long (docs, "Gates").
    gv : [B, H, T, V], optional
        The same for the value channels, with the heads of v: what g is to the keys. With it
        `materialize` is refused, and `mode` is "auto", "recurrent" or "chunk".

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 100, 16))
    >>> g = -np.exp(rng.standard_normal((1, 2, 100, 16)))
    >>> o, state = linattn_np.gla(q, k, v, g, output_final_state=True)
    >>> first, half = linattn_np.gla(q[:, :, :60], k[:, :, :60], v[:, :, :60], g[:, :, :60], output_final_state=True)
    >>> rest = linattn_np.gla(q[:, :, 60:], k[:, :, 60:], v[:, :, 60:], g[:, :, 60:], initial_state=half)
    >>> bool(np.allclose(o, np.concatenate([first, rest], axis=2)))
    True
    """
