"""Where the properties are tried: the backends of the tests, with what the attack asks of them besides."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import CLASSES, Numpy  # noqa: E402


def machine(name):
    """The backend `name` of the tests."""
    found = CLASSES[name](name)
    found.quick = not name.startswith(("emulated", "hopper"))           # large sizes are nothing to it
    found.broadcast = found.cupy.broadcast_to if hasattr(found, "cupy") else np.broadcast_to
    if isinstance(found, Numpy):
        found.modes = found.modes | {"softmax_attention": ("chunk",)}
    return found
