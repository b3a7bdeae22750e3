"""Ctrl-C, SIGTERM and SIGHUP end a subcommand: at once, or after its next step if it has work to finish.

Within `handled` a signal raises an exception. Code that is running may lose an exception: a callback of Numba's, for
example, drops it while a loop is loaded. So the signal is noted, too, and work in steps asks for it (`deferred`).
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
        """The exit code that shells have for a process ended by this signal."""
        return 128 + self.args[0]


class Noted:
    """The handler of signals: the signal that it has noted, and how many it has raised. Another signal replaces a noted
    Ctrl-C, after which work may go on.

    The first one counts. A key bounces, and a launcher passes on what its terminal has sent, too: what follows within
    BURST is the same. Later a second Ctrl-C ends the work at once, a third one the process; other signals wait.
    """

    number: int | None = None  # the noted signal
    asked_for = False  # whether the present work asks for it, so that the first signal raises nothing
    raised = 0  # how many signals have raised Ended
    latest = -BURST  # the time of the latest signal
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
    """A context in which a signal raises Ended in the main thread. Signals that are ignored, as under nohup, stay so.

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
    """Removes a noted Ctrl-C, after which the work goes on; raises Ended if another signal is noted."""
    number, noted.number, noted.raised = noted.number, None, 0
    if number not in (None, signal.SIGINT):
        raise Ended(number)
