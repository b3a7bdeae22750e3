"""One rank's part of a call: its arguments, compared with those of all ranks, and what each of its segments gets."""

from __future__ import annotations

from functools import lru_cache, partial
from weakref import WeakSet

import numpy as np

from .. import varlen
from ..accepted_arrays import host_array
from ..checked_calls import call_key
from ..conversions import callers_sizes, in_callers_library
from ..dispatch import choose
from ..errors import ContractTypeError
from ..layouts import swap_heads
from .call_comparison import CallComparison
from .engine import Engine
from .recurrence import MessageLayout, Recurrence, at_least_float32
from .sequence_cut import Cut

# Arguments that `RankCall` applies itself, or passes on with other values. A segment's call gets the others unchanged.
OF_SEQUENCES = ("cu_seqlens", "initial_state", "mask")  # `check` compares these with the tokens of all ranks
APPLIED = ("scale", "layout", "reverse", "out", "state_v_first", "output_final_state", "state_dtype", *OF_SEQUENCES)
ENGINES: WeakSet[type] = WeakSet()  # classes known to be engines: the check takes a fifth of the host's time of a call

cached_cut = lru_cache(64)(Cut)


class RankCall:
    """A call of the declared operator `op` with this rank's tokens. `arguments` must have "backend", "cu_seqlens" and
    "initial_state", and may have "mask" and other options of the operator.

    A *segment* is a run of one rank's tokens that one call of the operator computes (`sequence_cut`). Each of its
    *pieces* has its tokens of one sequence. Its *incoming piece*, if any, continues a sequence from another segment,
    and starts from the state that arrives from there.

    comm : the engine that sends messages
    segment_size : the most tokens of a segment, or None: one segment on each rank
    gradient : whether gradients will be asked for
    declared : the operator, with its optional array only if the call has it
    problem : the checked call on this rank's tokens
    arrays : views [B, H, T, ...], in the order of the declaration
    out : the caller's array for o, or None
    mask : as the operator takes it, of this rank's tokens, or None
    state : the parts of the whole initial state [N, H, K, V], or None
    bounds : cu_seqlens [N + 1] of the tokens of all ranks, or None
    packed : whether there are bounds
    sequences : their number; a dense batch counts as one, with the states of all its rows
    rows_per_sequence : rows of states [N, ...] that a sequence has: B for a dense batch, else one
    recurrence : computes what segments do to the state
    comparison : the exchange that compares this call with the other ranks'; it has begun
    """

    def __init__(self, op, inputs, *, comm, segment_size, gradient=False, **arguments):
        self.comm, self.segment_size, self.gradient, self.arguments = comm, segment_size, gradient, arguments
        self.declared, inputs = op.fitting(inputs)
        self.options = {name: value for name, value in arguments.items() if name not in APPLIED}  # of segments' calls
        if not is_engine(comm):
            self.declared.refuse(
                "comm", f"is a {type(comm).__name__}, expected an engine, such as connect() gives", ContractTypeError
            )
        key, _addresses = call_key(
            self.declared, inputs, self.arguments | {"gradient": gradient, "segment_size": segment_size}
        )
        check = partial(self.check, inputs)
        self.comparison = CallComparison(comm, self.declared.name, check, key)
        self.problem, self.state, self.mask, self.bounds = self.comparison.check_result
        self.arrays, self.out = list(self.problem.arrays.values()), self.problem.out
        self.packed = self.bounds is not None
        self.recurrence = Recurrence(self.declared, self.problem)
        self.rows_per_sequence = 1 if self.packed else self.problem.sizes["B"]
        self.sequences = len(self.bounds) - 1 if self.packed else 1
        self.options |= {"scale": self.problem.scale, "reverse": self.problem.reverse}

    # -- checks -------------------------------------------------------------------------------------------------------
    def check(self, inputs, needs_values):
        """((problem, state, mask, bounds), how many tokens this rank has, {name: value that all ranks must have}).

        `needs_values`: whether these values are needed. They are not if the ranks have agreed on an equal call earlier.
        """
        arguments = self.arguments
        options = {name: value for name, value in arguments.items() if name not in ("backend", *OF_SEQUENCES)}
        problem = self.declared.bind(inputs, as_given=True, gradient=self.gradient, **options)
        if needs_values:  # if no backend can compute the call, no rank begins
            choose(problem, arguments["backend"])
        op, sizes, home = problem.op, callers_sizes(problem), problem.home
        self.check_home(op, home)
        if self.segment_size is not None and (type(self.segment_size) is not int or self.segment_size < 1):
            op.refuse("segment_size", f"is {self.segment_size!r}, expected a positive int or None")
        bounds = self.checked_bounds(op, sizes)
        mask = op.mask(arguments.get("mask"), sizes, home, arguments["cu_seqlens"])
        N = sizes["B"] if bounds is None else len(bounds) - 1
        state = op.initial_state(
            arguments["initial_state"], sizes | {"N": N}, home, problem.state_v_first, problem.groups
        )
        shared = self.shared_values(problem, state, bounds, sizes) if needs_values else None
        return (problem, state, mask, bounds), sizes["T"], shared

    def check_home(self, op, home):
        """ContractError if the engine does not send arrays on the device `home`."""
        homes = self.comm.homes
        if home.split(":")[0] not in homes:
            way_out = "" if "cuda" in homes else '; linattn_np.distributed.connect("cuda") takes those on CUDA'
            kind = type(self.comm).__name__
            op.refuse(
                "comm", f"is a {kind}, which takes arrays on {', '.join(homes)}, but these are on {home}{way_out}"
            )

    def checked_bounds(self, op, sizes):
        """cu_seqlens, or None. Whether it ends where the tokens do is checked once all lengths are known: see `cut`."""
        cu_seqlens = self.arguments["cu_seqlens"]
        if cu_seqlens is None:
            return None
        bounds = host_array(cu_seqlens)
        is_list = bounds is not None and bounds.ndim == 1 and bounds.dtype.kind in "iu" and bounds.size
        total = int(bounds[-1]) if is_list else 0
        return op.spans(cu_seqlens, sizes | {"T": total}).bounds

    def shared_values(self, problem, state, bounds, sizes):
        """{name for an error: value} of all that must be the same on all ranks: what decides which messages are sent,
        and what a segment computes. How a rank passes its arrays (layout, order of a state's axes, out) and in which
        dtype it gets states may differ."""
        shared = {"a gradient": self.gradient, "the size of segments": self.segment_size}
        shared |= {f"the size of {axis}": sizes[axis] for axis in "BHKV"}
        shared |= {"the heads of v": sizes["H"] * problem.groups}
        shared |= {f"the dtype of {name}": x.dtype for name, x in problem.arrays.items()}
        shared |= {
            "the arrays' home": problem.home.split(":")[0],
            "scale": problem.scale,
            "reverse": problem.reverse,
            "initial_state": "given" if state else "not given",
            "output_final_state": problem.output_final_state,
            "cu_seqlens": None if bounds is None else bounds.tolist(),
        }
        shared |= {name: value for name, value in self.options.items() if name != "gamma"}
        if "log_decay" in problem.options:
            shared["log(gamma)"] = problem.options["log_decay"].tolist()
        return shared

    def cut(self, lengths, backwards) -> Cut:
        """The segments of ranks with `lengths` tokens, for a pass of the recurrence; `backwards`: for the pass of its
        gradient, which runs the other way."""
        op, total = self.problem.op, sum(lengths)
        if self.packed:
            try:
                varlen.parse(self.bounds, total)
            except ValueError as error:
                op.refuse("cu_seqlens", f"{error}, the tokens of all ranks: {lengths}")
        size = self.segment_size
        if size and any(length % size for length in lengths[:-1]):
            op.refuse(
                "segment_size",
                f"is {size}, but the ranks have {lengths} tokens, expected multiples of it "
                "on all but the last, so that cuts do not depend on the ranks",
            )
        bounds = self.bounds.tolist() if self.packed else [0, total]
        return cached_cut(tuple(lengths), tuple(bounds), self.problem.reverse != backwards, size)

    # -- a segment's call ---------------------------------------------------------------------------------------------
    def call_of_tokens(self, start, stop):
        """(arrays, arguments) of the operator for this rank's tokens start ... stop - 1, without states and cu_seqlens.

        Arrays without tokens become float32 if they have half precision, so that their gradients do, which are summed.
        """
        arrays = [
            x[:, :, start:stop] if "T" in axes.split() else at_least_float32(x)
            for x, axes in zip(self.arrays, self.problem.op.arrays.values())
        ]
        return arrays, self.options | ({} if self.mask is None else {"mask": self.mask[:, start:stop]})

    def call_of_segment(self, segment):
        """(arrays, arguments) of the operator for a segment, without states."""
        arrays, arguments = self.call_of_tokens(segment.start, segment.stop)
        if self.packed:  # a piece's `stop` is counted from the segment's first token
            arguments["cu_seqlens"] = [0, *(piece.stop for piece in segment.pieces)] if segment.pieces else [0, 0]
        return arrays, arguments

    # -- states -------------------------------------------------------------------------------------------------------
    def swap_state_axes(self, parts):
        """Views of states: from the caller's order of axes to [N, H, K, V], or back; its own inverse."""
        if parts is None:
            return None
        return [part.swapaxes(2, 3) if self.problem.state_v_first and part.ndim == 4 else part for part in parts]

    def state_rows(self, index):
        """The rows of sequence `index` in states [N, ...]: one, or all of a dense batch."""
        return slice(index, index + 1) if self.packed else slice(None)

    def empty(self, shape):
        """A new contiguous array on the device of this rank's arrays, in the dtype of states."""
        return np.empty_like(self.arrays[0], shape=shape, dtype=self.recurrence.dtype, order="C")

    def states_of(self, segment, arriving, starting_states):
        """The initial states of a segment's call: `arriving` for its incoming piece, and rows of `starting_states` (the
        states of all sequences, or None) for its other pieces. None if all are zeros."""
        if segment.incoming_piece is None and starting_states is None:
            return None
        if segment.incoming_piece is not None and not self.packed:
            return as_state(arriving)
        rows = self.rows_per_sequence * (len(segment.pieces) or 1)
        states = [self.empty(shape) for shape in self.recurrence.state_shapes(rows)]
        for number, part in enumerate(states):
            part[...] = 0
            for index, piece in enumerate(segment.pieces):
                if piece is segment.incoming_piece:
                    part[self.state_rows(index)] = arriving[number]
                elif starting_states is not None:
                    state = starting_states[number][self.state_rows(piece.sequence)]
                    part[self.state_rows(index)] = state.astype(self.recurrence.dtype, copy=False)
        return as_state(states)

    def states_to_caller(self, parts, dtypes):
        """States in these dtypes, as arrays of the caller's kind and order of axes."""
        parts = [part.astype(dtype, copy=False) for part, dtype in zip(self.swap_state_axes(parts), dtypes)]
        return as_state([in_callers_library(self.problem, part) for part in parts])

    def array_to_caller(self, x, axes):
        """An array as one of the caller's kind and layout."""
        return in_callers_library(self.problem, swap_heads(x, axes, self.problem.layout))

    # -- messages -----------------------------------------------------------------------------------------------------
    def exchange(self, messages, shapes, count):
        """Sends this rank's messages, {slot: arrays of these shapes}; each rank has the slots 0 ... `count` - 1.

        All ranks must call this. Returns a function that waits for the messages of all ranks; it returns the function
        (rank, slot) -> arrays.
        """
        layout = MessageLayout(shapes)
        message = layout.view_of(messages[0], self.recurrence.dtype) if count == len(messages) == 1 else None
        if message is None:
            message = self.empty((count, layout.length))  # slots without a message are not read
            for slot, arrays in messages.items():
                layout.put(message[slot], arrays)
        wait = self.comm.all_gather(message)

        def arrived():
            gathered = wait()
            return lambda rank, slot: layout.parts(gathered[rank, slot])

        return arrived


def is_engine(comm) -> bool:
    """Whether `comm` has the members of `Engine`."""
    kind = type(comm)
    if kind not in ENGINES and isinstance(comm, Engine):
        ENGINES.add(kind)
    return kind in ENGINES


def parts_of(state):
    """The tuple of a state's parts, or None; the opposite of `as_state`."""
    return state if state is None or isinstance(state, tuple) else (state,)


def as_state(parts):
    """A state as operators take it: its only part, or a tuple of them."""
    return tuple(parts) if len(parts) > 1 else parts[0]
