"""One token for B sequences, the state updated in place: what decoding calls."""

from __future__ import annotations

from ..conversions import in_kind
from ..declarations import GLA_STEP, RWKV6_STEP
from ..dispatch import backend_module, choose
from ..typing import A, Array, Backend, Integers


def gla_step(
    q: A,
    k: Array,
    v: Array,
    g: Array,
    state: Array,
    *,
    slots: Integers | None = None,
    scale: float | None = None,
    backend: Backend = "auto",
    out: Array | None = None,
) -> A:
    """One token of `gla` for B sequences; `state` is updated in place.

        S <- diag(exp g) S + k v^T,     o = scale * q^T S           (Yang et al., 2024, eq. 3)

    Parameters
    ----------
    q, k, g : [B, H, K], v : [B, H, V]
        As in `gla`, without the time axis; g is the natural log of the decay.
    state : [B, H, K, V], or a pool [P, H, K, V] with `slots`
        float32, float64, float16 or bfloat16; the arithmetic is float32 (float64 beside float64 inputs).
    slots : integers [B], optional
        Row of the pool that each sequence's state lives in, each at most once. Host integers are checked, and sent to
        the device as `cu_seqlens` are in `gla`; an int64 CuPy array is taken as it is, without synchronising.
    scale, backend, out
        As in `gla`.

    Returns
    -------
    o : [B, H, V], the dtype of q. Errors are those of `gla`; the state is untouched when one is raised.

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
    return step(GLA_STEP, (q, k, v, g), state, slots, scale, backend, out)


def rwkv6_step(
    r: A,
    k: Array,
    v: Array,
    w: Array,
    u: Array,
    state: Array,
    *,
    slots: Integers | None = None,
    scale: float | None = None,
    backend: Backend = "auto",
    out: Array | None = None,
) -> A:
    """One token of `rwkv6` for B sequences; `state` is updated in place.

        o = scale * r^T (S + diag(u) k v^T),    S <- diag(exp w) S + k v^T      (Peng et al., 2024, eq. 18-19)

    r, k, w are [B, H, K], v is [B, H, V], u is [H, K]; everything else is as in `gla_step`.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> r = k = w = np.zeros((1, 2, 8)); v = np.ones((1, 2, 4)); u = np.ones((2, 8))
    >>> linattn_np.rwkv6_step(r, k, v, w, u, np.ones((1, 2, 8, 4)), scale=1.0).shape
    (1, 2, 4)
    """
    return step(RWKV6_STEP, (r, k, v, w, u), state, slots, scale, backend, out)


def step(op, arrays, state, slots, scale, backend, out):
    problem = op.bind(arrays, state=state, slots=slots, scale=scale, out=out)
    o = backend_module(choose(problem, backend)).run(problem)
    return out if out is not None else in_kind(problem, o)
