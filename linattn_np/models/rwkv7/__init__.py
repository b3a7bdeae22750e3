"""RWKV-7 (x070, "Goose"; Peng et al., 2025, arXiv 2503.14456), without torch; `rwkv` has what all versions share."""

from .model import RWKV7

__all__ = ["RWKV7"]
