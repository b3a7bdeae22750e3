"""Work side by side on the machine's cores, by threads that are kept: NumPy lets go of the GIL in its loops."""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from threading import Barrier, Condition, Thread

import numpy as np

BUFFER = 1024  # elements, of NumPy's 8192: runs of up to a quarter of a buffer, as chunks are, take twice as long


def workers():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def pool():
    """New threads for every call would start with cold memory: a fifth of a short call's time.

    A thread that Ctrl-C finds while it is started is never told to end, and the process would wait for it for ever. So
    all are started at once, by a thread that no Ctrl-C reaches.
    """
    made = ThreadPoolExecutor(workers(), thread_name_prefix="linattn_np")
    together = Barrier(workers())

    def start():
        try:
            for found in [made.submit(together.wait) for _ in range(workers())]:
                found.result()
        except RuntimeError:  # the system gives no more threads
            together.abort()

    starter = Thread(target=start)
    starter.start()
    starter.join()
    return made


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # a child inherits the object, not its threads


def in_parallel(task, *items, caller=False):
    """[task(...) for ... in zip(*items)], side by side. A task starts none of its own: it would wait for itself.

    With `caller` the calling thread works too: where it had been computing alone, a system lets threads that it wakes
    share one core for milliseconds, all of a short call. Not for tasks that allocate much: the main thread's heap
    gives freed pages back to the system, the others' keep them.
    """
    shift = Shift(task, zip(*items))
    threads = min(workers(), len(shift.results))
    caller = caller or threads < 2
    try:
        helpers = helped(shift, threads - caller)
        if caller or not helpers:
            shift.work()
        for helper in helpers:
            helper.result()
    except BaseException:  # Ctrl-C, or a task that failed: the others write into the caller's arrays
        shift.end()
        raise
    return shift.results


def helped(shift, count) -> list:
    """Futures of `count` threads that work on it, or of as many as the system gives."""
    helpers: list = []
    with suppress(RuntimeError):
        while len(helpers) < count:
            helpers.append(pool().submit(shift.help))
    return helpers


class Shift:
    """Tasks that threads take from one queue. Nobody is at work any more once it has ended."""

    def __init__(self, task, items):
        self.task, self.todo = task, deque(enumerate(items))
        self.results = [None] * len(self.todo)
        self.change, self.at_work, self.ended = Condition(), 0, False

    def work(self):
        with np.errstate(all="ignore"):  # a thread has its own; with it ends the buffers' size too
            np.setbufsize(BUFFER)
            while self.todo:
                try:
                    i, item = self.todo.popleft()  # one step under the GIL
                except IndexError:  # another thread was faster
                    return
                self.results[i] = self.task(*item)

    def help(self):
        """`work` in another thread, which the caller can wait for without knowing it."""
        with self.change:
            if self.ended:
                return
            self.at_work += 1
        try:
            self.work()
        except BaseException:
            self.todo.clear()  # the call fails: nobody needs the rest
            raise
        finally:
            with self.change:
                self.at_work -= 1
                self.change.notify()

    def end(self):
        """No task is begun after this, and none goes on, however often the waiting is interrupted."""
        while True:
            try:
                self.todo.clear()
                with self.change:
                    self.ended = True
                    while self.at_work:
                        self.change.wait()
                return
            except BaseException:  # another Ctrl-C: what ends the call is the first one
                continue
