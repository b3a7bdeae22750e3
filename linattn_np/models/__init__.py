"""Whole models on NumPy or CuPy arrays, and what running them takes: sampling, batches, tokenizers."""

from .batch import Batch
from .example import austen
from .rwkv6 import RWKV6, State
from .rwkv7 import RWKV7
from .sampling import Sampling
from .tokenizers import Bytes, World
from .versions import load

__all__ = ["RWKV6", "RWKV7", "load", "State", "Batch", "Sampling", "Bytes", "World", "austen"]
