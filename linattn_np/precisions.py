"""How exactly products of float32 numbers are computed on a GPU's tensor cores, which know numbers of tf32 alone.

"float32" takes the sum of three products of tf32, near float32's own rounding (1e-6 of a whole result). "tf32" takes
one: a relative error of 4e-4, for a third of the products. Everything that uses no tensor cores, and every other dtype,
is the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PRECISIONS = ("float32", "tf32")
chosen = ContextVar("precision", default="float32")


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Calls in this context compute float32 products in `name`, "float32" or "tf32", where they do not say otherwise.

    A pullback keeps the precision of the call that returned it.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> q = k = v = g = np.zeros((1, 2, 64, 16), np.float32)
    >>> with linattn_np.precision("tf32"):
    ...     o, pullback = linattn_np.vjp(linattn_np.gla, q, k, v, g)
    """
    if not isinstance(name, str) or name not in PRECISIONS:
        raise ValueError(f"precision: is {name!r}, expected one of {', '.join(map(repr, PRECISIONS))}")
    token = chosen.set(name)
    try:
        yield
    finally:
        chosen.reset(token)


def current() -> str:
    return chosen.get()
