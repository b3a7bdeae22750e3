"""Ctrl-C, SIGTERM and SIGHUP, which end a subcommand: at once, or where it has work to finish after its next step.

`handled` takes them for as long as a subcommand runs. An exception that comes at any moment may be lost, as a callback
of Numba's drops it while a loop is loaded; so the signal is noted too, and work in steps asks for it (`deferred`).
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .loading import OWN_PROCESS, interrupted

NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
BURST = 0.1  # seconds


class Ended(KeyboardInterrupt):
    """A signal, whose number is the argument, ends the work."""

    @property
    def code(self) -> int:
        """The process's exit code, as shells count it."""
        return 128 + self.args[0]


class Noted:
    """The signal that came, whether the work under way will ask for it, and how often one was raised. Ctrl-C gives way
    to the others, as work may go on after it.

    The first one counts. A key bounces, and a launcher passes on what its terminal has sent, too: what follows within
    BURST is the same. Later a second Ctrl-C ends the work at once, a third one the process; other signals wait.
    """

    number: int | None = None
    asked_for = False
    raised = 0
    latest = -BURST
    over = False  # the work is done, and so is its end

    def __call__(self, number, frame=None):
        first, now = self.number is None, time.monotonic()
        bounced, self.latest = now - self.latest < BURST, now
        if self.over or first and bounced and number == signal.SIGINT:  # of a Ctrl-C after which the work goes on
            return
        if self.number in (None, signal.SIGINT):
            self.number = number
        if first and self.asked_for or not first and (bounced or number != signal.SIGINT):
            return
        self.raised += 1
        if OWN_PROCESS and self.raised > 2:  # in the work's own end, where nobody may catch it
            os._exit(128 + number)
        raise Ended(number)


noted = Noted()


@contextmanager
def handled() -> Iterator[None]:
    """Inside, a signal raises Ended. One that is ignored, as under nohup, stays so; only the main thread gets any.

    Behind it one ends the command's process, or is ignored where one has ended the work: Python's own end would show a
    traceback.
    """
    noted.__dict__.clear()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in NUMBERS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler, interrupted):
                before[number] = signal.signal(number, noted)
    try:
        try:
            yield
        finally:
            noted.over = True
    finally:  # also where one has come between these two lines
        last = signal.SIG_DFL if noted.number is None else signal.SIG_IGN
        for number, handler in before.items():
            signal.signal(number, last if OWN_PROCESS else handler)


@contextmanager
def deferred() -> Iterator[Callable[[], int | None]]:
    """Inside, the first signal is only noted: a function tells its number, or None. A second one raises Ended."""
    noted.asked_for, noted.latest = True, -BURST  # a Ctrl-C here is none that bounces from what was stopped before
    try:
        yield lambda: noted.number
    finally:
        noted.asked_for = False


def forget_ctrl_c():
    """The work goes on after a Ctrl-C that has stopped a part of it; another signal raises Ended."""
    number, noted.number, noted.raised = noted.number, None, 0
    if number not in (None, signal.SIGINT):
        raise Ended(number)
