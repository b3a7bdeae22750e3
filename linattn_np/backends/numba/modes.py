"""The modes in which Numba's kernels compute a call."""

from ...declarations import DELTA_RULES

MODES = ("auto", "staged", "recurrent")


def mode(problem) -> str:
    """The mode in which a call is computed: "recurrent" or "staged". The delta rules have only the former."""
    return "recurrent" if problem.mode == "recurrent" or problem.op in DELTA_RULES else "staged"
