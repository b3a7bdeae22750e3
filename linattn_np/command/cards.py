"""The texts of a batch on several cards: a process for each takes the next text when one of its slots is free."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait

from .. import NotSupported
from ..models.devices import check_device, cuda_devices, may_be_several, uses_cuda
from .signals import NUMBERS, Ended, deferred, noted
from .terminal import told

PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
PATIENCE = 0.2  # seconds between two looks for a signal
RAISED = ValueError, ImportError, OSError, MemoryError, RuntimeError  # by the first process for another; last, the rest


def devices(wanted) -> int:
    """CUDA devices that `--device` may use, 0 for the CPU; 1 where there may be one at most."""
    if wanted == "cpu":
        return 0
    if not may_be_several():
        return 1
    pipe, theirs = multiprocessing.Pipe(duplex=False)
    process = beginning().Process(target=tell_devices, args=(theirs, os.getpid()), daemon=True)
    with no_signals():
        process.start()  # as processes that are forked from one that has asked the driver cannot use it
    theirs.close()
    try:
        return pipe.recv()
    except EOFError:
        return 1
    finally:
        process.join()


def tell_devices(pipe, parent):
    begin_for(parent)
    pipe.send(cuda_devices())


def beginning():
    """How processes begin: with all that this one has imported, or from nothing where it has what does not outlive a
    fork: threads, CUDA's driver, or on macOS the system's libraries."""
    plain = sys.platform == "linux" and threading.active_count() == 1 and not uses_cuda()
    return multiprocessing.get_context("fork" if plain else "spawn")


def use(number, options):
    """Makes a CUDA device the current one, where CUDA can be used; ValueError where `--cards` wants more of them."""
    if options.device == "cpu":
        return
    try:
        check_device("generate", "cuda")
    except NotSupported:  # whoever loads a model says so, or takes the CPU
        return
    import cupy

    there = cupy.cuda.runtime.getDeviceCount()
    if options.cards and options.cards > there:
        raise ValueError(f"argument --cards: is {options.cards}, but this host has {there} CUDA devices")
    cupy.cuda.Device(number).use()


def processes(options, texts, slots) -> int:
    """How many share the work: --cards, else every card of this host for which there are texts enough."""
    full = -(-texts // slots)
    return max(1, min(options.cards or full > 1 and devices(options.device), full))


class Cards:
    """Processes that share the texts of a batch, one for each card; they end with the block.

    ahead : a function of a process's number, which can be pickled
        What it does while it waits for its texts.
    """

    def __init__(self, ahead):
        self.ahead, self.context, self.started = ahead, None, {}

    def __enter__(self):
        return self

    def __exit__(self, *why):
        for _, process in self.started.values():
            process.kill()  # also one that is stopped
        for _, process in self.started.values():
            process.join()

    def begin(self, count):
        """Starts processes until there are so many."""
        if self.context is None:
            self.context = beginning()
            self.taken = self.context.Value("q", 0)
        with no_signals():
            for card in range(len(self.started), count):
                pipe, theirs = self.context.Pipe()
                what = card, self.ahead, self.taken, theirs, os.getpid()
                process = self.context.Process(target=work, args=what, daemon=True)
                process.start()
                theirs.close()  # so that the end of the process is the end of its messages
                self.started[pipe] = card, process

    def spread(self, prepare, count, texts):
        """(number, line) of every text, in the order in which they are done; `count` processes share them.

        prepare : a function of the number of the process and of how many there are, which can be pickled
            Loads what is needed, checks its part of the texts, and returns a function that takes an iterator of their
            numbers and yields (number, line). No process begins before all have come so far.
        """
        self.begin(count)
        at_work, idle = list(self.started)[:count], list(self.started)[count:]
        for pipe in at_work:
            hand_over(pipe, (prepare, count, texts))  # of which a pipe holds few: all have been started meanwhile
        for pipe in idle:
            hand_over(pipe, None)
        for pipe in at_work:
            receive(pipe, *self.started[pipe])
        for pipe in at_work:
            pipe.send("begin")
        with deferred() as ended:
            while at_work and not ended():
                for pipe in wait(at_work, PATIENCE):
                    found = receive(pipe, *self.started[pipe])
                    if found is None:
                        at_work.remove(pipe)
                    else:
                        yield found
            if number := ended():
                raise Ended(number)


@contextmanager
def no_signals():
    """Signals come later; processes that begin inside get none until `begin_for`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_for(parent):
    """This process works for another one, whose terminal's signals are not for it, and ends with that, however it
    ends: where there is no prctl, at its next message."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # which was gone before
        os._exit(1)


def hand_over(pipe, what):
    """Sends it to a process that may have ended, of which `receive` tells."""
    with suppress(BrokenPipeError):
        pipe.send(what)


def receive(pipe, card, process):
    """The next message; raises what the process raised, or that it is gone."""
    try:
        kind, *found = pipe.recv()
    except EOFError:
        process.join()
        if noted.number:  # which went to all processes
            raise Ended(noted.number) from None
        raise OSError(f"the process of card {card} has ended with exit code {process.exitcode}") from None
    if kind == "failed":
        number, words = found
        raise RAISED[number](words)
    return found[0]


def work(card, ahead, taken, pipe, parent):
    """What a process does."""
    begin_for(parent)
    try:
        ahead(card)
        given = pipe.recv()
        if given is None:
            return
        prepare, count, texts = given
        write = prepare(card, count)
        pipe.send(("ready", None))
        pipe.recv()
        for found in write(numbers(taken, texts)):
            pipe.send(("text", found))
        pipe.send(("done", None))
    except (EOFError, BrokenPipeError):  # the first process has ended
        return
    except Exception as error:
        number = next((n for n, kind in enumerate(RAISED) if isinstance(error, kind)), -1)
        words = told(error) if number >= 0 else f"{type(error).__name__}: {error}"
        with suppress(BrokenPipeError):
            pipe.send(("failed", number, words))


def numbers(taken, texts):
    """The numbers of texts that no other process has taken."""
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= texts:
            return
        yield number
