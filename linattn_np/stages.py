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

from .declarations import CHUNK_CUMSUM, COMBINE, GATED_QK, INTER_CHUNK, INTRA_CHUNK
from .dispatch import call_stage
from .public_function import public_function


@public_function(CHUNK_CUMSUM, call_stage)  # gives the function its parameters, its body, and the shared text
def chunk_cumsum():
    """Stage 1: (b, e) [B, H, T, K], the gate's inclusive prefix and exclusive suffix sums within each chunk.

        b_i = g_1 + ... + g_i,      e_j = g_{j+1} + ... + g_C

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> b, e = linattn_np.stages.chunk_cumsum(-np.ones((1, 1, 3, 1)), chunk_size=16)
    >>> b.ravel(), e.ravel()
    (array([-1., -2., -3.]), array([-2., -1.,  0.]))
    """


@public_function(GATED_QK, call_stage)
def gated_qk():
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


@public_function(INTER_CHUNK, call_stage)
def inter_chunk():
    """Stage 3: h [B, H, NC, K, V], the state before every chunk; with `output_final_state` (h, [N, H, K, V]).

        h_{c+1} = diag(exp b_C) h_c + kg_c^T v_c

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> kg = v = np.ones((1, 1, 32, 1)); b = np.zeros((1, 1, 32, 1))
    >>> linattn_np.stages.inter_chunk(kg, v, b, chunk_size=16).ravel()
    array([ 0., 16.])
    """


@public_function(INTRA_CHUNK, call_stage)
def intra_chunk():
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


@public_function(COMBINE, call_stage)
def combine():
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
