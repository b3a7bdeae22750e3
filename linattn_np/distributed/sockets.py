"""Ranks that find each other by the environment variables of `torchrun`: host arrays over TCP."""

from __future__ import annotations

import json
import socket
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


class Sockets:
    """An `Engine` of NumPy arrays between processes of any hosts, each connected to each. Rank 0 listens at `address`.

    Cards agree by it, and NumPy ranks use it where there is no MPI. Nothing is encrypted: it is for networks that are
    trusted, as those of NCCL and MPI are.
    """

    homes = ("host",)

    def __init__(self, rank, size, address, port, *, limit_s=LIMIT_S):
        self.rank, self.size, self.limit_s = rank, size, limit_s
        self.peers, self.to_receive, self.receiving = {}, deque(), RLock()
        self.last_sent: Future = Future()
        self.last_sent.set_result(None)
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
        connection.settimeout(self.limit_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peers[peer] = connection

    def ended(self) -> str | None:
        """Which other rank has ended, as far as its connection tells without a wait."""
        for peer, connection in self.peers.items():
            with connection.dup() as second:
                second.settimeout(0)
                try:
                    if not second.recv(1, socket.MSG_PEEK):
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
        sent = [self.post(peer, message) for peer in others]

        def receive():
            for peer in reversed(others):  # the ranks that send to this one first
                self.read(peer, as_bytes(gathered[peer]))
            for each in sent:
                each.result()

        arrived = self.expect(receive)
        if message.nbytes >= LONG:
            self.receiver.submit(self.receive_until, arrived)

        def wait():
            self.receive_until(arrived)
            arrived.result()
            return gathered

        return wait

    def expect(self, receive) -> Future:
        """Messages come in the order of the calls, whichever is waited for first."""
        arrived: Future = Future()
        self.to_receive.append((receive, arrived))
        return arrived

    def receive_until(self, arrived):
        with self.receiving:
            while not arrived.done():
                receive, each = self.to_receive.popleft()
                try:
                    each.set_result(receive())
                except Exception as error:
                    each.set_exception(error)

    def send(self, x, to):
        self.post(to, as_bytes(x).copy())

    def post(self, peer, message) -> Future:
        """Has a thread send a message, or does it where none is on its way and it fits between two sockets."""
        if self.last_sent.done() and message.nbytes < SHORT:
            done: Future = Future()
            try:
                done.set_result(self.push(peer, message))
            except RankLost as error:
                done.set_exception(error)
            return done
        self.last_sent = self.sender.submit(self.push, peer, message)
        return self.last_sent

    def recv(self, x, source):
        arrived = self.expect(lambda: self.read(source, as_bytes(x)))
        self.receive_until(arrived)
        arrived.result()

    def abandon(self):
        """Ends the others' waiting for this rank, which has failed."""
        for connection in self.peers.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # also for a thread of this rank that waits there
            connection.close()

    def push(self, peer, message):
        try:
            length = len(message).to_bytes(8, "little")
            if len(message) < SHORT:
                self.peers[peer].sendall(length + bytes(message))
                return
            self.peers[peer].sendall(length)
            self.peers[peer].sendall(message)
        except OSError as error:
            raise self.lost(peer, error) from error

    def read(self, peer, into):
        """Fills a buffer with a message of exactly its length."""
        length = int.from_bytes(self.pull(peer, bytearray(8)), "little")
        if length != len(into):
            raise RankLost(f"rank {peer} sent {length} bytes where {len(into)} were expected: it is in another call")
        self.pull(peer, into)

    def read_text(self, peer):
        return json.loads(self.pull(peer, bytearray(int.from_bytes(self.pull(peer, bytearray(8)), "little"))))

    def pull(self, peer, into):
        view = memoryview(into)
        try:
            while view:
                count = self.peers[peer].recv_into(view)
                if not count:
                    raise ConnectionResetError("it has closed the connection")
                view = view[count:]
        except OSError as error:
            raise self.lost(peer, error) from error
        return into

    def lost(self, peer, error):
        if isinstance(error, TimeoutError):
            return RankLost(f"waited {self.limit_s:g} s for rank {peer}")
        return RankLost(f"rank {peer} has ended: {error}")
