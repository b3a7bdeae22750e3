"""One model that several ranks train, each on its part of every batch."""

from __future__ import annotations

import json

import numpy as np

from ..errors import ContractError
from .agreement import agree
from .engine import RankLost

BUCKET = 1 << 22  # numbers of a gradient that travel together: one bucket is added up while the next is under way


class DataParallel:
    """What `Training` asks of its ranks, by an engine: see `linattn_np.models.ranks`.

    Every rank computes the gradient of its rows, and the mean of all of them before each step: in the order of the
    ranks, so that all have the same bits, and the weights stay the same without ever being sent.

    Example
    -------
    >>> import numpy as np
    >>> from linattn_np import distributed
    >>> def on_a_rank(comm):
    ...     gradient = np.full(3, comm.rank, np.float32)
    ...     loss = distributed.DataParallel(comm).average(gradient, np.float32(2 * comm.rank))
    ...     return gradient.tolist(), float(loss)
    >>> distributed.run_threads(on_a_rank, 2)
    [([0.5, 0.5, 0.5], 1.0), ([0.5, 0.5, 0.5], 1.0)]
    """

    def __init__(self, comm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    def agree(self, meaning):
        """Raises `Disagreement` on all ranks where they do not mean the same training."""
        agree(self.comm, "Training", lambda: (None, 0, meaning))

    def part(self, rows):
        if len(rows) % self.size:
            raise ContractError(f"Training: batch is {len(rows)}, expected a multiple of the {self.size} ranks")
        count = len(rows) // self.size
        return rows[count * self.rank : count * (self.rank + 1)]

    def average(self, gradient, loss):
        share = loss.reshape(1) / self.size
        losses = self.comm.all_gather(share)
        if isinstance(gradient, np.ndarray) or not hasattr(self.comm, "all_reduce"):
            self.sum_of_gathered(gradient)
        else:
            self.comm.all_reduce(gradient)()
        gradient *= gradient.dtype.type(1 / self.size)
        return losses().sum()

    def sum_of_gathered(self, gradient):
        buckets = [gradient[start : start + BUCKET] for start in range(0, len(gradient), BUCKET)]
        under_way = []
        for bucket in buckets:
            under_way.append((bucket, self.comm.all_gather(bucket)))
            if len(under_way) > 1:
                self.add_up(*under_way.pop(0))
        for found in under_way:
            self.add_up(*found)

    @staticmethod
    def add_up(bucket, wait):
        first, *others = wait()
        for other in others:
            first += other
        bucket[...] = first

    def clock(self, step, seconds):
        told = self.comm.all_gather(np.array([step, seconds], np.float64))()
        if (told[:, 0] != step).any():
            raise RankLost(
                f"the ranks are at steps {', '.join(str(int(at)) for at in told[:, 0])}: one has lost its way"
            )
        return float(told[0, 1])

    def from_first(self, read):
        """{name: array} of the first rank; what it raises is a ContractError on the others."""
        found, error = {}, None
        if self.rank == 0:
            try:
                found = read()
            except Exception as refusal:
                error = refusal
        arrays = [(name, str(x.dtype), list(x.shape)) for name, x in found.items()]
        about = self.text_of_first(json.dumps({"arrays": arrays, "error": error and str(error)}))
        if error is not None:
            raise error
        if about["error"]:
            raise ContractError(f"rank 0: {about['error']}")
        for name, dtype, shape in about["arrays"]:
            if self.rank:
                found[name] = np.empty(shape, dtype)
                self.comm.recv(found[name], 0)
            else:
                for peer in range(1, self.size):
                    self.comm.send(np.ascontiguousarray(found[name]), peer)
        return found

    def text_of_first(self, text):
        length = int(self.comm.all_gather(np.array([len(text)]))()[0, 0])
        row = np.zeros(length, np.uint8)
        if self.rank == 0:
            row[:] = np.frombuffer(text.encode(), np.uint8)
        return json.loads(self.comm.all_gather(row)()[0].tobytes())
