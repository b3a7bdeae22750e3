"""CUDA graphs that CuPy captures: memory that a call allocates must be the graph's for as long as the graph lives.

CuPy's default memory pool lends a freed array's memory again, and the graph goes on reading and writing there.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import NotSupported

in_graphs: list = []  # what captured graphs use: kept for ever, since nobody says when a graph is gone


def loses_memory(home: str) -> bool:
    """Whether the memory of an array that is made now, and freed after the call, is lost to a graph under capture.

    An allocator other than CuPy's default one, which the caller has chosen, is taken to keep it: torch's does.
    """
    cupy = None if home == "host" else sys.modules.get("cupy")
    if cupy is None or not cupy.cuda.get_current_stream().is_capturing():
        return False
    return cupy.cuda.get_allocator() == cupy.get_default_memory_pool().malloc


def refuse_lost_memory(problem, argument: str, copied: str):
    """NotSupported where a call makes arrays that a graph under capture would lose; `copied` says which."""
    if loses_memory(problem.home):
        problem.op.refuse(
            argument,
            f"cannot be captured into a CUDA graph by CuPy: {copied} in memory that the graph does not keep; capture "
            "linattn_np.interop.torch by torch.cuda.graph, or call under cupy.cuda.using_allocator of a pool that "
            "lives as long as the graph",
            NotSupported,
        )


@contextmanager
def lasting_memory(home: str) -> Iterator[None]:
    """Gives a call under capture a memory pool of its own, which `in_graphs` keeps: see `loses_memory`."""
    if not loses_memory(home):
        yield
        return
    cupy = sys.modules["cupy"]
    pool = cupy.cuda.MemoryPool()
    in_graphs.append(pool)
    with cupy.cuda.using_allocator(pool.malloc):
        yield
