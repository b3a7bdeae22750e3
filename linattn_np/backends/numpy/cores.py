"""Work side by side on the machine's cores, by threads that are kept: NumPy lets go of the GIL in its loops."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

BUFFER = 1024       # elements, of NumPy's 8192: runs of up to a quarter of a buffer, as chunks are, take twice as long


def workers():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def pool():
    """New threads for every call would start with cold memory: a fifth of a short call's time."""
    return ThreadPoolExecutor(workers(), thread_name_prefix="linattn_np")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)    # a child inherits the object, not its threads


def in_parallel(task, *items, caller=False):
    """[task(...) for ... in zip(*items)], side by side. A task starts none of its own: it would wait for itself.

    With `caller` the calling thread works too: where it had been computing alone, a system lets threads that it wakes
    share one core for milliseconds, all of a short call. Not for tasks that allocate much: the main thread's heap
    gives freed pages back to the system, the others' keep them.
    """
    waiting = iter(list(enumerate(zip(*items))))        # taking the next is one step under the GIL
    results = [None] * len(items[0])

    def work():
        with np.errstate(all="ignore"):         # a thread has its own; with it ends the buffers' size too
            np.setbufsize(BUFFER)
            for i, item in waiting:
                results[i] = task(*item)

    threads = min(workers(), len(results))
    caller = caller or threads < 2
    helpers = [pool().submit(work) for _ in range(threads - caller)]
    if caller:
        work()
    for helper in helpers:
        helper.result()
    return results
