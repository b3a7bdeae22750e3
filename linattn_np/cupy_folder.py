"""The folder in which CuPy keeps compiled kernels for later processes."""

import atexit
import os
import shutil
import sys
import tempfile
import warnings
from functools import cache

from .errors import NotSupported
from .warnings_of_misuse import LinattnWarning

CUPYS_FOLDER = "~/.cupy/kernel_cache"  # without CUPY_CACHE_DIR


@cache
def folder_for_cupy():
    """Gives CuPy another folder for kernels if its own cannot be written: CuPy cannot be imported without one.

    The new folder lives as long as the process. If CuPy is imported already, kernels stay in memory. A LinattnWarning
    says either; NotSupported if no folder can be written. Call this before an import of CuPy.
    """
    folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser(CUPYS_FOLDER)
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return
    except OSError as error:
        wrong = f"CuPy cannot keep kernels in {folder} ({error.strerror})"
    way_out = "CUPY_CACHE_DIR names another folder"
    if "cupy" in sys.modules:
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    else:
        try:
            new_folder = tempfile.mkdtemp(prefix="linattn_np-")
        except OSError:
            raise NotSupported(f"{wrong}, nor in {tempfile.gettempdir()}: {way_out}") from None
        atexit.register(shutil.rmtree, new_folder, ignore_errors=True)
        os.environ["CUPY_CACHE_DIR"] = new_folder
    warnings.warn(f"{wrong}: every process compiles its own. {way_out}", LinattnWarning, stacklevel=2)
