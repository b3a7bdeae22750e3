"""One rank's share of a call: its segments, the states that come in, its outputs and its gradients.

Forward: every segment whose sequence goes on computes its summary (see `recurrence`), one all-gather brings the
summaries to all ranks, each adds up those before its own in the order of the recurrence, and computes its outputs from
there. What waits for no other rank is computed while the messages are under way. The backward pass is the same in the
other direction.
"""

from __future__ import annotations

from collections import namedtuple
from functools import lru_cache
from weakref import WeakSet

import numpy as np

from .. import varlen
from ..arrays import contents, from_native, host_array
from ..autodiff import resumed
from ..call_cache import call_key
from ..dispatch import call, choose, split_to_fit, summarise
from ..errors import ContractTypeError
from ..grouped import callers
from ..layouts import swap_heads
from ..ops import declaration
from ..views import callers_sizes
from .agreement import Question
from .cuts import Cut
from .engine import Engine
from .graphs import lasting_memory
from .recurrence import Recurrence, Row, wide

ENGINES: WeakSet[type] = WeakSet()
Bound = namedtuple("Bound", "problem arrays state mask out bounds")
COMPUTED = ("mode", "chunk_size", "materialize", "precision", "backend")  # said to every call of the operator as it is
OWN = ("gamma", "feature_map", "normalize")  # some operators' own
OTHERS = ("scale", "layout", "reverse", "out", "state_v_first", "output_final_state", "state_dtype")


cut_of = lru_cache(64)(Cut)


def is_engine(comm) -> bool:
    """Asked of a kind of engine once: it takes a fifth of what a call takes before it is launched."""
    kind = type(comm)
    if kind not in ENGINES and isinstance(comm, Engine):
        ENGINES.add(kind)
    return kind in ENGINES


