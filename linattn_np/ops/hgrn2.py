"""HGRN2: gated linear attention whose key is 1 minus the decay."""

from ..declarations import HGRN2
from ..public_function import public_function


@public_function(HGRN2)  # gives the function its parameters, its body, and the text on what operators share
def hgrn2():
    """HGRN2's recurrence: the key of a channel is 1 minus its decay.

        S_t = diag(exp g_t) S_{t-1} + (1 - exp g_t) v_t^T,        o_t = scale * q_t^T S_t

    (Qin et al., "HGRN2: Gated Linear RNNs with State Expansion", 2024, arXiv 2404.07904, with a forget gate exp g_t;
    q is the paper's output gate, v its input.) It is `gla` with ``k = 1 - exp g``, which is computed without
    cancellation near g = 0.

    Parameters
    ----------
    q, g : [B, H, T, K], v : [B, H, T, V]
        The query, the log of the decay (natural base, ``logsigmoid`` of a model's projection) and the value.
    scale : float, optional
        ``K ** -0.5`` by default as everywhere here; the paper has 1.0.

    Notes
    -----
    The gradient of g is the sum of that through the decay and that through the key. Each call makes k, an array as
    large as q, with the dtype of q. The call is refused where CuPy captures a CUDA graph, which does not keep k.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, g, v = rng.standard_normal((3, 1, 2, 50, 8))
    >>> g = -np.logaddexp(0, -g)
    >>> bool(np.allclose(linattn_np.hgrn2(q, g, v), linattn_np.gla(q, 1 - np.exp(g), v, g)))
    True
    """
