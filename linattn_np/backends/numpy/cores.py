"""Runs tasks at the same time on all cores, in threads that live as long as the process. NumPy and Numba release the
GIL in their loops."""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from threading import Barrier, Condition, Thread

import numpy as np

# Numbers in a buffer of NumPy's ufuncs, by default 8192. Loops over rows shorter than a quarter of a buffer take twice
# as long, and rows of chunks are short.
BUFFER = 1024
# A signal that comes when a thread is about to wait does not end the wait. So the caller's waits have a limit: Ctrl-C
# ends a call at most so many seconds later.
LONGEST_WAIT_S = 0.1


def workers():
    """How many tasks run at the same time: the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def pool():
    """The threads. New threads for every call would find no data in their caches, a fifth of a short call's time.

    If Ctrl-C comes while a thread is started, Python never tells that thread to end, and the process would wait for it
    for ever. So another thread, which Ctrl-C does not interrupt, starts all of them at once.
    """
    executor = ThreadPoolExecutor(workers(), thread_name_prefix="linattn_np")
    barrier = Barrier(workers())  # holds each thread until all have started: the pool starts none while one is idle

    def start():
        try:
            for future in [executor.submit(barrier.wait) for _ in range(workers())]:
                future.result()
        except RuntimeError:  # the system gives no more threads
            barrier.abort()

    starter = Thread(target=start)
    starter.start()
    starter.join()
    return executor


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # a child inherits the object, not its threads


def in_parallel(task, *items, caller=False):
    """[task(...) for ... in zip(*items)], with several tasks at the same time. A task must not call this function: it
    might wait for itself.

    caller : whether the calling thread computes tasks, too. For short calls it should: an operating system may let the
        threads that it wakes share one core for milliseconds. For tasks that allocate much memory it should not:
        what the main thread frees goes back to the system, which clears its pages anew for every task; what other
        threads free stays theirs.
    """
    queue = TaskQueue(task, zip(*items))
    threads = min(workers(), len(queue.results))
    caller = caller or threads < 2
    try:
        helpers = start_helpers(queue, threads - caller)
        if caller or not helpers:
            queue.work()
        for helper in helpers:
            while not helper.done():
                with suppress(TimeoutError):  # of the wait; a task's own is raised by result()
                    helper.exception(LONGEST_WAIT_S)
            helper.result()
    except BaseException:  # Ctrl-C, or a failed task: other tasks must not write into the caller's arrays any more
        queue.end()
        raise
    return queue.results


def start_helpers(queue, count) -> list:
    """Makes `count` threads, or as many as the system allows, compute tasks of the queue; returns their futures."""
    helpers: list = []
    with suppress(RuntimeError):
        while len(helpers) < count:
            helpers.append(pool().submit(queue.help_caller))
    return helpers


class TaskQueue:
    """The tasks of one call, which threads take from a queue, and their results."""

    def __init__(self, task, items):
        self.task, self.waiting = task, deque(enumerate(items))
        self.results = [None] * len(self.waiting)
        self.condition, self.helpers_at_work, self.ended = Condition(), 0, False

    def work(self):
        """Computes tasks until none is waiting."""
        with np.errstate(all="ignore"):  # of this thread; leaving the context also resets the buffers' size
            np.setbufsize(BUFFER)
            while self.waiting:
                try:
                    i, item = self.waiting.popleft()  # atomic under the GIL
                except IndexError:  # another thread was faster
                    return
                self.results[i] = self.task(*item)

    def help_caller(self):
        """`work`, in another thread than the caller's. `end` waits for all threads that are in this method."""
        with self.condition:
            if self.ended:
                return
            self.helpers_at_work += 1
        try:
            self.work()
        except BaseException:
            self.waiting.clear()  # the call fails, so the other results are not needed
            raise
        finally:
            with self.condition:
                self.helpers_at_work -= 1
                self.condition.notify()

    def end(self):
        """Waits for the tasks that are being computed and drops the others. Then no thread uses the caller's arrays,
        even if Ctrl-C interrupts the waiting several times."""
        while True:
            try:
                self.waiting.clear()
                with self.condition:
                    self.ended = True
                    while self.helpers_at_work:
                        self.condition.wait()
                return
            except BaseException:  # another Ctrl-C: the call ends with the first one
                continue
