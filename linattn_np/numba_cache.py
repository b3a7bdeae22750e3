"""Numba's compiled loops, cached on the disk for later processes.

The folder is NUMBA_CACHE_DIR's, else one beside the module or the user's cache. If the disk fails, each process
compiles its own loops. The import raises ImportError, and NumPy computes, if Numba cannot be imported or if
NUMBA_DISABLE_JIT is set. Hence a module of loops imports this module before Numba.
"""

import atexit
import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from .signals import signals_held

with signals_held():
    try:
        import numba
    except ImportError:
        raise
    except Exception as error:  # Numba refuses the value of an environment variable, such as NUMBA_NUM_THREADS=0
        raise ImportError(f"Numba cannot be imported: {error}") from error

    from numba.core import caching
    from numba.core.ccallback import CFunc
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.sigutils import normalize_signature

config: Any = numba.config  # to a type checker it has no settings: they are made from the environment
if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and NumPy computes instead of Numba's loops")
FEATURES = (config.CPU_FEATURES or "").split(",")
ALWAYS_THERE = {"64bit", "x87", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2", "neon"}  # of a 64-bit processor
if any(word[:1] not in ("", "+", "-") for word in FEATURES):  # LLVM would abort
    raise ImportError("NUMBA_CPU_FEATURES has a feature without + or - before it, and NumPy computes instead")
if ALWAYS_THERE.intersection(word[1:] for word in FEATURES if word.startswith("-")):  # LLVM would abort
    raise ImportError("NUMBA_CPU_FEATURES takes what every 64-bit processor has, and NumPy computes instead")

COMPILING: list[Callable[[], object]] = []  # functions to call before a loop is compiled; if empty, `say_once`
COMPILES = "compiling loops for this CPU, once, which takes 5 to 30 s"
DIGEST = hashlib.sha256().digest_size  # bytes of the checksum at the end of a file
atexit.register(global_compiler_lock.acquire)  # LLVM would crash if a thread compiled while the process ends


def njit(**options):
    """`numba.njit` whose machine code is cached on the disk."""

    def decorate(function):
        loop = numba.njit(no_cfunc_wrapper=True, **options)(function)  # no loop is called through a C pointer
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


def cache_of(function):
    """The cache of a function's machine code: on the disk, or none if no folder can be written."""
    try:
        return DiskCache(function)
    except (OSError, RuntimeError):
        return NoCache()


@cache
def say_once():
    """Prints, once in a process and if it has a terminal or a notebook, why a call takes seconds."""
    with suppress(Exception):  # stderr may be missing or closed
        if sys.stderr.isatty() or hasattr(sys, "ps1"):
            print(f"linattn_np: {COMPILES}", file=sys.stderr, flush=True)


class NoCache(caching.NullCache):
    """A cache without contents. Numba asks it before it compiles a loop."""

    def load_overload(self, signature, context):
        for callback in COMPILING or [say_once]:
            callback()


def check_regular(path):
    """ValueError if there is something else than a file at a path: reading a pipe or a device might never end."""
    if os.path.lexists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is no file")


class ChecksummedFiles(caching.IndexDataCacheFile):
    """Numba's cache files, whose methods these override; their data begin with the loop's key and end with a checksum:
    no other machine code may be run. Two processes that write at the same time may give the same name to the files of
    two signatures.
    """

    def save(self, key, data):
        super().save(key, (self._source_stamp, key, data))

    def load(self, key):
        stored = super().load(key)
        if stored is None:
            return None
        if stored[:2] != (self._source_stamp, key):
            raise ValueError("the file holds another loop")
        return stored[2]

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


@cache
def stamp_of_sources(package=Path(__file__).parent) -> str:
    """A digest of the times and sizes of the files from which loops take functions and constants. Numba compares those
    of a loop's own file alone: a loop would go on calling what another file held before."""
    files = sorted(file for room in ("models", "backends/numpy") for file in (package / room).rglob("*.py"))
    seen = [(file.relative_to(package).as_posix(), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    return hashlib.sha256(repr(seen).encode()).hexdigest()


class DiskCache(caching.FunctionCache):
    """Numba's cache of a function; if reading or writing it fails, the function is compiled."""

    def __init__(self, function):
        super().__init__(function)
        self._cache_file.__class__ = ChecksummedFiles
        self._cache_file._source_stamp = self._cache_file._source_stamp, stamp_of_sources()

    def load_overload(self, signature, context):
        code = None
        try:
            code = super().load_overload(signature, context)
        except Exception:  # Numba reads a file that was cut short again and again, unless it is emptied
            with suppress(Exception):
                self.flush()
        return code or NoCache().load_overload(signature, context)

    def save_overload(self, signature, data):
        with suppress(Exception):  # the disk is full, or the folder is gone
            super().save_overload(signature, data)