class Share:
    """`function` is the operator of linattn_np, `given` all its arguments by name, `comm` an `Engine`."""

    def __init__(self, function, given, comm, segment_size, gradient=False):
        self.function, self.comm, self.size = function, comm, segment_size
        self.declared, inputs, self.given = declaration(function, "linattn_np.distributed").taken_apart(given)
        self.gradient = gradient
        if not is_engine(comm):
            self.declared.refuse(
                "comm", f"is a {type(comm).__name__}, expected an engine, such as connect() gives", ContractTypeError
            )
        key, _ = call_key(self.declared, inputs, self.given | {"gradient": gradient, "segment_size": segment_size})
        self.question = Question(comm, self.declared.name, lambda anew: self.check(inputs, anew), key)
        self.problem, self.arrays, self.state, self.mask, self.out, self.bounds = self.question.checked
        self.packed = self.bounds is not None
        self.cut_into(self.question.expected() or self.question.answer())
        self.recurrence = Recurrence(function, self.declared, self.problem)
        self.rows = 1 if self.packed else self.problem.sizes["B"]  # of states for each sequence of the cut
        self.sequences = len(self.bounds) - 1 if self.packed else 1
        self.common = {name: self.given[name] for name in (*COMPUTED, *OWN) if name in self.given}
        self.common |= {"scale": self.problem.scale, "reverse": self.reverse}

    @property
    def reverse(self):
        return self.problem.reverse

    def cut_into(self, lengths):
        """The segments of ranks with so many tokens each."""
        self.check_lengths(lengths, self.bounds)
        bounds = self.bounds.tolist() if self.packed else [0, sum(lengths)]
        self.lengths, self.cut = lengths, cut_of(tuple(lengths), tuple(bounds), self.reverse, self.size)
        self.own, self.kept = self.cut.of(self.comm.rank), {}

    # -- checks -------------------------------------------------------------------------------------------------------
    def check(self, inputs, anew):
        """(Bound, this rank's tokens, what all ranks must agree on: None but of a call that is `anew`)."""
        declared, given = self.declared, self.given
        options = {name: given[name] for name in (*COMPUTED[:4], *OWN, *OTHERS) if name in given}
        problem = declared.bind(inputs, gradient=self.gradient, **options)
        if anew:
            (split_to_fit if self.gradient else choose)(problem, given["backend"])  # no backend: no rank begins
        declared, sizes = problem.op, callers_sizes(problem)
        if problem.home.split(":")[0] not in self.comm.homes:
            declared.refuse(
                "comm",
                f"is a {type(self.comm).__name__}, which takes arrays on "
                f"{', '.join(self.comm.homes)}, but these are on {problem.home}"
                + ("" if "cuda" in self.comm.homes else '; linattn_np.distributed.connect("cuda") takes those on CUDA'),
            )
        if self.size is not None and (type(self.size) is not int or self.size < 1):
            declared.refuse("segment_size", f"is {self.size!r}, expected a positive int or None")
        bounds = self.check_sequences(declared, sizes)
        mask = declared.mask(given.get("mask"), sizes, problem.home, given["cu_seqlens"])
        native = [declared.native(name, x)[0] for name, x in zip(declared.arrays, inputs)]
        arrays = [swap_heads(x, axes, problem.layout) for x, axes in zip(native, declared.arrays.values())]
        out = given.get("out")
        state = declared.initial_state(
            given["initial_state"],
            sizes | {"N": self.count(sizes, bounds)},
            problem.home,
            problem.state_v_first,
            problem.groups,
        )
        out = None if out is None else swap_heads(out, declared.out, problem.layout)
        bound = Bound(problem, arrays, state, mask, out, bounds)
        if not anew:
            return bound, sizes["T"], None
        meaning = {"the operator": declared.name, "a gradient": self.gradient, "the size of segments": self.size}
        meaning |= {f"the size of {axis}": sizes[axis] for axis in "BHKV"} | {"the heads of v": arrays[2].shape[1]}
        meaning |= {f"the dtype of {name}": x.dtype for name, x in zip(declared.arrays, arrays)}
        meaning |= {
            "the arrays' home": problem.home.split(":")[0],
            "scale": problem.scale,
            "reverse": problem.reverse,
            "initial_state": "given" if state else "not given",
            "output_final_state": problem.output_final_state,
            "cu_seqlens": None if bounds is None else bounds.tolist(),
        }
        meaning |= {name: given[name] for name in (*COMPUTED, "feature_map", "normalize") if name in given}
        if "gamma" in problem.options:
            meaning["gamma"] = problem.options["gamma"].tolist()
        return bound, sizes["T"], meaning

    def check_sequences(self, declared, sizes):
        """The checked cu_seqlens [N + 1], or None. Their end is checked once all lengths are known."""
        given = self.given["cu_seqlens"]
        if given is None:
            return None
        last = host_array(given) if contents(given, "iu") else None
        total = int(last[-1]) if last is not None and last.ndim == 1 and last.size else 0
        return declared.spans(given, sizes | {"T": total}).bounds

    def check_lengths(self, lengths, bounds):
        op, total = self.problem.op, sum(lengths)
        if bounds is not None:
            try:
                varlen.parse(bounds, total)
            except ValueError as error:
                op.refuse("cu_seqlens", f"{error}, the tokens of all ranks: {lengths}")
        if self.size and any(length % self.size for length in lengths[:-1]):
            op.refuse(
                "segment_size",
                f"is {self.size}, but the ranks have {lengths} tokens, expected multiples of it "
                "on all but the last, so that cuts do not depend on the ranks",
            )

    @staticmethod
    def count(sizes, bounds):
        return sizes["B"] if bounds is None else len(bounds) - 1

    # -- states -------------------------------------------------------------------------------------------------------
    def of_caller(self, parts):
        """States [N, ...] from the caller's order of axes, or into it; a view, its own inverse."""
        if parts is None:
            return None
        return [part.swapaxes(2, 3) if self.problem.state_v_first and part.ndim == 4 else part for part in parts]

    def place(self, number):
        """The rows of a packed sequence in states [N, ...]; a dense batch has them all."""
        return slice(number, number + 1) if self.packed else slice(None)

    def empty(self, shape, dtype=None):
        return np.empty_like(self.arrays[0], shape=shape, dtype=dtype or self.recurrence.dtype, order="C")

    def states_of(self, segment, crossing, known, parts):
        """What a call of the segment takes as states: `known` of the sequence that crosses, else rows of `parts`."""
        if crossing is None and parts is None:
            return None
        if crossing is not None and not self.packed:
            return tuple(known) if len(known) > 1 else known[0]
        states = []
        for number, shape in enumerate(self.recurrence.state_shapes(self.rows * (len(segment.pieces) or 1))):
            states.append(self.empty(shape))
            states[-1][...] = 0
            for at, piece in enumerate(segment.pieces):
                if piece is crossing:
                    states[-1][self.place(at)] = known[number]
                elif parts is not None:
                    of_sequence = parts[number][self.place(piece.sequence)]
                    states[-1][self.place(at)] = of_sequence.astype(self.recurrence.dtype, copy=False)
        return tuple(states) if len(states) > 1 else states[0]

    def tokens(self, start, stop, arrays):
        """These tokens of [B, H, T, ...] arrays; of what has no T all of it.

        That is in single precision at least, so that its gradients are, which are added up.
        """
        return [
            x[:, :, start:stop] if "T" in axes.split() else wide(x)
            for x, axes in zip(arrays, self.problem.op.arrays.values())
        ]

    def masked(self, start, stop):
        return {} if self.mask is None else {"mask": self.mask[:, start:stop]}

    def call_on(self, start, stop):
        """(arrays, arguments) of the operator for tokens of one sequence, without states."""
        return self.tokens(start, stop, self.arrays), self.common | self.masked(start, stop)

    def call_of(self, segment):
        """The same for a segment, whatever its sequences."""
        arrays, given = self.call_on(segment.start, segment.stop)
        if self.packed:
            given["cu_seqlens"] = [0, *(piece.stop for piece in segment.pieces)] if segment.pieces else [0, 0]
        return arrays, given

    # -- messages -----------------------------------------------------------------------------------------------------
    def exchange(self, mine, row, count):
        """Sends this rank's messages {slot: arrays}, of `count` slots on each rank.

        The function that comes back waits for all ranks', and gives a function of (rank, slot) that gives the arrays.
        """
        message = row.seen_in(mine[0], self.recurrence.dtype) if count == len(mine) == 1 else None
        if message is None:
            message = self.empty((count, row.length))  # nobody reads what nothing is put into
            for slot, arrays in mine.items():
                row.put(message[slot], arrays)
        wait = self.comm.all_gather(message)

        def messages():
            gathered = wait()
            return lambda rank, slot: row.parts(gathered[rank, slot])

        return messages

    def crossing(self, backwards, summary, ahead):
        """A function that waits for the others and gives {own segment's index: the state that comes into it}.

        summary(segment, piece, start, stop) is what the others are sent of a segment, and ahead(segment) does what can
        be done of a segment's call before the state is there, where it is the last of its sequence.
        """
        mine = self.summaries(backwards, summary, ahead)
        if (lengths := self.question.answer()) != self.lengths:  # the others have other parts than last time
            self.cut_into(lengths)
            mine = self.summaries(backwards, summary, ahead)
        if not self.cut.crosses:
            return dict
        recurrence = self.recurrence
        row = Row([*recurrence.state_shapes(self.rows), *recurrence.factor_shapes(self.rows)])
        wait = self.exchange(mine, row, self.cut.slots)
        return lambda: self.carried(backwards, wait())

    def summaries(self, backwards, summary, ahead):
        """What the others are sent, {slot: arrays}. It begins before they have said that they mean the same call."""
        mine = {}
        for segment in self.own:
            piece, waited_for = segment.outgoing, segment.incoming
            if backwards:
                piece, waited_for = waited_for, piece
            if piece is None and waited_for is not None and len(segment.pieces) == 1:
                ahead(segment)
            if piece is not None:
                mine[segment.slot] = summary(segment, piece, segment.start + piece.start, segment.start + piece.stop)
        return mine

    def carried(self, backwards, messages):
        """The state that comes into each own segment, added up in the order of the recurrence."""
        edge = self.dht if backwards else self.state
        found, state = {}, None
        wanted = {part.index for part in self.own if (part.outgoing if backwards else part.incoming) is not None}
        for segment in self.cut.running(backwards):
            arrives, leaves = segment.incoming, segment.outgoing
            if backwards:
                arrives, leaves = leaves, arrives
            if segment.index in wanted:
                found[segment.index] = state
            if len(found) == len(wanted):
                break
            if leaves is None:
                continue
            if arrives is not leaves:  # the sequence begins here
                state = None
                if edge is not None:
                    state = [x[self.place(leaves.sequence)].astype(self.recurrence.dtype) for x in edge]
            parts = messages(segment.rank, segment.slot)
            with np.errstate(all="ignore"):
                state = self.recurrence.received(parts, leaves.stop - leaves.start, backwards).apply(state)
        return found

    def shared(self, found, backwards):
        """States [N, ...] of all sequences from those that each rank has found: {sequence: parts}."""
        owners = self.cut.owners(backwards)
        places, filled = {}, [0] * self.comm.size
        for segment, piece in owners:
            places[piece.sequence] = segment.rank, filled[segment.rank]
            filled[segment.rank] += 1
        row = Row(self.recurrence.state_shapes(self.rows))
        edge = self.dht if backwards else self.state
        whole = [self.empty((self.rows * self.sequences, *shape[1:])) for shape in row.shapes]
        for n, states in enumerate(whole):  # of a sequence without tokens the state passes through
            states[...] = 0 if edge is None else edge[n].astype(self.recurrence.dtype, copy=False)
        if not places:
            return whole
        messages = self.exchange({places[sequence][1]: parts for sequence, parts in found.items()}, row, max(filled))()
        for sequence, place in places.items():
            for states, part in zip(whole, messages(*place)):
                states[self.place(sequence)] = part
        return whole

    def handed_out(self, parts, dtypes):
        """States [N, ...] as the caller has them."""
        parts = [part.astype(dtype, copy=False) for part, dtype in zip(self.of_caller(parts), dtypes)]
        parts = tuple(from_native(part, self.problem.kind, self.problem.example) for part in parts)
        return parts if len(parts) > 1 else parts[0]

    def as_caller(self, x, axes):
        return from_native(swap_heads(x, axes, self.problem.layout), self.problem.kind, self.problem.example)

    # -- forward ------------------------------------------------------------------------------------------------------
    def forward(self):
        """o, or (o, final state), of this rank's tokens."""
        with lasting_memory(self.problem.home):
            return self.results()

    def results(self):
        if self.state is not None:
            self.state = self.of_caller(self.state)
        wait = self.crossing(False, self.summary, self.ahead)
        o = self.out if self.out is not None else self.whole_output() if len(self.own) > 1 else None
        final, self.pulls, came_in = {}, {}, None
        for segment in sorted(self.own, key=lambda segment: segment.incoming is not None):
            if segment.incoming is not None and came_in is None:
                came_in = wait()
            arrays, given = self.call_of(segment)
            known = None if segment.incoming is None else came_in[segment.index]
            given["initial_state"] = self.states_of(segment, segment.incoming, known, self.state)
            if self.problem.output_final_state:
                given |= {"output_final_state": True, "state_dtype": self.recurrence.dtype}
            found, states = self.compute(segment, arrays, given, o)
            if o is None:
                o = found
            for at, piece in enumerate(segment.pieces):
                if states is not None and not piece.later:
                    final[piece.sequence] = [part[self.place(at)] for part in states]
        if came_in is None:
            wait()  # a rank that needs nothing takes part all the same
        result = self.as_caller(o, self.problem.op.out) if self.out is None else self.given["out"]
        if not self.problem.output_final_state:
            return result
        dtypes = [self.problem.state_dtype] * len(self.problem.op.state)
        return result, self.handed_out(self.shared(final, False), dtypes)

    def summary(self, segment, piece, start, stop):
        """What a piece makes of the state that comes in: its own final state, then the decays.

        Of a segment that is this piece alone, what a backend has computed besides is kept for `compute`.
        """
        alone = len(segment.pieces) == 1
        arrays, given = self.call_of(segment) if alone else self.call_on(start, stop)
        own, decays, kept = self.recurrence.summary(arrays, given, self.gradient)
        if alone:
            self.kept[segment.index] = kept
        return [*own, *decays]

    def ahead(self, segment):
        arrays, given = self.call_of(segment)
        if found := summarise(self.declared, arrays, gradient=self.gradient, ahead=True, **given):
            self.kept[segment.index] = found[2]

    def compute(self, segment, arrays, given, o):
        """(o, the final state's parts or None) of a segment; its o goes into `o` where there is one."""
        kept = self.kept.pop(segment.index, ())
        if self.gradient:
            result, self.pulls[segment.index] = resumed(self.function, arrays, given, kept)
        else:
            out = {} if o is None else {"out": o[:, :, segment.start : segment.stop]}
            result = call(self.declared, arrays, kept=kept, **given, **out)
        found, states = result if self.problem.output_final_state else (result, None)
        if self.gradient and o is not None:
            o[:, :, segment.start : segment.stop] = found
        return found, states if states is None or isinstance(states, tuple) else (states,)

    def whole_output(self):
        """For o, in the memory order of q."""
        B, HV, T, V = self.arrays[2].shape
        return np.empty_like(self.arrays[0], shape=(B, HV, T, V))

    # -- backward -----------------------------------------------------------------------------------------------------
    def pullback(self, do, dht=None, *, summed=True):
        """Gradients of this rank's arrays, then those of the whole initial state; see `vjp`."""
        with lasting_memory(self.problem.home):
            return self.gradients(do, dht, summed)

    def gradients(self, do, dht, summed):
        op = self.problem.op
        self.question = Question(self.comm, op.name, lambda _: self.check_gradients(do, dht))
        do, self.dht = self.question.checked
        wait = self.crossing(
            True, lambda *place: self.gradient_summary(do, *place), lambda segment: self.gradient_ahead(do, segment)
        )
        gradients, initial, came_in = {}, {}, None
        for segment in sorted(self.own, key=lambda segment: segment.outgoing is not None):
            if segment.outgoing is not None and came_in is None:
                came_in = wait()
            known = None if segment.outgoing is None else came_in[segment.index]
            states = self.states_of(segment, segment.outgoing, known, self.dht)
            kept = self.kept.pop(segment.index, ())
            found = self.pulls[segment.index].resumed(do[:, :, segment.start : segment.stop], states, kept)
            gradients[segment.index] = found[: len(op.arrays)]
            if self.state is not None and segment.pieces:
                parts = found[-1] if isinstance(found[-1], tuple) else (found[-1],)
                for at, piece in enumerate(segment.pieces):
                    if not piece.earlier:
                        initial[piece.sequence] = [part[self.place(at)] for part in parts]
        if came_in is None:
            wait()
        result = tuple(
            self.as_caller(self.joined(number, name, gradients, summed), axes)
            for number, (name, axes) in enumerate(op.arrays.items())
        )
        if self.state is None:
            return result
        return *result, self.handed_out(self.shared(initial, True), [part.dtype for part in self.state])

    def check_gradients(self, do, dht):
        """((do, dht) as this module has them, this rank's tokens, what all ranks must agree on)."""
        problem, op = self.problem, self.problem.op
        sizes = callers_sizes(problem) | {"N": self.rows * self.sequences}
        view = op.logical("do", op.native("do", do)[0], op.out, problem.layout)
        do = op.placed("do", view, callers(op.out, problem.groups), sizes, problem.home)
        if dht is not None:
            parts = dht if isinstance(dht, tuple) else (dht,)
            if len(parts) != len(op.state):
                op.refuse("dht", f"has {len(parts)} parts, expected {len(op.state)}")
            dht = self.of_caller(
                op.placed_states("dht", parts, sizes, problem.home, problem.state_v_first, problem.groups)
            )
        meaning = {"the pass": "backward", "the dtype of do": do.dtype, "dht": "given" if dht else "not given"}
        return (do, dht), self.lengths[self.comm.rank], meaning

    def gradient_summary(self, do, segment, piece, start, stop):
        """What a piece makes of the gradient that comes in, then the decays; see `summary`."""
        if len(segment.pieces) == 1 and (found := self.pulls[segment.index].summarise(do[:, :, start:stop])):
            own, decays, self.kept[segment.index] = found
            return [*own, *self.recurrence.told(decays)]
        if self.recurrence.turns_over:
            given = self.common | self.masked(start, stop)
            found = self.recurrence.gradient_summary(self.tokens(start, stop, self.arrays), do[:, :, start:stop], given)
            return [*found, *self.recurrence.factors(*self.call_on(start, stop))]
        found = self.pulls[segment.index](do[:, :, segment.start : segment.stop])[-1]
        rows = self.place(segment.pieces.index(piece))
        own = [part[rows] for part in (found if isinstance(found, tuple) else (found,))]
        return [*own, *self.recurrence.factors(*self.call_on(start, stop))]

    def gradient_ahead(self, do, segment):
        if found := self.pulls[segment.index].summarise(do[:, :, segment.start : segment.stop]):
            self.kept[segment.index] = found[2]

    def joined(self, number, name, gradients, summed):
        """An array's gradient from those of the own segments; of what all tokens share the sum over all ranks, or over
        the own segments where that is not to be `summed`."""
        x = self.arrays[number]
        if "T" not in self.problem.op.arrays[name].split():
            if not summed:
                return sum(gradients[segment.index][number] for segment in self.own).astype(x.dtype, copy=False)
            return self.summed(x, {segment.slot: [gradients[segment.index][number]] for segment in self.own})
        if len(self.own) == 1:
            return gradients[self.own[0].index][number]
        whole = np.empty_like(x)
        for segment in self.own:
            whole[:, :, segment.start : segment.stop] = gradients[segment.index][number]
        return whole

    def summed(self, x, mine):
        """The sum over all segments, in their order."""
        messages = self.exchange(mine, Row([x.shape]), self.cut.slots)()
        total = sum(messages(segment.rank, segment.slot)[0] for segment in self.cut.segments)
        return total.astype(x.dtype)
