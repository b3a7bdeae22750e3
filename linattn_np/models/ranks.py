"""Who takes part in a training: this process alone; `linattn_np.distributed.DataParallel` has the same face for more.

rank, size
agree(meaning)              raises where the ranks do not mean the same training, {what: value}
part(rows)                  those of a batch's rows that this rank learns from
average(gradient, loss)     the mean over all ranks: of the gradient in place, of the loss as what comes back
clock(step, seconds)        the first rank's seconds, once all ranks are at this step
from_first(read)            what read() returns on the first rank, arrays by name, on all
"""

from __future__ import annotations


class OneProcess:
    rank, size = 0, 1

    def agree(self, meaning):
        pass

    def part(self, rows):
        return rows

    def average(self, gradient, loss):
        return loss

    def clock(self, step, seconds):
        return seconds

    def from_first(self, read):
        return read()
