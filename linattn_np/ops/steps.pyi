"""Written by docs/write_operators.py: the steps."""

from typing import Unpack

from ..typing import A, Array, StepOptions

__all__ = ["gla_step", "rwkv6_step"]

def gla_step(q: A, k: Array, v: Array, g: Array, state: Array, **options: Unpack[StepOptions]) -> A: ...
def rwkv6_step(r: A, k: Array, v: Array, w: Array, u: Array, state: Array, **options: Unpack[StepOptions]) -> A: ...
