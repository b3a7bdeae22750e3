"""Which ranks there are: found out as users know it from mpiexec and torchrun."""

from __future__ import annotations

import hashlib
import os
import socket

import numpy as np

from .engine import LIMIT_S, Alone
from .mpi import Mpi
from .sockets import Sockets

MPIEXECS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")  # Open MPI, MPICH, PMIx, Intel
TORCHRUNS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def connect(device="cpu", *, limit_s=LIMIT_S):
    """The engine of this process, for `comm=`.

    - Under ``mpiexec -n 4 python train.py``: `Mpi`.
    - With torchrun's environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: `Sockets`, on the port after
      MASTER_PORT, which torchrun itself listens on. A program of one's own may set them too.
    - Otherwise `Alone`, so that the same program runs by itself.

    With ``device="cuda"`` these carry what the ranks agree by, and `Nccl` the arrays: the n-th rank of a host takes its
    n-th CUDA device, and makes it current. For one process with several cards see `run_threads`.

    A rank waits `limit_s` seconds for the others, then raises `RankLost`.

    Example
    -------
    >>> from linattn_np import distributed
    >>> comm = distributed.connect()
    >>> comm.rank, comm.size
    (0, 1)
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"connect: device is {device!r}, expected 'cpu' or 'cuda'")
    host = of_environment(os.environ, limit_s)
    return host if device == "cpu" else on_card(host, limit_s)


def of_environment(environment, limit_s):
    if any(name in environment for name in MPIEXECS):
        return Mpi(limit_s=limit_s)
    if "WORLD_SIZE" not in environment:
        return Alone()
    absent = [name for name in TORCHRUNS if name not in environment]
    if absent:
        raise ValueError(
            f"connect: WORLD_SIZE is set, but not {', '.join(absent)}; torchrun sets all of " + ", ".join(TORCHRUNS)
        )
    rank, size, address, port = (environment[name] for name in TORCHRUNS)
    return Sockets(int(rank), int(size), address, int(port) + 1, limit_s=limit_s) if int(size) > 1 else Alone()


def on_card(host, limit_s):
    """An `Nccl` engine on this rank's device."""
    import cupy

    from .nccl import Nccl

    place, count = place_on_host(host), cupy.cuda.runtime.getDeviceCount()
    if place >= count:
        raise RuntimeError(
            f"connect: rank {host.rank} is number {place + 1} on its host, which has {count} CUDA devices"
        )
    cupy.cuda.Device(place).use()
    return Nccl(host, limit_s=limit_s)


def place_on_host(host) -> int:
    """How many lower ranks run on this rank's host."""
    own = np.frombuffer(hashlib.blake2b(socket.gethostname().encode(), digest_size=16).digest(), np.uint8)
    names = host.all_gather(own)()
    return int((names[: host.rank] == own).all(axis=1).sum())
