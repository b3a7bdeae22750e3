"""Numba's loops that are not on the disk yet: compiled before a subcommand goes on, or beside NumPy's first text."""

import multiprocessing
import os
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from .. import NotSupported
from .cards import begin_for, beginning, no_signals
from .signals import Ended
from .terminal import TICK, bar, say, status, ticking

LOOPS = 38  # about as many as a model's first tokens need


class LoopsMissing(ImportError):
    """A loop is not on the disk. As an ImportError it has float32 weights get NumPy's layers."""


@contextmanager
def before_compiling(tell):
    """Inside, Numba calls `tell` before it compiles a loop."""
    try:
        from ..numba_cache import COMPILING
    except ImportError:
        yield
        return
    COMPILING.append(tell)
    try:
        yield
    finally:
        COMPILING.remove(tell)


class Bar:
    """Shows how many loops have begun, and the seconds since."""

    def __init__(self, show, what, then=""):
        self.show, self.what, self.then, self.done, self.start = show, what, then, 0, time.monotonic()

    def draw(self):
        self.show(f"{self.what} {bar(self.done / LOOPS)} {time.monotonic() - self.start:.0f} s{self.then}")


@contextmanager
def compiling(show):
    """Inside, a line says that Numba compiles, before it does, and `show` how far it is."""
    shown = Bar(show, "compiling")

    def tell():
        shown.done += 1
        if shown.done == 1:
            from ..numba_cache import COMPILES

            show("")
            say(COMPILES)
            ticks.enter_context(ticking(shown.draw))

    with ExitStack() as ticks, before_compiling(tell):
        yield


def refuse():
    raise LoopsMissing("a loop is not compiled yet")


class LoopsBeside:
    """Another process compiles the loops that a model needs, while its layers are NumPy's.

    new_model : a function that can be pickled
        Makes the model again, with layers of Numba's loops, and runs them once.
    """

    def __init__(self, new_model):
        self.new_model = new_model
        self.pipe, theirs = multiprocessing.Pipe(duplex=False)
        self.process = beginning().Process(target=compile_beside, args=(new_model, theirs, os.getpid()), daemon=True)
        with no_signals():
            self.process.start()
        theirs.close()

    def hasten(self, model):
        """Gives the model layers of loops once the process has ended."""
        if not self.process or self.process.is_alive():
            return
        self.process = None
        with suppress(LoopsMissing), before_compiling(refuse):
            model.layers = self.new_model().layers

    def wait(self):
        """Until the loops are on the disk; a signal leaves them for later."""
        if not self.process:
            return
        with suppress(Ended, EOFError), status("") as show:
            shown = Bar(show, "compiling loops for the next text", "; Ctrl-C leaves it for later")
            while True:
                shown.draw()
                if self.pipe.poll(TICK):
                    self.pipe.recv()
                    shown.done += 1


def compile_beside(new_model, pipe, parent):
    """What the process does; it sends a message before each loop."""
    begin_for(parent)
    with before_compiling(partial(pipe.send, None)):
        new_model()


def with_loops(new_model, progress, show):
    """(a new model with all its loops, compiled if need be, None)."""
    with compiling(show):
        return new_model(progress), None


def begun_on_numpy(new_model, progress, show):
    """(a new model, LoopsBeside or None): where loops are missing, float32 weights begin with NumPy's layers."""
    missing = []

    def tell():
        missing.append(True)
        refuse()

    try:
        with before_compiling(tell):
            model = new_model(progress)
    except (LoopsMissing, NotSupported):
        if not missing:
            raise
        return with_loops(new_model, progress, show)
    return model, LoopsBeside(new_model) if missing else None
