"""The kernels that RWKV-7 models have besides those of RWKV-6 and of the operator.

X is the dtype of what a kernel hands to the next product.
"""

from __future__ import annotations

import numpy as np

from .arguments import members
from .kernel import ModelKernel
from .rwkv6_model_kernels import OfHeads

DOWNS = 4  # matrices of low rank: of the decay, the learning rate, the gate and the value


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
