"""The operators on a sequence that is cut over ranks: processes, hosts or cards, each with a part of the tokens.

`connect()` gives a process its engine, which carries the messages; `run_threads` makes ranks of one process. An engine
is anything with the members of `Engine`: `Mpi` and `ProcessGroup`, which is one of torch.distributed's, carry NumPy
arrays, and `Nccl` CuPy arrays. JAX has collectives of its own: the functions of `linattn_np.interop.jax` take
``axis_name=`` under `shard_map`.
"""

from . import operators
from .data_parallel import DataParallel, SequenceParallel
from .engine import Alone, Disagreement, Engine, RankLost
from .nccl import Nccl
from .operators import *  # noqa: F403
from .process_ranks import Mpi, ProcessGroup, connect
from .thread_ranks import run_threads

__all__ = [
    "connect",
    "run_threads",
    "DataParallel",
    "SequenceParallel",
    "Engine",
    "Alone",
    "Mpi",
    "Nccl",
    "ProcessGroup",
    "RankLost",
    "Disagreement",
]
__all__ += operators.__all__
