"""Whether Numba's loops compute a call: if Numba is installed and the call is long enough."""

from functools import cache

from ...signals import signals_held

LEAST_ELEMENTS = 1 << 17  # for fewer numbers importing Numba takes longer than it saves


def loops(elements):
    """The module of loops for a call whose arrays have `elements` numbers, or None if NumPy and BLAS compute it."""
    return module() if elements >= LEAST_ELEMENTS else None


def loaded_loops(elements):
    """`module()` if an earlier call has asked for it, else `loops(elements)`: short calls need not pay the import."""
    return module() if module.cache_info().currsize else loops(elements)


@cache
@signals_held()
def module():
    """The module of loops; None if Numba cannot be used. A signal that comes during the import waits for its end."""
    try:
        from ... import numba_cache  # noqa: F401  before Numba: an ImportError where Numba is missing or unusable
        from . import numba_loops
    except ImportError:
        return None
    return numba_loops
