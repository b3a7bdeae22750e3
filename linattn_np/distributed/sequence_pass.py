"""A pass over a sequence that is cut into segments: forward for results, backward for gradients.

Every segment whose sequence goes on in another one makes its `Summary`, what it does to any state. An all-gather brings
the summaries to all ranks; each applies those before its own segments, in the order of the recurrence, and computes
from the states that it finds. What needs no state is computed while the messages are under way.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager

import numpy as np

from ..autodiff import vjp_of
from ..backends.cupy import execute
from ..conversions import callers_sizes
from ..dispatch import call as call_operator
from ..dispatch import summarise
from ..value_heads import callers
from .call_comparison import Question
from .rank_call import RankCall, parts_of


class Pass:
    """One pass, in the order of the recurrence or `backwards`: that of its gradient.

    call : a `RankCall`
    question : whether all ranks mean this pass
    edge : the states [N, ...] from which sequences begin, in this direction, or None for zeros
    kept : by segment, what a backend has computed with a summary and need not compute again

    A derived class has

    summary(segment, piece)         [*own, *factors] of one piece of a segment: its `Summary`, as it is sent
    summarise_ahead(segment)        what `compute` needs of `summary`, for a segment whose summary nobody is sent
    compute(segment, states)        (the result for a segment that begins from `states`, the states behind it or None)
    """

    backwards = False

    def __init__(self, call, question, edge):
        self.call, self.question, self.edge = call, question, edge
        self.recurrence, self.kept = call.recurrence, {}

    def run(self, lengths):
        """({own segment's index: result}, {sequence: the parts of the state behind it, where it ends here}).

        lengths : the tokens that the ranks are expected to have; their answer may differ
        """
        mine = self.summaries(lengths)
        if (answer := self.question.answer()) != lengths:
            mine = self.summaries(answer)
        wait = self.exchange(mine) if self.cut.crosses else None
        results, ends, arriving = {}, {}, None
        for segment in sorted(self.own, key=lambda segment: segment.incoming is not None):
            if segment.incoming is not None and arriving is None:
                arriving = self.arriving_states(wait())
            begin = None if segment.incoming is None else arriving[segment.index]
            results[segment.index], behind = self.compute(segment, self.call.states_of(segment, begin, self.edge))
            for at, piece in enumerate(segment.pieces):
                if behind is not None and not piece.later:
                    ends[piece.sequence] = [part[self.call.rows_of(at)] for part in behind]
        if wait is not None and arriving is None:
            wait()  # a rank that needs no state takes part all the same
        return results, ends

    def summaries(self, lengths):
        """{slot: message} of this rank's segments, for ranks with so many tokens each."""
        self.lengths, self.cut = lengths, self.call.cut(lengths, self.backwards)
        self.own, mine = self.cut.of(self.call.comm.rank), {}
        self.kept.clear()
        for segment in self.own:
            if segment.outgoing is not None:
                mine[segment.slot] = self.summary(segment, segment.outgoing)
            elif segment.incoming is not None and len(segment.pieces) == 1:
                self.summarise_ahead(segment)
        return mine

    def exchange(self, mine):
        recurrence, rows = self.recurrence, self.call.rows
        shapes = [*recurrence.state_shapes(rows), *recurrence.factor_shapes(rows)]
        return self.call.exchange(mine, shapes, self.cut.slots)

    def arriving_states(self, messages):
        """{own segment's index: the state that comes into it}, summaries applied in the order of this pass."""
        found, state = {}, None
        wanted = {segment.index for segment in self.own if segment.incoming is not None}
        for segment in self.cut.running():
            leaves = segment.outgoing
            if segment.index in wanted:
                found[segment.index] = state
            if len(found) == len(wanted):
                break
            if leaves is None:
                continue
            if not leaves.earlier:  # the sequence begins in this segment
                state = self.edge_of(leaves.sequence)
            message = messages(segment.rank, segment.slot)
            with np.errstate(all="ignore"):
                state = self.recurrence.received(message, leaves.stop - leaves.start, self.backwards).apply(state)
        return found

    def edge_of(self, sequence):
        if self.edge is None:
            return None
        return [part[self.call.rows_of(sequence)].astype(self.recurrence.dtype) for part in self.edge]

    def everyones(self, ends):
        """The states [N, ...] behind all sequences, from those that each rank has found."""
        call, places, filled = self.call, {}, [0] * self.call.comm.size
        for segment, piece in self.cut.ends():
            places[piece.sequence] = segment.rank, filled[segment.rank]
            filled[segment.rank] += 1
        shapes = self.recurrence.state_shapes(call.rows)
        whole = [call.empty((call.rows * call.sequences, *shape[1:])) for shape in shapes]
        for n, states in enumerate(whole):  # a sequence without tokens leaves its state as it is
            states[...] = 0 if self.edge is None else self.edge[n].astype(self.recurrence.dtype, copy=False)
        if not places:
            return whole
        messages = call.exchange(
            {places[sequence][1]: parts for sequence, parts in ends.items()}, shapes, max(filled)
        )()
        for sequence, place in places.items():
            for states, part in zip(whole, messages(*place)):
                states[call.rows_of(sequence)] = part
        return whole


class Forward(Pass):
    """o and the final state of a call; with a gradient also the pullback of every own segment."""

    def __init__(self, call: RankCall):
        super().__init__(call, call.question, call.in_order(call.state))
        self.o = call.out
        self.pulls: dict = {}  # the pullback of each own segment, by its index

    def result(self):
        """o, or (o, final state), of this rank's tokens."""
        call, problem = self.call, self.call.problem
        with lasting_memory(problem.home):
            results, ends = self.run(self.question.expected() or self.question.answer())
            o = next(iter(results.values())) if self.o is None else self.o
            result = call.array_to_caller(o, problem.op.out) if call.out is None else call.given["out"]
            if not problem.output_final_state:
                return result
            dtypes = [problem.state_dtype] * len(problem.op.state)
            return result, call.states_to_caller(self.everyones(ends), dtypes)

    def summary(self, segment, piece):
        call, alone = self.call, len(segment.pieces) == 1
        given = call.of_segment(segment) if alone else call.of_tokens(*tokens_of(segment, piece))
        own, factors, kept = self.recurrence.summary(*given, call.gradient)
        if alone:
            self.kept[segment.index] = kept
        return [*own, *factors]

    def summarise_ahead(self, segment):
        arrays, given = self.call.of_segment(segment)
        if found := summarise(self.call.declared, arrays, gradient=self.call.gradient, ahead=True, **given):
            self.kept[segment.index] = found[2]

    def compute(self, segment, states):
        call, problem = self.call, self.call.problem
        arrays, given = call.of_segment(segment)
        given["initial_state"] = states
        if problem.output_final_state:
            given |= {"output_final_state": True, "state_dtype": self.recurrence.dtype}
        if self.o is None and len(self.own) > 1:
            B, heads, T, V = call.arrays[2].shape
            self.o = np.empty_like(call.arrays[0], shape=(B, heads, T, V))  # in the memory order of q
        kept, of_segment = self.kept.pop(segment.index, ()), slice(segment.start, segment.stop)
        if call.gradient:
            result, self.pulls[segment.index] = vjp_of(call.declared, arrays, kept=kept, **given)
        else:
            out = {} if self.o is None else {"out": self.o[:, :, of_segment]}
            result = call_operator(call.declared, arrays, kept=kept, **given, **out)
        o, final = result if problem.output_final_state else (result, None)
        if call.gradient and self.o is not None:
            self.o[:, :, of_segment] = o
        return o, parts_of(final)


class Backward(Pass):
    """Gradients of this rank's arrays and of the whole initial state, from those of its o and of the final state."""

    backwards = True

    def __init__(self, forward: Forward, do, dht):
        call, self.pulls, self.forward_lengths = forward.call, forward.pulls, forward.lengths
        self.call = call
        question = Question(call.comm, f"{call.problem.op.name}'s gradient", lambda _: self.check(do, dht))
        self.do, dht = question.checked
        super().__init__(call, question, dht)

    def check(self, do, dht):
        """((do, dht) as the arrays of the call are, this rank's tokens, what all ranks must agree on)."""
        call, problem, op = self.call, self.call.problem, self.call.problem.op
        sizes = callers_sizes(problem) | {"N": call.rows * call.sequences}
        view = op.logical("do", op.native("do", do)[0], op.out, problem.layout)
        do = op.placed("do", view, callers(op.out, problem.groups), sizes, problem.home)
        if dht is not None:
            parts = parts_of(dht)
            if len(parts) != len(op.state):
                op.refuse("dht", f"has {len(parts)} parts, expected {len(op.state)}")
            placed = op.placed_states("dht", parts, sizes, problem.home, problem.state_v_first, problem.groups)
            dht = call.in_order(placed)
        meaning = {"the dtype of do": do.dtype, "dht": "given" if dht else "not given"}
        return (do, dht), self.forward_lengths[call.comm.rank], meaning

    def gradients(self, summed):
        call, op = self.call, self.call.problem.op
        found, ends = self.run(self.forward_lengths)
        gradients = tuple(
            call.array_to_caller(self.joined(number, axes, found, summed), axes)
            for number, axes in enumerate(op.arrays.values())
        )
        if call.state is None:
            return gradients
        return *gradients, call.states_to_caller(self.everyones(ends), [part.dtype for part in call.state])

    def summary(self, segment, piece):
        call, recurrence, do = self.call, self.recurrence, self.do
        start, stop = tokens_of(segment, piece)
        pull = self.pulls[segment.index]
        if len(segment.pieces) == 1 and (found := pull.summarise(do[:, :, start:stop])):
            own, decays, self.kept[segment.index] = found
            return [*own, *recurrence.told(decays)]
        arrays, given = call.of_tokens(start, stop)
        if recurrence.turns_over:
            own = recurrence.gradient_summary(arrays, do[:, :, start:stop], given)
        else:
            whole = parts_of(pull(do[:, :, segment.start : segment.stop])[-1])
            own = [part[call.rows_of(segment.pieces.index(piece))] for part in whole]
        return [*own, *recurrence.factors(arrays, given)]

    def summarise_ahead(self, segment):
        if found := self.pulls[segment.index].summarise(self.do[:, :, segment.start : segment.stop]):
            self.kept[segment.index] = found[2]

    def compute(self, segment, states):
        kept, do = self.kept.pop(segment.index, ()), self.do[:, :, segment.start : segment.stop]
        gradients = self.pulls[segment.index].resumed(do, states, kept)
        count = len(self.call.problem.op.arrays)
        return gradients[:count], None if self.call.state is None else parts_of(gradients[-1])

    def joined(self, number, axes, found, summed):
        """An array's gradient from those of the own segments.

        What all tokens share gets the sum over all ranks or, unless it is to be `summed`, over the own segments.
        """
        x, parts = self.call.arrays[number], {segment: found[segment.index][number] for segment in self.own}
        if "T" not in axes.split():
            if summed:
                return self.sum_over_ranks(x, {segment.slot: [part] for segment, part in parts.items()})
            return sum(parts.values()).astype(x.dtype, copy=False)
        if len(parts) == 1:
            return parts[self.own[0]]
        whole = np.empty_like(x)
        for segment, part in parts.items():
            whole[:, :, segment.start : segment.stop] = part
        return whole

    def sum_over_ranks(self, x, mine):
        """The sum over all segments, in the order of the tokens."""
        messages = self.call.exchange(mine, [x.shape], self.cut.slots)()
        total = sum(messages(segment.rank, segment.slot)[0] for segment in self.cut.segments)
        return total.astype(x.dtype)


def gradients(forward, do, dht, summed):
    """The pullback of `operators.vjp`."""
    with lasting_memory(forward.call.problem.home):
        return Backward(forward, do, dht).gradients(summed)


def tokens_of(segment, piece):
    """(start, stop) of a piece, among the tokens of its rank."""
    return segment.start + piece.start, segment.start + piece.stop


@contextmanager
def lasting_memory(home):
    """Gives a call that a CUDA graph captures a memory pool of its own: every launch of the graph writes there again.

    `home` is that of the arrays. An allocator other than CuPy's default one, which the caller has chosen, stays.
    """
    cupy = sys.modules.get("cupy")
    if home == "host" or not cupy.cuda.get_current_stream().is_capturing() or has_own_allocator(cupy):
        yield
        return
    pool = cupy.cuda.MemoryPool()
    execute.in_graphs.append(pool)
    with cupy.cuda.using_allocator(pool.malloc):
        yield


def has_own_allocator(cupy) -> bool:
    return cupy.cuda.get_allocator() != cupy.get_default_memory_pool().malloc
