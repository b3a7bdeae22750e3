"""The kernels that RWKV-7 models have besides those of RWKV-6 and of the operator.

X is the dtype of what a kernel hands to the next product, Y that of what data open.
"""

from __future__ import annotations

import numpy as np

from ...array_kinds import BFLOAT16
from .arguments import members
from .kernel import ModelKernel
from .plan import FLOAT32
from .rwkv6_model_kernels import OfHeads, low_rank_blocks

DOWNS = 4  # matrices of low rank: of the decay, the learning rate, the gate and the value


class Openings(ModelKernel):
    file = "rwkv7/openings"
    arguments = members("pointers low up bases w openings, integers tokens D R")
    shared = ("LowRank<{dtype}, {TILES}, {PARTS}>",)
    threads = 256
    dtype: np.dtype
    Y: np.dtype
    PARTS: int
    TILES: int

    @classmethod
    def of_step(cls, dtype):
        return cls(dtype, FLOAT32, 3 if dtype == BFLOAT16 else 2, 1)

    @classmethod
    def of_prompt(cls, dtype):
        return cls(dtype, dtype, 2, 2)

    def blocks(self, tokens, D) -> int:
        return DOWNS * low_rank_blocks(self.TILES, tokens, D)


class TimeMixOfToken(ModelKernel):
    file = "rwkv7/time_mix_step"
    arguments = members(
        "pointers v k r w openings first removal replacement bonus weight bias state slots y, integers B H N, reals eps"
    )
    shared = ("Scratch",)
    threads = 256
    X: np.dtype
    state: np.dtype
    TERMS: int


class Keys(OfHeads):
    file = "rwkv7/keys"
    arguments = members("pointers k v rate share first a b removal replacement, integers rows H N")
