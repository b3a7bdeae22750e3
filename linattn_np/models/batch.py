"""Decoding of many sequences in one batch, which sequences join and leave between steps."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NoReturn

import numpy as np

from ..errors import ContractError, ContractTypeError
from .locks import Lock, one_at_a_time
from .number_checks import checked_int
from .prompt_reading import read
from .protocols import Model, State
from .sampling import Sampler, Sampling, complaints, draw_each


class Logits:
    """Logits [N, V] of a call of `model`. A device may still compute them; reading `rows` waits for it."""

    def __init__(self, model: Model, logits):
        self.model, self.logits = model, logits

    @cached_property
    def rows(self) -> np.ndarray:
        """The logits on the host."""
        return self.model.to_host(self.logits)


@dataclass
class Sequence:
    """One sequence of a batch: the row of its state in the pool, its sampler, and the logits of its next token, which
    are row `row` of `source`."""

    slot: int
    sampler: Sampler
    source: Logits
    row: int

    @property
    def logits(self) -> np.ndarray:
        """The logits of the next token [V], on the host."""
        return self.source.rows[self.row]


class Batch:
    """A pool of `slots` states and the sequences that use them.

    The tokens of a sequence do not depend on the other sequences, except for the rounding of matrix products of another
    size. Several threads may call a batch; its methods run one at a time. A copy has states of its own and shares the
    model.

    Example
    -------
    >>> from linattn_np.models import Batch, RWKV6, Sampling
    >>> batch = Batch(RWKV6.from_file("examples/data/austen-x060/model.safetensors"), slots=4)
    >>> emma, anne = batch.join([b"Miss Woodh", b"Captain Went"], Sampling(temperature=0))
    >>> written = {emma: [], anne: []}
    >>> for _ in range(5):
    ...     for slot, token in batch.step().items():
    ...         written[slot].append(token)
    >>> bytes(written[emma]), bytes(written[anne])
    (b'ouse,', b'worth')
    >>> batch.leave(emma)
    >>> batch.free
    3
    """

    def __init__(self, model: Model, slots: int):
        checked_int("Batch", "slots", slots, 1)
        self.model, self.pool = model, model.initial_state(slots)
        self.slots, self.lock = slots, Lock()
        self.sequences: dict[int, Sequence] = {}
        self.untouched = set(range(slots))  # the rows of the pool that no sequence has used

    def __repr__(self):
        return f"Batch({self.model!r}, {len(self.sequences)} of {self.slots} slots in use)"

    @property
    def free(self) -> int:
        """The number of slots that no sequence uses."""
        return self.slots - len(self.sequences)

    def __copy__(self):
        return deepcopy(self, {id(self.model): self.model})

    @one_at_a_time
    def join(self, prompts, how: Sampling | list[Sampling], states: list[State | None] | None = None) -> list[int]:
        """Reads `prompts` (host integers, of any lengths); returns the slot of each sequence.

        All but the last `prompt_reading.PIECE` tokens of a prompt are read in pieces of that length; the last tokens
        of all prompts are read in one packed pass.

        how : one `Sampling` for all prompts, or a list with one for each. Sequences with the same seed get the same
            random numbers.
        states : a state of one sequence for each prompt, which the prompt continues, or None, with which a sequence
            starts; by default None for all.

        ContractError if an argument does not fit; then no sequence has joined.
        """
        prompts, samplings = self.checked_prompts(prompts, how, states)
        samplers = [sampling.sampler() for sampling in samplings]
        states = states or [None] * len(prompts)
        states = [None if state is None else self.model.on_device(state, rows=1) for state in states]
        rests, read_states = zip(*map(partial(read, self.model), prompts, states))
        slots = [slot for slot in range(self.slots) if slot not in self.sequences][: len(prompts)]
        self.fill(slots, read_states)
        bounds = np.cumsum([0, *map(len, rests)])
        logits, _ = self.model.forward(
            np.concatenate(rests)[None], self.pool, cu_seqlens=bounds, slots=slots, last=True
        )
        source = Logits(self.model, logits)
        self.sequences |= {
            slot: Sequence(slot, sampler, source, row) for row, (slot, sampler) in enumerate(zip(slots, samplers))
        }
        return slots

    def checked_prompts(self, prompts, how, states):
        """(the tokens of each prompt, its `Sampling`), after checking the arguments of `join`."""
        prompts = [tokens_of(prompt) for prompt in prompts]
        samplings = how if isinstance(how, list) else [how] * len(prompts)
        if not prompts:
            refuse("prompts is empty, expected at least one")
        if not all(map(len, prompts)):
            refuse("prompts holds an empty one, expected at least a token in each")
        if others := [sampling for sampling in samplings if not isinstance(sampling, Sampling)]:
            refuse(f"how holds a {type(others[0]).__name__}, expected Sampling", ContractTypeError)
        if len(samplings) != len(prompts) or (states is not None and len(states) != len(prompts)):
            refuse(
                f"{len(prompts)} prompts come with {len(samplings)} ways of sampling"
                + (f" and {len(states)} states" if states is not None else "")
            )
        if len(prompts) > self.free:
            refuse(f"{len(prompts)} prompts want to join, but only {self.free} of {self.slots} slots are free")
        self.model.checked(np.concatenate(prompts)[None])
        return prompts, samplings

    def fill(self, slots, states):
        """Writes states to rows of the pool; None is the initial state, which untouched rows have already."""
        with self.model.turn():
            if reset := [slot for slot, state in zip(slots, states) if state is None and slot not in self.untouched]:
                self.pool.put(reset, self.model.initial_state())
            self.untouched.difference_update(slots)
            for slot, state in zip(slots, states):
                if state is not None:
                    self.pool.put(slot, state)

    @one_at_a_time
    def complaint(self, slot: int) -> str | None:
        """Why the next `step` cannot draw a token of the sequence in `slot`, whose logits are NaN or infinite; None if
        it can."""
        sequence = self.sequences[self.used(slot)]
        return sequence.sampler.complaint(sequence.logits)

    @one_at_a_time
    def complaints(self) -> dict[int, str]:
        """{slot: `complaint` of its sequence}, for the sequences that have one."""
        slots = list(self.sequences)
        return {slots[index]: complaint for index, complaint in complaints(*self.samplers_and_logits()).items()}

    def samplers_and_logits(self):
        """(the samplers, their logits), in the order of the sequences; logits are [N, V] if one call has computed them
        in this order, else a list of rows [V]."""
        sequences = list(self.sequences.values())
        source = sequences[0].source if sequences else None
        of_one_call = all(sequence.source is source and sequence.row == row for row, sequence in enumerate(sequences))
        rows = source.rows[: len(sequences)] if of_one_call and source else [sequence.logits for sequence in sequences]
        return [sequence.sampler for sequence in sequences], rows

    @one_at_a_time
    def step(self) -> dict[int, int]:
        """{slot: the next token} of every sequence. A device computes the following logits after the return.

        ContractError if a sequence has a `complaint`, before any token is drawn; the others can go on once it has left.
        """
        for slot, complaint in self.complaints().items():
            refuse(f"the sequence in slot {slot} cannot go on: {complaint}")
        return self.advance()

    @one_at_a_time
    def advance(self) -> dict[int, int]:
        """`step`, for a caller that has made sure that no sequence has a complaint."""
        if not self.sequences:
            return {}
        drawn = dict(zip(self.sequences, draw_each(*self.samplers_and_logits())))
        tokens = np.array(list(drawn.values()))[:, None]
        logits, _ = self.model.forward(tokens, self.pool, slots=list(drawn), last=True)
        source = Logits(self.model, logits)
        for row, slot in enumerate(drawn):
            sequence = self.sequences[slot]
            sequence.source, sequence.row = source, row
        return drawn

    @one_at_a_time
    def state(self, slot: int) -> State:
        """A copy of one sequence's state, as the model's `forward` takes it with one sequence."""
        with self.model.turn():
            return self.pool.row(self.used(slot)).copy()

    @one_at_a_time
    def leave(self, slot: int):
        """Removes the sequence in `slot`, which is then free."""
        del self.sequences[self.used(slot)]

    def used(self, slot):
        """`slot`, after checking that a sequence uses it."""
        if slot not in self.sequences:
            refuse(f"slot is {slot!r}, expected one in use: {', '.join(map(str, self.sequences)) or 'none is'}")
        return slot


def tokens_of(prompt):
    """A prompt's tokens [T], not yet checked against a vocabulary."""
    try:
        tokens = np.asarray(list(prompt))
    except (TypeError, ValueError):  # not iterable; or its elements are sequences of different lengths
        tokens = None
    if tokens is None or tokens.ndim != 1:
        refuse(
            f"prompts holds a {type(prompt).__qualname__} that is no sequence of tokens, expected host integers [T]",
            ContractTypeError,
        )
    return tokens


def refuse(complaint: str, error=ContractError) -> NoReturn:
    raise error(f"Batch: {complaint}")
