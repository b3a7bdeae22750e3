"""Numba's loops for RWKV-6: a step of a few sequences in one call, and what stands between a prompt's products.

What Python and NumPy take between the loops of a token is as long as 4 bits of its matrices take to be read.
"""

import numpy as np

from ...numba_cache import njit
from ..matrix_loops import product_at

LOOP = {
    "nogil": True,
    "error_model": "numpy",  # a look for zeros at every division keeps a loop from vectors
    "fastmath": {"contract", "nsz", "arcp", "reassoc"},
}

# What a step takes of a layer, in this order: vectors of D numbers, and how many of them there are; and matrices.
VECTORS = {"ln1": 2, "ln2": 2, "ln_x": 2, "maa_x": 1, "maa": 5, "decay": 1, "bonus": 1, "ffn_maa": 2}
LN1, LN2, LN_X, MAA_X, MAA, DECAY, BONUS, FFN_MAA = (sum([*VECTORS.values()][:n]) for n in range(len(VECTORS)))
MATRICES = tuple("maa_down maa_up kvrg decay_down decay_up output ffn_key ffn_receptance ffn_value".split())
MAA_DOWN, MAA_UP, KVRG, DECAY_DOWN, DECAY_UP, OUTPUT, FFN_KEY, FFN_RECEPTANCE, FFN_VALUE = range(len(MATRICES))
MOST = np.float32(7.90531110763549805)  # tanh of more is 1


# -- elementwise ------------------------------------------------------------------------------------------------------
@njit(forceinline=True, **LOOP)
def tanh(x):
    """Within 6 units in the last place, and in vectors, as libm's is not: Eigen's rational function."""
    s = x * x
    p = np.float32(2.00018790482477e-13) - np.float32(2.76076847742355e-16) * s
    p = np.float32(-8.60467152213735e-11) + p * s
    p = np.float32(5.12229709037114e-08) + p * s
    p = np.float32(1.48572235717979e-05) + p * s
    p = np.float32(6.37261928875436e-04) + p * s
    p = np.float32(4.89352455891786e-03) + p * s
    q = np.float32(1.18534705686654e-04) + np.float32(1.19825839466702e-06) * s
    q = np.float32(2.26843463243900e-03) + q * s
    q = np.float32(4.89352518554385e-03) + q * s
    one = np.float32(1)
    return one if x > MOST else -one if x < -MOST else x * p / q


@njit(forceinline=True, **LOOP)
def sigmoid(x):
    return np.float32(0.5) * tanh(np.float32(0.5) * x) + np.float32(0.5)


@njit(**LOOP)
def tanh_of(x):
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[b, c] = tanh(x[b, c])


