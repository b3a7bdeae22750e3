"""Locks by which several threads use an object one after the other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from typing import Concatenate, ParamSpec, TypeVar

from ..errors import NotSupported

S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")


class Lock:
    """A lock that its holder may take again. A copy of it, or one from a pickle, is a new lock."""

    def __init__(self):
        self.lock = RLock()

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()

    def __reduce__(self):
        return Lock, ()


def one_at_a_time(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """The method, holding `self.lock` while it runs; the class sets `lock`, a `Lock`, in `__init__`."""

    @wraps(method)
    def locked(self: S, /, *arguments: P.args, **options: P.kwargs) -> R:
        with self.lock:  # type: ignore[attr-defined]
            return method(self, *arguments, **options)

    return locked


class Turns:
    """Orders the work that threads enqueue on the same buffers of a device.

    Calling the object returns a context, a *turn*. One thread at a time can be in a turn. The work enqueued in it runs
    after the work of all earlier turns, whatever streams they were on.
    """

    def __init__(self, device):
        self.device, self.lock, self.event = device, RLock(), device.record()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if self.device.capturing:
                raise NotSupported(
                    "RWKV: a model's calls cannot be captured in a CUDA graph; they make graphs themselves"
                )
            self.device.wait(self.event)  # also on the same address of a stream: the earlier stream may be gone
            try:
                yield
            finally:
                self.device.record(self.event)

    def wait(self):
        """Waits until the work of all earlier turns is done, so that its memory may be freed."""
        self.device.finish(self.event)
