"""Linear attention with feature maps and the normaliser."""

from ..declarations import LINEAR_ATTENTION
from ..public_function import public_function


@public_function(LINEAR_ATTENTION)  # gives the function its parameters, its body, and the text on what operators share
def linear_attention():
    """Causal linear attention, with an optional feature map and normaliser.

        S_t = S_{t-1} + phi(k_t) v_t^T,     z_t = z_{t-1} + phi(k_t)
        o_t = scale * phi(q_t)^T S_t,       or with `normalize`  o_t = (phi(q_t)^T S_t) / (phi(q_t)^T z_t)

    (Katharopoulos et al., "Transformers are RNNs", 2020, eq. 10-12 and 18-20. The scale cancels in the normalised
    form. Where numerator and denominator are both 0, as for a query whose features are all 0, o_t is 0.)

    Parameters
    ----------
    q, k : [B, H, T, K], v : [B, H, T, V]
        Query, key and value.
    feature_map : None, "elu", "relu" or "exp"
        phi, applied to q and k: the identity, ``elu(x) + 1``, ``max(x, 0)`` or ``exp(x)``.
    normalize : bool
        Divide by phi(q_t)^T z_t. The state is then the pair ``(S [N, H, K, V], z [N, H, K])``, in `initial_state` and
        in the result, so that a sequence can be resumed. z belongs to the heads of k, also where v has more.

    Notes
    -----
    With ``"exp"`` and `normalize`, host arrays may hold any finite q and k: exp is taken less the channel's largest key
    so far. The state is of exp(k) itself, and overflows float32 for keys from 88 on. On a GPU o does too.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 50, 8))
    >>> o = linattn_np.linear_attention(q, k, v, feature_map="elu", normalize=True)
    >>> bool(np.allclose(o[:, :, 0], v[:, :, 0]))         # the first token can only attend to itself
    True
    """
