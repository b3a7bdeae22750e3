"""Threads that help with matrix products while a call is at work.

They run Numba's loops, which do not hold the GIL. A call wakes them once, not at every product: until it stops them
they look at its board for parts to compute. A thread that comes late, or never, costs time and nothing else.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from ..argument_checks import whole_of

SHARE = 4 << 20  # bytes of matrices for which it pays to wake another thread


def count() -> int:
    """The threads of a call: OMP_NUM_THREADS, as BLAS counts them, or the cores that this process may use."""
    wanted = whole_of(os.environ.get("OMP_NUM_THREADS", ""))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(wanted or cores, cores)


class Helpers:
    """The threads of a process beside those that call; they wait until there is a board."""

    def __init__(self):
        self.forget()

    def forget(self):
        """As if none had been started: a forked child has none of its parent's threads."""
        self.boards, self.started, self.lock = SimpleQueue(), 0, threading.Lock()

    def wake(self, board, wanted):
        with self.lock:
            with suppress(RuntimeError):  # the system gives no more threads
                for _ in range(wanted - self.started):
                    threading.Thread(target=self.run, daemon=True, name="linattn_np").start()
                    self.started += 1
        for _ in range(min(wanted, self.started)):
            self.boards.put(board)

    def run(self):
        from . import matrix_loops

        while True:
            matrix_loops.assist(self.boards.get())


HELPERS = Helpers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=HELPERS.forget)


class Board:
    """Where a call publishes its products; one for each call, as several may be at work."""

    def __init__(self):
        from . import matrix_loops

        self.loops = matrix_loops
        self.array, self.busy = matrix_loops.new_board(), False
        self.most = count() - 1 if hasattr(os, "sched_yield") else 0

    @contextmanager
    def helped(self, size: int):
        """Products inside have others' help, where `size` bytes of matrices are worth it; every product is inside."""
        if self.busy:
            yield
            return
        self.busy = True
        wanted = min(self.most, size // SHARE)
        if wanted and not HELPERS.started:  # on a stopped board it compiles only: machine code that a helper compiles
            self.loops.assist(self.array)  # would be lost, every time anew, where the process ends before it is kept
        self.array[self.loops.STOPPED] = 0
        if wanted:
            HELPERS.wake(self.array, wanted)
        try:
            yield
        finally:
            self.busy = False
            self.array[self.loops.STOPPED] = 1  # for those, too, that come late, from an earlier time
