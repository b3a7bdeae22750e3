"""Dropout in a training: on the host a function; on a GPU the arguments of kernels that apply it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


def keep(x):
    """(x without any dropout, the pullback)."""
    return x, lambda dy: dy


def apply_dropout(rng, rate, x):
    """(x with a share `rate` of its elements set to 0 and the others scaled up, the pullback)."""
    mask, scale = rng.random(x.shape, dtype=np.float32) >= rate, 1 / (1 - rate)
    return x * mask * scale, lambda dy: dy * mask * scale


@dataclass(frozen=True)
class Dropout:
    """The arguments of kernels: `seeds`, two integers on the device that determine which elements become 0; `rate`, the
    share of these."""

    seeds: Any
    rate: float
