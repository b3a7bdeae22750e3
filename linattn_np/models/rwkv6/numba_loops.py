"""Numba's loops for RWKV-6: a step of a few sequences in one call; and, for prompts, what is computed between the
products with weights, which are computed elsewhere.

B sequences of a step or tokens of a prompt, D channels, H heads of N, P rows of a state. `rwkv.numba_loops` says what
callers guarantee. `w` holds log decays. xx is the normed x, and d = (the previous token's xx) - xx.
"""

import numpy as np

from ...numba_cache import njit
from ..rwkv import numba_loops as loops

# The vectors of a layer that `step` takes, {name in `weights.LAYER`: how many of D numbers}: they are the rows of its
# argument `vectors`, in this order, FIRST.name ... END.name - 1.
VECTORS = {"ln1": 2, "ln2": 2, "ln_x": 2, "maa_x": 1, "maa": 5, "decay": 1, "bonus": 1, "ffn_maa": 2}
FIRST, END = loops.rows_of_vectors(VECTORS)
# The matrices, and the index of each in the argument `matrices`.
MATRICES = tuple("maa_down maa_up kvrg decay_down decay_up output ffn_key ffn_receptance ffn_value".split())
INDEX = loops.indices(MATRICES)


@njit(**loops.LOOP_OPTIONS)
def add_gated(x, gate, value):
    """x [B, D] += sigmoid(gate) value."""
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[b, c] += loops.sigmoid(gate[b, c]) * value[b, c]


@njit(**loops.LOOP_OPTIONS)
def data_mix(m, maa, xx, d):
    """m [5, B, D] becomes xx + d (maa + m)."""
    for n in range(m.shape[0]):
        for b in range(m.shape[1]):
            for c in range(m.shape[2]):
                m[n, b, c] = xx[b, c] + d[b, c] * (maa[n, c] + m[n, b, c])


@njit(**loops.LOOP_OPTIONS)
def log_decay(w, base):
    """w [B, D] becomes -exp(base + w)."""
    for b in range(w.shape[0]):
        for c in range(w.shape[1]):
            w[b, c] = -np.exp(base[c] + w[b, c])


@njit(**loops.LOOP_OPTIONS)
def recurrence(kvr, w, bonus, wkv, slots):
    """o = r^T (S + diag(bonus) k v^T), S <- diag(exp w) S + k v^T of every head; kvr [3, B, D].

    S is the row slots[b] of wkv [P, H, N (keys), N (values)], and is updated in place.
    """
    o = np.zeros_like(w)
    H, N = wkv.shape[1:3]
    for b in range(w.shape[0]):
        for h in range(H):
            start, state = h * N, wkv[slots[b], h]
            k, v, r = (kvr[0, b, start : start + N], kvr[1, b, start : start + N], kvr[2, b, start : start + N])
            out = o[b, start : start + N]
            for i in range(N):
                key, query, decay = k[i], r[i], np.exp(w[b, start + i])
                bonus_key = key * bonus[start + i]
                for j in range(N):
                    out[j] += query * (state[i, j] + bonus_key * v[j])
                    state[i, j] = decay * state[i, j] + key * v[j]
    return o


@njit(**loops.LOOP_OPTIONS)
def gated_norm(o, gate, norm, heads, eps):
    """o [B, D] becomes GroupNorm(o) silu(gate)."""
    B, D = o.shape
    N = D // heads
    for b in range(B):
        for h in range(heads):
            head = slice(h * N, (h + 1) * N)
            loops.normalize(o[b, head], norm[0, head], norm[1, head], eps, o[b, head])
        for c in range(D):
            o[b, c] *= gate[b, c] * loops.sigmoid(gate[b, c])


@njit(**loops.LOOP_OPTIONS)
def time_mix(multiply, board, matrices, vectors, eps, x, shift, wkv, slots):
    """Adds the time mix of one layer to x, as `mixes.time_mix` does, and updates the state. Arguments: see `step`."""
    mixed_x, xx, d = loops.shift_mix(
        x, vectors[FIRST.ln1 : END.ln1], eps[0], vectors[FIRST.maa_x : END.maa_x], shift, slots
    )
    low = loops.product(multiply, board, matrices[INDEX.maa_down], mixed_x)
    mixed = loops.product(multiply, board, matrices[INDEX.maa_up], loops.tanh_of_parts(low[0], 5))
    data_mix(mixed, vectors[FIRST.maa : END.maa], xx, d)  # w k v r g
    y = loops.products(multiply, board, (matrices[INDEX.kvrg], matrices[INDEX.decay_down]), (mixed[1:], mixed[:1]))
    kvrg, low = y[0], y[1]
    loops.tanh_in_place(low[0])
    w = loops.product(multiply, board, matrices[INDEX.decay_up], low)[0]
    log_decay(w, vectors[FIRST.decay])
    o = recurrence(kvrg[:3], w, vectors[FIRST.bonus], wkv, slots)
    gated_norm(o, kvrg[3], vectors[FIRST.ln_x : END.ln_x], wkv.shape[1], eps[1])
    loops.add(x, loops.product(multiply, board, matrices[INDEX.output], o.reshape(1, *o.shape))[0])


@njit(**loops.LOOP_OPTIONS)
def channel_mix(multiply, board, matrices, vectors, eps, x, shift, slots):
    """Adds the channel mix of one layer to x; updates `shift`."""
    mixed, _, _ = loops.shift_mix(
        x, vectors[FIRST.ln2 : END.ln2], eps[0], vectors[FIRST.ffn_maa : END.ffn_maa], shift, slots
    )
    y = loops.products(
        multiply, board, (matrices[INDEX.ffn_key], matrices[INDEX.ffn_receptance]), (mixed[:1], mixed[1:])
    )
    k, gate = y[0], y[1]
    loops.relu_squared(k[0])
    add_gated(x, gate[0], loops.product(multiply, board, matrices[INDEX.ffn_value], k)[0])


@njit(**loops.LOOP_OPTIONS)
def step(multiply, board, matrices, head, vectors, norms, eps, x, att_shift, wkv, ffn_shift, slots):
    """The logits [B, V] of x [B, D], a token's embedding for each of B sequences. The state's arrays are updated.

    multiply : the address of the compiled loop that multiplies; board : the array by which threads share its work
    matrices, head : int64 [L, MATRICES, 4] and [4], of each matrix the code of its format, the addresses of its bits
        and scales, and its rows
    vectors, norms : [L, sum of VECTORS, D] and [4, D], ln0's and ln_out's weight and bias
    eps : of the layer norms, and of the group norm
    att_shift, wkv, ffn_shift : the state, as in `rwkv.state.State`, for P rows
    slots : [B], each sequence's row of the state
    """
    x = loops.layer_norm(x, norms[:2], eps[0])
    for layer in range(matrices.shape[0]):
        layer_matrices, layer_vectors = matrices[layer], vectors[layer]
        time_mix(multiply, board, layer_matrices, layer_vectors, eps, x, att_shift[layer], wkv[layer], slots)
        channel_mix(multiply, board, layer_matrices, layer_vectors, eps, x, ffn_shift[layer], slots)
    x = loops.layer_norm(x, norms[2:], eps[0])
    return loops.product(multiply, board, head, x.reshape(1, *x.shape))[0]
