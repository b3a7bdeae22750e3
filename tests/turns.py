"""Numba's simulator with the threads of a block taking turns, which takes a third of its time.

Numba's own loop lets all threads of a block run at once and asks every one of them, again and again, whether it waits
at a barrier: the asking takes the interpreter from those that work. Here a thread runs alone until it comes to a
barrier or to its end, then the next one does, in the order of their indices. So a kernel that lacks a barrier fails
every time.
"""

import threading
from types import SimpleNamespace

import numpy as np
from numba.cuda.simulator import kernel, kernelapi


def taken():
    """A lock that the next `acquire` waits for."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Turn:
    """What a thread waits for at a barrier: its next turn. Stands for the `threading.Event` of Numba's threads."""

    def __init__(self, stopped):
        self.stopped, self.mine = stopped, taken()

    def wait(self):
        self.stopped.release()
        self.mine.acquire()

    def set(self):
        self.mine.release()

    def clear(self):
        """A turn is used up by waiting for it."""


def run_block(block, index, *args):
    """Runs a kernel's block, in place of `BlockManager.run`."""
    stopped = taken()

    def body():
        try:
            block._f(*args)
        finally:
            stopped.release()

    threads = [kernel.BlockThread(body, block, index, thread, block._debug) for thread in np.ndindex(*block._block_dim)]
    begin = {thread: thread.start for thread in threads}
    while begin:
        waiting = {}
        for thread, go in begin.items():
            if run_until_barrier(thread, go, stopped):
                waiting[thread] = thread.syncthreads_event.set
            elif thread.exception:
                end(threads, stopped)
                raise thread.exception[0].with_traceback(thread.exception[1])
        begin = waiting


def run_until_barrier(thread, go, stopped):
    """Whether the thread came to a barrier; if not, it has ended."""
    if thread.ident is None:
        thread.syncthreads_event = Turn(stopped)
    thread.syncthreads_blocked = False
    go()
    stopped.acquire()
    if not thread.syncthreads_blocked:
        thread.join()
    return thread.syncthreads_blocked


def end(threads, stopped):
    """Ends those that wait at a barrier: each raises there, as Numba has it."""
    for thread in threads:
        thread.abort = True
        if thread.is_alive():
            run_until_barrier(thread, thread.syncthreads_event.set, stopped)


def caller_and_own(frame):
    """What the simulator takes from `traceback.extract_stack`: the file and the line that make a shared array. All of
    the stack, with the text of its lines, took a third of a thread's time.
    """
    return [(each.f_code.co_filename, each.f_lineno) for each in (frame.f_back, frame)]


def take_turns():
    """From here on, all blocks of the simulator run so."""
    kernel.BlockManager.run = run_block
    kernelapi.traceback = SimpleNamespace(extract_stack=caller_and_own)
