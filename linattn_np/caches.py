"""What is kept: for later calls, bounded in bytes; for later processes, where there is a folder for it."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import warnings
from functools import cache
from threading import Lock

from .doubts import LinattnWarning
from .errors import NotSupported

CUPYS_FOLDER = "~/.cupy/kernel_cache"  # without CUPY_CACHE_DIR


class Cache:
    """Values by key: at most `entries`, and `most` bytes by what each is said to take, or one value that takes more.

    What nobody has asked for since it was last looked at goes first.
    """

    def __init__(self, most: int, entries: int):
        self.most, self.entries, self.bytes = most, entries, 0
        self.kept: dict = {}
        self.lock = Lock()

    def get(self, key):
        """The value, or None."""
        entry = self.kept.get(key)
        if entry is None:
            return None
        entry[2] = True  # asked for
        return entry[0]

    def keep(self, key, value, nbytes: int):
        """The value kept from now on: `value`, or that of a thread that was faster."""
        with self.lock:
            if key in self.kept:
                return self.kept[key][0]
            while self.kept and (len(self.kept) >= self.entries or self.bytes + nbytes > self.most):
                oldest = next(iter(self.kept))
                entry = self.kept.pop(oldest)
                if entry[2]:
                    entry[2] = False
                    self.kept[oldest] = entry
                else:
                    self.bytes -= entry[1]
            self.kept[key] = [value, nbytes, False]
            self.bytes += nbytes
            return value

    def clear(self):
        with self.lock:
            self.kept.clear()
            self.bytes = 0


@cache
def folder_for_cupy():
    """Where CuPy's folder for kernels cannot be written, one of this process's takes its place, without which CuPy
    cannot be imported; where it has been, kernels stay in memory. LinattnWarning says so, and NotSupported that there
    is no place at all."""
    folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser(CUPYS_FOLDER)
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return
    except OSError as error:
        wrong = f"CuPy cannot keep kernels in {folder} ({error.strerror})"
    way = "CUPY_CACHE_DIR names another folder"
    if "cupy" in sys.modules:
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    else:
        try:
            own = tempfile.mkdtemp(prefix="linattn_np-")
        except OSError:
            raise NotSupported(f"{wrong}, nor in {tempfile.gettempdir()}: {way}") from None
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        os.environ["CUPY_CACHE_DIR"] = own
    warnings.warn(f"{wrong}: every process compiles its own. {way}", LinattnWarning, stacklevel=2)
