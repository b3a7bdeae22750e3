"""Warnings about likely mistakes: calls that follow every rule and probably compute something else than was meant.

The checks read shapes, and some numbers of arrays on the host. They never read numbers on a device, which would have to
be waited for. Python shows a warning once for each line that calls.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

import numpy as np

LARGEST_SUM = 88.0  # of gates: exp of more overflows float32
SAMPLES = 16  # tokens whose gates are read
PACKAGE = __name__.partition(".")[0]


class LinattnWarning(UserWarning):
    """A call of linattn_np that computes what it says, but probably not what was meant."""


def layout_warnings(problem) -> tuple[str, ...]:
    """Warns of arrays that look like [B, T, H, ...] but are read as [B, H, T, ...]: they have fewer tokens than heads.

    There is no warning where another argument has H or T alone, whose size was checked, or where there is no layout.
    """
    H, T = problem.sizes.get("H", 0), problem.sizes.get("S", problem.sizes.get("T"))
    known = problem.varlen or problem.mask is not None or problem.initial_state is not None
    known = known or any(axes.startswith("H") for axes in problem.op.arrays.values())
    known = known or "layout" not in problem.op.keywords.__annotations__
    if problem.layout != "bhtd" or known or not T or T >= H:
        return ()
    name = next(iter(problem.arrays))
    return (
        f"{name} is {tuple(problem[name].shape)}, read as [B, H, T, ...]: H={H} heads of T={T} tokens. If it is "
        '[B, T, H, ...], pass layout="bthd"',
    )


def gate_warnings(problem):
    """Warns of gates that look like decays: they are above 0 at every token that is read, and their sum overflows."""
    for name in problem.op.decays:
        gate, T = problem.arrays[name], problem.sizes.get("T", 1)
        if T > 1 and gate.size and float(gate[0, 0, T // 2, ...].flat[0]) > 0:
            some = gate[0, 0, :: -(-T // SAMPLES) | 1].astype(np.float64)  # odd: a pattern is seldom as long
            mean = some.mean()
            if some.min() > 0 and mean * T > LARGEST_SUM:
                yield (
                    f"{name} is above 0 at every token looked at, {mean:.3g} on average, so that the state grows by "
                    f"exp({mean * T:.3g}) over T={T} tokens. A gate is the natural log of a decay: if {name} holds "
                    f"decays, pass np.log({name})"
                )


def warn_of_call(problem):
    """Shows the warnings about a checked call."""
    for warning in (*problem.warnings, *(gate_warnings(problem) if problem.home == "host" else ())):
        warn(f"{problem.op.name}: {warning}")


def warn(message: str):
    """Shows a warning that names the line which called this package."""
    level, inside = 1, 1
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
            inside = level
        frame, level = frame.f_back, level + 1
    warnings.warn(message, LinattnWarning, stacklevel=inside + 1)
