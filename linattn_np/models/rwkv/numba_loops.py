"""Numba's loops for RWKV models of all versions: the operations of a prompt or a step beside the recurrence.

A version adds loops for its two mixes and `step`, which computes one token of a few sequences in a single call. With
several calls per token, the overhead of Python and NumPy would be as long as reading the matrices in a 4-bit format.

Arrays are float32 and in C order, which callers guarantee: Numba compiles a loop again for other dtypes and layouts.
B sequences or tokens, D channels, n mixes.
"""

from collections import namedtuple
from itertools import accumulate

import numpy as np

from ...backends.numpy.numba_loops import LOOP as LOOP_OPTIONS
from ...backends.numpy.numba_loops import tanh
from ...numba_cache import njit
from ..matrix_loops import multiply_at


# -- a version's tables, as constants of its loops ---------------------------------------------------------------------
def rows_of_vectors(counts):
    """(the first row, the last row + 1) of each vector, as namedtuples, for `counts` {name: its number of rows}."""
    ends = [*accumulate(counts.values())]
    rows = namedtuple("Rows", counts)
    return rows(*[0, *ends[:-1]]), rows(*ends)


def indices(names):
    """The index of each name, as a namedtuple."""
    return namedtuple("Indices", names)(*range(len(names)))


# -- elementwise ------------------------------------------------------------------------------------------------------
@njit(forceinline=True, **LOOP_OPTIONS)
def sigmoid(x):
    """1 / (1 + exp(-x)), as (1 + tanh(x / 2)) / 2."""
    return np.float32(0.5) * tanh(np.float32(0.5) * x) + np.float32(0.5)


@njit(**LOOP_OPTIONS)
def tanh_in_place(x):
    """tanh of x [B, K], in place."""
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[b, c] = tanh(x[b, c])


@njit(**LOOP_OPTIONS)
def tanh_of_parts(x, count):
    """tanh of x [B, count * R], as a new array [count, B, R]: R is the rank of `count` low-rank products."""
    out = np.empty((count, x.shape[0], x.shape[1] // count), np.float32)
    for n in range(count):
        for b in range(out.shape[1]):
            for c in range(out.shape[2]):
                out[n, b, c] = tanh(x[b, n * out.shape[2] + c])
    return out


@njit(**LOOP_OPTIONS)
def add(x, y):
    """x [B, D] += y. Numba's own array addition takes seconds to compile, because of its check of shapes."""
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[b, c] += y[b, c]


@njit(**LOOP_OPTIONS)
def relu_squared(x):
    """x [B, D] becomes relu(x)^2; a NaN stays."""
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            positive = x[b, c] if x[b, c] > 0 or np.isnan(x[b, c]) else np.float32(0)
            x[b, c] = positive * positive


# -- norms and mixes --------------------------------------------------------------------------------------------------
@njit(**LOOP_OPTIONS)
def normalize(x, weight, bias, eps, out):
    """Writes the layer norm of x [D] to `out`."""
    D, total, squares = x.shape[0], np.float32(0), np.float32(0)
    for c in range(D):
        total += x[c]
    mean = total / np.float32(D)
    for c in range(D):
        squares += (x[c] - mean) ** 2
    scale = np.float32(1) / np.sqrt(squares / np.float32(D) + np.float32(eps))
    for c in range(D):
        out[c] = (x[c] - mean) * scale * weight[c] + bias[c]


@njit(**LOOP_OPTIONS)
def layer_norm(x, norm, eps):
    """The layer norm of x [B, D]; `norm` [2, D] is its weight and its bias."""
    out = np.empty_like(x)
    for b in range(x.shape[0]):
        normalize(x[b], norm[0], norm[1], eps, out[b])
    return out


@njit(**LOOP_OPTIONS)
def mixed(xx, d, maa):
    """The mixes xx + d maa [n, B, D] for xx and d [B, D], maa [n, D]."""
    out = np.empty((maa.shape[0], *xx.shape), np.float32)
    for n in range(out.shape[0]):
        for b in range(out.shape[1]):
            for c in range(out.shape[2]):
                out[n, b, c] = xx[b, c] + d[b, c] * maa[n, c]
    return out


@njit(**LOOP_OPTIONS)
def shift_mix(x, norm, eps, maa, shift, slots):
    """(mixes xx + d maa [n, B, D], xx, d) for x [B, D]: xx is the normed x, d = shift[slots] - xx.

    The rows `slots` of shift [P, D], the previous tokens' xx, are replaced by xx.
    """
    xx, d = layer_norm(x, norm, eps), np.empty_like(x)
    for b in range(x.shape[0]):
        previous = shift[slots[b]]
        for c in range(x.shape[1]):
            d[b, c] = previous[c] - xx[b, c]
            previous[c] = xx[b, c]
    return mixed(xx, d, maa), xx, d


# -- products ---------------------------------------------------------------------------------------------------------
@njit(**LOOP_OPTIONS)
def products(multiply, board, matrices, x):
    """The list of x[n] W[n]^T [S, B, M], for arrays x[n] [S, B, K] and stacks W[n] of S matrices [M, K].

    multiply : the address of the compiled loop `matrix_loops.multiply`
    board : the array of the `Board` by which threads share the work
    matrices : the tuple of the stacks' `Matrix.description`s; x : a tuple as long
    """
    y = [np.empty((x[n].shape[0], x[n].shape[1], matrices[n][3]), np.float32) for n in range(len(x))]
    multiply_at(multiply, board, matrices, x, y)
    return y


@njit(**LOOP_OPTIONS)
def product(multiply, board, matrix, x):
    """x W^T [S, B, M] for one array x [S, B, K] and one stack; arguments as in `products`."""
    return products(multiply, board, (matrix,), (x,))[0]
