"""Calls that are captured into CUDA graphs."""

from __future__ import annotations

import sys
from contextlib import contextmanager

from ..backends.cupy import execute


@contextmanager
def lasting_memory(home):
    """Where a graph is captured, memory comes from a pool of its own: every launch of the graph writes there again.

    `home` is that of the arrays. Who has told CuPy to take memory from another pool than its default one keeps that.
    """
    cupy = sys.modules.get("cupy")
    if home == "host" or not cupy.cuda.get_current_stream().is_capturing() or other_pool(cupy):
        yield
        return
    pool = cupy.cuda.MemoryPool()
    execute.in_graphs.append(pool)
    with cupy.cuda.using_allocator(pool.malloc):
        yield


def other_pool(cupy) -> bool:
    return cupy.cuda.get_allocator() != cupy.get_default_memory_pool().malloc
