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

    There is no warning if another argument confirms H or T, or if the operator has no argument `layout`.
    """
    H, T = problem.sizes.get("H", 0), problem.sizes.get("S", problem.sizes.get("T"))
    confirmed = problem.varlen or problem.mask is not None or problem.initial_state is not None
    confirmed = confirmed or any(axes.startswith("H") for axes in problem.op.arrays.values())
    has_layout = "layout" in problem.op.keywords.__annotations__
    if problem.layout != "bhtd" or confirmed or not has_layout or not T or T >= H:
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
            step = -(-T // SAMPLES) | 1  # odd: gates that repeat themselves seldom have an odd period
            samples = gate[0, 0, ::step].astype(np.float64)
            mean = samples.mean()
            if samples.min() > 0 and mean * T > LARGEST_SUM:
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
    level, outermost = 1, 1  # frames above this one: of the loop; of the outermost function of this package
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
            outermost = level
        frame, level = frame.f_back, level + 1
    warnings.warn(message, LinattnWarning, stacklevel=outermost + 1)
