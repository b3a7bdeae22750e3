"""Numba's loops for RWKV models of all versions: what stands between the products of a prompt or of a step.

A version adds its two mixes, and its `step`: a token of a few sequences in one call, since what Python and NumPy take
between the loops of a token is as long as 4 bits of its matrices take to be read.
"""

import numpy as np

from ...numba_cache import njit
from ..matrix_loops import product_at

LOOP = {
    "nogil": True,
    "error_model": "numpy",  # a look for zeros at every division keeps a loop from vectors
    "fastmath": {"contract", "nsz", "arcp", "reassoc"},
}
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
def add(x, y):
    """x [B, D] += y. Numba's own sum of two arrays takes seconds to compile, for an error about their shapes."""
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[b, c] += y[b, c]


@njit(**LOOP)
def relu_squared(x):
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            positive = x[b, c] if x[b, c] > 0 or np.isnan(x[b, c]) else np.float32(0)
            x[b, c] = positive * positive


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


# -- products ----------------------------------------------------------------------------------------------------------
@njit(**LOOP)
def product(multiply, board, matrix, x):
    """x [S, B, K] W^T; `matrix` is what `numba_layers.described` says of it, `multiply` the address of a loop."""
    format, bits, scales, rows = matrix
    y = np.empty((x.shape[0], x.shape[1], rows), np.float32)
    product_at(multiply, board, format, bits, scales, x, y)
    return y
