"""Cards: CuPy arrays over NCCL, on a stream of its own."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager

import numpy as np

from ..errors import NotSupported
from .engine import LIMIT_S, RankLost, begin, check_limit

PRIORITY = -5  # the highest: a message's few blocks must not wait until a card that is full of work has none left
CLOSING_S = 2.0  # how long the end of a communicator is waited for
GRACE_S = 5.0  # how long a message is waited for before ranks that have ended are looked for
GREETING = 128  # bytes of NCCL's unique id, by which its ranks find each other
FLAGS = 1 << 12  # the most messages under way: CUDA blocks the host before there are more


class Nccl:
    """An `Engine` of CuPy arrays through `cupy.cuda.nccl`, for the current device, beside an engine of host arrays.

    `host`, such as an `Mpi` or a `ProcessGroup`, carries what the ranks agree by, and NCCL's first greeting. Messages
    are enqueued on the engine's own stream, which waits for the current one and for which the current one waits when
    the result is used: the host never does.

    NCCL itself waits for ever. Where a message has not arrived after `limit_s` seconds, or soon after `host` has seen
    another rank end, the communicator is aborted, and stderr says so: what has been computed from it is worthless, and
    the engine's next use raises `RankLost`.

    NCCL destroys a communicator only when no CUDA graph holds messages of it. The engine waits for that `CLOSING_S`
    seconds at most, and a process may end before.
    """

    homes: tuple[str, ...] = ("host", "cuda")

    def __init__(self, host, *, communicator=None, limit_s=LIMIT_S):
        check_limit("Nccl", limit_s)
        import cupy
        from cupy.cuda import nccl

        if not nccl.available:
            raise NotSupported("CuPy finds no NCCL; pip install nvidia-nccl-cu13, or -cu12 with cupy-cuda12x")
        if communicator is None:
            greeting = np.frombuffer(nccl.get_unique_id() if host.rank == 0 else bytes(GREETING), np.uint8)
            communicator = nccl.NcclCommunicator(host.size, host.all_gather(greeting)()[0].tobytes(), host.rank)
        flags = cupy.cuda.alloc_pinned_memory(FLAGS)
        last_for_ever(communicator)  # its own end would wait for graphs, perhaps as long
        last_for_ever(flags)  # the card may write there after the engine's end
        self.cupy, self.byte = cupy, nccl.NCCL_UINT8
        self.float32, self.average = nccl.NCCL_FLOAT32, nccl.NCCL_AVG
        self.host, self.communicator = host, communicator
        self.rank, self.size, self.device = host.rank, host.size, cupy.cuda.Device()
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=PRIORITY)
        self.before = self.event()  # what a message waits for
        ended = getattr(host, "ended", lambda: None)
        name, self.flags = f"NCCL, rank {self.rank} of {self.size}", flags.ptr
        self.watch = Watch(communicator.abort, name, limit_s, ended, np.frombuffer(flags, np.uint8, FLAGS))

    def all_gather(self, x):
        if isinstance(x, np.ndarray):
            return self.host.all_gather(x)
        gathered, read = self.cupy.empty((self.size, *x.shape), x.dtype), [x]  # x lives until NCCL has read it
        done = self.enqueue(
            lambda stream: self.communicator.allGather(x.data.ptr, gathered.data.ptr, x.nbytes, self.byte, stream)
        )

        def wait():
            self.watch.check()
            self.join(done)
            read.clear()
            return gathered

        return wait

    def all_mean(self, x):
        """Puts the mean over all ranks of a contiguous float32 array in its place, once what comes back is called."""
        address = x.data.ptr
        done = self.enqueue(
            lambda stream: self.communicator.allReduce(address, address, x.size, self.float32, self.average, stream)
        )

        def wait():
            self.watch.check()
            self.join(done)

        return wait

    def send(self, x, to):
        if isinstance(x, np.ndarray):
            return self.host.send(x, to)
        self.join(self.enqueue(lambda stream: self.communicator.send(x.data.ptr, x.nbytes, self.byte, to, stream), to))

    def recv(self, x, source):
        if isinstance(x, np.ndarray):
            return self.host.recv(x, source)
        done = self.enqueue(
            lambda stream: self.communicator.recv(x.data.ptr, x.nbytes, self.byte, source, stream), source
        )
        self.join(done)

    def join(self, done):
        self.cupy.cuda.get_current_stream().wait_event(done)

    def enqueue(self, work, peer=None):
        """Enqueues `work` after everything on the current stream; returns the event of its end.

        peer : the other rank of a message between two; None where all ranks take part
        """
        self.watch.check()
        self.stream.wait_event(self.cupy.cuda.get_current_stream().record(self.before))
        self.meet(peer)
        with self.watch.host_call():  # NCCL connects ranks as they first meet: the host waits for them
            work(self.stream.ptr)
        done = self.stream.record(self.event())
        if not self.stream.is_capturing():  # a graph runs the stream's work again, but not the watch: see `launched`
            self.watch_over()
        return done

    def launched(self):
        """Watches the messages of a CUDA graph that was just launched on the current stream."""
        self.watch.check()
        self.stream.wait_event(self.cupy.cuda.get_current_stream().record(self.before))
        self.watch_over()

    def watch_over(self):
        """Has the card write a flag when the stream's work is done: a callback would wait for Python's lock."""
        place, value = self.watch.begin()
        self.cupy.cuda.runtime.memsetAsync(self.flags + place, value, 1, self.stream.ptr)

    def begin(self, operation):
        begin(self.host, operation)

    def meet(self, peer):
        """Waits until the other ranks are about to enqueue the same message: needed for threads alone."""

    def abandon(self):
        """Aborts the messages under way, since this rank has failed: the other ranks then fail, too."""
        self.host.abandon()
        self.close(failed=True).join(CLOSING_S)

    def close(self, failed=False):
        """Starts a thread that destroys the communicator after its work or, after a failure, aborts it."""
        self.watch.end()
        closing = threading.Thread(target=self.give_back, args=(failed,), daemon=True)
        closing.start()
        return closing

    def give_back(self, failed):
        with self.device:
            if failed:
                self.communicator.abort()
            else:
                self.stream.synchronize()
                self.communicator.destroy()

    def event(self):
        return self.cupy.cuda.Event(disable_timing=True)


def last_for_ever(x):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))


class NcclOfThread(Nccl):
    """The engine of a rank that is a thread: all threads enqueue a message together.

    A message occupies its card until the other ranks have enqueued theirs. Until then CUDA may block a thread that asks
    for memory, on any card of the process: two threads would wait for each other for ever.
    """

    def meet(self, peer):
        token = np.zeros(1, np.uint8)
        if peer is None:
            self.host.all_gather(token)()
        else:
            self.host.send(token, peer)
            self.host.recv(token, peer)


def of_one_process(ends, limit_s):
    """An engine for each of `ends`, the host engines of a process's threads: rank r on device r."""
    import cupy
    from cupy.cuda import nccl

    count = cupy.cuda.runtime.getDeviceCount()
    if count < len(ends):
        raise NotSupported(f"run_threads: {len(ends)} ranks want as many CUDA devices, there are {count}")
    engines = []
    for end, communicator in zip(ends, nccl.NcclCommunicator.initAll(len(ends))):
        with cupy.cuda.Device(end.rank):
            engines.append(NcclOfThread(end, communicator=communicator, limit_s=limit_s))
    return engines


