"""Softmax attention: grouped query heads, caches of keys, windows, sinks."""

from ..declarations import SOFTMAX_ATTENTION
from ..public_function import public_function


@public_function(SOFTMAX_ATTENTION)  # gives the function its parameters, its body, and the text on what operators share
def softmax_attention():
    """Softmax attention in tiles with an online softmax: memory linear in T, the T x S matrix never exists.

        s_tj = scale * q_t . k_j,       of a softcap c:  c * tanh(s_tj / c)
        L_t = log(sum_j exp(s_tj)),     with sinks:  log(exp(sinks_h) + sum_j exp(s_tj))
        o_t = sum_j exp(s_tj - L_t) v_j

    The sums run over the keys j that query t sees. Its own place among the S keys is p = t + S - T, so that the last
    query is at the last key:

        j <= p when causal,       p - left <= j <= p + right with window=(left, right)

    A query that sees no key has o = 0 and L = -inf, or with sinks L = sinks_h. (Vaswani et al., 2017, eq. 1; the tiling
    is Dao et al., "FlashAttention", 2022, algorithm 1, its gradient algorithm 4; grouped heads are Ainslie et al.,
    "GQA", 2023; the softcap is Gemma 2's, the sinks are gpt-oss's.)

    Parameters
    ----------
    q : [B, H, T, K], k : [B, HK, S, K], v : [B, HK, S, V]
        H is a multiple of HK; query head h attends to the keys and values of head ``h // (H // HK)``. HK = 1 is
        multi-query attention. One query for each of B sequences against a cache of S keys is T = 1.
    causal : bool
        Attend to the past and the present only; False attends to the whole sequence.
    window : (int, int), optional
        How many keys before and behind its own place a query sees; -1 for no bound. Causal, right counts as 0.
    softcap : float, optional
        Bounds the scores between -softcap and softcap; 0 or None for no bound.
    sinks : [H], optional
        A logit a query head that takes its share of the weights and has no value. The dtype of q, or float32 beside
        half-precision arrays.
    return_lse : bool
        Return ``(o, L)``, L [B, H, T] in either layout, float32 (float64 beside float64 arrays). Results over parts of
        the keys are merged by it: o = sum_n exp(L_n - L) o_n with L = logaddexp of the L_n. `vjp`'s pullback takes L's
        gradient as its second argument.
    cu_seqlens : host integers [N + 1], optional
        Sequences packed into one row (B = 1) attend within themselves only.
    cu_seqlens_k : host integers [N + 1], optional
        The same of k and v, where a sequence's keys are not as many as its queries.
    dropout_p, block_table
        FlashAttention's; there is no dropout and no paged cache. Other values than 0 and None raise `NotSupported`.
    chunk_size : int, optional
        The tile on the CPU, a multiple of 16; the CUDA kernels have tiles of their own.

    mode : "auto" or "chunk"
        Both are the same.

    Returns
    -------
    o : [B, H, T, V], the dtype and memory order of q; or ``(o, L)``

    Notes
    -----
    Arrays are those of `gla`; gradients are those of q, k, v, and of `sinks` where they are given. On a GPU
    kernels on tensor cores take float16 and bfloat16 with K and V up to 128, plain ones the others. Their blocks, in
    which a NaN in v reaches tokens before it, have up to 128 queries; one in k or v makes NaN of all gradients of k.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, (k, v) = rng.standard_normal((1, 8, 50, 16)), rng.standard_normal((2, 1, 2, 50, 16))
    >>> o = linattn_np.softmax_attention(q, k, v)
    >>> last = linattn_np.softmax_attention(q[:, :, -1:], k, v)             # a token against its cache
    >>> bool(np.allclose(o[:, :, -1:], last))
    True
    >>> halves = [
    ...     linattn_np.softmax_attention(q, k[:, :, n : n + 25], v[:, :, n : n + 25], causal=False, return_lse=True)
    ...     for n in (0, 25)
    ... ]
    >>> lse = np.logaddexp(*(part for _, part in halves))[..., None]
    >>> merged = sum(np.exp(part[..., None] - lse) * o for o, part in halves)
    >>> bool(np.allclose(merged, linattn_np.softmax_attention(q, k, v, causal=False)))
    True
    """
