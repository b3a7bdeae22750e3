"""Elementwise functions and norms of NumPy or CuPy arrays."""

from __future__ import annotations

import sys

import numpy as np


def library_of(x):
    """The library of an array, NumPy or CuPy."""
    return np if isinstance(x, np.ndarray) else sys.modules["cupy"]


def sigmoid(x):
    """1 / (1 + exp(-x)) without overflow. Small results have all digits, unlike those computed from tanh."""
    xp = library_of(x)
    return xp.exp(xp.minimum(x, 0)) / (1 + xp.exp(xp.minimum(x, -x)))


def tanh(x):
    return library_of(x).tanh(x)


def affine(x, weight, bias):
    return x * weight + bias


def lerp(x, d, share):
    return x + d * share


def log_decay(base, low):
    return -library_of(low).exp(base + low)


def gated(x, weight, bias, gate):
    """(x weight + bias) silu(gate)."""
    return (x * weight + bias) * gate * sigmoid(gate)


def relu_squared(x):
    x = library_of(x).maximum(x, 0)
    return x * x


def sigmoid_gate(gate, value):
    return sigmoid(gate) * value


# -- norms ------------------------------------------------------------------------------------------------------------
def layer_norm(x, weight_and_bias, eps):
    return affine(normalize(x, eps), *weight_and_bias)


def normalize(x, eps):
    """(x - mean) / sqrt(variance + eps) along the last axis."""
    size = x.shape[-1]  # sums, as NumPy's mean is slow on a single token
    x = x - x.sum(axis=-1, keepdims=True) / size
    return x / library_of(x).sqrt((x * x).sum(axis=-1, keepdims=True) / size + eps)


def beside(vectors, x):
    """A view of `vectors` [n, D] or [D] as [n, 1, ..., D], which broadcasts with x [..., D]."""
    return vectors.reshape(-1, *[1] * (x.ndim - 1), vectors.shape[-1])
