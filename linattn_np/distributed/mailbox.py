"""Short messages between the processes of a host, through memory that all of them see.

What ranks agree by is a few bytes that all wait for. A socket takes calls of the system to send and to receive, and
wakes who waits too late: with four ranks it took longer than all else of a call.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import time
from contextlib import suppress

import numpy as np

from .engine import hosts

IN_ORDER = ("x86_64",)  # machines on which nobody sees a number before what was written in front of it
SLOTS, SLOT = 64, 128  # messages of a rank that may be under way, and bytes of each with its number and length
ROOM = SLOT - 16  # bytes of the longest message
SPIN_S, YIELD_S = 5e-5, 1e-3  # how long to look without a break, and then so that other processes may run
NAP_S, LOOK_S = 5e-5, 0.02  # afterwards a nap between two looks, and from one look at who has ended to another


class Mailbox:
    """One rank's view of the memory. Of each rank it has SLOTS messages in turn, and the number of the last that the
    rank has read of all others'. Numbers count from 1, and are written last.
    """

    def __init__(self, rank, size, memory):
        self.rank, self.size, self.memory = rank, size, memoryview(memory)
        self.words, self.number = self.memory.cast("q"), 0

    @staticmethod
    def bytes_of(size) -> int:
        return size * (SLOTS + 1) * SLOT

    def place(self, rank, number) -> int:
        """Of a rank's message, in bytes; behind its SLOTS messages stands what it has read."""
        return (rank * (SLOTS + 1) + number % SLOTS) * SLOT

    def post(self, message):
        """Tells the others the length of a message, and the message itself where there is ROOM. A slot must be free."""
        self.number += 1
        at, length = self.place(self.rank, self.number), len(message)
        if length <= ROOM:
            self.memory[at + 16 : at + 16 + length] = message
        self.words[at // 8 + 1] = length
        self.words[at // 8] = self.number
        return self.number

    @property
    def full(self) -> bool:
        """Whether some rank has yet to read what stands where the next message goes."""
        return any(self.number + 1 - self.read_by(rank) > SLOTS for rank in range(self.size) if rank != self.rank)

    def read_by(self, rank) -> int:
        return self.words[((rank + 1) * (SLOTS + 1) - 1) * SLOT // 8]

    def arrived(self, rank, number) -> bool:
        return self.words[self.place(rank, number) // 8] == number

    def length(self, rank, number) -> int:
        return self.words[self.place(rank, number) // 8 + 1]

    def read(self, rank, number, into):
        at = self.place(rank, number) + 16
        into[:] = self.memory[at : at + len(into)]

    def done(self, number):
        """This rank has read all messages up to this number."""
        self.words[((self.rank + 1) * (SLOTS + 1) - 1) * SLOT // 8] = number


def patiently(ready, ended, limit_s):
    """Waits until ready(), and gives None; or why not: what ended() says of the others, or "late"."""
    start = time.monotonic()
    looked = start + YIELD_S
    while not ready():
        now = time.monotonic()
        if now - start < SPIN_S:
            continue
        if now - start < YIELD_S:
            os.sched_yield()
            continue
        time.sleep(NAP_S)
        if now - looked > LOOK_S:
            looked = now
            if (why := ended()) and not ready():
                return why
            if now - start > limit_s:
                return "late"
    return None


def shared_mailbox(comm) -> Mailbox | None:
    """A mailbox of all ranks, or None on all of them, where they cannot have one. The memory has no name any more."""
    of_ranks = hosts(comm)
    possible = platform.machine() in IN_ORDER and (of_ranks == of_ranks[0]).all()
    if not comm.all_gather(np.array([possible]))().all():
        return None
    file, path = -1, ""
    with suppress(OSError):
        if comm.rank == 0:
            file, path = tempfile.mkstemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
            os.truncate(file, Mailbox.bytes_of(comm.size))
    named = np.zeros(4096, np.uint8)
    named[: len(path)] = np.frombuffer(path.encode(), np.uint8)
    path = comm.all_gather(named)()[0].tobytes().rstrip(b"\0").decode()
    memory = None
    with suppress(OSError, ValueError):
        if comm.rank:
            file = os.open(path, os.O_RDWR)
        memory = mmap.mmap(file, Mailbox.bytes_of(comm.size))
    if file >= 0:
        os.close(file)
    everyone = comm.all_gather(np.array([memory is not None]))().all()
    if comm.rank == 0 and path:
        os.unlink(path)
    return Mailbox(comm.rank, comm.size, memory) if everyone else None
