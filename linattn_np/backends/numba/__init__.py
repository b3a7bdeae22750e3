"""Kernels in Python, compiled by Numba-CUDA: the backend to learn the algorithm from.

Importing this package, or asking `why_not`, imports neither Numba nor CuPy. Host arrays run only in Numba's
own simulator, which the environment variable NUMBA_ENABLE_CUDASIM=1 turns on.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from ...declarations import DELTA_RULES, GATED, STAGES, STEPS

MODES = ("auto", "staged", "recurrent")
LONGEST_KEY = 256  # the most channels of the recurrence, which keeps the state's columns in registers
# The kernels of all stages; a stage has those whose names begin with its own.
STAGED = ("chunk_cumsum", "gated_qk", "inter_chunk", "intra_chunk_below", "intra_chunk_diagonal", "combine")


def why_not(problem) -> str | None:
    """Why this backend cannot run a call; None when it can."""
    simulated = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
    if problem.op not in (*GATED, *DELTA_RULES, *STEPS, *STAGES):
        return "it has the gated family, the delta rules, their steps of one token and the five stages only"
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


def mode(problem) -> str:
    """The mode in which a call is computed: "recurrent" or "staged". The delta rules have only the former."""
    return "recurrent" if problem.mode == "recurrent" or problem.op in DELTA_RULES else "staged"


def run(problem):
    from . import plans

    return plans.run(problem, mode(problem))


def describe(problem, bytes_moved) -> dict:
    from . import plans

    of_stage = tuple(kernel for kernel in STAGED if problem.op in STAGES and kernel.startswith(problem.op.name))
    return {
        "mode": None if problem.op in STAGES else mode(problem),
        "kernels": ("recurrent",) if mode(problem) == "recurrent" else of_stage or STAGED,
        "tiles": plans.tiles(problem, mode(problem)),
        "copies": plans.copies(problem),
        "floor_ms": plans.floor_ms(problem, bytes_moved),
    }
