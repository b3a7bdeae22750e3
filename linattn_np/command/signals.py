"""Ctrl-C, SIGTERM and SIGHUP end a subcommand: at once, or after its next step if it has work to finish.

Within `handled` a signal raises an exception. Code that runs at that moment may lose the exception: a callback of
Numba's, for example, drops it while a loop is loaded. So the signal is noted, too. Work that is `deferred` ends after
its step.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .loading import OWN_PROCESS, interrupted

NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
BURST = 0.1  # seconds within which a Ctrl-C is another signal's echo


class Ended(KeyboardInterrupt):
    """A signal, whose number is the argument, ends the work."""

    @property
    def code(self) -> int:
        """The exit code that shells have for a process ended by this signal."""
        return 128 + self.args[0]


class Noted:
    """The handler of signals.

    The first signal is noted, and raises Ended unless the work is `deferred`. SIGTERM or SIGHUP after a noted Ctrl-C is
    noted in its place: `forget_ctrl_c` removes a Ctrl-C only, so the work does not go on then. Of later signals only
    Ctrl-C raises Ended, in any work; the second such Ctrl-C ends the process, if it is the command's own (OWN_PROCESS).

    A Ctrl-C within BURST of another signal is that signal's echo, and does nothing: a key bounces, and a launcher
    passes on what its terminal has also sent to this process.
    """

    number: int | None = None  # the noted signal
    work_is_deferred = False
    requests = 0  # to end: the first signal, and each Ctrl-C after it that is no echo
    latest = -BURST  # the time of the latest signal
    over = False  # whether `handled` has ended

    def __call__(self, number, frame=None):
        now = time.monotonic()
        echo, self.latest = number == signal.SIGINT and now - self.latest < BURST, now
        if self.over:
            return
        if self.number is None:
            if not echo:  # of a Ctrl-C that `forget_ctrl_c` removed
                self.note_first(number)
        elif number != signal.SIGINT:
            if self.number == signal.SIGINT:
                self.number = number
        elif not echo:
            self.insist()

    def note_first(self, number):
        self.number, self.requests = number, 1
        if not self.work_is_deferred:
            raise Ended(number)

    def insist(self):
        """Ends the work by a Ctrl-C after the first signal."""
        self.requests += 1
        if OWN_PROCESS and self.requests > 2:  # the work's cleanup may have lost the exception
            os._exit(128 + signal.SIGINT)
        raise Ended(signal.SIGINT)


noted = Noted()


@contextmanager
def handled() -> Iterator[None]:
    """A context in which a signal raises Ended in the main thread. Signals that are ignored, as under nohup, stay so.
    The context does not nest. A program that calls the command in its own process gets its handlers back.

    After the context a signal ends the command's own process; if a signal has ended the work, later ones are ignored:
    Python, which is ending, would print a traceback.
    """
    noted.__dict__.clear()  # all attributes have the values of the class again
    handlers_before = {}
    if threading.current_thread() is threading.main_thread():
        for number in NUMBERS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler, interrupted):
                handlers_before[number] = signal.signal(number, noted)
    try:
        try:
            yield
        finally:
            noted.over = True
    finally:  # this outer `finally` runs even if a signal comes inside the inner one
        at_exit = signal.SIG_DFL if noted.number is None else signal.SIG_IGN
        for number, handler in handlers_before.items():
            signal.signal(number, at_exit if OWN_PROCESS else handler)


@contextmanager
def deferred() -> Iterator[Callable[[], int | None]]:
    """A context in which the first signal is only noted. Its value is a function that returns the number of the noted
    signal, or None: the work calls it between its steps."""
    noted.work_is_deferred, noted.latest = True, -BURST  # a Ctrl-C here is no echo of one that stopped earlier work
    try:
        yield lambda: noted.number
    finally:
        noted.work_is_deferred = False


def forget_ctrl_c():
    """Removes a noted Ctrl-C, after which the work goes on; raises Ended if another signal is noted."""
    number, noted.number = noted.number, None
    if number not in (None, signal.SIGINT):
        noted.number = number  # for `handled`, which then ignores later signals
        raise Ended(number)
