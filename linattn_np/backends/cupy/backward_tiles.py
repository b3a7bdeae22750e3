"""Tiles of a state: if a state is larger than a backward kernel's tile, the kernel is launched for one tile of channels
and columns after the other.

o is a sum over channels, and columns do not depend on each other. So each tile is a call of its own, and the tiles'
gradients add up: dq, dk, dg and du over columns, dv over channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .gated_kernels import TILES
from .plan import Array, Draft


@dataclass(frozen=True)
class StateTile:
    """A range of channels and a range of columns of the state [K, V]."""

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
        """The tile's part of an array or None, whose last axis is `axis`, "K" or "V"; all of a gate that channels
        share."""
        return x if x is None or x.shape[-1] == 1 else x[..., self.channels if axis == "K" else self.columns]

    def state(self, x):
        """The tile's channels and columns of the state `x`, or None."""
        return x and x[..., self.channels, self.columns]

    def problem(self, problem, **own_arrays):
        """The problem of this tile alone; `own_arrays`: those that are the tile's already, by name."""
        arrays = {name: self.part(x, problem.op.arrays[name].split()[-1]) for name, x in problem.arrays.items()}
        sizes = {axis: part.stop - part.start for axis, part in (("K", self.channels), ("V", self.columns))}
        initial = problem.initial_state and (self.state(problem.initial_state[0]),)
        return problem.replace(arrays=arrays | own_arrays, sizes=problem.sizes | sizes, initial_state=initial)


def tiles_of(problem) -> list[StateTile]:
    """All tiles; tiles of the same columns follow each other."""

    def parts(size):
        return [slice(first, min(first + TILES[-1], size)) for first in range(0, size, TILES[-1])]

    K, V = problem.shape("K V")
    # The first columns, and of these the first channels, come first: `adds` and `adds_dv` depend on it
    return [StateTile(channels, columns) for columns in parts(V) for channels in parts(K)]


class DraftOfTiles(Draft):
    """Adds to a `draft` the steps of one tile after the other, which all use the same buffers."""

    def __init__(self, draft):
        super().__init__()
        self.buffers, self.steps = draft.buffers, draft.steps
        self.arrays: dict = {}  # ((shape, dtype, axes), number): the array with this number among those alike
        self.used: dict = {}  # (shape, dtype, axes): how many arrays the present tile uses

    def next_tile(self) -> DraftOfTiles:
        """Frees all buffers for the next tile, which reads nothing that the previous tile wrote."""
        # `empty` then gives the same arrays again; what tiles add up, as dq, is of the outer draft. A Draft remembers
        # arrays in `contiguous_versions` alone
        self.used, self.contiguous_versions = {}, {}
        return self

    def empty(self, shape, dtype, axes=None) -> Array:
        kind = tuple(shape), np.dtype(dtype), axes
        self.used[kind] = number = self.used.get(kind, 0) + 1
        if (kind, number) not in self.arrays:
            self.arrays[kind, number] = super().empty(*kind)
        return self.arrays[kind, number]
