"""Ranks that are threads of one process: for tests, and for one process with several cards."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import numpy as np

from .engine import LIMIT_S, RankLost


def run_threads(function, size, *, device="cpu", limit_s=LIMIT_S):
    """[function(comm) of every rank], computed side by side by `size` threads of this process.

    With ``device="cuda"`` rank r works on CUDA device r, and CuPy arrays go over NCCL. The first rank that raises ends
    the others, and its error is raised here.

    Example
    -------
    >>> import numpy as np
    >>> from linattn_np import distributed
    >>> distributed.run_threads(lambda comm: comm.all_gather(np.array([comm.rank]))().ravel().tolist(), 3)
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"run_threads: device is {device!r}, expected 'cpu' or 'cuda'")
    meeting = Meeting(size, limit_s)
    ends = [Threads(meeting, rank) for rank in range(size)]
    if device == "cuda":
        from .nccl import CLOSING_S, of_one_process

        ends = of_one_process(ends, limit_s)
    results = [None] * size

    def work(rank):
        try:
            with on_card(rank) if device == "cuda" else nullcontext():
                results[rank] = function(ends[rank])
        except BaseException as error:
            meeting.fail(rank, error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if device == "cuda":
        for closing in [end.close(failed=meeting.failure is not None) for end in ends]:
            closing.join(CLOSING_S)
    if meeting.failure is not None:
        raise meeting.failure[1]
    return results


def on_card(ordinal):
    import cupy

    return cupy.cuda.Device(ordinal)


class Meeting:
    """Where the threads leave their messages, each under a name that all know, until everyone has read them."""

    def __init__(self, size, limit_s):
        self.size, self.limit_s = size, limit_s
        self.changed = threading.Condition()
        self.left, self.readers = {}, {}
        self.failure = None

    def leave(self, name, who, message):
        with self.changed:
            self.left.setdefault(name, {})[who] = message
            self.changed.notify_all()

    def read(self, name, count, readers):
        """The messages of `count` ranks by rank; the last of so many readers takes them away."""
        deadline = time.monotonic() + self.limit_s
        with self.changed:
            while len(self.left.get(name, ())) < count:
                if self.failure is not None:
                    rank, error = self.failure
                    raise RankLost(f"rank {rank} has ended: {type(error).__name__}: {error}")
                if not self.changed.wait(deadline - time.monotonic()):
                    absent = sorted(set(range(self.size)) - set(self.left.get(name, ())))
                    raise RankLost(f"waited {self.limit_s:g} s for rank {', '.join(map(str, absent))}")
            found = self.left[name]
            self.readers[name] = self.readers.get(name, 0) + 1
            if self.readers[name] == readers:
                del self.left[name], self.readers[name]
            return found

    def fail(self, rank, error):
        with self.changed:
            self.failure = self.failure or (rank, error)
            self.changed.notify_all()


class Threads:
    """An `Engine` of NumPy arrays between the threads of one process. `run_threads` makes them."""

    homes = ("host",)

    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.gathered, self.sent, self.received = 0, {}, {}

    def all_gather(self, x):
        name = "all", self.gathered
        self.gathered += 1
        self.meeting.leave(name, self.rank, x.copy())  # the caller may write to x before the slowest has read it

        def wait():
            found = self.meeting.read(name, self.size, self.size)
            return np.stack([found[rank] for rank in range(self.size)])

        return wait

    def send(self, x, to):
        count = self.sent[to] = self.sent.get(to, 0) + 1
        self.meeting.leave((self.rank, to, count), self.rank, x.copy())

    def abandon(self):
        """`run_threads` tells the others when a thread ends."""

    def recv(self, x, source):
        count = self.received[source] = self.received.get(source, 0) + 1
        x[...] = self.meeting.read((source, self.rank, count), 1, 1)[source]
