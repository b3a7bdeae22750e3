"""RWKV-6 (x060, "Finch"; Peng et al., "Eagle and Finch", 2024), without torch; `rwkv` has what all versions share."""

from ..rwkv.state import State
from .model import RWKV6

__all__ = ["RWKV6", "State"]
