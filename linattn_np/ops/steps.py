"""One token for B sequences, the state updated in place: what decoding calls."""

from ..declarations import GLA_STEP, RWKV6_STEP
from ..dispatch import call_step
from ..public_function import public_function

__all__ = ["gla_step", "rwkv6_step"]


@public_function(GLA_STEP, call_step)
def gla_step():
    """One token of `gla` for B sequences; `state` is updated in place.

        S <- diag(exp g) S + k v^T,     o = scale * q^T S           (Yang et al., 2024, eq. 3)

    Parameters
    ----------
    q, k, g : [B, H, K], v : [B, H, V]
        As in `gla`, without the time axis; g is the natural log of the decay.

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
    """


@public_function(RWKV6_STEP, call_step)
def rwkv6_step():
    """One token of `rwkv6` for B sequences; `state` is updated in place.

        o = scale * r^T (S + diag(u) k v^T),    S <- diag(exp w) S + k v^T      (Peng et al., 2024, eq. 18-19)

    Parameters
    ----------
    r, k, w : [B, H, K], v : [B, H, V], u : [H, K]
        As in `rwkv6`, without the time axis; w is the natural log of the decay.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> r = k = w = np.zeros((1, 2, 8)); v = np.ones((1, 2, 4)); u = np.ones((2, 8))
    >>> linattn_np.rwkv6_step(r, k, v, w, u, np.ones((1, 2, 8, 4)), scale=1.0).shape
    (1, 2, 4)
    """
