"""Threads that help a model's call with its matrix products.

They run Numba's loops, which do not hold the GIL. A step of decoding wakes them once, not at every product, a prompt at
each large one: until they are stopped, they look at the call's board for parts of products to compute. If a thread
starts late, or never, the others compute its parts (`matrix_loops` says how parts are claimed). `matrix_loops`, which
imports Numba, is imported when a thread or a board is made.
"""

import os
import threading
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from ..argument_checks import whole_of

SHARE = 4 << 20  # a helper is woken for so many bytes of matrices: with fewer, waking it takes longer than it saves


def count() -> int:
    """The threads of a call: OMP_NUM_THREADS, but at most the cores that this process may use; all cores if the
    variable is not set, is 0, or is no whole number: a list of numbers is for nested teams."""
    wanted = whole_of(os.environ.get("OMP_NUM_THREADS", ""))  # None if it is no whole number, or negative
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(wanted or cores, cores)


class Helpers:
    """The helper threads of a process, which are started when they are first needed and wait for boards."""

    def __init__(self):
        self.forget()

    def forget(self):
        """Forgets all threads that were started: a forked child has none of its parent's threads."""
        self.boards, self.started, self.lock = SimpleQueue(), 0, threading.Lock()

    def wake(self, board, wanted):
        """Makes up to `wanted` threads help with the products of a board. All boards share the threads: one that helps
        with another board comes when that one is over."""
        with self.lock:
            with suppress(RuntimeError):  # the system gives no more threads
                for _ in range(wanted - self.started):
                    threading.Thread(target=self.run, daemon=True, name="linattn_np").start()
                    self.started += 1
        for _ in range(min(wanted, self.started)):
            self.boards.put(board)

    def run(self):
        """The endless loop of a helper thread: it helps with one board after the other."""
        from . import matrix_loops

        while True:
            matrix_loops.assist(self.boards.get())


HELPERS = Helpers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=HELPERS.forget)


class Board:
    """The board on which a call publishes its products. Every call of a model has its own. A step of decoding enters
    `helped` once, a prompt at each product; only the call's thread enters it.

    array : the board for `matrix_loops`, which helpers read without the GIL. Two of its elements are set here: THREADS,
        how many share the products, the call's thread and its helpers, by which a claim's size is chosen; and STOPPED,
        whether helpers must return, which they read atomically at each look
    busy : whether the thread is inside `helped`
    most : the most helpers; none where the system lacks sched_yield, which a thread without a part calls
    """

    def __init__(self):
        from . import matrix_loops

        self.loops = matrix_loops
        self.array, self.busy = matrix_loops.new_board(), False
        self.most = count() - 1 if hasattr(os, "sched_yield") else 0

    @contextmanager
    def helped(self, size: int):
        """A context in which helpers compute parts of products: one for each SHARE of `size`, the bytes that all
        products inside read, or could read in the time that they take. Outside of it the call's thread computes them
        alone; a context inside another one does nothing."""
        if self.busy:
            yield
            return
        self.busy = True
        # `try` is the next line: Ctrl-C may come at any one, and helpers look at the board until STOPPED is 1.
        try:
            wanted = min(self.most, size // SHARE)
            # A helper that an earlier context of this board woke, and that starts only now, joins, too. More threads
            # than THREADS do no harm: each part is claimed once, and THREADS decides only how many a claim takes.
            self.array[self.loops.THREADS], self.array[self.loops.STOPPED] = wanted + 1, 0
            if wanted:
                HELPERS.wake(self.array, wanted)
            yield
        finally:
            self.array[self.loops.STOPPED] = 1  # first, as above; a helper that reads it later returns at once
            self.busy = False
