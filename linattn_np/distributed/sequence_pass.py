"""One pass over sequences whose tokens are cut into segments on several ranks: forward, or backward for gradients.

1. A segment makes a summary for its last sequence, if that sequence continues in the next segment: the linear map
   S_out = F S_in + S_added of the state. An all-gather sends the summaries to all ranks.
2. Segments that begin all their sequences are computed while the messages are under way.
3. Each rank applies the summaries of the preceding segments, and computes its other segments from these states.

All orders ("before", "preceding", "continues") are those of the pass: the order in which the recurrence visits the
tokens, or for gradients the opposite order. A *piece* is the tokens of one sequence in one segment. A state is a list
of arrays: S [N, H, K, V], and for a normaliser z [N, H, K]; a backward pass carries the state's gradient instead. F is
a list of factors, one for each gate, or a matrix for a delta rule: see `summary.Summary`.

With cu_seqlens each sequence is one row of N. Without, all B rows of the batch are cut at the same tokens: here they
are one sequence, of B rows of N.
"""

from __future__ import annotations

import numpy as np

from ..autodiff import placed_cotangents, vjp_of
from ..conversions import callers_sizes
from ..dispatch import call as call_operator
from ..dispatch import summarise
from ..graph_capture import lasting_memory
from .call_comparison import CallComparison
from .rank_call import RankCall, parts_of


class Pass:
    """The steps that the forward and the backward pass have in common.

    Which messages are sent depends on the cut alone, which is the same on all ranks: all must send in one order.

    call : this rank's arguments, checked
    comparison : the exchange by which ranks find out whether they make the same call and how many tokens each has
    starting_states : the states [N, ...] before the first token of every row, or None for zeros
    summaries : {segment index: the arrays that the backend has made for the summary, and `compute` can use again}
    lengths, cut, own_segments : the tokens of each rank, the cut by them, and this rank's segments; `run` sets them

    A derived class has

    summary_message(segment, piece) returns [*S_added, *F], the arrays of the summary of a piece; may fill `summaries`
    prepare(segment)                fills `summaries` for a segment of one piece that sends no summary but needs a
                                    state, while the summaries of other ranks are under way
    compute(segment, states)        returns (the segment's result, its sequences' final states or None)
    """

    backwards = False

    def __init__(self, call, comparison, starting_states):
        self.call, self.comparison, self.starting_states = call, comparison, starting_states
        self.recurrence, self.summaries = call.recurrence, {}

    def run(self, expected_lengths):
        """({index of a segment of this rank: its result}, {sequence: its final state, if it ends on this rank}).

        expected_lengths : how many tokens each rank probably has. The true numbers arrive while the summaries are
            computed; the summaries are computed again if they differ
        """
        messages = self.summary_messages(expected_lengths)
        if (lengths := self.comparison.agreed_lengths()) != expected_lengths:
            messages = self.summary_messages(lengths)
        wait_for_summaries = None
        if any(segment.outgoing_piece for segment in self.cut.segments):  # a sequence has tokens in several segments
            recurrence, rows = self.recurrence, self.call.rows_per_sequence
            shapes = [*recurrence.state_shapes(rows), *recurrence.factor_shapes(rows)]
            wait_for_summaries = self.call.exchange(messages, shapes, self.cut.slots)
        results, final_states, arriving = {}, {}, None
        for segment in sorted(self.own_segments, key=lambda segment: segment.incoming_piece is not None):
            if segment.incoming_piece is not None and arriving is None:
                arriving = self.arriving_states(wait_for_summaries())
            state = None if segment.incoming_piece is None else arriving[segment.index]
            initial = self.call.states_of(segment, state, self.starting_states)
            results[segment.index], final = self.compute(segment, initial)
            for n, piece in enumerate(segment.pieces):
                if final is not None and not piece.has_successor:
                    final_states[piece.sequence] = [part[self.call.state_rows(n)] for part in final]
        if wait_for_summaries is not None and arriving is None:
            wait_for_summaries()  # an all-gather ends on every rank, also on those that need no state
        return results, final_states

    def summary_messages(self, lengths):
        """Cuts the tokens of all ranks. Returns {slot: summary} of this rank's segments that have one; a slot is a
        segment's number on its rank."""
        self.lengths, self.cut = lengths, self.call.cut(lengths, self.backwards)
        self.own_segments = [segment for segment in self.cut.segments if segment.rank == self.call.comm.rank]
        messages = {}
        self.summaries.clear()
        for segment in self.own_segments:
            if segment.outgoing_piece is not None:
                messages[segment.slot] = self.summary_message(segment, segment.outgoing_piece)
            elif segment.incoming_piece is not None and len(segment.pieces) == 1:
                self.prepare(segment)
        return messages

    def arriving_states(self, summary_at):
        """{index of a segment of this rank: the state of its incoming piece}. `summary_at(rank, slot)` returns a
        summary's message."""
        arriving, state = {}, None
        wanted = {segment.index for segment in self.own_segments if segment.incoming_piece is not None}
        for segment in reversed(self.cut.segments) if self.cut.reverse else self.cut.segments:
            piece = segment.outgoing_piece
            if segment.index in wanted:
                arriving[segment.index] = state
            if len(arriving) == len(wanted):
                break
            if piece is None:
                continue
            if not piece.has_predecessor:  # the sequence begins in this segment
                state = self.starting_state(piece.sequence)
            tokens, message = piece.stop - piece.start, summary_at(segment.rank, segment.slot)
            with np.errstate(all="ignore"):
                state = self.recurrence.summary_of_message(message, tokens, self.backwards).apply(state)
        return arriving

    def starting_state(self, sequence):
        """The state with which a sequence begins, or None for zeros."""
        if self.starting_states is None:
            return None
        rows, dtype = self.call.state_rows(sequence), self.recurrence.dtype
        return [part[rows].astype(dtype) for part in self.starting_states]

    def gather_final_states(self, final_states):
        """The final states [N, ...] of all sequences, on every rank, from those that `run` found on each rank."""
        call, places, counts = self.call, {}, [0] * self.call.comm.size
        for segment in self.cut.segments:
            for piece in segment.pieces:
                if not piece.has_successor:  # message n of a rank: the n-th sequence that ends there
                    places[piece.sequence] = segment.rank, counts[segment.rank]
                    counts[segment.rank] += 1
        shapes = self.recurrence.state_shapes(call.rows_per_sequence)
        gathered = [call.empty((call.rows_per_sequence * call.sequences, *shape[1:])) for shape in shapes]
        for n, states in enumerate(gathered):  # a sequence without tokens ends in the state with which it begins
            start = self.starting_states
            states[...] = 0 if start is None else start[n].astype(self.recurrence.dtype, copy=False)
        if not places:
            return gathered
        messages = {places[sequence][1]: state for sequence, state in final_states.items()}
        state_at = call.exchange(messages, shapes, max(counts))()
        for sequence, (rank, message) in places.items():
            for states, part in zip(gathered, state_at(rank, message)):
                states[call.state_rows(sequence)] = part
        return gathered


