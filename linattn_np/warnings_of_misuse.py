"""Calls that are right by every rule and hardly meant: a warning, at most once a place, that any filter silences.

It looks at shapes, and at some numbers of arrays on the host; never at a device's, for which it would have to wait.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

import numpy as np

LARGEST_SUM = 88.0  # of gates: exp of more overflows float32
SAMPLES = 16  # tokens whose gates are looked at
PACKAGE = __name__.partition(".")[0]


class LinattnWarning(UserWarning):
    """A call of linattn_np that computes what it says, but probably not what was meant."""


def of_layout(problem) -> tuple[str, ...]:
    """[B, T, H, ...] given where [B, H, T, ...] is expected: fewer tokens than heads, and no argument has one alone."""
    H, T = problem.sizes.get("H", 0), problem.sizes.get("S", problem.sizes.get("T"))
    known = problem.varlen or problem.mask is not None or problem.initial_state is not None
    known = known or any(axes.startswith("H") for axes in problem.op.arrays.values())
    if problem.layout != "bhtd" or known or not T or T >= H:
        return ()
    name = next(iter(problem.arrays))
    return (
        f"{name} is {tuple(problem[name].shape)}, read as [B, H, T, ...]: H={H} heads of T={T} tokens. If it is "
        '[B, T, H, ...], pass layout="bthd"',
    )


def of_gates(problem):
    """Decays given where their logs are expected: gates above 0 at every token looked at, whose sum overflows."""
    for name in problem.op.gates:
        gate, T = problem.arrays[name], problem.sizes.get("T", 0)
        if gate.ndim > 2 and T > 1 and gate.size and float(gate[0, 0, T // 2, ...].flat[0]) > 0:
            some = gate[0, 0, :: -(-T // SAMPLES) | 1].astype(np.float64)  # odd: a pattern is seldom as long
            mean = some.mean()
            if some.min() > 0 and mean * T > LARGEST_SUM:
                yield (
                    f"{name} is above 0 at every token looked at, {mean:.3g} on average, so that the state grows by "
                    f"exp({mean * T:.3g}) over T={T} tokens. A gate is the natural log of a decay: if {name} holds "
                    f"decays, pass np.log({name})"
                )


def tell(problem):
    """Warns of what is doubtful about a call."""
    for doubt in problem.doubts:
        warn(f"{problem.op.name}: {doubt}")
    if problem.home == "host":
        for doubt in of_gates(problem):
            warn(f"{problem.op.name}: {doubt}")


def warn(message: str):
    """In the name of the line that called this package."""
    level, inside = 1, 1
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
            inside = level
        frame, level = frame.f_back, level + 1
    warnings.warn(message, LinattnWarning, stacklevel=inside + 1)
