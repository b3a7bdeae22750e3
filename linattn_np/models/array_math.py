"""Elementwise functions on NumPy or CuPy arrays; on CuPy arrays each is one launch."""

from __future__ import annotations

import sys
from functools import cache, wraps

import numpy as np


def library_of(x):
    """The library of an array, NumPy or CuPy."""
    return np if isinstance(x, np.ndarray) else sys.modules["cupy"]


def fused(function):
    """The elementwise `function`, made one launch if its arrays are CuPy's."""

    @wraps(function)
    def call(*arrays):
        return (function if library_of(arrays[0]) is np else on_cupy(function))(*arrays)

    return call


@cache
def on_cupy(function):
    name = f"linattn_{function.__name__}"  # CUDA has functions of some of these names, such as tanh
    return sys.modules["cupy"].fuse(kernel_name=name)(function)


def sigmoid(x):
    """1 / (1 + exp(-x)) without overflow. Small results have all digits, unlike those computed from tanh."""
    xp = library_of(x)
    return xp.exp(xp.minimum(x, 0)) / (1 + xp.exp(xp.minimum(x, -x)))


@fused
def tanh(x):
    return library_of(x).tanh(x)


@fused
def affine(x, weight, bias):
    return x * weight + bias


@fused
def lerp(x, d, share):
    return x + d * share


@fused
def log_decay(base, low):
    return -library_of(low).exp(base + low)


@fused
def gated(x, weight, bias, gate):
    """(x weight + bias) silu(gate)."""
    return (x * weight + bias) * gate * sigmoid(gate)


@fused
def relu_squared(x):
    x = library_of(x).maximum(x, 0)
    return x * x


@fused
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
