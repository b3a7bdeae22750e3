"""The precision of products of float32 numbers on a GPU's tensor cores, which multiply tf32 numbers at best.

"float32" computes a product as a sum of three tf32 products: the root mean square of a result's errors is 1e-6 of the
result's own, near float32's rounding. "tf32" computes one: 4e-4, for a third of the products. Results without tensor
cores, and those in other dtypes, are the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PRECISIONS = ("float32", "tf32")
current_name = ContextVar("precision", default="float32")


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
    previous = current_name.set(name)
    try:
        yield
    finally:
        current_name.reset(previous)


def current() -> str:
    """The precision of calls that do not say it, in this thread or task."""
    return current_name.get()
