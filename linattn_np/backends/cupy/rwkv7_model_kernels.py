"""The kernels of RWKV-7 models besides those of the operator and those of `rwkv6_model_kernels`. As there, X is the
dtype of a kernel's output that is an operand of the next matrix product, and TERMS is how many numbers of dtype X,
whose sum is exact, represent each float32 number of it; H heads have N channels each.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .arguments import members
from .kernel import ModelKernel
from .rwkv6_model_kernels import HeadKernel

DOWNS = 4  # products of low rank in a layer's time mix: for the decay, the learning rate, the gate and the value


class TimeMixOfToken(ModelKernel):
    """For a decoding step: the state update of one head of one sequence, its group norm, bonus and gate."""

    file = "rwkv7/time_mix_step"
    arguments = members(
        "pointers v k r w openings first removal replacement bonus weight bias state slots y, integers B H N, reals eps"
    )
    shared = ("Scratch",)
    threads = 256
    X: np.dtype
    state: np.dtype
    TERMS: int


class TimeMixOfHeads(TimeMixOfToken):
    """`TimeMixOfToken` for heads of 64 channels: a warp computes one head of one sequence."""

    file = "rwkv7/time_mix_batch"
    shared = ("Shared",)
    threads = 32
    N: ClassVar[int] = 64


class Keys(HeadKernel):
    """For prompts: the operator's keys k, a, b and the value, from the key, its learning rate and the share of the
    first layer's value."""

    file = "rwkv7/keys"
    arguments = members("pointers k v rate share first a b removal replacement, integers rows H N")
