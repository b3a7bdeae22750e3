"""One model that several ranks train, each on its part of every batch, or of every context."""

from __future__ import annotations

import json
from collections import deque
from functools import partial

import numpy as np

from ..errors import ContractError
from . import operators
from .call_comparison import agree
from .engine import RankLost, begin

BUCKET = 1 << 22  # numbers that travel together where they are added up here
BUCKETS = 8  # that may be under way, which bounds the memory


class DataParallel:
    """What `Training` asks of its ranks, by an engine: see `linattn_np.models.single_process`.

    Every rank computes the gradient of its rows, and the mean of all of them before each step. Parts of it travel while
    the backward pass computes the next. All ranks get the same bits, from NumPy in the order of the ranks, so that the
    weights stay the same without ever being sent.

    Example
    -------
    >>> import numpy as np
    >>> from linattn_np import distributed
    >>> def on_a_rank(comm):
    ...     gradient, ranks = np.full(3, comm.rank, np.float32), distributed.DataParallel(comm)
    ...     ranks.begin(gradient)
    ...     ranks.finish()
    ...     return gradient.tolist()
    >>> distributed.run_threads(on_a_rank, 2)
    [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
    """

    cut = None

    def __init__(self, comm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.under_way = deque()

    def agree(self, meaning):
        """Raises `Disagreement` on all ranks where they do not mean the same training."""
        agree(self.comm, "Training", lambda: (None, 0, meaning | {"the ranks": type(self).__name__}))

    def share(self, batch, context):
        return self.evenly("batch", batch), context

    def evenly(self, name, count):
        if count % self.size:
            raise ContractError(f"Training: {name} is {count}, expected a multiple of the {self.size} ranks")
        return count // self.size

    def part(self, tokens):
        return np.split(tokens, self.size)[self.rank]

    # -- means over all ranks -----------------------------------------------------------------------------------------
    def begin(self, numbers):
        if not isinstance(numbers, np.ndarray) and hasattr(self.comm, "all_mean"):
            self.under_way.append(self.comm.all_mean(numbers))
            return
        for start in range(0, len(numbers), BUCKET):
            bucket = numbers[start : start + BUCKET]
            self.under_way.append(partial(self.add_up, bucket, self.comm.all_gather(bucket)))
            if len(self.under_way) > BUCKETS:
                self.under_way.popleft()()

    def finish(self):
        while self.under_way:
            self.under_way.popleft()()

    def add_up(self, bucket, wait):
        first, *others = wait()
        for other in others:
            first += other
        first *= first.dtype.type(1 / self.size)
        bucket[...] = first

    def launched(self):
        if hasattr(self.comm, "launched"):
            self.comm.launched()

    # -- the course of a training -------------------------------------------------------------------------------------
    def clock(self, step, seconds):
        begin(self.comm, f"Training, step {step}")
        told = self.comm.all_gather(np.array([step, seconds], np.float64))()
        if (told[:, 0] != step).any():
            raise RankLost(
                f"the ranks are at steps {', '.join(str(int(at)) for at in told[:, 0])}: one has lost its way"
            )
        return float(told[0, 1])

    def from_first(self, read):
        """{name: array} as read() returns it on the first rank; an error there is a ContractError on the others."""
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
    """How a model's loss reaches the tokens of other ranks; see `linattn_np.models.single_process.WholeSequences`."""

    def __init__(self, comm):
        self.comm = comm

    def from_previous_rank(self, last):
        return self.from_rank(self.comm.rank - 1, last)

    def from_next_rank(self, first):
        return self.from_rank(self.comm.rank + 1, first)

    def from_rank(self, source, x):
        """The array of rank `source`, or None where there is no such rank. All ranks take part."""
        everyones = self.comm.all_gather(x.copy())()
        return everyones[source] if 0 <= source < self.comm.size else None

    def vjp_of(self, operator, *arrays, **options):
        """`vjp` over the tokens of all ranks. The gradient of an array without tokens is that of this rank's tokens,
        since a training averages it over all ranks afterwards."""
        result, pullback = operators.vjp(getattr(operators, operator.__name__), *arrays, comm=self.comm, **options)
        return result, partial(pullback, summed=False)
