"""Whether Numba's loops compute what stands between products: where Numba is installed and a call is long enough."""

from functools import cache

LEAST_ELEMENTS = 1 << 20  # between products: a call of fewer takes less time than importing Numba


def loops(elements):
    """The module of loops, or None: then NumPy's own functions do the same, in several passes."""
    return module() if elements >= LEAST_ELEMENTS else None


@cache
def module():
    try:
        from . import numba_loops
    except ImportError:
        return None
    return numba_loops
