"""The quadratic form: no states between chunks, every query is multiplied by every key before it.

    o_i = scale (q_i exp(b_i) h_0 + sum_{j<=i} A_ij v_j),     A_ij = sum_k q_ik k_jk exp(g_{j+1,k} + ... + g_ik)

b_i is the sum of log gates from the sequence's start through token i, h_0 the initial state. RWKV-6
(`member.exclusive`) reads the state before it writes: both sums of gates end at token i - 1, and A_ii has the bonus u,
sum_k q_ik u_k k_ik.

Queries are computed a block (a chunk of C tokens) after the other. The keys of all earlier blocks are decayed to the
start of the present one by products of decays, never by quotients. If a decay underflows and what it multiplies is so
large that this matters, or if a result is not finite, all is computed again token by token (`mend`). Memory is one
block of rows of A, never T x T, and a copy of the keys.

From the other files:
    Segment       neighbouring chunks: `pack` cuts x [B, H, T, ...] into chunks [B, H, n, C, ...]; `unpack_into` is the
                  opposite
    Chunking      `begins`: {first chunk of a sequence: sequence}; `ends`: {last chunk: sequence}, in the same order;
                  `of_rows`: the states of rows by batch entry and sequence, a view [B, sequences, H, K, V]
    Gates         the log gates of a block; `underflow` tells whether a decay underflows and that matters
    gated_scores  (q_i exp(gates of the block through i), k_j exp(gates of the block after j), A of the block); also
                  writes the product of the block's decays to its argument `decay`
    put_bonus     sets A's diagonal to sum_k q_ik u_k k_ik
    Scratch       `scratch(name, shape)`: an array with undefined numbers, in memory that a later call reuses
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
        state = chunking.of_rows(final, np.s_[:, :])[:, s]
        accurate &= sequence(member, q[chunks], k[chunks], v[chunks], g[chunks], state, packed[chunks])
    whole.unpack_into(o, packed)
    if not (accurate and is_finite(packed, final)):
        mend(member, o, final)
    return final


def sequence(member, q, k, v, g, state, o):
    """One sequence of n blocks [B, H, n, C, ...]: fills o, replaces `state` by the final state; returns whether no
    underflow of a decay matters."""
    B, H, n, C, K = k.shape
    scratch = Scratch(k.dtype)
    keys, values = np.empty((B, H, n * C, K), k.dtype), v.reshape(B, H, n * C, -1)
    initial, accurate = state.copy(), True  # h_0, decayed to the present block like the keys
    for i in range(n):
        gates, decay = Gates(g[:, :, i], scratch), scratch("decay", g[:, :, i, 0].shape)
        qg, kg, A = gated_scores(q[:, :, i], k[:, :, i], gates, member.exclusive, decay, scratch)  # fills decay
        if member.u is not None:
            put_bonus(A, q[:, :, i], k[:, :, i], member.bonus(np.s_[:, :])[:, 0])  # u of all rows, [H, 1, K]
        earlier_keys, earlier_values = keys[:, :, : i * C], values[:, :, : i * C]
        accurate &= not gates.underflow(earlier_keys, initial)
        scores = qg @ earlier_keys.swapaxes(-1, -2)
        o[:, :, i] = member.scale * (qg @ initial + scores @ earlier_values + A @ v[:, :, i])
        earlier_keys *= decay[:, :, None]
        keys[:, :, i * C : (i + 1) * C] = kg
        initial *= decay[..., None]
    state[:] = initial + keys.swapaxes(-1, -2) @ values
    return accurate
