"""Engines send messages between ranks: the protocol of an engine, and the base class of those for NumPy arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..argument_checks import is_real
from ..errors import ContractError
from ..messages import shown

LIMIT_S = 600.0  # how long a rank waits for the others by default, as torch.distributed does with NCCL
LIMITS_S = 1e-3, 1e9  # the shortest and the longest time limit: torch takes milliseconds, and 0 as no limit

# The format of messages between processes, which all run one version of this package.
HEAD = np.dtype([("nbytes", "<i8"), ("begins", "<i8"), ("number", "<i8"), ("operation", "S72")])
FRAME = 256  # bytes of a message's first part: its head, then the message itself if it fits
ROOM = FRAME - HEAD.itemsize
# Tags, by which a receiver tells the messages of one sender apart; the rest of all-gather n, what its first part has no
# room for, has the tag GATHERED_REST + n % TAGS.
GATHERED, SENT, SENT_REST, GATHERED_REST = 0, 1, 2, 3
TAGS = 4096
BACKGROUND = 1 << 16  # an all-gather of at least so many bytes is run by a thread while its rank computes


class RankLost(RuntimeError):
    """Another rank has ended, or did not answer within the time limit."""


class Disagreement(ContractError):
    """The ranks make different calls; the message says which rank differs in what. Nothing is written."""


@runtime_checkable
class Engine(Protocol):
    """Sends and receives one rank's messages. Any object with these members can be passed as `comm=`.

    Every rank calls the same methods in the same order. Arrays are contiguous. An engine may read an array that it is
    given until the function that `all_gather` returned has been called. Work on a device is enqueued without waiting.

    An engine may also have `begin(operation)`, which gets the name of what its next messages belong to; `launched()`
    and `all_mean(x)`, as `Nccl` has them; and, for the command line, `abandon()`: its rank fails, the others must end.
    """

    rank: int
    size: int
    homes: tuple[str, ...]  # where arrays may be: "host", "cuda"

    def all_gather(self, x) -> Callable[[], Any]:
        """Sends `x`, of the same shape and dtype on all ranks. Returns a function that waits for [size, ...]."""

    def send(self, x, to: int) -> None:
        """Sends `x` to a rank that calls `recv`."""

    def recv(self, x, source: int) -> None:
        """Fills `x` with what rank `source` sends."""


class Alone:
    """The engine of one rank without others."""

    rank, size = 0, 1
    homes: tuple[str, ...] = ("host", "cuda")

    def all_gather(self, x):
        return lambda: x[None]

    def send(self, x, to):
        raise ValueError(f"Alone: there is no rank {to} to send to")

    def recv(self, x, source):
        raise ValueError(f"Alone: there is no rank {source} to receive from")

    def abandon(self):
        """Does nothing: there are no other ranks to tell."""


class HostEngine:
    """The base of engines for NumPy arrays, such as `Mpi`, on a library that sends bytes from one rank to another.

    A message begins with a part of fixed size. Its head has the message's length and its sender's current operation.
    Ranks compare the heads before they send the rest: libraries hang, or end the process, if sizes differ.

    A derived class has

    post(message, to, tag)          begins to send bytes; returns a request
    fetch(into, source, tag)        begins to receive as many bytes as `into` has; returns a request
    finish(request, peer)           waits for the request, RankLost after `limit_s` seconds
    threaded                        whether threads of one rank may call these at the same time

    others : the other ranks, the next one first
    operation, number : the current operation's name, and its number in order
    is_first_message : whether the next message is the operation's first
    gather_count, latest_gather : the number of all-gathers so far; the `Completion` of the latest, which runs those
        before it
    """

    homes: tuple[str, ...] = ("host",)
    threaded = False

    def __init__(self, rank, size, limit_s):
        check_limit(type(self).__name__, limit_s)
        self.rank, self.size, self.limit_s = rank, size, limit_s
        self.others = [(rank + step) % size for step in range(1, size)]
        self.operation, self.number, self.is_first_message = "no operation", 0, False
        self.gather_count, self.latest_gather = 0, None

    def begin(self, operation):
        """Sets the operation that the next messages belong to."""
        self.operation, self.number, self.is_first_message = operation, self.number + 1, True

    def abandon(self):
        """Does nothing: when a rank ends, most libraries raise an error on the ranks that wait for it."""

    def all_gather(self, x):
        message = as_bytes(x)
        gathered = np.empty((self.size, *x.shape), x.dtype)
        gathered[self.rank] = x
        frames = np.empty((self.size, FRAME), np.uint8)
        frames[self.rank] = self.frame(message)
        frames_arrive = self.exchange(frames[self.rank], frames, GATHERED)
        tag = GATHERED_REST + self.gather_count % TAGS
        self.gather_count += 1

        def work():
            frames_arrive()
            self.compare(frames)
            rows = gathered.reshape(self.size, -1).view(np.uint8)
            if message.nbytes > ROOM:
                self.exchange(message, rows, tag)()
            else:
                rows[self.others] = frames[self.others, HEAD.itemsize :][:, : message.nbytes]
            return gathered

        self.latest_gather = Completion(work, self.latest_gather)
        if self.threaded and message.nbytes >= BACKGROUND:
            with suppress(RuntimeError):  # the system gives no thread: the rank itself does it when it waits
                threading.Thread(target=self.latest_gather.settle, daemon=True).start()
        return self.latest_gather

    def exchange(self, message, rows, tag):
        """Begins to send `message` to all other ranks, and to receive theirs into their rows. Returns a function that
        waits for it."""
        requests = [(self.fetch(rows[peer], peer, tag), peer) for peer in self.others]
        requests += [(self.post(message, peer, tag), peer) for peer in self.others]

        def wait():
            for request, peer in requests:
                self.finish(request, peer)

        return wait

    def send(self, x, to):
        message = as_bytes(x)
        self.finish(self.post(self.frame(message), to, SENT), to)
        if message.nbytes > ROOM:
            self.finish(self.post(message, to, SENT_REST), to)

    def recv(self, x, source):
        message, frame = as_bytes(x), np.empty(FRAME, np.uint8)
        self.finish(self.fetch(frame, source, SENT), source)
        (head,) = read_heads(frame[None])
        nbytes, *_ = head
        if nbytes != message.nbytes:
            raise RankLost(
                f"rank {source} sent {nbytes} bytes where {message.nbytes} were expected: "
                f"it is {operation_in_words(head)}"
            )
        if message.nbytes > ROOM:
            self.finish(self.fetch(message, source, SENT_REST), source)
        else:
            message[:] = frame[HEAD.itemsize :][: message.nbytes]

    def frame(self, message):
        """The first part of a message: once for each, since the next one is no longer the operation's first."""
        frame = np.zeros(FRAME, np.uint8)
        head = message.nbytes, self.is_first_message, self.number, self.operation.encode()
        frame[: HEAD.itemsize] = np.array([head], HEAD).view(np.uint8)
        if message.nbytes <= ROOM:
            frame[HEAD.itemsize :][: message.nbytes] = message
        self.is_first_message = False
        return frame

    def compare(self, frames):
        """Raises Disagreement on every rank if messages differ in length, or if some begin an operation and others not.

        Names and numbers of operations serve the error alone. Ranks that begin different operations find that out from
        their messages: see `call_comparison`.
        """
        heads = read_heads(frames)
        if len({(nbytes, begins) for nbytes, begins, *_ in heads}) == 1:
            return
        senders: dict = {}  # ranks by what they say of themselves
        for rank, head in enumerate(heads):
            senders.setdefault(f"{operation_in_words(head)}, with a message of {head[0]} bytes", []).append(rank)
        groups = [
            f"{ranks_in_words(ranks)} {'is' if len(ranks) == 1 else 'are'} {words}" for words, ranks in senders.items()
        ]
        raise Disagreement(f"the ranks are in different operations: {'; '.join(groups)}")


