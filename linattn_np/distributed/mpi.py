"""Ranks that `mpiexec` has started: NumPy arrays through mpi4py."""

from __future__ import annotations

import atexit
import time

import numpy as np

from .engine import LIMIT_S, RankLost, as_bytes

LONGEST_PAUSE_S = 1e-3


class Mpi:
    """An `Engine` of NumPy arrays on an mpi4py communicator, COMM_WORLD by default, of which it takes a copy.

    A rank that `mpiexec` sees end badly ends the others. For one that hangs they wait `limit_s` seconds: then they
    raise `RankLost`, and end the whole job when they end. ``mpiexec -n 4 python -m mpi4py train.py`` ends it at the
    first exception of any rank, without a wait.
    """

    homes = ("host",)

    def __init__(self, communicator=None, *, limit_s=LIMIT_S):
        from mpi4py import MPI

        self.byte, self.limit_s = MPI.BYTE, limit_s
        self.communicator = (communicator or MPI.COMM_WORLD).Dup()
        self.rank, self.size = self.communicator.rank, self.communicator.size

    def all_gather(self, x):
        gathered = np.empty((self.size, *x.shape), x.dtype)
        request = self.communicator.Iallgather([as_bytes(x), self.byte], [as_bytes(gathered), self.byte])

        def wait():
            self.finish(request, f"all {self.size} ranks, of which this is rank {self.rank}")
            return gathered

        return wait

    def send(self, x, to):
        self.finish(self.communicator.Isend([as_bytes(x), self.byte], to), f"rank {to}")

    def recv(self, x, source):
        self.finish(self.communicator.Irecv([as_bytes(x), self.byte], source), f"rank {source}")

    def abandon(self):
        """Ends all ranks with this one, which has failed: MPI's own end would wait for the others."""
        atexit.register(self.communicator.Abort, 1)

    def finish(self, request, whom):
        """MPI's own wait has no limit. Pauses grow, as ranks may share a core."""
        deadline, pause = time.monotonic() + self.limit_s, 1e-6
        while not request.Test():
            if time.monotonic() > deadline:
                self.abandon()
                raise RankLost(f"waited {self.limit_s:g} s for {whom}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
