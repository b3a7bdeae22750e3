"""The forms in which Numba's kernels compute a call."""

from ...declarations import DELTA_RULES

MODES = ("auto", "staged", "recurrent")


def mode(problem) -> str:
    """The form that runs: the delta rules have one."""
    return "recurrent" if problem.mode == "recurrent" or problem.op in DELTA_RULES else "staged"
