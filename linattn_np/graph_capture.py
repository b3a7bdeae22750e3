"""CUDA graphs that CuPy captures: memory that a call allocates must be the graph's for as long as the graph lives.

CuPy's default memory pool lends a freed array's memory again, and the graph goes on reading and writing there.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import NotSupported

in_graphs: list = []  # arrays and pools that captured graphs use: kept for ever, as no graph tells when it is freed


def loses_memory(home: str) -> bool:
    """Whether a graph is being captured that would use an array's memory after the call has freed it.

    An allocator that the caller has chosen is trusted to keep the memory, as torch's does.
    """
    cupy = None if home == "host" else sys.modules.get("cupy")
    if cupy is None or not cupy.cuda.get_current_stream().is_capturing():
        return False
    return cupy.cuda.get_allocator() == cupy.get_default_memory_pool().malloc


def refuse_lost_memory(problem, argument: str, copied: str):
    """NotSupported if the call makes arrays that a graph under capture would lose.

    argument, copied : the argument that the error names; the subject and verb of its text, such as "the copies are"
    """
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
