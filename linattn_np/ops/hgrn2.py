"""HGRN2: gated linear attention whose key is 1 minus the decay."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from ..declarations import HGRN2
from ..dispatch import call
from ..typing import A, Array, MaskedOptions, State


@overload
def hgrn2(
    q: A, g: Array, v: Array, *, output_final_state: Literal[False] = False, **options: Unpack[MaskedOptions]
) -> A: ...


@overload
def hgrn2(
    q: A, g: Array, v: Array, *, output_final_state: Literal[True], **options: Unpack[MaskedOptions]
) -> tuple[A, State]: ...


@overload
def hgrn2(
    q: A, g: Array, v: Array, *, output_final_state: bool, **options: Unpack[MaskedOptions]
) -> A | tuple[A, State]: ...


def hgrn2(
    q,
    g,
    v,
    *,
    scale=None,
    initial_state=None,
    output_final_state=False,
    state_dtype=None,
    cu_seqlens=None,
    mask=None,
    reverse=False,
    state_v_first=False,
    layout="bhtd",
    mode="auto",
    chunk_size=None,
    materialize=None,
    precision=None,
    backend="auto",
    out=None,
):
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

    Everything else, the result and the errors are those of `gla`. The gradient of g is the sum of that through the
    decay and that through the key. Each call makes k, an array as large as q, with the dtype of q: no CUDA graph may
    capture the call, since the graph would not keep k's memory.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, g, v = rng.standard_normal((3, 1, 2, 50, 8))
    >>> g = -np.logaddexp(0, -g)
    >>> bool(np.allclose(linattn_np.hgrn2(q, g, v), linattn_np.gla(q, 1 - np.exp(g), v, g)))
    True
    """
    return call(
        HGRN2,
        (q, g, v),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_dtype=state_dtype,
        cu_seqlens=cu_seqlens,
        mask=mask,
        reverse=reverse,
        state_v_first=state_v_first,
        layout=layout,
        mode=mode,
        chunk_size=chunk_size,
        materialize=materialize,
        precision=precision,
        backend=backend,
        out=out,
    )
