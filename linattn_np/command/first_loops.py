"""Compiles Numba's loops that are not on the disk yet: before a subcommand goes on, or by another process while NumPy
computes the first text.

show : a function that shows a status line; "" clears it
progress : a function (bytes read, bytes in all) that shows how far a checkpoint is loaded
"""

import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from .. import NotSupported
from .cards import begin_for, start_method, started
from .signals import Ended
from .terminal import TICK, bar, status, ticking, to_stderr

LOOPS = 40  # about the number of loops that a model's first tokens need


class LoopsMissing(ImportError):
    """A loop is not on the disk. It is an ImportError so that `models.matrices.loops` makes a NotSupported of it, as if
    Numba were missing: then float32 weights get NumPy's layers (`models.rwkv.cpu_layers`), and others none."""


@contextmanager
def before_compiling(callback):
    """A context in which `callback()` is called before Numba compiles a loop."""
    try:
        from ..numba_cache import COMPILING
    except ImportError:
        yield
        return
    COMPILING.append(callback)
    try:
        yield
    finally:
        COMPILING.remove(callback)


class Bar:
    """Shows the number of loops whose compilation has begun (`done`), and the seconds since the start, between two
    texts."""

    def __init__(self, show, text, end=""):
        self.show, self.text, self.end, self.done, self.start = show, text, end, 0, time.monotonic()

    def draw(self):
        self.show(f"{self.text} {bar(self.done / LOOPS)} {time.monotonic() - self.start:.0f} s{self.end}")


@contextmanager
def compiling(show):
    """A context in which a line says that Numba compiles, before the first loop, and `show` gets the progress."""
    shown = Bar(show, "compiling")

    def tell():
        shown.done += 1
        if shown.done == 1:
            from ..numba_cache import COMPILES

            show("")
            to_stderr(COMPILES)
            ticks.enter_context(ticking(shown.draw))

    with ExitStack() as ticks, before_compiling(tell):
        yield


def refuse():
    """Stops the compilation of a loop."""
    raise LoopsMissing("a loop is not compiled yet")


class LoopsBeside:
    """Makes another process compile the loops of a model, whose layers are NumPy's meanwhile.

    new_model : a function that can be pickled and needs no argument; it makes the model again with layers of Numba's
        loops, and runs them once
    """

    def __init__(self, new_model):
        self.new_model = new_model
        # the process calls compile_beside(new_model, its end of the pipe, the number of this process)
        self.process, self.pipe = started(start_method(), compile_beside, new_model)

    def hasten(self, model):
        """Gives the model layers of Numba's loops, if the process has ended. If it has not stored them all, the layers
        stay NumPy's; new_model raises no NotSupported, as NumPy has layers for these weights."""
        if not self.process or self.process.is_alive():
            return
        self.process = None
        with suppress(LoopsMissing), before_compiling(refuse):
            model.layers = self.new_model().layers

    def wait(self):
        """Waits until the process has ended, which closes the pipe (EOFError), or until a signal comes (Ended)."""
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
    """The main function of `LoopsBeside`'s process, which ends with the process `parent`; it sends a message before it
    compiles each loop."""
    begin_for(parent)
    with before_compiling(partial(pipe.send, None)):
        new_model()


def with_loops(new_model, progress, show):
    """(a new model whose loops are compiled, None)."""
    with compiling(show):
        return new_model(progress), None


def begun_on_numpy(new_model, progress, show):
    """(a new model, None); if loops are missing, (a model with NumPy's layers, a `LoopsBeside`). What `with_loops`
    returns if loops are missing but NumPy has no layers for the weights, or if the layers already have some loops."""
    missing = []

    def tell():
        missing.append(True)
        refuse()

    try:
        with before_compiling(tell):
            model = new_model(progress)
    except (LoopsMissing, NotSupported):
        if not missing:  # NotSupported for another reason
            raise
        return with_loops(new_model, progress, show)
    return model, LoopsBeside(new_model) if missing else None
