"""Elementwise functions and norms of NumPy or CuPy arrays."""

import numpy as np


def sigmoid(x):
    """1 / (1 + exp(-x)) without overflow. Small results have all digits, unlike those computed from tanh."""
    return np.exp(np.minimum(x, 0)) / (1 + np.exp(np.minimum(x, -x)))


def affine_times_silu(x, weight, bias, gate):
    """(x weight + bias) silu(gate)."""
    return (x * weight + bias) * gate * sigmoid(gate)


def relu_squared(x):
    x = np.maximum(x, 0)
    return x * x


# -- norms ------------------------------------------------------------------------------------------------------------
def layer_norm(x, weight_and_bias, eps):
    weight, bias = weight_and_bias
    return normalize(x, eps) * weight + bias


def normalize(x, eps):
    """(x - mean) / sqrt(variance + eps) along the last axis."""
    size = x.shape[-1]  # sums, as NumPy's mean is slow on a single token
    x = x - x.sum(axis=-1, keepdims=True) / size
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) / size + eps)


def beside(vectors, x):
    """A view of `vectors` [n, D] or [D] as [n, 1, ..., D], which broadcasts with x [..., D]."""
    return vectors.reshape(-1, *[1] * (x.ndim - 1), vectors.shape[-1])