@njit(**LOOP)
def tanh_parts(x, count):
    """tanh of x [B, count R], as [count, B, R]."""
    to = np.empty((count, x.shape[0], x.shape[1] // count), np.float32)
    for n in range(count):
        for b in range(to.shape[1]):
            for c in range(to.shape[2]):
                to[n, b, c] = tanh(x[b, n * to.shape[2] + c])
    return to


@njit(**LOOP)
def relu_squared(x):
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            positive = x[b, c] if x[b, c] > 0 or np.isnan(x[b, c]) else np.float32(0)
            x[b, c] = positive * positive


@njit(**LOOP)
def add(x, value):
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[b, c] += value[b, c]


@njit(**LOOP)
def add_gated(x, gate, value):
    """x + sigmoid(gate) value."""
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[b, c] += sigmoid(gate[b, c]) * value[b, c]


# -- the mixes' pieces ------------------------------------------------------------------------------------------------
@njit(**LOOP)
def normalize(x, weight, bias, eps, to):
    """A norm of x [D]."""
    D, total, squares = x.shape[0], np.float32(0), np.float32(0)
    for c in range(D):
        total += x[c]
    mean = total / np.float32(D)
    for c in range(D):
        squares += (x[c] - mean) ** 2
    scale = np.float32(1) / np.sqrt(squares / np.float32(D) + np.float32(eps))
    for c in range(D):
        to[c] = (x[c] - mean) * scale * weight[c] + bias[c]


@njit(**LOOP)
def layer_norm(x, norm, eps):
    to = np.empty_like(x)
    for b in range(x.shape[0]):
        normalize(x[b], norm[0], norm[1], eps, to[b])
    return to


@njit(**LOOP)
def mixed(xx, d, maa):
    """xx + d maa [n, B, D] for xx and d [B, D], maa [n, D]."""
    to = np.empty((maa.shape[0], *xx.shape), np.float32)
    for n in range(to.shape[0]):
        for b in range(to.shape[1]):
            for c in range(to.shape[2]):
                to[n, b, c] = xx[b, c] + d[b, c] * maa[n, c]
    return to


@njit(**LOOP)
def shift_mix(x, norm, eps, maa, shift, slots):
    """xx + d maa [n, B, D], xx and d, for x [B, D], maa [n, D], shift [P, D]."""
    xx, d = layer_norm(x, norm, eps), np.empty_like(x)
    for b in range(x.shape[0]):
        last = shift[slots[b]]
        for c in range(x.shape[1]):
            d[b, c] = last[c] - xx[b, c]
            last[c] = xx[b, c]
    return mixed(xx, d, maa), xx, d


@njit(**LOOP)
def data_mix(m, maa, xx, d):
    """m [5, B, D] becomes xx + d (maa + m)."""
    for n in range(m.shape[0]):
        for b in range(m.shape[1]):
            for c in range(m.shape[2]):
                m[n, b, c] = xx[b, c] + d[b, c] * (maa[n, c] + m[n, b, c])


@njit(**LOOP)
def log_decay(w, base):
    for b in range(w.shape[0]):
        for c in range(w.shape[1]):
            w[b, c] = -np.exp(base[c] + w[b, c])


@njit(**LOOP)
def recurrence(kvr, w, bonus, wkv, slots):
    """o = r^T (S + diag(u) k v^T), S <- diag(exp w) S + k v^T of every head; kvr [3, B, D], wkv [P, H, N, N]."""
    o = np.zeros_like(w)
    H, N = wkv.shape[1:3]
    for b in range(w.shape[0]):
        for h in range(H):
            start, state = h * N, wkv[slots[b], h]
            k, v, r = (kvr[0, b, start : start + N], kvr[1, b, start : start + N], kvr[2, b, start : start + N])
            to = o[b, start : start + N]
            for i in range(N):
                key, query, decay = k[i], r[i], np.exp(w[b, start + i])
                new = key * bonus[start + i]
                for j in range(N):
                    to[j] += query * (state[i, j] + new * v[j])
                    state[i, j] = decay * state[i, j] + key * v[j]
    return o


@njit(**LOOP)
def gated_norm(o, gate, norm, heads, eps):
    """o [B, D] becomes GroupNorm(o) silu(gate)."""
    B, D = o.shape
    N = D // heads
    for b in range(B):
        for h in range(heads):
            head = slice(h * N, (h + 1) * N)
            normalize(o[b, head], norm[0, head], norm[1, head], eps, o[b, head])
        for c in range(D):
            o[b, c] *= gate[b, c] * sigmoid(gate[b, c])


# -- a step -----------------------------------------------------------------------------------------------------------
@njit(**LOOP)
def product(multiply, board, matrix, x):
    """x [S, B, K] W^T; `matrix` is what `numba_layers.described` says of it, `multiply` the address of a loop."""
    format, bits, scales, rows = matrix
    y = np.empty((x.shape[0], x.shape[1], rows), np.float32)
    product_at(multiply, board, format, bits, scales, x, y)
    return y


@njit(**LOOP)
def time_mix(multiply, board, matrices, vectors, eps, x, shift, wkv, slots):
    x_x, xx, d = shift_mix(x, vectors[LN1 : LN1 + 2], eps[0], vectors[MAA_X : MAA_X + 1], shift, slots)
    low = product(multiply, board, matrices[MAA_DOWN], x_x)
    x_wkvrg = product(multiply, board, matrices[MAA_UP], tanh_parts(low[0], 5))
    data_mix(x_wkvrg, vectors[MAA : MAA + 5], xx, d)
    kvrg = product(multiply, board, matrices[KVRG], x_wkvrg[1:])
    low = product(multiply, board, matrices[DECAY_DOWN], x_wkvrg[:1])
    tanh_of(low[0])
    w = product(multiply, board, matrices[DECAY_UP], low)[0]
    log_decay(w, vectors[DECAY])
    o = recurrence(kvrg[:3], w, vectors[BONUS], wkv, slots)
    gated_norm(o, kvrg[3], vectors[LN_X : LN_X + 2], wkv.shape[1], eps[1])
    add(x, product(multiply, board, matrices[OUTPUT], o.reshape(1, *o.shape))[0])


@njit(**LOOP)
def channel_mix(multiply, board, matrices, vectors, eps, x, shift, slots):
    x_kr, _, _ = shift_mix(x, vectors[LN2 : LN2 + 2], eps[0], vectors[FFN_MAA : FFN_MAA + 2], shift, slots)
    k = product(multiply, board, matrices[FFN_KEY], x_kr[:1])
    relu_squared(k[0])
    gate = product(multiply, board, matrices[FFN_RECEPTANCE], x_kr[1:])
    add_gated(x, gate[0], product(multiply, board, matrices[FFN_VALUE], k)[0])


@njit(**LOOP)
def step(multiply, board, matrices, head, vectors, norms, eps, x, att_shift, wkv, ffn_shift, slots):
    """The logits [B, V] of x [B, D], a token's embedding for each of B sequences; `slots` has their rows of the state.

    matrices : int64 [L, MATRICES, 4], and head [4]
    vectors : [L, sum of VECTORS, D], and norms [4, D], the first and the last
    eps : of the layer norms, and of the group norm
    """
    x = layer_norm(x, norms[:2], eps[0])
    for layer in range(matrices.shape[0]):
        its, vector = matrices[layer], vectors[layer]
        time_mix(multiply, board, its, vector, eps, x, att_shift[layer], wkv[layer], slots)
        channel_mix(multiply, board, its, vector, eps, x, ffn_shift[layer], slots)
    x = layer_norm(x, norms[2:], eps[0])
    return product(multiply, board, head, x.reshape(1, *x.shape))[0]
