"""Whole models on NumPy or CuPy arrays, and what running them takes: sampling, batches, tokenizers."""

from .batch import Batch
from .example import austen
from .rwkv6 import RWKV6, State
from .sampling import Sampling
from .tokenizers import Bytes, World

__all__ = ["RWKV6", "State", "Batch", "Sampling", "Bytes", "World", "austen"]
