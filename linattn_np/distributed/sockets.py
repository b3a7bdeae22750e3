"""Ranks that find each other by the environment variables of `torchrun`: host arrays over TCP."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import RLock

import numpy as np

from .engine import LIMIT_S, RankLost, as_bytes

RETRY_S = 0.05
SHORT = 1 << 10  # bytes of a message that is sent at once: a thread takes longer to begin
LONG = 1 << 16  # bytes of a message that is received before anyone waits for it
LENGTH = 8  # bytes before each message that tell its length


class Arrival:
    """Whether a message is there, and what went wrong: of a Future what takes no lock."""

    def __init__(self, error=None):
        self.done, self.error = False, error

    def result(self):
        if self.error is not None:
            raise self.error


class Sockets:
    """An `Engine` of NumPy arrays between processes of any hosts, each connected to each. Rank 0 listens at `address`.

    Cards agree by it, and NumPy ranks use it where there is no MPI. Nothing is encrypted: it is for networks that are
    trusted, as those of NCCL and MPI are.
    """

    homes = ("host",)

    def __init__(self, rank, size, address, port, *, limit_s=LIMIT_S):
        self.rank, self.size, self.limit_s = rank, size, limit_s
        self.peers, self.to_receive, self.receiving = {}, deque(), RLock()
        self.last_sent: Future | None = None  # what a thread was given to send
        self.sender, self.receiver = (ThreadPoolExecutor(1, "linattn_np.distributed") for _ in range(2))
        deadline = time.monotonic() + limit_s
        with socket.create_server((address if rank == 0 else "", port if rank == 0 else 0), backlog=size) as server:
            server.settimeout(limit_s)
            if rank:
                self.dial(0, address, port, {"rank": rank, "port": server.getsockname()[1]}, deadline)
                addresses = self.read_text(0)
                for lower in range(1, rank):
                    self.dial(lower, *addresses[str(lower)], {"rank": rank}, deadline)
            addresses = {}
            while len(self.peers) < size - 1:
                self.answer(server, addresses)
        if rank == 0:
            for peer in self.peers:
                self.push(peer, json.dumps(addresses).encode())

    # -- meeting ------------------------------------------------------------------------------------------------------
    def dial(self, peer, address, port, introduction, deadline):
        while True:
            try:
                self.keep(peer, socket.create_connection((address, port), timeout=self.limit_s))
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RankLost(f"rank {peer} does not answer at {address}:{port}: {error}") from error
                time.sleep(RETRY_S)
        self.push(peer, json.dumps(introduction).encode())

    def answer(self, server, addresses):
        try:
            connection, (address, *_) = server.accept()
        except TimeoutError as error:
            absent = sorted(set(range(self.rank + 1, self.size)) - set(self.peers))
            raise RankLost(f"waited {self.limit_s:g} s for rank {', '.join(map(str, absent))} to connect") from error
        self.keep(None, connection)
        told = self.read_text(None)
        self.peers[told["rank"]] = self.peers.pop(None)
        addresses[told["rank"]] = address, told.get("port")

    def keep(self, peer, connection):
        connection.settimeout(None)
        seconds = struct.pack("ll", int(self.limit_s), int(self.limit_s % 1 * 1e6))
        # the system's own limits: Python's take one call more, each time
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, limit, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peers[peer] = connection

    def ended(self) -> str | None:
        """Which other rank has ended, as far as its connection tells without a wait."""
        for peer, connection in self.peers.items():
            try:
                if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return f"rank {peer} has ended"
            except BlockingIOError:
                pass
            except OSError as error:
                return f"rank {peer} has ended: {error}"
        return None

    # -- messages -----------------------------------------------------------------------------------------------------
    def all_gather(self, x):
        gathered = np.empty((self.size, *x.shape), x.dtype)
        gathered[self.rank] = x
        message = as_bytes(x)
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        sent = self.post(others, message)

        def receive():
            for peer in reversed(others):  # the ranks that send to this one first
                self.read(peer, as_bytes(gathered[peer]))
            sent()

        arrived = self.expect(receive)
        if message.nbytes >= LONG:
            self.receiver.submit(self.receive_until, arrived)

        def wait():
            self.receive_until(arrived)
            return gathered

        return wait

    def send(self, x, to):
        self.post([to], as_bytes(x).copy())

    def recv(self, x, source):
        self.receive_until(self.expect(lambda: self.read(source, as_bytes(x))))

    def post(self, peers, message):
        """Has a thread send a message, or does it where none is on its way and it fits between two sockets.

        What comes back waits until it is sent, and raises where it could not be.
        """
        if message.nbytes < SHORT and (self.last_sent is None or self.last_sent.done()):
            try:
                self.push_to(peers, message)
            except RankLost as error:
                return Arrival(error).result
            return Arrival().result
        self.last_sent = self.sender.submit(self.push_to, peers, message)
        return self.last_sent.result

    def expect(self, receive) -> Arrival:
        """Messages come in the order of the calls, whichever is waited for first."""
        arrived = Arrival()
        self.to_receive.append((receive, arrived))
        return arrived

    def receive_until(self, arrived):
        with self.receiving:
            while not arrived.done:
                receive, each = self.to_receive.popleft()
                try:
                    receive()
                except Exception as error:
                    each.error = error
                each.done = True
        arrived.result()

    def abandon(self):
        """Ends the others' waiting for this rank, which has failed."""
        for connection in self.peers.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # also for a thread of this rank that waits there
            connection.close()

    def push_to(self, peers, message):
        """Sends to each, also where one of them has ended."""
        failure = None
        for peer in peers:
            try:
                self.push(peer, message)
            except RankLost as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def push(self, peer, message):
        try:
            length = len(message).to_bytes(LENGTH, "little")
            if len(message) < SHORT:
                self.peers[peer].sendall(length + bytes(message))
                return
            self.peers[peer].sendall(length)
            self.peers[peer].sendall(message)
        except OSError as error:
            raise self.lost(peer, error) from error

    def read(self, peer, into):
        """Fills a buffer with a message of exactly its length; a short one comes with its length in one piece."""
        framed = memoryview(bytearray(LENGTH + (len(into) if len(into) < SHORT else 0)))
        here = self.pull(peer, framed, at_least=LENGTH)
        length = int.from_bytes(framed[:LENGTH], "little")
        if length != len(into):
            raise RankLost(f"rank {peer} sent {length} bytes where {len(into)} were expected: it is in another call")
        self.pull(peer, framed[here:])
        short = framed[LENGTH:]
        into[: len(short)] = short
        self.pull(peer, into[len(short) :])

    def read_text(self, peer):
        length = bytearray(LENGTH)
        self.pull(peer, length)
        text = bytearray(int.from_bytes(length, "little"))
        self.pull(peer, text)
        return json.loads(text)

    def pull(self, peer, into, at_least=None):
        """Fills a buffer, or its beginning, and says how much of it."""
        view = memoryview(into)
        here, wanted = 0, len(view) if at_least is None else at_least
        try:
            while here < wanted:
                count = self.peers[peer].recv_into(view[here:])
                if not count:
                    raise ConnectionResetError("it has closed the connection")
                here += count
        except OSError as error:
            raise self.lost(peer, error) from error
        return here

    def lost(self, peer, error):
        if isinstance(error, (TimeoutError, BlockingIOError)):
            return RankLost(f"waited {self.limit_s:g} s for rank {peer}")
        return RankLost(f"rank {peer} has ended: {error}")
