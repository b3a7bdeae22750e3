"""The planner of steps of gated operators: one token for every sequence, whose state is updated in place.

Sizes: B sequences, H heads, K channels, V columns. A step has no gradients.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .arguments import members
from .gated_kernels import read_order
from .kernel import DOUBLE, FLOATS, GatedKernel, no_kernels
from .plan import FLOAT32, Draft, aligned16, ceil_div, has_rows


class RecurrentStep(GatedKernel):
    """o and the new state. `slots`: the row of `state` that each sequence uses, or null if these are 0 ... B - 1;
    `aligned16`: whether rows of the state allow accesses of 16 bytes; u: null for operators without it. The order and
    types are those of struct Args in the kernel's file."""

    file = "recurrent/step"
    arguments = members(
        "rows q k v g o, pointers u, rows state, pointers slots, integers H K V, reals scale, integers aligned16"
    )
    shared = ("Wider<{dtype}, {state}>[WARPS<{state}>][BV]",)
    BV: ClassVar[int] = 64  # columns of the state per block
    state: np.dtype

    @property
    def threads(self):
        return 64 * self.BV * self.state.itemsize // (4 * 16)  # a thread accesses 4 times 16 bytes of a tile [64, BV]


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why this kernel cannot compute a problem; None when it can."""
    state = problem.options["state"]
    if state.dtype not in FLOATS:
        return f"the state is {state.dtype}; it takes {', '.join(map(str, FLOATS))}"
    if not has_rows(state):
        return "the state's last axis is not contiguous, so it cannot be updated in place"
    return no_kernels(problem.dtype, FLOATS)


def plan(problem, device):
    """The plan of a step: o, with the option "state" updated in place."""
    draft = Draft()
    q, k, v, g = draft.inputs(problem)
    state, slots = problem.options["state"], problem.options["slots"]
    B, H, K, V = problem.shape("B H K V")
    if isinstance(slots, np.ndarray):
        slots = draft.table(slots)
    o, kernel = draft.output(problem), RecurrentStep(read_order(problem.op), problem.dtype, g.dtype, state.dtype)
    real = DOUBLE if DOUBLE in (problem.dtype, state.dtype) else FLOAT32
    u = draft.as_contiguous(problem.arrays.get("u"), "u", real)
    arrays = {"q": q, "k": k, "v": v, "g": g, "o": o, "u": u, "state": state, "slots": slots}
    sizes = {"H": H, "K": K, "V": V, "scale": problem.scale, "aligned16": aligned16(state)}
    draft.launch(kernel, B * H * ceil_div(V, kernel.BV), **arrays, **sizes)
    return draft.plan(draft.give_back(problem, o), tiles={"BV": kernel.BV})


def plan_vjp(problem, device, do, dht, saved):
    raise NotImplementedError("a step has no gradients")
