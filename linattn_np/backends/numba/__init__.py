"""Kernels in Python, compiled by Numba-CUDA: the backend to learn the algorithm from.

Importing this package, or asking `why_not`, imports neither Numba nor CuPy. Host arrays run only in Numba's
own simulator, which the environment variable NUMBA_ENABLE_CUDASIM=1 turns on.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from .routes import KERNELS, LONGEST_KEY, MODES, STAGES, mode


def why_not(problem) -> str | None:
    simulated = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
    if problem.op.name not in KERNELS:
        return "it has gla, rwkv6, their steps and the five stages only"
    if problem.gradient:
        return "it has no gradients"
    if problem.mode not in MODES:
        return f"it has modes 'staged' and 'recurrent', not {problem.mode!r}"
    if problem.materialize is False:
        return "materialize=False asks for a fused kernel; its staged kernels keep every chunk's state"
    if mode(problem) == "recurrent" and problem.sizes["K"] > LONGEST_KEY:
        K = problem.sizes["K"]
        return f"K={K} is more than the {LONGEST_KEY} channels its recurrence keeps in registers"
    if find_spec("numba") is None or find_spec("numba_cuda") is None:
        return "numba-cuda is not installed"
    if simulated and problem.home != "host":
        return "Numba's simulator is on (NUMBA_ENABLE_CUDASIM), and it takes host arrays only"
    if problem.home == "host" and not simulated:
        return "the arrays are on the host"
    return None


def run(problem):
    from . import plans

    return plans.run(problem)


def describe(problem, bytes_moved) -> dict:
    from . import plans

    recurrent = mode(problem) == "recurrent"
    return {
        "mode": mode(problem) if problem.op.name not in STAGES else None,
        "kernels": ("recurrent",) if recurrent else KERNELS[problem.op.name],
        "tiles": plans.tiles(problem, recurrent),
        "copies": plans.copies(problem),
        "floor_ms": plans.floor_ms(problem, bytes_moved),
    }
