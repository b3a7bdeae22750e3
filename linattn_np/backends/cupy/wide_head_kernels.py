"""Instances of the kernels of heads with more than 128 channels."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .arguments import members
from .kernel import GatedKernel, TiledKernel
from .plan import ceil_div


class GatedWideOperands(GatedKernel):
    """Forward with more than 128 channels, on every card: the operands and the scores of all chunks, made once for all
    columns."""

    file = "gated/wide_operands"
    arguments = members("rows q k g, pointers u operands scores decays, shape, integers bytes")
    shared = ("Shared<SplitChannels, {dtype}, {gate}, 128, 16>",)
    threads = 256


class GatedWideForward(TiledKernel):
    """Forward from the operands and scores that `GatedWideOperands` has written."""

    file = "gated/wide_forward"
    arguments = members("rows v o, pointers operands scores decays initial final, shape, reals scale, integers bytes")
    shared = ("WideShared<{dtype}, {channel_tiles}>",)
    CHUNK: ClassVar[int] = 32
    TILE: ClassVar[int] = 128  # channels
    SCORES: ClassVar[int] = 2 * 32 * 40  # numbers of a chunk's scores
    BV: ClassVar[int] = 64
    MOST_TILES: ClassVar[int] = 4  # tiles of channels for which a block has registers
    constants = (("CHUNK<bf16>", "CHUNK"), ("WIDE", "TILE"), ("SCORES", "SCORES"), ("BV", "BV"))
    dtype: np.dtype
    channel_tiles: int

    @classmethod
    def fitting(cls, dtype, K):
        return cls(dtype, ceil_div(K, cls.TILE))

    @property
    def channels(self):
        """Channels of a launch."""
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
