"""Gated linear attention with one gate a head."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from ..declarations import SIMPLE_GLA
from ..dispatch import call
from ..typing import A, Array, MaskedOptions, State


@overload
def simple_gla(
    q: A, k: Array, v: Array, g: Array, *, output_final_state: Literal[False] = False, **options: Unpack[MaskedOptions]
) -> A: ...


@overload
def simple_gla(
    q: A, k: Array, v: Array, g: Array, *, output_final_state: Literal[True], **options: Unpack[MaskedOptions]
) -> tuple[A, State]: ...


@overload
def simple_gla(
    q: A, k: Array, v: Array, g: Array, *, output_final_state: bool, **options: Unpack[MaskedOptions]
) -> A | tuple[A, State]: ...


def simple_gla(
    q,
    k,
    v,
    g,
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
    """Linear attention with one scalar decay a head and token, the form that Mamba-2 takes.

        S_t = exp(g_t) S_{t-1} + k_t v_t^T,        o_t = scale * q_t^T S_t

    (Dao and Gu, "Transformers are SSMs", 2024, eq. 6 with a_t = exp g_t.)

    Parameters
    ----------
    g : [B, H, T] (``[B, T, H]`` with ``layout="bthd"``)
        The log of the decay, natural base.

    Everything else, the result and the errors are those of `gla`.

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
    return call(
        SIMPLE_GLA,
        (q, k, v, g),
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
