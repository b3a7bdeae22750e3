"""Ctrl-C, SIGTERM and SIGHUP end a subcommand: at once, or after its next step if it has work to finish.

Within `handled` a signal raises an exception. Code that runs at that moment may lose the exception: a callback of
Numba's, for example, drops it while a loop is loaded. So the signal is noted, too, and work that is done in steps asks
for it (`deferred`).
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
    """The handler of signals. It notes the first signal; another one replaces a noted Ctrl-C, after which the work may
    go on (`forget_ctrl_c`).

    The first signal raises Ended, unless the work is `deferred`. A second Ctrl-C raises Ended in any work, and a third
    one ends the process; other signals after the first raise nothing. Nor does a signal within BURST of the last one:
    a key bounces, and a launcher passes on what its terminal has also sent to this process.
    """

    number: int | None = None  # the noted signal
    asked_for = False  # whether the current work is `deferred` and asks for `number`
    counted = 0  # signals, without those that came within BURST and those that wait for the noted one
    latest = -BURST  # the time of the latest signal
    over = False  # whether `handled` has ended

    def __call__(self, number, frame=None):
        first, now = self.number is None, time.monotonic()
        bounced, self.latest = now - self.latest < BURST, now
        if self.over or first and bounced and number == signal.SIGINT:  # a bounce of one that `forget_ctrl_c` removed
            return
        if self.number in (None, signal.SIGINT):
            self.number = number
        if not first and (bounced or number != signal.SIGINT):
            return
        self.counted += 1
        if first and self.asked_for:
            return
        if OWN_PROCESS and self.counted > 2:  # the work is already ending; nothing might catch the exception
            os._exit(128 + number)
        raise Ended(number)


noted = Noted()


@contextmanager
def handled() -> Iterator[None]:
    """A context in which a signal raises Ended in the main thread. Signals that are ignored, as under nohup, stay so.

    After the context a signal ends the command's process; if a signal has ended the work, later ones are ignored:
    Python, which is ending, would print a traceback.
    """
    noted.__dict__.clear()  # all attributes have the values of the class again
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
    finally:  # this outer `finally` runs even if a signal comes inside the inner one
        last = signal.SIG_DFL if noted.number is None else signal.SIG_IGN
        for number, handler in before.items():
            signal.signal(number, last if OWN_PROCESS else handler)


@contextmanager
def deferred() -> Iterator[Callable[[], int | None]]:
    """A context in which the first signal is only noted, and a second one raises Ended. Its value is a function that
    returns the number of the noted signal, or None."""
    noted.asked_for, noted.latest = True, -BURST  # a Ctrl-C here is no bounce of one that stopped earlier work
    try:
        yield lambda: noted.number
    finally:
        noted.asked_for = False


def forget_ctrl_c():
    """Removes a noted Ctrl-C, after which the work goes on; raises Ended if another signal is noted."""
    number, noted.number, noted.counted = noted.number, None, 0
    if number not in (None, signal.SIGINT):
        noted.number = number  # for `handled`, which asks whether a signal has ended the work
        raise Ended(number)