class Watch:
    """Calls `abort` when a message has not arrived in time, or a call on the host has not returned.

    ended : a function that names the ranks which have ended, or returns None
    flags : uint8 [FLAGS]: the card writes the value that `begin` returned when a message has arrived
    """

    def __init__(self, abort, name, limit_s, ended=lambda: None, flags=None):
        self.abort, self.name, self.limit_s, self.ended_rank = abort, name, limit_s, ended
        self.flags = np.zeros(FLAGS, np.uint8) if flags is None else flags
        self.flags[:] = 0
        self.under_way, self.lock, self.lost, self.thread = deque(), threading.Lock(), None, None
        self.calls_since, self.count, self.ended = None, 0, threading.Event()

    def begin(self):
        """(the place of the next message's flag, its value once the message has arrived). Messages arrive in order."""
        rounds, place = divmod(self.count, FLAGS)
        message = place, rounds % 255 + 1  # the value differs from that of the last round
        self.count += 1
        self.waits_since()  # forgets what has arrived
        self.under_way.append((message, time.monotonic()))
        self.start()
        return message

    @contextmanager
    def host_call(self):
        """Watches a call that ends with an error when `abort` is called; raises `RankLost` in the error's place."""
        self.calls_since = time.monotonic()
        self.start()
        try:
            yield
        except Exception:
            self.check()
            raise
        finally:
            self.calls_since = None

    def start(self):
        if self.thread is None:
            self.thread = threading.Thread(target=self.look, daemon=True)
            self.thread.start()

    def waits_since(self):
        """When what is waited for was begun: the host's call, else the first message that has not arrived; or None."""
        if (since := self.calls_since) is not None:
            return since
        with self.lock:
            while self.under_way:
                (place, value), begun = self.under_way[0]
                if self.flags[place] != value:
                    return begun
                self.under_way.popleft()
        return None

    def check(self):
        if self.lost:
            raise RankLost(self.lost)

    def end(self):
        self.ended.set()

    def look(self):
        while self.lost is None and not self.ended.wait(min(1.0, self.limit_s / 4)):
            since = self.waits_since()
            waited = 0.0 if since is None else time.monotonic() - since
            ended = self.ended_rank() if waited > GRACE_S else None
            if ended or waited > self.limit_s:
                why = ended or f"waited {self.limit_s:g} s for the other ranks; one has ended or hangs"
                self.lost = f"{self.name}: {why}"
                print(f"linattn_np.distributed: {self.lost}", file=sys.stderr, flush=True)
                self.abort()
