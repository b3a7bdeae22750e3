"""A training by this process alone. `linattn_np.distributed.DataParallel` has the same methods for several ranks.

rank, size
agree(meaning)              raises if the ranks' settings of the training, {what: value}, differ
share(batch, context)       (sequences, context) of a step that this rank learns from; raises where they do not fit
part(tokens)                the tokens [sequences, context + 1] of these, of all [batch, context + 1]
cut                         what a model's loss asks where those are parts of sequences, as `distributed.CutSequences`
                            has it; else None
begin(numbers)              starts to replace numbers by their mean over all ranks; until `finish` nobody may use them
finish()                    waits for all means that were started
launched()                  says that a CUDA graph with such messages has been launched
clock(step, seconds)        the first rank's seconds, once all ranks are at this step
from_first(read)            what read() returns on the first rank, arrays by name, on all
"""

from __future__ import annotations

from ..autodiff import vjp


class OneProcess:
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
    """The `cut` of a loss whose tokens are whole sequences; `distributed.CutSequences` has the same face for parts.

    from_before(last)           of every sequence's last element here [B, ...] that of the rank before, or None
    from_behind(first)          of the first elements those of the rank behind, or None
    vjp_of(operator, ...)       `linattn_np.vjp` over all tokens; the gradient of what has none is a share of the whole
    """

    def from_before(self, last):
        return None

    def from_behind(self, first):
        return None

    def vjp_of(self, operator, *arrays, **options):
        return vjp(operator, *arrays, **options)


WHOLE = WholeSequences()
