"""Where the properties are tried: the backends of the tests, with what the attack asks of them besides."""

from __future__ import annotations

import numpy as np
from conftest import CLASSES, SIMULATOR


def machine(name):
    """The backend `name` of the tests."""
    found = CLASSES[name](name)
    found.quick = name in ("numpy", "cupy") or name == "numba" and not SIMULATOR  # large sizes are nothing to it
    found.ready = name == "numpy"  # no kernels are built on the way
    found.broadcast = found.cupy.broadcast_to if hasattr(found, "cupy") else np.broadcast_to
    return found
