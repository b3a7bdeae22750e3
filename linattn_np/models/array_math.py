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


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    """By tanh, as flash-linear-attention computes it."""
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def log_sigmoid(x):
    return np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x)))


# The activations of a channel mix, by flash-linear-attention's names of them.
ACTIVATIONS = {
    **{"sqrelu": relu_squared, "relu": lambda x: np.maximum(x, 0), "gelu": gelu, "silu": silu, "swish": silu},
    **{"sigmoid": sigmoid, "logsigmoid": log_sigmoid},
}


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
