"""The chunked form, stage by stage: five public building blocks that any backend computes.

With chunks of C tokens, b the inclusive prefix sum of the gate within the chunk and e its exclusive suffix sum:

    1  chunk_cumsum   b_i = g_1 + ... + g_i                     e_j = g_{j+1} + ... + g_C
    2  gated_qk       qg_i = q_i exp(d_i)                       kg_j = k_j exp(e_j)
    3  inter_chunk    h_{c+1} = diag(exp b_C) h_c + kg_c^T v_c
    4  intra_chunk    A_ij = sum_k q_ik k_jk exp(g_{j+1,k} + ... + g_ik)        j <= i, within the chunk
    5  combine        o = scale * (qg h_c + A v)

GLA reads the state after the write: d_i = b_i. RWKV-6 reads before it: d_i = b_{i-1}, the sum in A ends at i - 1 and
A_ii = sum_k q_ik u_k k_ik. (Yang et al., 2024, section 4; Peng et al., 2024, eq. 18-19.)

Every exponent is a sum of gates, never a difference of two cumulated ones, so 0, -inf and -1e30 are ordinary values.
Gates are natural logs. Chunks do not cross the sequences of `cu_seqlens`; NC counts all chunks. Stage results are
float32, float64 beside float64 inputs. `layout`, `backend` and errors are as in `linattn_np.gla`.
"""

from __future__ import annotations

from typing import Literal, overload

from numpy.typing import DTypeLike

from .contract import CHUNK
from .conversions import in_kind, to_caller
from .declarations import CHUNK_CUMSUM, COMBINE, GATED_QK, INTER_CHUNK, INTRA_CHUNK, INTRA_CHUNK_BONUS
from .dispatch import backend_module, choose
from .typing import Array, Backend, Integers, Layout, Result, State


def run_stage(op, arrays, backend, **arguments):
    problem = op.bind(arrays, **arguments)
    return problem, backend_module(choose(problem, backend)).run(problem)


def chunk_cumsum(
    g: Array,
    *,
    chunk_size: int = CHUNK,
    cu_seqlens: Integers | None = None,
    layout: Layout = "bhtd",
    backend: Backend = "auto",
) -> tuple[Result, Result]:
    """Stage 1: (b, e) [B, H, T, K], the gate's inclusive prefix and exclusive suffix sums within each chunk.

        b_i = g_1 + ... + g_i,      e_j = g_{j+1} + ... + g_C

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> b, e = linattn_np.stages.chunk_cumsum(-np.ones((1, 1, 3, 1)), chunk_size=16)
    >>> b.ravel(), e.ravel()
    (array([-1., -2., -3.]), array([-2., -1.,  0.]))
    """
    problem, (b, e) = run_stage(
        CHUNK_CUMSUM, (g,), backend, chunk_size=chunk_size, cu_seqlens=cu_seqlens, layout=layout
    )
    return in_kind(problem, to_caller(problem, b, "B H T K")), in_kind(problem, to_caller(problem, e, "B H T K"))


def gated_qk(
    q: Array,
    k: Array,
    b: Array,
    e: Array,
    *,
    exclusive: bool = False,
    chunk_size: int = CHUNK,
    cu_seqlens: Integers | None = None,
    layout: Layout = "bhtd",
    backend: Backend = "auto",
) -> tuple[Result, Result]:
    """Stage 2: (qg, kg) [B, H, T, K], the query decayed from the chunk's start and the key to the chunk's end.

        qg_i = q_i exp(b_i), or q_i exp(b_{i-1}) when `exclusive` (RWKV-6);     kg_j = k_j exp(e_j)

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> q = k = np.ones((1, 1, 2, 1)); g = np.full((1, 1, 2, 1), np.log(0.5))
    >>> qg, kg = linattn_np.stages.gated_qk(q, k, *linattn_np.stages.chunk_cumsum(g))
    >>> qg.ravel(), kg.ravel()
    (array([0.5 , 0.25]), array([0.5, 1. ]))
    """
    problem, (qg, kg) = run_stage(
        GATED_QK,
        (q, k, b, e),
        backend,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
        layout=layout,
        exclusive=GATED_QK.flag("exclusive", exclusive),
    )
    return in_kind(problem, to_caller(problem, qg, "B H T K")), in_kind(problem, to_caller(problem, kg, "B H T K"))


@overload
def inter_chunk(
    kg: Array,
    v: Array,
    b: Array,
    *,
    output_final_state: Literal[False] = False,
    initial_state: Array | None = None,
    state_dtype: DTypeLike | None = None,
    chunk_size: int = CHUNK,
    cu_seqlens: Integers | None = None,
    layout: Layout = "bhtd",
    backend: Backend = "auto",
) -> Result: ...


