"""Written by docs/write_operators.py: the steps."""

from typing import Unpack

from ..typing import A, Array, DeltaRuleStepOptions, StepOptions

__all__ = ["gla_step", "rwkv6_step", "delta_rule_step", "gated_delta_rule_step", "kda_step", "rwkv7_step"]

def gla_step(q: A, k: Array, v: Array, g: Array, state: Array, **options: Unpack[StepOptions]) -> A: ...
def rwkv6_step(r: A, k: Array, v: Array, w: Array, u: Array, state: Array, **options: Unpack[StepOptions]) -> A: ...
def delta_rule_step(
    q: A, k: Array, v: Array, beta: Array, state: Array, **options: Unpack[DeltaRuleStepOptions]
) -> A: ...
def gated_delta_rule_step(
    q: A, k: Array, v: Array, g: Array, beta: Array, state: Array, **options: Unpack[DeltaRuleStepOptions]
) -> A: ...
def kda_step(
    q: A, k: Array, v: Array, g: Array, beta: Array, state: Array, **options: Unpack[DeltaRuleStepOptions]
) -> A: ...
def rwkv7_step(
    r: A, w: Array, k: Array, v: Array, a: Array, b: Array, state: Array, **options: Unpack[StepOptions]
) -> A: ...
