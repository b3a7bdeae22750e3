"""The delta rule."""

from ..declarations import DELTA_RULE
from ..public_function import public_function


@public_function(DELTA_RULE)  # gives the function its parameters, its body, and the text on what operators share
def delta_rule():
    """Linear attention that writes of a value what the state does not yet know of it: DeltaNet's recurrence.

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,        o_t = scale * q_t^T S_t

    (Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024, eq. 3.) A key of
    length 1 and beta = 1 replace what the state has at that key; beta = 0 writes nothing, beta = 2 turns it around.

    Parameters
    ----------
    q, k : [B, HK, T, K], v : [B, H, T, V]
        Query, key and value. H is a multiple of HK; head h of v takes the query and the key of head ``h // (H // HK)``.
        Where ``beta * |k|^2`` is above 2 the state grows from token to token: see `qk_l2norm`.
    beta : [B, H, T] (``[B, T, H]`` with ``layout="bthd"``)
        How strongly a token is written, any number: a sigmoid, or twice a sigmoid for negative eigenvalues. The dtype
        of q, or float32 beside half-precision arrays.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 50, 8))
    >>> k /= np.linalg.norm(k, axis=-1, keepdims=True)
    >>> o, state = linattn_np.delta_rule(q, k, v, np.ones((1, 2, 50)), output_final_state=True)
    >>> bool(np.allclose(k[0, 0, -1] @ state[0, 0], v[0, 0, -1]))       # the last value can be read again
    True
    """
