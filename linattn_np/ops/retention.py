"""RetNet's retention."""

from ..declarations import RETENTION
from ..public_function import public_function


@public_function(RETENTION)  # gives the function its parameters, its body, and the text on what operators share
def retention():
    """Retention: linear attention with a fixed decay a head.

        S_t = gamma_h S_{t-1} + k_t v_t^T,        o_t = scale * q_t^T S_t

    (Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models", 2023, eq. 6. The rotation
    of q and k, and the norm after the heads, belong to the layer.)

    Parameters
    ----------
    q, k : [B, H, T, K], v : [B, H, T, V]
        Query, key and value.
    gamma : float or host array [H], optional
        Decays between 0 and 1 (not their logs); ``1 - 2 ** (-5 - h)`` for head h by default, eq. 8 there. Their logs
        are taken in float64, since float32 has no number between ``1 - 2 ** -24`` and 1.

    Notes
    -----
    There is no `mask`, since padding would decay the state as well: where there is padding, `simple_gla` with the gate
    ``log(gamma)`` takes it, by default ``log1p(-2.0 ** (-5 - h))``.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> q = k = v = np.ones((1, 1, 3, 1))
    >>> linattn_np.retention(q, k, v, gamma=0.5).ravel()
    array([1.  , 1.5 , 1.75])
    """
