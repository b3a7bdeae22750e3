"""Whether calls on a GPU take the kernels of that card, where it has its own, or the portable ones of every card.

No user needs to choose: a card's own kernels are the faster ones. `explain`, benchmarks and tests choose the portable
ones on a card that has its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

KERNELS = ("auto", "portable")
requested = ContextVar("kernels", default="auto")


@contextmanager
def choose_kernels(kernels: str) -> Iterator[None]:
    """Calls in this context take these kernels; so do their pullbacks, wherever they are called."""
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}, expected one of {', '.join(map(repr, KERNELS))}")
    token = requested.set(kernels)
    try:
        yield
    finally:
        requested.reset(token)


def portable() -> bool:
    """Whether the portable kernels were asked for."""
    return requested.get() == "portable"
