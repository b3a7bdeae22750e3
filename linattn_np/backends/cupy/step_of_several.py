"""The planner of steps of several tokens, for speculative decoding: a call computes a few tokens of every sequence, of
which the caller may later reject the last ones.

First those of the previous call's tokens that were accepted, the first `accepted` of the `pending` ones, are applied to
the state. This call's tokens are then stored as pending. The state and `pending` are updated in place. Such a step has
no gradients.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ...declarations import MOST_PENDING
from .arguments import members
from .delta import Inputs
from .delta import unsupported as unsupported_rows
from .delta_kernels import DPLR
from .gated_kernels import channels
from .kernel import DOUBLE, Kernel
from .plan import FLOAT32, Draft, aligned16, has_rows
from .step import plan_vjp
from .step import unsupported as unsupported_state

__all__ = ["plan", "plan_vjp", "unsupported"]

GLA, BEFORE_WRITE = "Gla", "BeforeWrite"  # the template argument `rule` of gated operators; `delta_kernels` has others


class StepOfSeveral(Kernel):
    """o, the new state and the new pending tokens, by a block for each sequence and head of values. M is how many
    tokens `pending` has room for, `group` how many heads of values share a head of q and k; `aligned16`: whether rows
    of the state allow accesses of 16 bytes."""

    file = "recurrent/step_of_several"
    arguments = members(
        "rows q k v, rows? a b, rows g, rows? beta, rows o, pointers? bonus, rows state pending, "
        "pointers? slots accepted, integers H T_ K V M group, reals scale, integers normalized aligned16"
    )
    shared = ("Shared<{rule}, Widest<{dtype}, {state}>, {BK}, COLUMNS<Widest<{dtype}, {state}>, {BK}>>",)
    constants: ClassVar[tuple] = (("TOKENS", "TOKENS"),)
    TOKENS: ClassVar[int] = MOST_PENDING
    rule: str
    dtype: np.dtype
    gate: np.dtype
    state: np.dtype
    BK: int

    @property
    def real(self) -> np.dtype:
        """The dtype of the arithmetic and of `pending`."""
        return DOUBLE if DOUBLE in (self.dtype, self.state) else FLOAT32

    @property
    def BV(self) -> int:
        """Columns of the state that a block computes at a time."""
        return self.threads // (8 if self.BK == 256 and self.real == DOUBLE else 4)

    @property
    def threads(self):
        return 512 if self.BK == 128 and self.real == FLOAT32 else 256


def unsupported(problem) -> str | None:
    """Why the kernel cannot compute a problem; None when it can."""
    options = problem.options
    if not has_rows(options["pending"]):
        return "pending's last axis is not contiguous, so it cannot be updated in place"
    if "a" in problem.arrays and DOUBLE == options["pending"].dtype and problem.sizes["K"] > 128:
        return f"K={problem.sizes['K']} is over 128, for several tokens with two keys each in float64"
    return unsupported_rows(problem) or unsupported_state(problem)


def plan(problem, device):
    """The plan of a step: o, with the options "state" and "pending" updated in place."""
    draft = Draft()
    inputs, o, op = Inputs(draft, problem), draft.output(problem), problem.op
    options, (B, H, T, K, V) = problem.options, problem.shape("B H T K V")
    rule = inputs.rule if op.strengths or inputs.rule == DPLR else BEFORE_WRITE if op.reads_before_write else GLA
    state, pending, slots = options["state"], options["pending"], options["slots"]
    if isinstance(slots, np.ndarray):
        slots = draft.table(slots)
    kernel = StepOfSeveral(rule, problem.dtype, inputs.gate, state.dtype, channels(K))
    arrays = {name: x for name, x in inputs.arrays.items() if name != "u"}
    arrays |= {"state": state, "pending": pending, "slots": slots, "accepted": options["accepted"], "o": o}
    arrays["bonus"] = draft.as_contiguous(problem.arrays.get("u"), "u", kernel.real)
    sizes = {"H": H, "T_": T, "K": K, "V": V, "M": pending.shape[2], "group": inputs.group}
    options = {"scale": problem.scale, "normalized": inputs.normalized, "aligned16": aligned16(state)}
    draft.launch(kernel, B * H, **arrays, **sizes, **options)
    return draft.plan(draft.give_back(problem, o), tiles={"BK": kernel.BK, "BV": kernel.BV})
