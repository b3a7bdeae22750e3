"""Numba's compiled loops, cached on the disk for later processes.

The folder is NUMBA_CACHE_DIR's, else one beside the module or the user's cache. If the disk fails, each process
compiles its own loops. The import raises ImportError if Numba cannot be imported or NUMBA_DISABLE_JIT is set. A module
of loops imports Numba only after this one, whose ImportError has NumPy compute instead.
"""

import atexit
import hashlib
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

try:
    import numba
except ImportError:
    raise
except Exception as error:  # it does not take the value of an environment variable, such as NUMBA_NUM_THREADS=0
    raise ImportError(f"Numba cannot be imported: {error}") from error

from numba.core import caching
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.sigutils import normalize_signature

config: Any = numba.config  # its settings are made as the environment has them
if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and NumPy computes instead of Numba's loops")
FEATURES = (config.CPU_FEATURES or "").split(",")
ALWAYS_THERE = {"64bit", "x87", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2", "neon"}  # of a 64-bit processor
if any(word[:1] not in ("", "+", "-") for word in FEATURES):  # LLVM would abort
    raise ImportError("NUMBA_CPU_FEATURES has a feature without + or - before it, and NumPy computes instead")
if ALWAYS_THERE.intersection(word[1:] for word in FEATURES if word.startswith("-")):  # so it would here
    raise ImportError("NUMBA_CPU_FEATURES takes what every 64-bit processor has, and NumPy computes instead")

COMPILING: list[Callable[[], object]] = []  # functions to call before a loop is compiled; without one, `say_once`
COMPILES = "compiling loops for this CPU, once, which takes 5 to 30 s"
DIGEST = hashlib.sha256().digest_size  # bytes behind what a file holds
atexit.register(global_compiler_lock.acquire)  # LLVM would crash if a thread compiled while the process ends


def njit(**options):
    """`numba.njit` whose machine code is cached on the disk."""

    def decorate(function):
        loop = numba.njit(no_cfunc_wrapper=True, **options)(function)  # none is called through a C pointer
        loop._cache = cache_of(function)
        loop.compile = signals_held()(loop.compile)
        return loop

    return decorate


def cfunc(signature, **options):
    """`numba.cfunc` whose machine code is cached on the disk."""

    def decorate(function):
        loop = CFunc(function, normalize_signature(signature), locals={}, options=options)
        loop._cache = cache_of(function)
        with signals_held():
            loop.compile()
        return loop

    return decorate


@contextmanager
def signals_held() -> Iterator[None]:
    """Inside, signals that Python handles wait. While a loop is compiled or loaded, the exception of one may leave
    LLVM's lock taken, for which other threads wait for ever, or a callback of Numba's drops it."""
    came: list[int] = []
    with ExitStack() as behind:
        if threading.current_thread() is threading.main_thread():  # no other thread has signals
            behind.callback(lambda: deque(map(signal.raise_signal, came)))
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    behind.callback(signal.signal, number, handler)
                    signal.signal(number, lambda number, frame: came.append(number))
        yield


def cache_of(function):
    try:
        return DiskCache(function)
    except (OSError, RuntimeError):  # there is no folder that can be written
        return NoCache()


@cache
def say_once():
    """Tells whoever calls from a terminal or a notebook why nothing happens for seconds."""
    with suppress(Exception):  # stderr may be missing or closed
        if sys.stderr.isatty() or hasattr(sys, "ps1"):
            print(f"linattn_np: {COMPILES}", file=sys.stderr, flush=True)


class NoCache(caching.NullCache):
    def load_overload(self, signature, context):
        for tell in COMPILING or [say_once]:
            tell()


def check_regular(path):
    """ValueError of what is at a path and no file: reading a pipe or a device might never end."""
    if os.path.lexists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is no file")


class ChecksummedFiles(caching.IndexDataCacheFile):
    """Numba's cache files with a checksum behind the data, and in it the loop's key: no other machine code may run.

    Two processes that write at the same time may give the same name to the files of two signatures.
    """

    def save(self, key, data):
        super().save(key, (self._source_stamp, key, data))

    def load(self, key):
        found = super().load(key)
        if found is None:
            return None
        if found[:2] != (self._source_stamp, key):
            raise ValueError("the file holds another loop")
        return found[2]

    def _dump(self, obj):
        data = super()._dump(obj)
        return data + hashlib.sha256(data).digest()

    def _load_index(self):
        check_regular(self._index_path)
        return super()._load_index()

    def _load_data(self, name):
        check_regular(self._data_path(name))
        with open(self._data_path(name), "rb") as file:
            data = file.read()
        if hashlib.sha256(data[:-DIGEST]).digest() != data[-DIGEST:]:
            raise ValueError(f"{name} is damaged")
        return pickle.loads(data[:-DIGEST])


class DiskCache(caching.FunctionCache):
    """Numba's cache of a function; if reading or writing it fails, the function is compiled."""

    def __init__(self, function):
        super().__init__(function)
        self._cache_file.__class__ = ChecksummedFiles

    def load_overload(self, signature, context):
        found = None
        try:
            found = super().load_overload(signature, context)
        except Exception:  # Numba reads a file that was cut short again and again, unless it is emptied
            with suppress(Exception):
                self.flush()
        return found or NoCache().load_overload(signature, context)

    def save_overload(self, signature, data):
        with suppress(Exception):  # the disk is full, or the folder is gone
            super().save_overload(signature, data)
