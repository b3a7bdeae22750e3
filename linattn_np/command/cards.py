"""Writes the texts of a batch on several cards. Each card has a process, which takes the next text when one of its
slots is free.
"""

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
from .terminal import error_line

PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
PATIENCE = 0.2  # seconds between two tests for a signal
# The classes of a process's errors, one of which the first process raises again: RuntimeError for all others.
RAISED = ValueError, ImportError, OSError, MemoryError, RuntimeError


def devices(wanted) -> int:
    """The number of CUDA devices for the option --device: 0 for the CPU; 1 if there is at most one, or if unknown."""
    if wanted == "cpu":
        return 0
    if not may_be_several():
        return 1
    # Another process, since those forked from one that has loaded the driver cannot use it.
    process, pipe = started(start_method(), tell_devices)
    try:
        return pipe.recv()
    except EOFError:
        return 1
    finally:
        process.join()


def tell_devices(pipe, parent):
    """The main function of the process that `devices` starts: sends the number of CUDA devices."""
    begin_for(parent)
    pipe.send(cuda_devices())


def start_method():
    """The context of multiprocessing that starts processes: by a fork, which keeps what this process has imported; or
    anew, if this process has threads or CUDA's driver, or runs on macOS, whose libraries do not work after a fork."""
    plain = sys.platform == "linux" and threading.active_count() == 1 and not uses_cuda()
    return multiprocessing.get_context("fork" if plain else "spawn")


def started(context, function, *arguments):
    """(a new process that calls function(*arguments, pipe, number of this process), this process's end of the pipe).

    context : what `start_method` returns
    function : it calls `begin_for` first
    """
    pipe, other_end = context.Pipe()
    process = context.Process(target=function, args=(*arguments, other_end, os.getpid()), daemon=True)
    with no_signals():
        process.start()
    other_end.close()  # so that the pipe ends when the process ends
    return process, pipe


def use(number, options):
    """Makes a CUDA device the current one, if CUDA can be used; ValueError if --cards is more than there are."""
    if options.device == "cpu":
        return
    try:
        check_device("generate", "cuda")
    except NotSupported:  # loading the model will raise it again, or take the CPU
        return
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if options.cards and options.cards > count:
        raise ValueError(f"argument --cards: is {options.cards}, but this host has {count} CUDA devices")
    cupy.cuda.Device(number).use()


def processes(options, texts, slots) -> int:
    """The number of processes: --cards, or else all cards of this host, but no more than there are texts to fill."""
    full = -(-texts // slots)
    return max(1, min(options.cards or full > 1 and devices(options.device), full))


class Cards:
    """A context with the processes that share the texts of a batch, one for each card. They end with the context.

    ahead : a function of a process's number, which can be pickled; a process calls it before it gets its texts
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
        """Starts processes until there are `count`."""
        if self.context is None:
            self.context = start_method()
            self.taken = self.context.Value("q", 0)  # how many texts processes have taken
        with no_signals():  # so that `__exit__` finds every process
            for card in range(len(self.started), count):
                process, pipe = started(self.context, work, card, self.ahead, self.taken)
                self.started[pipe] = card, process

    def spread(self, prepare, count, texts):
        """Yields (number, line) of every text, in the order in which they are done; `count` processes share them.

        prepare : a function of (the number of a process, the number of processes), which can be pickled. It loads the
            model and checks a part of the texts. It returns a function of an iterator of texts' numbers, which yields
            (number, line). Processes begin to write when `prepare` has returned in all of them.
        """
        self.begin(count)
        at_work, idle = list(self.started)[:count], list(self.started)[count:]
        for pipe in at_work:
            hand_over(pipe, (prepare, count, texts))
        for pipe in idle:
            hand_over(pipe, None)
        for pipe in at_work:
            receive(pipe, *self.started[pipe])
        for pipe in at_work:
            pipe.send("begin")
        with deferred() as ended:
            while at_work and not ended():
                for pipe in wait(at_work, PATIENCE):
                    text = receive(pipe, *self.started[pipe])
                    if text is None:
                        at_work.remove(pipe)
                    else:
                        yield text
            if number := ended():
                raise Ended(number)


@contextmanager
def no_signals():
    """A context that delays signals until its end. Processes that are started in it get none before `begin_for`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_for(parent):
    """Prepares this process to work for the process `parent`: it ignores the terminal's signals and ends with `parent`;
    on systems without prctl, it ends at its next message to `parent`."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # `parent` has ended already
        os._exit(1)


def hand_over(pipe, message):
    """Sends a message to a process. If the process has ended, `receive` will raise the error."""
    with suppress(BrokenPipeError):
        pipe.send(message)


def receive(pipe, card, process):
    """The next message of a process. Raises its error if it has failed, and OSError if it has ended."""
    try:
        kind, *content = pipe.recv()
    except EOFError:
        process.join()
        if noted.number:  # a signal has ended this process and the others
            raise Ended(noted.number) from None
        raise OSError(f"the process of card {card} has ended with exit code {process.exitcode}") from None
    if kind == "failed":
        number, message = content
        raise RAISED[number](message)
    return content[0]


def work(card, ahead, taken, pipe, parent):
    """The main function of a process of `Cards`: gets `Cards.spread`'s arguments from the pipe, and sends messages
    ("ready", None), ("text", (number, line)), ..., ("done", None); or ("failed", index in RAISED, message)."""
    begin_for(parent)
    try:
        ahead(card)
        arguments = pipe.recv()
        if arguments is None:  # there are fewer texts than processes
            return
        prepare, count, texts = arguments
        write = prepare(card, count)
        pipe.send(("ready", None))
        pipe.recv()
        for text in write(numbers(taken, texts)):
            pipe.send(("text", text))
        pipe.send(("done", None))
    except (EOFError, BrokenPipeError):  # the first process has ended
        return
    except Exception as error:
        number = next((n for n, error_class in enumerate(RAISED) if isinstance(error, error_class)), -1)
        message = error_line(error) if number >= 0 else f"{type(error).__name__}: {error}"
        with suppress(BrokenPipeError):
            pipe.send(("failed", number, message))


def numbers(taken, texts):
    """Takes texts that no other process has taken, until `texts` are taken; yields their numbers."""
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= texts:
            return
        yield number
