"""One model that several ranks train, each on its part of every context: for contexts that one cannot hold."""

from __future__ import annotations

from functools import partial

import numpy as np

from . import operators
from .data_parallel import DataParallel


class SequenceParallel(DataParallel):
    """`DataParallel` whose ranks have a part of every context, in the order of the ranks, in place of rows.

    A token shift takes the last token of the rank before, the recurrence the state (`linattn_np.distributed`), and
    gradients go the other way. Loss and gradient are the mean over all parts, as with `DataParallel`.
    """

    def __init__(self, comm):
        super().__init__(comm)
        self.cut = CutSequences(comm)

    def share(self, batch, context):
        return batch, self.evenly("context", context)

    def part(self, tokens):
        count = (tokens.shape[1] - 1) // self.size
        return np.ascontiguousarray(tokens[:, count * self.rank : count * (self.rank + 1) + 1])


class CutSequences:
    """What a model's loss asks of the other ranks' tokens; see `linattn_np.models.ranks.WholeSequences`."""

    def __init__(self, comm):
        self.comm = comm

    def from_before(self, last):
        return self.from_rank(self.comm.rank - 1, last)

    def from_behind(self, first):
        return self.from_rank(self.comm.rank + 1, first)

    def from_rank(self, source, x):
        """What rank `source` gives, where there is one; all take part."""
        everyones = self.comm.all_gather(x.copy())()
        return everyones[source] if 0 <= source < self.comm.size else None

    def vjp_of(self, operator, *arrays, **options):
        """A rank's gradients of what has no tokens are those of its own: the mean over all ranks puts them together."""
        result, pullback = operators.vjp(getattr(operators, operator.__name__), *arrays, comm=self.comm, **options)
        return result, partial(pullback, summed=False)
