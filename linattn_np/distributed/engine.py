"""What carries messages between ranks: the protocol of an engine, and the engine of a rank that is alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

LIMIT_S = 600.0  # how long a rank waits for the others by default, as torch.distributed does with NCCL


class RankLost(RuntimeError):
    """Another rank has ended, or did not answer within the time limit."""


@runtime_checkable
class Engine(Protocol):
    """One rank's end of the wire. Anything with these members will do as `comm=`.

    Every rank calls the same methods in the same order. Arrays are contiguous; an engine may read what it is given
    until the function that `all_gather` returned has been called. Work on a device is enqueued, and not waited for.
    """

    rank: int
    size: int
    homes: tuple[str, ...]  # the arrays that it takes: "host", "cuda"

    def all_gather(self, x) -> Callable[[], Any]:
        """Sends `x`, of one shape and dtype on all ranks. The function that comes back waits, and gives [size, ...]."""

    def send(self, x, to: int) -> None:
        """Sends `x` to a rank that calls `recv`."""

    def recv(self, x, source: int) -> None:
        """Fills `x` with what rank `source` sends."""


class Alone:
    """The engine of one rank without others."""

    rank, size, homes = 0, 1, ("host", "cuda")

    def all_gather(self, x):
        return lambda: x[None]

    def send(self, x, to):
        raise ValueError(f"Alone: there is no rank {to} to send to")

    def recv(self, x, source):
        raise ValueError(f"Alone: there is no rank {source} to receive from")

    def abandon(self):
        """There is nobody else."""


def as_bytes(x) -> np.ndarray:
    """A contiguous host array's memory, for libraries that have not every dtype."""
    if not isinstance(x, np.ndarray) or not x.flags.c_contiguous:
        raise TypeError(f"this engine takes contiguous NumPy arrays, got a {type(x).__module__}.{type(x).__qualname__}")
    return x.reshape(-1).view(np.uint8)
