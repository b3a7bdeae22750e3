"""Whole models on NumPy or CuPy arrays, each in one readable file."""

from .rwkv6 import RWKV6

__all__ = ["RWKV6"]