class Completion:
    """The end of an all-gather, `work()`. The first thread that calls this object runs `previous`, then this one."""

    def __init__(self, work, previous):
        self.work, self.previous = work, previous
        self.lock, self.result, self.error = threading.Lock(), None, None

    def __call__(self):
        self.settle()
        if self.error is not None:
            raise self.error
        return self.result

    def settle(self):
        """Runs the earlier all-gathers, then this one."""
        chain, gather = [], self
        while gather is not None:
            chain.append(gather)
            gather = gather.previous
        for gather in reversed(chain):
            gather.run()

    def run(self):
        """Runs `work`, unless another thread has run it."""
        with self.lock:
            if self.work is None:
                return
            try:
                self.result = self.work()
            except Exception as error:
                self.error = error
            self.work = self.previous = None


def begin(comm, operation):
    """Sets the operation that this rank begins, if its engine sends that to the other ranks."""
    if hasattr(comm, "begin"):
        comm.begin(operation)


def read_heads(frames):
    """[(bytes, whether the operation begins, its number, its name)] from frames [n, FRAME]."""
    return frames[:, : HEAD.itemsize].copy().view(HEAD)[:, 0].tolist()


def operation_in_words(head):
    """In words for an error, the operation in which a rank was when it sent a message with this head."""
    _, begins, number, operation = head
    return f"{'at the beginning of' if begins else 'in or after'} {operation.decode(errors='ignore')} (call {number})"


def ranks_in_words(ranks):
    """For example, "ranks 1, 2 and 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def check_limit(where, limit_s):
    """ContractError unless a time limit is from LIMITS_S[0] to LIMITS_S[1]."""
    least, most = LIMITS_S
    if not (is_real(limit_s) and least <= limit_s <= most):
        raise ContractError(f"{where}: limit_s is {shown(limit_s)}, expected seconds, from {least:g} to {most:g}")


def as_bytes(x) -> np.ndarray:
    """A view of the bytes of a contiguous host array, as libraries do not know every dtype."""
    if not isinstance(x, np.ndarray) or not x.flags.c_contiguous:
        raise TypeError(f"this engine takes contiguous NumPy arrays, got a {type(x).__module__}.{type(x).__qualname__}")
    return x.reshape(-1).view(np.uint8)
