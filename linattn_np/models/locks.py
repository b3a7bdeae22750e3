"""Threads of the host that share an object: one after another."""

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
    """A lock that its holder may take again; a copy or a pickle of it is a new one."""

    def __init__(self):
        self.lock = RLock()

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()

    def __reduce__(self):
        return Lock, ()


def one_at_a_time(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that holds `self.lock`."""

    @wraps(method)
    def locked(self: S, /, *arguments: P.args, **how: P.kwargs) -> R:
        with self.lock:  # type: ignore[attr-defined]
            return method(self, *arguments, **how)

    return locked


class Turns:
    """Orders the work that threads enqueue on a device's buffers. A call of it is a context: it holds a lock of the
    host, and what is enqueued inside runs after all that was enqueued inside before, on any stream."""

    def __init__(self, device):
        self.device, self.lock, self.event = device, RLock(), device.record()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if self.device.capturing:
                raise NotSupported(
                    "RWKV: a model's calls cannot be captured in a CUDA graph; they make graphs themselves"
                )
            self.device.wait(self.event)  # on the same stream, too: one that is gone may have had its address
            try:
                yield
            finally:
                self.device.record(self.event)

    def wait(self):
        """Until all that was enqueued in earlier turns is done, so that its memory may be given back."""
        self.device.finish(self.event)
