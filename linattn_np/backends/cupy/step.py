"""The planner of steps: one token for every sequence, or a few for speculative decoding, of which the caller may later
reject the last ones. The state is updated in place. A step has no gradients.

A call with several tokens first applies those of the previous call's that were accepted, the first `accepted` of the
`pending` ones, to the state. Its own tokens are then stored as pending.

Sizes: B sequences, H heads, K channels, V columns, M tokens that `pending` has room for. `group` heads of values share
a head of q and k. `slots`: the row of `state` that each sequence uses, or null if these are 0 ... B - 1; `aligned16`:
whether rows of the state allow accesses of 16 bytes.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ...declarations import DELTA_RULE_STEPS, MOST_PENDING
from . import delta
from .arguments import members
from .arithmetic import ceil_div
from .delta_kernels import DPLR, DeltaStep
from .gated_kernels import channels, read_order
from .kernel import DOUBLE, FLOATS, GatedKernel, StepKernel, no_kernels
from .plan import FLOAT32, Draft, aligned16, has_rows

# A class describes a kernel: its annotated fields are the template's arguments, in order; `arguments` the members of
# struct Args, which the compiler checks, with `?` if they may be null.
#
# Arguments: scale: the factor of o; slots: the row of `state` of each sequence; bonus: RWKV-6's u, or null; aligned16:
# whether all rows start on 16 bytes. `StepOfSeveral`: T_: tokens of a sequence; pending: the previous call's tokens, M
# at most, which its states lack; accepted: how many of them are applied first, or null: none; group: heads of values
# that share keys; normalized: whether the kernel divides q and k by their lengths

GLA, BEFORE_WRITE = "Gla", "BeforeWrite"  # the template argument `rule` of gated operators; `delta_kernels` has others


class RecurrentStep(StepKernel, GatedKernel):
    """o and the new state. u: null for operators without it."""

    file = "recurrent/step"
    arguments = members(
        "strided q k v g o, pointers u, strided state, pointers slots, int64s H K V, float64s scale, int64s aligned16"
    )
    shared_memory = ("{real}[WARPS<{state}>][BV]",)
    BV: ClassVar[int] = 64  # columns of the state per block
    constants = (*StepKernel.constants, ("BV", "BV"))
    state: np.dtype

    @property
    def threads(self):
        return 64 * self.BV * self.state.itemsize // (4 * 16)  # a thread accesses 4 times 16 bytes of a tile [64, BV]


class StepOfSeveral(StepKernel):
    """o, the new state and the new pending tokens, by a block for each sequence and head of values. `pending` has the
    dtype of the arithmetic."""

    file = "recurrent/step_of_several"
    arguments = members(
        "strided q k v, strided? a b, strided g, strided? beta, strided o, pointers? bonus, strided state pending, "
        "pointers? slots accepted, int64s H T_ K V M group, float64s scale, int64s normalized aligned16"
    )
    shared_memory = ("Shared<{rule}, {real}, {BK}, COLUMNS<{real}, {BK}>>",)
    constants = (*StepKernel.constants, ("TOKENS", "TOKENS"), ("COLUMNS<{real}, {BK}>", "BV"))
    TOKENS: ClassVar[int] = MOST_PENDING
    rule: str
    dtype: np.dtype
    gate: np.dtype
    state: np.dtype
    BK: int

    @property
    def BV(self) -> int:
        """Columns of the state that a block computes at a time."""
        return self.threads // (8 if self.BK == 256 and self.real == DOUBLE else 4)

    @property
    def threads(self):
        return 512 if self.BK == 128 and self.real == FLOAT32 else 256


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why the kernels cannot compute a problem; None when they can."""
    state, pending = problem.options["state"], problem.options["pending"]
    if pending is not None:
        if not has_rows(pending):
            return "pending's last axis is not contiguous, so it cannot be updated in place"
        if "a" in problem.arrays and DOUBLE == pending.dtype and problem.sizes["K"] > 128:
            return f"K={problem.sizes['K']} is over 128, for several tokens with two keys each in float64"
    if (pending is not None or problem.op in DELTA_RULE_STEPS) and (reason := delta.unsupported(problem)):
        return reason
    if state.dtype not in FLOATS:
        return f"the state is {state.dtype}; it takes {', '.join(map(str, FLOATS))}"
    if not has_rows(state):
        return "the state's last axis is not contiguous, so it cannot be updated in place"
    return no_kernels(problem.dtype, FLOATS)


def plan(problem, device):
    """The plan of a step: o, with the options "state" and "pending" updated in place."""
    draft, options, (H, K, V) = Draft(), problem.options, problem.shape("H K V")
    o, state, slots = draft.output(problem), options["state"], options["slots"]
    if isinstance(slots, np.ndarray):
        slots = draft.table(slots)
    draft.default_args = {"H": H, "K": K, "V": V, "scale": problem.scale, "o": o, "state": state, "slots": slots}
    draft.default_args["aligned16"] = aligned16(state)
    if options["pending"] is not None:
        launch = launch_several
    else:
        launch = launch_delta_rule if problem.op in DELTA_RULE_STEPS else launch_gated
    return draft.plan(draft.give_back(problem, o), tiles=launch(draft, problem, state.dtype))


def launch_gated(draft, problem, state):
    """Appends the launch for one token of a gated operator; returns its tiles. `state`: the dtype of the state."""
    (q, k, v, g), (B, H, V) = draft.inputs(problem), problem.shape("B H V")
    kernel = RecurrentStep(read_order(problem.op), problem.dtype, g.dtype, state)
    u = draft.as_contiguous(problem.arrays.get("u"), "u", kernel.real)
    draft.launch(kernel, B * H * ceil_div(V, kernel.BV), q=q, k=k, v=v, g=g, u=u)
    return {"BV": kernel.BV}


def launch_delta_rule(draft, problem, state):
    """As `launch_gated`, for a delta rule."""
    inputs, (B, H, K, V) = delta.Inputs(draft, problem), problem.shape("B H K V")
    kernel = DeltaStep.fitting(*delta.instance_of(problem), state, K=K, V=V)
    options = {"HV": H, "group": inputs.group, "normalized": inputs.normalized}
    draft.launch(kernel, B * H * ceil_div(V, kernel.BV), **inputs.arrays, **options)
    return {"BV": kernel.BV}


def launch_several(draft, problem, state):
    """As `launch_gated`, for several tokens of any operator."""
    inputs, op, pending = delta.Inputs(draft, problem), problem.op, problem.options["pending"]
    B, H, T, K = problem.shape("B H T K")
    rule = inputs.rule if op.strengths or inputs.rule == DPLR else BEFORE_WRITE if op.reads_before_write else GLA
    kernel = StepOfSeveral(rule, problem.dtype, inputs.gate, state, channels(K))
    arrays = {name: x for name, x in inputs.arrays.items() if name != "u"}
    arrays |= {"pending": pending, "accepted": problem.options["accepted"]}
    arrays["bonus"] = draft.as_contiguous(problem.arrays.get("u"), "u", kernel.real)
    sizes = {"T_": T, "M": pending.shape[2], "group": inputs.group, "normalized": inputs.normalized}
    draft.launch(kernel, B * H, **arrays, **sizes)
    return {"BK": kernel.BK, "BV": kernel.BV}
