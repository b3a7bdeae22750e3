"""Kernel classes of the gated family for heads of more than 128 channels, on every card.

`gated_kernels` explains the classes and has the other kernels.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .arguments import members
from .kernel import GatedKernel, TiledKernel
from .plan import ceil_div


class GatedWideOperands(GatedKernel):
    """The first kernel of the forward pass: the operands (queries and keys with their decays) and the scores of all
    chunks, computed once for all columns."""

    file = "gated/wide_operands"
    arguments = members("rows q k g, pointers u operands scores decays, shape, integers bytes")
    shared = ("Shared<SplitChannels, {dtype}, {gate}, 128, 16>",)
    threads = 256


class GatedWideForward(TiledKernel):
    """The second kernel: o and the final state, from what `GatedWideOperands` has written."""

    file = "gated/wide_forward"
    arguments = members("rows v o, pointers operands scores decays initial final, shape, reals scale, integers bytes")
    shared = ("WideShared<{dtype}, {channel_tiles}>",)
    CHUNK: ClassVar[int] = 32
    TILE: ClassVar[int] = 128  # channels of a tile
    SCORES: ClassVar[int] = 2 * 32 * 40  # numbers per chunk in `scores`: two matrices [32, 32], rows padded to 40
    BV: ClassVar[int] = 64
    MOST_TILES: ClassVar[int] = 4  # tiles of channels that a block's registers can hold
    constants = (("CHUNK<bf16>", "CHUNK"), ("WIDE", "TILE"), ("SCORES", "SCORES"), ("BV", "BV"))
    dtype: np.dtype
    channel_tiles: int

    @classmethod
    def fitting(cls, dtype, K):
        return cls(dtype, ceil_div(K, cls.TILE))

    @property
    def channels(self):
        """The channels of all tiles; one launch computes all of them."""
        return self.channel_tiles * self.TILE

    @property
    def threads(self):
        return 2 * self.BV * self.channel_tiles

    @property
    def resident(self):
        return 1 if self.channel_tiles > 2 else 2

    @property
    def tiles(self):
        return {"BK": self.channels, "BV": self.BV, "chunk": self.CHUNK, "sub_chunk": 8}