@overload
def inter_chunk(
    kg: Array,
    v: Array,
    b: Array,
    *,
    output_final_state: Literal[True],
    initial_state: Array | None = None,
    state_dtype: DTypeLike | None = None,
    chunk_size: int = CHUNK,
    cu_seqlens: Integers | None = None,
    layout: Layout = "bhtd",
    backend: Backend = "auto",
) -> tuple[Result, State]: ...


def inter_chunk(
    kg,
    v,
    b,
    *,
    initial_state=None,
    output_final_state=False,
    state_dtype=None,
    chunk_size=CHUNK,
    cu_seqlens=None,
    layout="bhtd",
    backend="auto",
):
    """Stage 3: h [B, H, NC, K, V], the state before every chunk; with `output_final_state` (h, [N, H, K, V]).

        h_{c+1} = diag(exp b_C) h_c + kg_c^T v_c

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> kg = v = np.ones((1, 1, 32, 1)); b = np.zeros((1, 1, 32, 1))
    >>> linattn_np.stages.inter_chunk(kg, v, b, chunk_size=16).ravel()
    array([ 0., 16.])
    """
    problem, (h, final_state) = run_stage(
        INTER_CHUNK,
        (kg, v, b),
        backend,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_dtype=state_dtype,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
        layout=layout,
    )
    h = in_kind(problem, h)
    return (h, in_kind(problem, final_state[0])) if output_final_state else h


def intra_chunk(
    q: Array,
    k: Array,
    g: Array,
    *,
    u: Array | None = None,
    chunk_size: int = CHUNK,
    cu_seqlens: Integers | None = None,
    layout: Layout = "bhtd",
    backend: Backend = "auto",
) -> Result:
    """Stage 4: A [B, H, T, C], the weight of the chunk's j-th token on token i; 0 above the diagonal.

        A_ij = sum_k q_ik k_jk exp(g_{j+1,k} + ... + g_ik),     j <= i

    With `u` [H, K] RWKV-6's form: the sum ends at i - 1 and A_ii = sum_k q_ik u_k k_ik. Exact for every gate: blocks
    of 16 x 16 tokens off the diagonal are products at a reference point between the two, so that no exponent is
    positive for g <= 0; those on it multiply the decays one by one.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> q = k = np.ones((1, 1, 3, 1)); g = np.full((1, 1, 3, 1), np.log(0.5))
    >>> linattn_np.stages.intra_chunk(q, k, g, chunk_size=16)[0, 0, :, :3]
    array([[1.  , 0.  , 0.  ],
           [0.5 , 1.  , 0.  ],
           [0.25, 0.5 , 1.  ]])
    """
    op, arrays = (INTRA_CHUNK, [q, k, g]) if u is None else (INTRA_CHUNK_BONUS, [q, k, g, u])
    problem, A = run_stage(op, arrays, backend, chunk_size=chunk_size, cu_seqlens=cu_seqlens, layout=layout)
    return in_kind(problem, to_caller(problem, A, "B H T C"))


def combine(
    qg: Array,
    h: Array,
    A: Array,
    v: Array,
    *,
    scale: float | None = None,
    chunk_size: int = CHUNK,
    cu_seqlens: Integers | None = None,
    layout: Layout = "bhtd",
    backend: Backend = "auto",
    out: Array | None = None,
) -> Result:
    """Stage 5: o [B, H, T, V], what the past chunks and the present one give.

        o = scale * (qg h_c + A v)

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, g = rng.standard_normal((4, 1, 1, 40, 8))
    >>> g = -np.exp(g)
    >>> b, e = linattn_np.stages.chunk_cumsum(g, chunk_size=16)
    >>> qg, kg = linattn_np.stages.gated_qk(q, k, b, e, chunk_size=16)
    >>> h = linattn_np.stages.inter_chunk(kg, v, b, chunk_size=16)
    >>> A = linattn_np.stages.intra_chunk(q, k, g, chunk_size=16)
    >>> o = linattn_np.stages.combine(qg, h, A, v, chunk_size=16)
    >>> bool(np.allclose(o, linattn_np.gla(q, k, v, g)))
    True
    """
    problem, o = run_stage(
        COMBINE,
        (qg, h, A, v),
        backend,
        scale=scale,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
        layout=layout,
        out=out,
    )
    return out if out is not None else in_kind(problem, to_caller(problem, o, "B H T V"))
