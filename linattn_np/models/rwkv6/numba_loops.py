"""What stands between two products, for B sequences of a token each, or for B tokens where nothing mixes them."""

import numpy as np
from numba import njit

LOOP = {"nogil": True, "cache": True, "fastmath": {"contract", "nsz", "arcp", "reassoc"}}


@njit(**LOOP)
def shift_mix(x, norm, maa, shift, slots, eps, mixed, xx, d):
    """x [B, D], norm [2, D], maa [n, D], shift [P, D]; mixed [n, B, D], xx and d [B, D]."""
    D = x.shape[1]
    for b in range(x.shape[0]):
        slot, total, squares = slots[b], np.float32(0), np.float32(0)
        for c in range(D):
            total += x[b, c]
        mean = total / np.float32(D)
        for c in range(D):
            squares += (x[b, c] - mean) ** 2
        scale = np.float32(1) / np.sqrt(squares / np.float32(D) + np.float32(eps))
        for c in range(D):
            new = (x[b, c] - mean) * scale * norm[0, c] + norm[1, c]
            xx[b, c] = new
            d[b, c] = shift[slot, c] - new
            shift[slot, c] = new
        for n in range(maa.shape[0]):
            for c in range(D):
                mixed[n, b, c] = xx[b, c] + d[b, c] * maa[n, c]


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
def recurrence(kvr, w, bonus, wkv, slots, o):
    """o = r^T (S + diag(u) k v^T), S <- diag(exp w) S + k v^T of every head; kvr [3, B, D], wkv [P, H, N, N]."""
    H, N = bonus.shape
    for b in range(w.shape[0]):
        for h in range(H):
            start, state = h * N, wkv[slots[b], h]
            k, v, r = (kvr[0, b, start : start + N], kvr[1, b, start : start + N], kvr[2, b, start : start + N])
            to = o[b, start : start + N]
            to[:] = 0
            for i in range(N):
                key, query, decay = k[i], r[i], np.exp(w[b, start + i])
                new = key * bonus[h, i]
                for j in range(N):
                    to[j] += query * (state[i, j] + new * v[j])
                    state[i, j] = decay * state[i, j] + key * v[j]


@njit(**LOOP)
def gated_norm(o, gate, norm, heads, eps):
    """o [B, D] becomes GroupNorm(o) silu(gate)."""
    B, D = o.shape
    N = D // heads
    for b in range(B):
        for h in range(heads):
            first, total, squares = h * N, np.float32(0), np.float32(0)
            for c in range(first, first + N):
                total += o[b, c]
            mean = total / np.float32(N)
            for c in range(first, first + N):
                squares += (o[b, c] - mean) ** 2
            scale = np.float32(1) / np.sqrt(squares / np.float32(N) + np.float32(eps))
            for c in range(first, first + N):
                value = (o[b, c] - mean) * scale * norm[0, c] + norm[1, c]
                opening = np.float32(0.5) * np.tanh(np.float32(0.5) * gate[b, c]) + np.float32(0.5)
                o[b, c] = value * gate[b, c] * opening


@njit(**LOOP)
def relu_squared(x):
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            positive = x[b, c] if x[b, c] > 0 or np.isnan(x[b, c]) else np.float32(0)
            x[b, c] = positive * positive


@njit(**LOOP)
def add_gated(x, gate, value):
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[b, c] += (np.float32(0.5) * np.tanh(np.float32(0.5) * gate[b, c]) + np.float32(0.5)) * value[b, c]