class Forward(Pass):
    """Computes o and the final state; if gradients follow, also the pullback of each of this rank's segments."""

    def __init__(self, call: RankCall):
        super().__init__(call, call.comparison, call.swap_state_axes(call.state))
        self.o = call.out
        self.pullbacks: dict = {}  # by the index of the segment

    def result(self):
        """o, or (o, final states), of this rank's tokens, as arrays of the caller's kind and layout."""
        call, problem = self.call, self.call.problem
        with lasting_memory(problem.home):  # a graph that is captured now uses this memory later
            results, final_states = self.run(self.comparison.remembered_lengths() or self.comparison.agreed_lengths())
            o = next(iter(results.values())) if self.o is None else self.o
            result = call.array_to_caller(o, problem.op.out) if call.out is None else call.arguments["out"]
            if not problem.output_final_state:
                return result
            dtypes = [problem.state_dtype] * len(problem.op.state)
            return result, call.states_to_caller(self.gather_final_states(final_states), dtypes)

    def summary_message(self, segment, piece):
        call, is_only_piece = self.call, len(segment.pieces) == 1
        arguments = call.call_of_segment(segment) if is_only_piece else call.call_of_tokens(*tokens_of(segment, piece))
        added, factors, summaries = self.recurrence.summary(*arguments, call.gradient)
        if is_only_piece:
            self.summaries[segment.index] = summaries
        return [*added, *factors]

    def prepare(self, segment):
        arrays, options = self.call.call_of_segment(segment)
        options |= {"gradient": self.call.gradient, "only_summaries": True}
        if summary := summarise(self.call.declared, arrays, **options):
            *_, self.summaries[segment.index] = summary

    def compute(self, segment, states):
        call, problem = self.call, self.call.problem
        arrays, options = call.call_of_segment(segment)
        options["initial_state"] = states
        if problem.output_final_state:
            options |= {"output_final_state": True, "state_dtype": self.recurrence.dtype}
        if self.o is None and len(self.own_segments) > 1:  # o gets the memory order of q
            q, recurrence = call.arrays[0], self.recurrence
            self.o = np.empty_like(q, shape=(len(q), recurrence.heads["V"], q.shape[2], recurrence.V))
        summaries, tokens = self.summaries.pop(segment.index, ()), slice(segment.start, segment.stop)
        if call.gradient:
            result, self.pullbacks[segment.index] = vjp_of(call.declared, arrays, summaries=summaries, **options)
        else:
            out = {} if self.o is None else {"out": self.o[:, :, tokens]}
            result = call_operator(call.declared, arrays, summaries=summaries, **options, **out)
        o, final_states = result if problem.output_final_state else (result, None)
        if call.gradient and self.o is not None:
            self.o[:, :, tokens] = o
        return o, parts_of(final_states)


