"""The engine of CuPy arrays, over NCCL, and a watch that ends messages which do not arrive."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from functools import partial

import numpy as np

from ..errors import NotSupported
from .engine import LIMIT_S, RankLost, begin, check_limit

PRIORITY = -5  # the highest: the few blocks of a message must not wait for all blocks of earlier kernels
CLOSING_S = 2.0  # the longest wait for a communicator's end
GRACE_S = 5.0  # after so long a wait for a message, the engine asks whether other ranks have ended
GREETING = 128  # bytes of NCCL's unique id, by which its ranks find each other
FLAGS = 1 << 12  # the most messages under way; CUDA blocks the host before there are more


class Nccl:
    """An `Engine` of CuPy arrays on the current device, by `cupy.cuda.nccl`.

    `host`, an engine of host arrays such as `Mpi` or `ProcessGroup`, sends the messages in which ranks compare their
    calls, and NCCL's unique id. Messages are enqueued on the engine's own stream. This stream waits for the current
    one, and the current one waits for it before a result is used; the host does not wait.

    NCCL itself has no time limit. If a message has not arrived after `limit_s` seconds, or if `host` reports that
    another rank has ended, the communicator is aborted, and a line on stderr says so. Results that depend on the
    message are then wrong, and the engine's next use raises `RankLost`.

    NCCL destroys a communicator only when no CUDA graph contains its messages. The engine waits for that for at most
    `CLOSING_S` seconds; a process may end earlier.
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
        never_free(communicator)  # freeing it would wait for graphs, maybe without end
        never_free(flags)  # the card may write there after the engine's end
        self.cupy, self.byte = cupy, nccl.NCCL_UINT8
        self.float32, self.average = nccl.NCCL_FLOAT32, nccl.NCCL_AVG
        self.host, self.communicator = host, communicator
        self.rank, self.size, self.device = host.rank, host.size, cupy.cuda.Device()
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=PRIORITY)
        self.caller_event = self.event()  # recorded on the current stream for a message to wait for
        ended = getattr(host, "ended", lambda: None)
        name, self.flags = f"NCCL, rank {self.rank} of {self.size}", flags.ptr
        self.watch = Watch(communicator.abort, name, limit_s, ended, np.frombuffer(flags, np.uint8, FLAGS))

    def all_gather(self, x):
        if isinstance(x, np.ndarray):
            return self.host.all_gather(x)
        gathered = self.cupy.empty((self.size, *x.shape), x.dtype)
        done = self.enqueue(
            lambda stream: self.communicator.allGather(x.data.ptr, gathered.data.ptr, x.nbytes, self.byte, stream)
        )
        return partial(self.arrived, done, gathered, [x])

    def all_mean(self, x):
        """Starts to replace the numbers of a contiguous float32 array by their mean over all ranks. Returns a function
        that makes the current stream wait for it."""
        address = x.data.ptr
        done = self.enqueue(
            lambda stream: self.communicator.allReduce(address, address, x.size, self.float32, self.average, stream)
        )
        return partial(self.arrived, done)

    def arrived(self, done, result=None, read=None):
        """Makes the current stream wait for a message of all ranks, whose end is the event `done`; returns `result`.
        `read`: a list that keeps the array that NCCL reads until then."""
        self.watch.check()
        self.join(done)
        if read:
            read.clear()
        return result

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
        """Makes the current stream wait for the event `done`."""
        self.cupy.cuda.get_current_stream().wait_event(done)

    def enqueue(self, work, peer=None):
        """Enqueues a message after all work on the current stream; returns the event of its end.

        work : a function of the stream's address, which enqueues the message
        peer : the other rank of a message between two; None if all ranks take part
        """
        self.watch.check()
        self.stream.wait_event(self.cupy.cuda.get_current_stream().record(self.caller_event))
        self.wait_for_ranks(peer)
        with self.watch.host_call():  # the host waits while NCCL connects ranks at their first message
            work(self.stream.ptr)
        done = self.stream.record(self.event())
        if not self.stream.is_capturing():  # the messages of a graph are watched when it is launched: see `launched`
            self.watch_over()
        return done

    def launched(self):
        """Watches the messages of a CUDA graph that was just launched on the current stream."""
        self.watch.check()
        self.stream.wait_event(self.cupy.cuda.get_current_stream().record(self.caller_event))
        self.watch_over()

    def watch_over(self):
        """Enqueues the writing of a flag, by which `watch` sees that the stream's work is done. A callback of CUDA
        would need Python's lock."""
        index, value = self.watch.begin()
        self.cupy.cuda.runtime.memsetAsync(self.flags + index, value, 1, self.stream.ptr)

    def begin(self, operation):
        """As `HostEngine.begin`."""
        begin(self.host, operation)

    def wait_for_ranks(self, peer):
        """Waits until the other ranks are about to enqueue the same message. Only `NcclOfThread` needs this."""

    def abandon(self):
        """Aborts the messages under way because this rank has failed; the other ranks then fail, too."""
        self.host.abandon()
        self.close(failed=True).join(CLOSING_S)

    def close(self, failed=False):
        """Starts a thread that destroys the communicator when its work is done, or aborts it if this rank has `failed`;
        returns the thread."""
        self.watch.end()
        closing = threading.Thread(target=self.destroy, args=(failed,), daemon=True)
        closing.start()
        return closing

    def destroy(self, failed):
        with self.device:
            if failed:
                self.communicator.abort()
            else:
                self.stream.synchronize()
                self.communicator.destroy()

    def event(self):
        return self.cupy.cuda.Event(disable_timing=True)


