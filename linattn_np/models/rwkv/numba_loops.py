"""Numba's loops for RWKV models of all versions: the operations of a prompt or a step beside the recurrence.

A version adds loops for its two mixes and `step`, which computes one token of a few sequences in a single call. With
several calls per token, the overhead of Python and NumPy would be as long as reading the matrices in a 4-bit format.
"""

import numpy as np

from ...numba_cache import njit
from ..matrix_loops import multiply_at

LOOP = {
    "nogil": True,
    "error_model": "numpy",  # checks of divisors for 0 would prevent vectorisation
    "fastmath": {"contract", "nsz", "arcp", "reassoc"},
}
MOST = np.float32(7.90531110763549805)  # tanh of larger numbers rounds to 1


# -- elementwise ------------------------------------------------------------------------------------------------------
@njit(forceinline=True, **LOOP)
def tanh(x):
    """tanh by Eigen's rational function, within 6 units in the last place; it vectorises, which libm's does not."""
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
    """tanh of x [B, K], in place."""
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[b, c] = tanh(x[b, c])


@njit(**LOOP)
def tanh_parts(x, count):
    """tanh of x [B, count * R] as [count, B, R]."""
    to = np.empty((count, x.shape[0], x.shape[1] // count), np.float32)
    for n in range(count):
        for b in range(to.shape[1]):
            for c in range(to.shape[2]):
                to[n, b, c] = tanh(x[b, n * to.shape[2] + c])
    return to


@njit(**LOOP)
def add(x, y):
    """x [B, D] += y. Numba's own array addition takes seconds to compile, because of its check of shapes."""
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[b, c] += y[b, c]


@njit(**LOOP)
def relu_squared(x):
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            positive = x[b, c] if x[b, c] > 0 or np.isnan(x[b, c]) else np.float32(0)
            x[b, c] = positive * positive


# -- norms and mixes --------------------------------------------------------------------------------------------------
@njit(**LOOP)
def normalize(x, weight, bias, eps, to):
    """Writes the layer norm of x [D] to `to`."""
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
    """The mixes xx + d maa [n, B, D] for xx and d [B, D], maa [n, D]."""
    to = np.empty((maa.shape[0], *xx.shape), np.float32)
    for n in range(to.shape[0]):
        for b in range(to.shape[1]):
            for c in range(to.shape[2]):
                to[n, b, c] = xx[b, c] + d[b, c] * maa[n, c]
    return to


@njit(**LOOP)
def shift_mix(x, norm, eps, maa, shift, slots):
    """(mixes xx + d maa [n, B, D], xx, d) for x [B, D]: xx is the normed x, d = shift[slots] - xx.

    The rows `slots` of shift [P, D], the previous tokens' xx, are replaced by xx.
    """
    xx, d = layer_norm(x, norm, eps), np.empty_like(x)
    for b in range(x.shape[0]):
        last = shift[slots[b]]
        for c in range(x.shape[1]):
            d[b, c] = last[c] - xx[b, c]
            last[c] = xx[b, c]
    return mixed(xx, d, maa), xx, d


# -- products ---------------------------------------------------------------------------------------------------------
@njit(**LOOP)
def product(multiply, board, matrix, x):
    """x W^T for x [S, B, K].

    multiply : the address of the compiled loop that multiplies
    board : the table by which threads share the work
    matrix : the description of W, by `numba_layers.described`
    """
    format, bits, scales, rows = matrix
    y = np.empty((x.shape[0], x.shape[1], rows), np.float32)
    multiply_at(multiply, board, format, bits, scales, x, y)
    return y
