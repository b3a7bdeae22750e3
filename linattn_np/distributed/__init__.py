"""The operators on a sequence that is cut over ranks: processes, hosts or cards, each with a part of the tokens.

`connect()` gives a process its engine, which carries the messages; `run_threads` makes ranks of one process. An engine
is anything with the members of `Engine`: `Mpi` and `Sockets` carry NumPy arrays, `Nccl` CuPy arrays, and
`linattn_np.interop.torch.ProcessGroup` both, on a process group of torch.distributed. JAX has collectives of its own:
the functions of `linattn_np.interop.jax` take ``axis_name=`` under `shard_map`.
"""

from .agreement import Disagreement
from .data_parallel import DataParallel
from .engine import Alone, Engine, RankLost
from .mpi import Mpi
from .nccl import Nccl
from .operators import gla, linear_attention, retention, rwkv6, simple_gla, vjp
from .sequence_parallel import SequenceParallel
from .sockets import Sockets
from .startup import connect
from .threads import run_threads

__all__ = [
    "gla",
    "rwkv6",
    "simple_gla",
    "retention",
    "linear_attention",
    "vjp",
    "connect",
    "run_threads",
    "DataParallel",
    "SequenceParallel",
    "Engine",
    "Alone",
    "Mpi",
    "Nccl",
    "Sockets",
    "RankLost",
    "Disagreement",
]