def never_free(x):
    """Adds a reference to an object, so that Python never frees it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))


class NcclOfThread(Nccl):
    """The engine of a rank that is a thread. All threads enqueue a message at the same time.

    A message occupies its card until the other ranks have enqueued theirs. Until then CUDA may block any thread of the
    process that allocates memory. If that thread still had to enqueue its own part of the message, neither would go on.
    """

    def wait_for_ranks(self, peer):
        token = np.zeros(1, np.uint8)
        if peer is None:
            self.host.all_gather(token)()
        else:
            self.host.send(token, peer)
            self.host.recv(token, peer)


def of_one_process(ends, limit_s):
    """[an engine for CuPy arrays for each of `ends`], which are the host engines of the process's threads. Rank r is on
    device r."""
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
    """A thread that calls `abort` if a message does not arrive in time, or a call of the host does not return in time.

    ended : a function that returns a text which names the ranks that have ended, or None
    flags : uint8 [FLAGS]; when a message has arrived, the card writes the value that `begin` has returned for it
    """

    def __init__(self, abort, name, limit_s, ended=lambda: None, flags=None):
        self.abort, self.name, self.limit_s, self.ended_ranks = abort, name, limit_s, ended
        self.flags = np.zeros(FLAGS, np.uint8) if flags is None else flags
        self.flags[:] = 0
        self.under_way, self.lock, self.lost, self.thread = deque(), threading.Lock(), None, None
        self.call_began, self.count, self.ended = None, 0, threading.Event()

    def begin(self):
        """(the index of the next message's flag, its value once the message has arrived). Messages arrive in order."""
        rounds, index = divmod(self.count, FLAGS)
        message = index, rounds % 255 + 1  # the value differs from that of the last round
        self.count += 1
        self.waits_since()  # removes messages that have arrived from `under_way`
        assert len(self.under_way) < FLAGS  # else a flag would serve two of them
        self.under_way.append((message, time.monotonic()))
        self.start()
        return message

    @contextmanager
    def host_call(self):
        """A context in which a call of the host is watched. If `abort` ends the call by an error, `RankLost` replaces
        the error."""
        self.call_began = time.monotonic()
        self.start()
        try:
            yield
        except Exception:
            self.check()
            raise
        finally:
            self.call_began = None

    def start(self):
        """Starts the thread, if it has not been started."""
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, daemon=True)
            self.thread.start()

    def waits_since(self):
        """The time at which the host's call began, or else the first message that has not arrived; None if there is
        neither."""
        if (since := self.call_began) is not None:
            return since
        with self.lock:
            while self.under_way:
                (index, value), begun = self.under_way[0]
                if self.flags[index] != value:
                    return begun
                self.under_way.popleft()
        return None

    def check(self):
        """RankLost if `abort` has been called."""
        if self.lost:
            raise RankLost(self.lost)

    def end(self):
        self.ended.set()

    def run(self):
        """The loop of the thread: until the end, it looks four times in the time limit, at least once a second."""
        while self.lost is None and not self.ended.wait(min(1.0, self.limit_s / 4)):
            since = self.waits_since()
            waited = 0.0 if since is None else time.monotonic() - since
            ended = self.ended_ranks() if waited > GRACE_S else None
            if ended or waited > self.limit_s:
                why = ended or f"waited {self.limit_s:g} s for the other ranks; one has ended or hangs"
                self.lost = f"{self.name}: {why}"
                print(f"linattn_np.distributed: {self.lost}", file=sys.stderr, flush=True)
                self.abort()
