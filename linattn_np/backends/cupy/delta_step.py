"""The planner of steps of the delta rules: one token for every sequence, whose state is updated in place."""

from __future__ import annotations

import numpy as np

from .delta import Inputs
from .delta import unsupported as unsupported_rows
from .delta_kernels import DeltaStep
from .gated_kernels import channels
from .plan import Draft, aligned16, ceil_div
from .step import plan_vjp
from .step import unsupported as unsupported_state

__all__ = ["plan", "plan_vjp", "unsupported"]


def unsupported(problem) -> str | None:
    """Why the kernel cannot compute a problem; None when it can."""
    return unsupported_rows(problem) or unsupported_state(problem)


def plan(problem, device):
    """The plan of a step: o, with the option "state" updated in place."""
    draft = Draft()
    inputs, o = Inputs(draft, problem), draft.output(problem)
    state, slots = problem.options["state"], problem.options["slots"]
    B, H, K, V = problem.shape("B H K V")
    if isinstance(slots, np.ndarray):
        slots = draft.table(slots)
    kernel = DeltaStep(*inputs.instance, state.dtype, channels(K))
    args = {"H": H, "K": K, "V": V, "group": inputs.group, "scale": problem.scale, "normalized": inputs.normalized}
    args |= {"state": state, "slots": slots, "pieces": aligned16(state)}
    draft.launch(kernel, B * H * ceil_div(V, kernel.BV), **inputs.arrays, **args, o=o)
    return draft.plan(draft.give_back(problem, o), tiles={"BV": kernel.BV})
