"""Locks by which several threads use an object one after the other."""

from _thread import RLock  # the class; threading.RLock is a function, which cannot be a base
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from ..errors import NotSupported

S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")


class Lock(RLock):  # type: ignore[misc]  # to type checkers it is no base, to CPython it is
    """A lock that its holder may take again. A copy of it, or one from a pickle, is a new lock.

    It inherits `__enter__`, which is written in C. Ctrl-C could end one in Python after it has taken the lock and
    before the `with` statement knows it: the lock would never be released.
    """

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

    Calling the object returns a context, a *turn*. One thread at a time can be in a turn; it may enter another inside.
    The work enqueued in it runs after the work of all earlier turns, whatever streams they were on. All work of a
    turn must be on one stream, which is current when the turn begins and when it ends.

    device : a CupyDevice: `record` and `wait` concern its current stream, at `finish` the host waits
    """

    def __init__(self, device):
        self.device, self.lock, self.event = device, Lock(), device.record()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if self.device.capturing:
                raise NotSupported(
                    "RWKV: a model's calls cannot be captured in a CUDA graph; they make graphs themselves"
                )
            # Also if the stream's address is that of the last turn: that stream may be gone, and this one new.
            self.device.wait(self.event)
            try:
                yield  # Ctrl-C before `with` knows the context drops the generator: `finally` and the lock's `with` run
            finally:
                self.device.record(self.event)

    def wait(self):
        """Waits until the work of all earlier turns is done, so that its memory may be freed. For threads in a turn."""
        self.device.finish(self.event)
