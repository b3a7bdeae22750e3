"""Layers around the operators, forwards and backwards, on NumPy or CuPy arrays."""

from .delta import GatedDeltaNet, KimiDeltaAttention
from .gated_linear_attention import GatedLinearAttention, random_weights

__all__ = ["GatedLinearAttention", "random_weights", "GatedDeltaNet", "KimiDeltaAttention"]
