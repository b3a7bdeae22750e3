"""Whether Numba's loops compute a call: if Numba is installed and the call is long enough."""

from functools import cache

from ...signals import signals_held

LEAST_ELEMENTS = 1 << 17  # for fewer numbers importing Numba takes longer than it saves


def loops(elements):
    """The module of loops for a call with so many numbers, or None if NumPy and BLAS compute it."""
    return module() if elements >= LEAST_ELEMENTS else None


def loaded_loops(elements):
    """`module()` if an earlier call has imported Numba already, else `loops(elements)`."""
    return module() if module.cache_info().currsize else loops(elements)


@cache
@signals_held()
def module():
    """The module of loops; None if Numba cannot be imported."""
    try:
        from ... import numba_cache  # noqa: F401  its ImportError tells why Numba cannot be used
        from . import numba_loops
    except ImportError:
        return None
    return numba_loops
