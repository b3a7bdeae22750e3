"""Ctrl-C, SIGTERM and SIGHUP, which end a subcommand: at once, or where it has work to finish after its next step.

`handled` takes them for as long as a subcommand runs. An exception that comes at any moment may be lost, as a callback
of Numba's drops it while a loop is loaded; so the signal is noted too, and work in steps asks for it (`deferred`).
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .loading import OWN_PROCESS

NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Ended(KeyboardInterrupt):
    """A signal, whose number is the argument, ends the work."""

    @property
    def code(self) -> int:
        """The process's exit code, as shells count it."""
        return 128 + self.args[0]


class Noted:
    """The signal that came, whether the work under way will ask for it, and how often one was raised. Ctrl-C gives way
    to the others, as work may go on after it."""

    number: int | None = None
    asked_for = False
    raised = 0

    def __call__(self, number, frame=None):
        alone = self.number is None
        if self.number in (None, signal.SIGINT):
            self.number = number
        if not (alone and self.asked_for):
            self.raised += 1
            if OWN_PROCESS and self.raised == 2:  # in the work's own end, where a third could be caught by nobody
                for one in NUMBERS:
                    if signal.getsignal(one) is self:
                        signal.signal(one, signal.SIG_DFL)
            raise Ended(number)


noted = Noted()


@contextmanager
def handled() -> Iterator[None]:
    """Inside, a signal raises Ended. One that is ignored, as under nohup, stays so; only the main thread gets any.

    Behind it one ends the command's process: Python's own end would show a traceback.
    """
    noted.number, noted.asked_for, noted.raised, before = None, False, 0, {}
    if threading.current_thread() is threading.main_thread():
        for number in NUMBERS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, noted)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if OWN_PROCESS else handler)


@contextmanager
def deferred() -> Iterator[Callable[[], int | None]]:
    """Inside, the first signal is only noted: a function tells its number, or None. A second one raises Ended."""
    noted.asked_for = True
    try:
        yield lambda: noted.number
    finally:
        noted.asked_for = False


def forget_ctrl_c():
    """The work goes on after a Ctrl-C that has stopped a part of it; another signal raises Ended."""
    number, noted.number, noted.raised = noted.number, None, 0
    if number not in (None, signal.SIGINT):
        raise Ended(number)
