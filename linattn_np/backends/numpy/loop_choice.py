"""Whether Numba's loops compute a call: where Numba is installed and the call is long enough."""

from functools import cache

LEAST_ELEMENTS = 1 << 17  # between products: calls of fewer are not worth Numba's import


def loops(elements):
    """The module of loops, or None: then NumPy and BLAS do the same."""
    return module() if elements >= LEAST_ELEMENTS else None


def loops_at_hand(elements):
    """`module()` where an earlier call has imported Numba already, else what `loops` decides for so many elements."""
    return module() if module.cache_info().currsize else loops(elements)


@cache
def module():
    try:
        from ... import numba_cache  # noqa: F401  its ImportError tells why Numba cannot be used
        from . import numba_loops
    except ImportError:
        return None
    return numba_loops
