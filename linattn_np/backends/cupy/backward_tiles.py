"""Tiles of a state: backward kernels that have few channels and columns compute wide heads a tile after the other.

o is a sum over channels, and columns have nothing to do with each other. So the gradients of each tile are those of an
operator of its own, and add up: dq, dk, dg and du over columns, dv over channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .gated_kernels import TILES
from .plan import Array, Draft


@dataclass(frozen=True)
class StateTile:
    channels: slice
    columns: slice

    @property
    def adds(self) -> bool:
        """Whether dq, dk and dg hold the sums of earlier tiles, of other columns."""
        return self.columns.start > 0

    @property
    def adds_dv(self) -> bool:
        """Whether dv holds the sums of earlier tiles, of other channels."""
        return self.channels.start > 0

    def part(self, x, axis):
        """The tile's part of an array whose last axis is K or V, or None; a gate that channels share stays whole."""
        return x if x is None or x.shape[-1] == 1 else x[..., self.channels if axis == "K" else self.columns]

    def state(self, x):
        """The tile's channels and columns of the state `x`, or None."""
        return x and x[..., self.channels, self.columns]

    def problem(self, problem, **known):
        """The problem of this tile alone; `known`: arrays by name that are the tile's already."""
        arrays = {name: self.part(x, problem.op.arrays[name].split()[-1]) for name, x in problem.arrays.items()}
        sizes = {axis: part.stop - part.start for axis, part in (("K", self.channels), ("V", self.columns))}
        initial = problem.initial_state and (self.state(problem.initial_state[0]),)
        return problem.replace(arrays=arrays | known, sizes=problem.sizes | sizes, initial_state=initial)


def tiles_of(problem) -> list[StateTile]:
    """All tiles; tiles of the same columns follow each other."""

    def parts(size):
        return [slice(first, min(first + TILES[-1], size)) for first in range(0, size, TILES[-1])]

    K, V = problem.shape("K V")
    return [StateTile(channels, columns) for columns in parts(V) for channels in parts(K)]


class Reused(Draft):
    """A draft for the parts of a call, one after the other, which all use the same buffers."""

    def __init__(self, draft):
        super().__init__()
        self.buffers, self.steps, self.known, self.taken = draft.buffers, draft.steps, {}, {}

    def again(self) -> Reused:
        """Frees all buffers for the next part, which reads nothing that the previous part wrote."""
        self.taken, self.contiguous_versions = {}, {}
        return self

    def empty(self, shape, dtype, axes=None) -> Array:
        kind = tuple(shape), np.dtype(dtype), axes
        self.taken[kind] = number = self.taken.get(kind, 0) + 1
        if (kind, number) not in self.known:
            self.known[kind, number] = super().empty(*kind)
        return self.known[kind, number]
