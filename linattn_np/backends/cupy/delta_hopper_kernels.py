"""Instances of Hopper's kernels for the delta rule."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .arguments import members
from .gated_kernels import SM90
from .kernel import TiledKernel, padded


class DeltaScalarForwardSm90(TiledKernel):
    """The delta rule's forward pass under a gate for all channels of a token, or none."""

    file = "delta/sm90/scalar_forward"
    arguments = members(
        "maps+rows q k v o, rows? g, rows beta, shape, pointers? initial final, "
        "integers group state_k state_v wide_gate wide_beta normalized, reals scale"
    )
    shared = ("Shared<{dtype}, {BK}, {BV}>",)
    arch = SM90
    CHUNK: ClassVar[int] = 32
    dtype: np.dtype
    BK: int
    BV: int

    @property
    def threads(self):
        return 2 * self.BV + 256

    @property
    def resident(self):
        return 2 if self.BK + self.BV == 128 else 1

    @property
    def shared_bytes(self):
        stages, panel = 3 if self.resident == 2 else 5, 128 * self.CHUNK
        stage = panel * (2 * self.BK // 64 + 4 + self.BV // 64)  # tokens, what is made of them, values
        gates, ahead, barriers = 6 * 4 * self.CHUNK + 16, 2 * 4 * 4 * self.CHUNK, 8 * 7
        return padded(stages * (stage + gates + barriers) + 2 * panel + ahead, 1024)
