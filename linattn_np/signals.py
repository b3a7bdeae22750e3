"""Signals, such as Ctrl-C's, that wait until what they would damage is done."""

import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def signals_held() -> Iterator[None]:
    """A context at whose end the signals that came inside are raised.

    A signal's handler may raise an exception anywhere in Python code. While Numba compiles or loads a loop, the
    exception might leave LLVM's lock taken, so that other threads wait for ever, or a callback might drop the
    exception. While a library is imported, the exception might leave half of its modules behind, or one of its
    extension modules might drop the exception, as SciPy's and Numba's do, and Ctrl-C would have done nothing.
    """
    held: list[int] = []
    with ExitStack() as at_end:
        if threading.current_thread() is threading.main_thread():  # Python calls handlers in this thread alone
            at_end.callback(lambda: deque(map(signal.raise_signal, held)))
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    at_end.callback(signal.signal, number, handler)
                    signal.signal(number, lambda number, frame: held.append(number))
        yield
