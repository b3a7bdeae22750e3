"""A training by this process alone. `linattn_np.distributed.DataParallel` has the same methods for several ranks.

rank, size                  this process's number, and how many there are
agree(meaning)              raises if the ranks' settings of the training, {name: value}, differ
share(batch, context)       (sequences, context) that this rank computes of a step with [batch, context] tokens; raises
                            if the ranks cannot divide them
part(tokens)                this rank's tokens [sequences, context + 1], of the step's [batch, context + 1]
cut                         None if a rank has whole sequences; else an object like `distributed.CutSequences`, by which
                            a model's loss exchanges numbers with the ranks that have the rest of the sequences
begin(numbers)              starts to replace numbers by their mean over all ranks; until `finish` nobody may use them
finish()                    waits for all means that were started
launched()                  must be called after the launch of a CUDA graph that contains such exchanges
clock(step, seconds)        the first rank's `seconds`, once all ranks have reached this step
from_first(read)            on all ranks, what read() ({name: array}) returns on the first one; others do not call it
"""

from __future__ import annotations

from ..autodiff import vjp


class OneProcess:
    """The one rank of such a training; see the module for its methods."""

    rank, size, cut = 0, 1, None

    def agree(self, meaning):
        pass

    def share(self, batch, context):
        return batch, context

    def part(self, tokens):
        return tokens

    def begin(self, numbers):
        pass

    def finish(self):
        pass

    def launched(self):
        pass

    def clock(self, step, seconds):
        return seconds

    def from_first(self, read):
        return read()


class WholeSequences:
    """The `cut` of a loss whose tokens are whole sequences. `distributed.CutSequences` has the same methods for ranks
    that have parts of sequences.

    from_previous_rank(last)    each rank passes its last token's numbers of each sequence [B, ...], and gets those of
                                the rank with the tokens before its own; None if there are none
    from_next_rank(first)       each rank passes numbers of its first tokens, and gets those of the rank with the tokens
                                after its own; None if there are none
    vjp_of(operator, ...)       `linattn_np.vjp` over the tokens of all ranks. The gradient of an array without tokens
                                is this rank's term, and the sum over the ranks is the gradient.
    """

    def from_previous_rank(self, last):
        return None

    def from_next_rank(self, first):
        return None

    def vjp_of(self, operator, *arrays, **options):
        return vjp(operator, *arrays, **options)


WHOLE = WholeSequences()
