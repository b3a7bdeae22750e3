"""Softmax attention, the peer that every user compares with."""

from __future__ import annotations

from typing import Literal

from ..declarations import SOFTMAX_ATTENTION
from ..dispatch import call
from ..typing import A, Array, Backend, Integers, Layout


def softmax_attention(
    q: A,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Integers | None = None,
    layout: Layout = "bhtd",
    mode: Literal["auto", "chunk"] = "auto",
    chunk_size: int | None = None,
    backend: Backend = "auto",
    out: Array | None = None,
) -> A:
    """Softmax attention in tiles with an online softmax: memory linear in T, the T x T matrix never exists.

        o_t = sum_s softmax_s(scale * q_t . k_s) v_s,       s <= t when causal

    (Vaswani et al., 2017, eq. 1; the tiling is Dao et al., "FlashAttention", 2022, algorithm 1, its gradient
    algorithm 4.)

    Parameters
    ----------
    causal : bool
        Attend to the past and the present only; False attends to the whole sequence.
    cu_seqlens : host integers [N + 1], optional
        Packed sequences attend within themselves only.
    chunk_size : int, optional
        The tile on the CPU, a multiple of 16; the CUDA kernels have tiles of their own.

    q, k, v, scale, layout, backend, out, the result and the errors are those of `gla`. The CUDA kernels take float16
    and bfloat16, and K and V up to 128; others raise `NotSupported`. Their blocks, in which a NaN in v reaches tokens
    before it, have up to 128 queries; one in k or v makes NaN of all gradients of k.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> q = k = v = np.random.default_rng(0).standard_normal((1, 2, 50, 8))
    >>> o = linattn_np.softmax_attention(q, k, v)
    >>> bool(np.allclose(o[:, :, 0], v[:, :, 0]))
    True
    """
    return call(
        SOFTMAX_ATTENTION,
        (q, k, v),
        causal=causal,
        scale=scale,
        cu_seqlens=cu_seqlens,
        layout=layout,
        mode=mode,
        chunk_size=chunk_size,
        backend=backend,
        out=out,
    )
