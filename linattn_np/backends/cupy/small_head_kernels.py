"""Kernel classes of the gated family for heads of at most 16 channels and columns, on every card.

`gated_kernels` explains the classes and has the other kernels.
"""

from __future__ import annotations

from typing import ClassVar

from .arguments import members
from .kernel import GatedKernel
from .plan import ceil_div

SIZES = (8, 16)  # the possible D: the most channels and columns of a head


class GatedSmall(GatedKernel):
    """The base of these kernels: a warp computes several heads, and a block has WARPS warps."""

    CHUNK: ClassVar[int] = 8  # tokens that are in shared memory at a time
    WARPS: ClassVar[int] = 4
    SEGMENT: ClassVar[int] = 64  # tokens of the shortest segment
    shared = ("Shared<{dtype}, {gate}, {D}>",)
    constants: ClassVar[tuple] = (("STEP", "CHUNK"), ("WARPS", "WARPS"))
    D: int

    @classmethod
    def fitting(cls, read_order, problem, gate):
        return cls(read_order, problem.dtype, gate, SIZES[max(problem.shape("K V")) > SIZES[0]])

    @property
    def threads(self):
        return 32 * self.WARPS

    @property
    def resident(self):
        if self.D > SIZES[0]:
            return 3
        return 5 if self.gate.itemsize == 2 else 4

    @property
    def heads(self) -> int:
        """Heads per block."""
        return 64 // self.D * self.WARPS

    def blocks(self, heads) -> int:
        """Blocks for the given number of heads, counted over all sequences or segments."""
        return ceil_div(heads, self.heads)

    @property
    def channels(self):
        """The most channels per launch."""
        return self.D

    @property
    def tiles(self):
        return {"BK": self.D, "BV": self.D, "heads": self.heads, "chunk": self.CHUNK}


class GatedSmallForward(GatedSmall):
    """o and the final state."""

    file = "gated/small_forward"
    arguments = members("rows q k v g o, pointers u initial final, shape, reals scale, integers bytes")


class GatedSmallStates(GatedSmall):
    """The summaries of the first `computed` of the `segments` of each sequence: each segment's final state if its
    initial state is 0 (`states`), and the product of its `decays`; with `both` also the same backwards in time, for the
    state's gradient."""

    file = "gated/small_states"
    arguments = members(
        "rows q k v, rows? do_, rows g, pointers? initial dht, pointers states decays, shape, reals scale, "
        "integers segments computed both bytes"
    )


class GatedSmallBackward(GatedSmall):
    """dq, dk, dv, dg, dh0, and du of each segment. `starts` and `ends`: the states at the segments' starts and the
    states' gradients at their ends."""

    file = "gated/small_backward"
    arguments = members(
        "rows q k v do_ g dq dk dv dg, pointers u starts ends dh0 step_states partial_du, shape, reals scale, "
        "integers P bytes"
    )
    WARPS: ClassVar[int] = 2
    SEGMENT: ClassVar[int] = 32
    resident = 4
    NUMBERS: ClassVar[int] = 16  # numbers of a state that each lane holds in registers
    constants = (*GatedSmall.constants, ("NUMBERS", "NUMBERS"))

    @property
    def heads(self):
        return 32 * self.NUMBERS // self.D**2 * self.WARPS
