"""Training of one model by several ranks, each of which computes a part of every batch, or of every context."""

from __future__ import annotations

import json
from collections import deque
from functools import partial

import numpy as np

from ..errors import ContractError
from . import operators
from .call_comparison import agree, all_values
from .engine import RankLost
from .engine import begin as begin_operation

BUCKET = 1 << 22  # the most numbers of a message, of NumPy arrays and for engines without `all_mean`
BUCKETS = 8  # the most such messages at a time, which bounds the memory


class DataParallel:
    """A `Training` whose ranks each compute some rows of every batch. `linattn_np.models.single_process` describes the
    methods; messages are sent by an engine. All ranks call the methods in the same order, with arrays of equal shapes.

    Every rank computes the gradient of its rows; before each step all ranks compute the mean of these gradients. Parts
    of a gradient are sent while the backward pass computes other parts. All ranks add the gradients in the order of the
    ranks, and so get the same bits; an engine with `all_mean` must give all ranks the same bits, too. Hence their
    weights stay equal without being sent.

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

    cut = None  # ranks have whole sequences

    def __init__(self, comm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.under_way = deque()

    def agree(self, meaning):
        """Raises `Disagreement` on all ranks if their settings, {name: value}, differ."""
        # `CallComparison`'s check returns (its result, the rank's tokens, values to compare): here the values alone.
        agree(self.comm, "Training", lambda: (None, 0, meaning | {"the ranks": type(self).__name__}))

    def share(self, batch, context):
        return self.evenly("batch", batch), context

    def evenly(self, name, count):
        """`count` divided by the number of ranks; ContractError for a remainder."""
        if count % self.size:
            raise ContractError(f"Training: {name} is {count}, expected a multiple of the {self.size} ranks")
        return count // self.size

    def part(self, tokens):
        return np.split(tokens, self.size)[self.rank]

    # -- means over all ranks -----------------------------------------------------------------------------------------
    def begin(self, numbers):
        """Starts to replace `numbers`, a contiguous array [n], by their mean over all ranks; `finish` waits for it."""
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
        """Replaces the numbers of a bucket by the mean of those that `wait()` returns, [ranks, numbers]: an array of
        this call's own, which is overwritten, or with one rank the bucket."""
        first, *others = wait()
        for other in others:
            first += other
        first *= first.dtype.type(1 / self.size)
        bucket[...] = first

    def launched(self):
        """Tells an engine that watches its messages (`Nccl`) that a graph with messages has been launched."""
        if hasattr(self.comm, "launched"):
            self.comm.launched()

    # -- the course of a training -------------------------------------------------------------------------------------
    def clock(self, step, seconds):
        """The first rank's `seconds` on all ranks, which so decide alike; RankLost if they are at different steps."""
        begin_operation(self.comm, f"Training, step {step}")
        steps_and_seconds = self.comm.all_gather(np.array([step, seconds], np.float64))()
        if (steps_and_seconds[:, 0] != step).any():
            steps = ", ".join(str(int(n)) for n in steps_and_seconds[:, 0])
            raise RankLost(f"the ranks are at steps {steps}: one has lost its way")
        return float(steps_and_seconds[0, 1])

    def from_first(self, read):
        """{name: array} as read() returns it on the first rank; an error there is a ContractError on the others."""
        arrays, error = {}, None
        if self.rank == 0:
            try:
                arrays = read()
            except Exception as refusal:
                error = refusal
        descriptions = [(name, str(x.dtype), list(x.shape)) for name, x in arrays.items()]
        text = json.dumps({"arrays": descriptions, "error": error and str(error)}).encode()
        of_first, *_ = all_values(self.comm, text, self.comm.all_gather(np.array([len(text)]))().ravel())
        if error is not None:
            raise error
        if of_first["error"]:
            raise ContractError(f"rank 0: {of_first['error']}")
        for name, dtype, shape in of_first["arrays"]:
            if self.rank:
                arrays[name] = np.empty(shape, dtype)
                self.comm.recv(arrays[name], 0)
            else:
                for peer in range(1, self.size):
                    self.comm.send(np.ascontiguousarray(arrays[name]), peer)
        return arrays


class SequenceParallel(DataParallel):
    """A `Training` whose ranks each compute a part of the tokens of every row, in the order of the ranks.

    A token shift gets the last token of the previous rank, and the recurrence gets its state
    (`linattn_np.distributed`); gradients are sent the opposite way. Loss and gradient are the means over all parts, as
    in `DataParallel`.
    """

    def __init__(self, comm):
        super().__init__(comm)
        self.cut = CutSequences(comm)

    def share(self, batch, context):
        return batch, self.evenly("context", context)

    def part(self, tokens):
        count = (tokens.shape[1] - 1) // self.size  # of inputs; a part has one token more, the last one's target
        return np.ascontiguousarray(tokens[:, count * self.rank : count * (self.rank + 1) + 1])


class CutSequences:
    """The `cut` of a model's loss if ranks have parts of sequences. `linattn_np.models.single_process.WholeSequences`
    describes the methods."""

    def __init__(self, comm):
        self.comm = comm

    def from_previous_rank(self, last):
        return self.from_rank(self.comm.rank - 1, last)

    def from_next_rank(self, first):
        return self.from_rank(self.comm.rank + 1, first)

    def from_rank(self, source, x):
        """The array x of rank `source`, or None if there is no such rank. All ranks must call this."""
        of_all_ranks = self.comm.all_gather(x.copy())()
        return of_all_ranks[source] if 0 <= source < self.comm.size else None

    def vjp_of(self, operator, *arrays, **options):
        """`vjp` over the tokens of all ranks. The gradient of an array without tokens is that of this rank's tokens:
        a training averages it over all ranks afterwards, whose losses are means over equal parts (`evenly`)."""
        result, pullback = operators.vjp(getattr(operators, operator.__name__), *arrays, comm=self.comm, **options)
        return result, partial(pullback, summed=False)
