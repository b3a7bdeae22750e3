"""Ranks that are threads of one process: for tests, and for one process with several cards."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from contextlib import nullcontext

from ..argument_checks import is_int
from ..errors import ContractError
from ..messages import shown
from .engine import LIMIT_S, HostEngine, RankLost, check_limit

MOST_THREADS = 4096


def run_threads(function, size, *, device="cpu", limit_s=LIMIT_S):
    """[function(comm) of every rank], computed at the same time by `size` threads of this process.

    With ``device="cuda"``, rank r computes on CUDA device r, and NCCL sends CuPy arrays. The first rank that raises an
    error ends the others, and this function raises its error.

    Example
    -------
    >>> import numpy as np
    >>> from linattn_np import distributed
    >>> distributed.run_threads(lambda comm: comm.all_gather(np.array([comm.rank]))().ravel().tolist(), 3)
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    from ..models.devices import check_device

    check_device("run_threads", device)
    if not is_int(size) or not 1 <= size <= MOST_THREADS:
        raise ContractError(f"run_threads: size is {shown(size)}, expected an int from 1 to {MOST_THREADS}")
    check_limit("run_threads", limit_s)
    mailbox = Mailbox(limit_s)
    ends = [Threads(mailbox, rank, size) for rank in range(size)]
    if device == "cuda":
        from .nccl import CLOSING_S, of_one_process

        ends = of_one_process(ends, limit_s)
    results = [None] * size

    def work(rank):
        try:
            with sys.modules["cupy"].cuda.Device(rank) if device == "cuda" else nullcontext():
                results[rank] = function(ends[rank])
        except BaseException as error:
            mailbox.fail(rank, error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        wait_for(threads)
    except BaseException as error:  # Ctrl-C: every rank ends at its next message, and uses no array afterwards
        mailbox.fail("of the caller", error)
        wait_for([thread for thread in threads if thread.is_alive()])
        raise
    if device == "cuda":
        for closing in [end.close(failed=mailbox.failure is not None) for end in ends]:
            closing.join(CLOSING_S)
    if mailbox.failure is not None:
        raise mailbox.failure[1]
    return results


def wait_for(threads):
    """Waits until the threads have ended. A signal that comes when this thread is about to wait does not end the wait,
    so each wait has a limit."""
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)


class Mailbox:
    """Holds the messages that the threads send to each other until they are received."""

    def __init__(self, limit_s):
        self.limit_s = limit_s
        self.changed = threading.Condition()
        self.messages = defaultdict(deque)  # by (source, to, tag)
        self.failure = None  # (the first rank that has failed, its error), or of the caller

    def leave(self, name, message):
        """Adds a message; `name`: (source, to, tag)."""
        with self.changed:
            self.messages[name].append(message)
            self.changed.notify_all()

    def take(self, name):
        """Waits for the first message of this name, and removes it."""
        deadline = time.monotonic() + self.limit_s
        with self.changed:
            while self.failure is None and not self.messages[name]:
                if not self.changed.wait(deadline - time.monotonic()):
                    raise RankLost(f"waited {self.limit_s:g} s for rank {name[0]}")
            if self.failure is not None:
                rank, error = self.failure
                raise RankLost(f"rank {rank} has ended: {type(error).__name__}: {error}")
            return self.messages[name].popleft()

    def fail(self, rank, error):
        """Makes all ranks raise RankLost where they take the next message."""
        with self.changed:
            self.failure = self.failure or (rank, error)
            self.changed.notify_all()


class Threads(HostEngine):
    """An `Engine` of NumPy arrays between the threads of one process. `run_threads` makes them."""

    def __init__(self, mailbox, rank, size):
        super().__init__(rank, size, mailbox.limit_s)
        self.mailbox = mailbox

    def post(self, message, to, tag):
        self.mailbox.leave((self.rank, to, tag), message.copy())

    def fetch(self, into, source, tag):
        return into, (source, self.rank, tag)

    def finish(self, request, peer):
        if request is not None:  # it is None for `post`, which is done at once
            into, name = request
            into[:] = self.mailbox.take(name)
