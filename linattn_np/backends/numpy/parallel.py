"""The quadratic form: no states between chunks, every query is multiplied by every key before it.

    o_i = scale (q_i exp(b_i) h_0 + sum_j A_ij v_j),     A_ij = sum_k q_ik k_jk exp(g_{j+1,k} + ... + g_ik)

Queries are computed a block (a chunk of C tokens) after the other. The keys of all earlier blocks are decayed to the
present one by products of decays, so any gate is exact. Memory is one block of rows of A, never T x T.
"""

import numpy as np

from .by_token import is_finite
from .chunked import mend, put_bonus
from .chunking import Chunking
from .packing import Scratch, Segment
from .scores import Gates, gated_scores


def run(member, o):
    """Fills o [B, H, T, V], returns the final state [N, H, K, V]."""
    problem, chunking = member.problem, Chunking(member.problem)
    whole = Segment(chunking.table, chunking.size)
    q, k, v, g = (whole.pack(x, problem.compute_dtype) for x in (member.q, member.k, member.v, member.g))
    packed, final, accurate = np.empty(v.shape, v.dtype), member.initial_state(), True
    for (first, s), last in zip(chunking.begins.items(), chunking.ends):
        chunks = np.s_[:, :, first : last + 1]
        state = chunking.of_sequence(final, np.s_[:, :], s)
        accurate &= sequence(member, q[chunks], k[chunks], v[chunks], g[chunks], state, packed[chunks])
    whole.unpack_into(o, packed)
    if not (accurate and is_finite(packed, final)):
        mend(member, o, final)
    return final


def sequence(member, q, k, v, g, state, o):
    """One sequence of n blocks [B, H, n, C, ...]: fills o, replaces `state` by the final state; returns whether all
    decays are in range."""
    B, H, n, C, K = k.shape
    scratch = Scratch(k.dtype)
    keys, values = np.empty((B, H, n * C, K), k.dtype), v.reshape(B, H, n * C, -1)
    decayed, accurate = state.copy(), True  # h_0, decayed to the present block like the keys
    for i in range(n):
        decay = scratch("decay", g[:, :, i, 0].shape)
        block = q[:, :, i], k[:, :, i], Gates(g[:, :, i], scratch)
        qg, kg, A = gated_scores(*block, member.exclusive, decay, scratch)
        if member.u is not None:
            put_bonus(A, *block[:2], member.bonus(np.s_[:, :])[:, 0])
        past = slice(0, i * C)
        accurate &= not block[2].underflow(keys[:, :, past], decayed)
        scores = qg @ keys[:, :, past].swapaxes(-1, -2)
        o[:, :, i] = member.scale * (qg @ decayed + scores @ values[:, :, past] + A @ v[:, :, i])
        keys[:, :, past] *= decay[:, :, None]
        keys[:, :, i * C : (i + 1) * C] = kg
        decayed *= decay[..., None]
    state[:] = decayed + keys.swapaxes(-1, -2) @ values
    return accurate