class Backward(Pass):
    """Computes the gradients of this rank's arrays and of all initial states.

    do : the gradient of this rank's o
    dht : the gradients of the final states of all sequences, or None; this pass begins with them
    """

    backwards = True

    def __init__(self, forward: Forward, do, dht):
        call, self.pullbacks, self.forward_lengths = forward.call, forward.pullbacks, forward.lengths
        self.call = call
        comparison = CallComparison(call.comm, f"{call.problem.op.name}'s gradient", lambda _: self.check(do, dht))
        self.do, dht = comparison.check_result  # the constructor has called check
        super().__init__(call, comparison, dht)

    def check(self, do, dht):
        """((do, dht) as [B, H, T, V] and [N, ...] of the call's kind, the number of this rank's tokens, {name: value
        that must be the same on all ranks}), for `CallComparison`."""
        call, problem = self.call, self.call.problem
        sizes = callers_sizes(problem) | {"N": call.rows_per_sequence * call.sequences}
        do, dht = placed_cotangents(problem, do, dht, sizes)
        equal_on_ranks = {"the dtype of do": do.dtype, "dht": "given" if dht else "not given"}
        return (do, call.swap_state_axes(dht)), self.forward_lengths[call.comm.rank], equal_on_ranks

    def gradients(self, summed):
        """(the gradients of the arrays ..., and of the initial states if the call had some); `summed`: see `joined`."""
        call, op = self.call, self.call.problem.op
        results, final_states = self.run(self.forward_lengths)
        gradients = tuple(
            call.array_to_caller(self.joined(number, axes, results, summed), axes)
            for number, axes in enumerate(op.arrays.values())
        )
        if call.state is None:
            return gradients
        dtypes = [part.dtype for part in call.state]
        return *gradients, call.states_to_caller(self.gather_final_states(final_states), dtypes)

    def summary_message(self, segment, piece):
        call, recurrence, do = self.call, self.recurrence, self.do
        start, stop = tokens_of(segment, piece)
        pullback = self.pullbacks[segment.index]
        if len(segment.pieces) == 1 and (summary := pullback.summarise(do[:, :, start:stop])):
            added, decays, self.summaries[segment.index] = summary
            return [*added, *recurrence.factors_of_decays(decays)]
        arrays, options = call.call_of_tokens(start, stop)
        if recurrence.reversal_gives_gradient:
            added = recurrence.gradient_summary(arrays, do[:, :, start:stop], options)
        else:
            dstates = parts_of(pullback(do[:, :, segment.start : segment.stop])[-1])
            added = [part[call.state_rows(segment.pieces.index(piece))] for part in dstates]
        return [*added, *recurrence.factors(arrays, options)]

    def prepare(self, segment):
        if summary := self.pullbacks[segment.index].summarise(self.do[:, :, segment.start : segment.stop]):
            *_, self.summaries[segment.index] = summary

    def compute(self, segment, states):
        summaries, do = self.summaries.pop(segment.index, ()), self.do[:, :, segment.start : segment.stop]
        gradients = self.pullbacks[segment.index].gradients(do, states, summaries)
        count = len(self.call.problem.op.arrays)
        return gradients[:count], None if self.call.state is None else parts_of(gradients[-1])

    def joined(self, number, axes, results, summed):
        """The gradient of array `number` of the call, from those of this rank's segments.

        An array without tokens, which all segments share, gets the sum over the segments: those of all ranks if
        `summed`, else those of this rank.
        """
        x, parts = self.call.arrays[number], {segment: results[segment.index][number] for segment in self.own_segments}
        if "T" not in axes.split():
            if summed:
                return self.sum_over_ranks(x, {segment.slot: [part] for segment, part in parts.items()})
            return sum(parts.values()).astype(x.dtype, copy=False)
        if len(parts) == 1:
            return parts[self.own_segments[0]]
        gradient = np.empty_like(x)
        for segment, part in parts.items():
            gradient[:, :, segment.start : segment.stop] = part
        return gradient

    def sum_over_ranks(self, x, messages):
        """The sum of {slot: [array like x]} over all segments of all ranks, added in the order of the tokens."""
        array_at = self.call.exchange(messages, [x.shape], self.cut.slots)()
        total = sum(array_at(segment.rank, segment.slot)[0] for segment in self.cut.segments)
        return total.astype(x.dtype)


def gradients_of(forward, do, dht, summed):
    """`Backward.gradients` of a forward pass; in `operators.vjp` the result of pullback(do, dht, summed=summed)."""
    with lasting_memory(forward.call.problem.home):
        return Backward(forward, do, dht).gradients(summed)


def tokens_of(segment, piece):
    """(first token, last token + 1) of a piece, counted among the tokens of its rank."""
    return segment.start + piece.start, segment.start + piece.stop
