"""Prints what a bug report needs: versions, devices, which backends run and why others do not, caches, BLAS.

    linattn-np info

Nothing is sent anywhere.
"""

import os
import platform
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np

from .. import NotSupported, __version__, explain, gla
from ..backends.numpy.cores import workers
from ..cupy_folder import folder_for_cupy
from ..models import austen
from ..models.devices import check_device, why_no_cupy
from ..models.rwkv.cpu_layers import has_loops
from .blas_threads import VARIABLES
from .measuring import cpu
from .terminal import to_stdout

PACKAGE = Path(__file__).resolve().parents[1]
PACKAGES = "numpy ml_dtypes safetensors cupy-cuda12x cupy-cuda13x cupy numba numba-cuda threadpoolctl".split()
PACKAGES += "matplotlib pyrwkv-tokenizer mpi4py torch jax".split()
SET_BY_USER = [*VARIABLES, "CUDA_VISIBLE_DEVICES", "CUDA_PATH", "CUDA_CACHE_PATH"]  # environment variables
SET_BY_USER += ["CUPY_CACHE_DIR", "NUMBA_CACHE_DIR", "NUMBA_ENABLE_CUDASIM"]


def add_options(parser):
    """Every subcommand has this function; `info` has no options."""


def run(options):
    sections = {"versions": versions, "devices": devices, "backends": backends}
    for title, facts in (sections | {"caches": caches, "threads": threads, "environment": environment}).items():
        to_stdout(title)
        for name, fact in lines_of(facts):
            to_stdout(f"  {name:<20} {' '.join(fact.split())}")


def lines_of(facts):
    """Yields (name, text) for the facts of a section. A fact may be a function that finds it: if it fails, the text is
    the error. If the section itself fails, the error is its last line."""
    try:
        for name, fact in facts():
            try:
                yield name, str(fact() if callable(fact) else fact)
            except Exception as error:
                yield name, untold(error)
    except Exception as error:
        yield "more", untold(error)


def untold(error) -> str:
    return f"cannot be told: {type(error).__name__}: {error}"


# -- sections: each returns or yields (name, fact) for its lines ------------------------------------------------------
def versions():
    yield "linattn_np", f"{__version__} in {PACKAGE}"
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def devices():
    yield "CPU", f"{cpu()}, {workers()} cores for this process"
    folder_for_cupy()  # CuPy cannot be imported without a folder that it may write to
    try:
        import cupy
    except ImportError as error:
        yield "GPU", f"none: {why_no_cupy(error)}"
        return
    runtime = cupy.cuda.runtime
    yield "CUDA runtime", lambda: version(runtime.runtimeGetVersion())
    yield "CUDA driver", lambda: version(runtime.driverGetVersion()) if runtime.driverGetVersion() else "none is loaded"
    yield "NVRTC", lambda: ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    if not cupy.cuda.is_available():
        yield "GPU", "none: CuPy finds no CUDA device"
        return
    for i in range(runtime.getDeviceCount()):
        yield f"GPU {i}", partial(card, runtime, i)


def card(runtime, i) -> str:
    """The name and properties of a card."""
    about = runtime.getDeviceProperties(i)
    return (
        f"{about['name'].decode()}, compute capability {about['major']}.{about['minor']}, "
        f"{about['totalGlobalMem'] / 2**30:.0f} GiB"
    )


def version(number) -> str:
    """A version of CUDA as text: 12.4 for its number 12040."""
    return f"{number // 1000}.{number % 1000 // 10}"


def backends():
    """Which backends run operators, on the GPU if there is one, and on which devices models run."""
    try:
        check_device("models", "cuda")  # imports CuPy
        xp, missing = sys.modules["cupy"], None
    except NotSupported as error:  # its text: "models: device 'cuda' cannot be used: the reason; what helps"
        xp, missing = np, str(error).split(": ")[-1].partition(";")[0]
    for name in ("numpy", "cupy", "numba"):
        yield f"operators, {name}", partial(route, xp if name != "numpy" else np, name, missing)
    yield "models on the CPU", "run, by Numba's loops" if has_loops() else "run, by NumPy: without Numba, more slowly"
    yield "models on the GPU", f"do not run: {missing}" if missing else "run"


def route(xp, name, missing) -> str:
    """Whether backend `name` runs gla on arrays of the library `xp`, or why not."""
    x = xp.zeros((1, 1, 16, 16), np.float32)
    found = explain(gla, x, x, x, x, backend=name)
    return "run" if found.backend else f"do not run: {missing or found.reasons[name]}"


def caches():
    home = Path(os.path.expanduser("~"))  # it may not exist
    for name, variable, folder in (
        ("CuPy's kernels", "CUPY_CACHE_DIR", home / ".cupy" / "kernel_cache"),
        ("CUDA's kernels", "CUDA_CACHE_PATH", home / ".nv" / "ComputeCache"),
        ("Numba's loops", "NUMBA_CACHE_DIR", PACKAGE),
    ):
        yield name, partial(cache_in, Path(os.environ.get(variable) or folder))
    yield "example's model", austen  # a function: its path, or an error that says how to get it


def cache_in(folder) -> str:
    """A folder of compiled code, and how much is in it."""
    files = [path for path in folder.rglob("*.nb[ic]" if folder == PACKAGE else "*") if path.is_file()]
    return f"{folder}: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB"


def threads():
    yield "NumPy's BLAS", blas_of_numpy
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        yield "threads", "BLAS chooses without threadpoolctl: pip install 'linattn-np[threads]' brings it"
        return
    for pool in threadpool_info():
        about = f"{pool['version'] or ''} {pool.get('architecture', '')}"
        yield pool["internal_api"], f"{about}: {pool['num_threads']} threads"


def blas_of_numpy() -> str:
    built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{built['name']} {built['version']}"


def environment():
    given = [(name, value) for name in SET_BY_USER if (value := os.environ.get(name))]
    return given or [("none set", f"of {', '.join(SET_BY_USER)}")]
