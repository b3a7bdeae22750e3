"""What a training's residual loses of its changes: on the host a function, on the device what a kernel draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


def keep(x):
    """Drops nothing."""
    return x, lambda dy: dy


def dropout(rng, rate, x):
    """x without a share `rate` of its elements, the others scaled up, and the pullback."""
    kept, scale = rng.random(x.shape, dtype=np.float32) >= rate, 1 / (1 - rate)
    return masked(x, kept, scale), lambda dy: masked(dy, kept, scale)


def masked(x, kept, scale):
    return x * kept * scale


@dataclass(frozen=True)
class Dropout:
    """The same for kernels: `seeds`, two integers on the device, tell which elements go."""

    seeds: Any
    rate: float
