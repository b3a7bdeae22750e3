"""Ranks compare a call's arguments before the call sends an array or writes a result."""

import hashlib
import json
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import ContractError
from .engine import Disagreement, begin, ranks_in_words

DIGEST = 16  # bytes of a digest
REMEMBERED = 256  # the most calls that are remembered for an engine
CALL = "the call"  # the name of a value: if ranks differ in it, their other values are not compared
HEADERS: WeakKeyDictionary = WeakKeyDictionary()  # engine -> {key of a call: (header, text)}
LENGTHS: WeakKeyDictionary = WeakKeyDictionary()  # engine -> {header: the tokens of every rank in the last such call}


def agree(comm, name, check):
    """(the result, the first of what this rank's check() returns; [the tokens of every rank]), once all ranks make the
    same call."""
    comparison = CallComparison(comm, name, lambda _: check())
    return comparison.check_result, comparison.agreed_lengths()


class CallComparison:
    """Finds out whether the other ranks make the same call. Nothing else is sent before all have answered.

    `check(needs_values)` returns (any result, this rank's tokens, {name: value that must be the same on all ranks}), or
    raises ContractError, which then ends the call on all ranks. The first message, the *header*, has 32 bytes: a digest
    of the values, the number of tokens, and the length of the *text* of the values, which is sent only if digests
    differ. Calls with the same `key` have the same values and tokens, so that `check(False)` need not return them.
    """

    def __init__(self, comm, name, check, key=None):
        self.comm, self.name = comm, name
        begin(comm, name)  # messages from here on belong to the operation `name`, until another one begins
        self.check_result, self.error, self.lengths = None, None, None
        known_headers = remembered(HEADERS, comm)
        self.header, self.text = known_headers.get(key, (None, None))
        try:
            self.check_result, tokens, values = check(self.header is None)
            if self.header is None:
                values = {CALL: name} | {what: str(value) for what, value in values.items()}
                self.header, self.text = header_and_text(tokens, values)
                if key is not None:
                    remember(known_headers, key, (self.header, self.text))
        except ContractError as refusal:
            self.error = refusal
            self.header, self.text = header_and_text(0, {"refused": f"{type(refusal).__name__}: {refusal}"})
        # all_gather returns a function, which waits for the headers of all ranks [ranks, 32].
        self.headers = comm.all_gather(np.frombuffer(self.header, np.uint8).copy())
        if self.error is not None:
            self.agreed_lengths()  # raises the error, after the other ranks have been told

    def remembered_lengths(self):
        """[The tokens of every rank] in the last call of this rank with the same values, or None."""
        return remembered(LENGTHS, self.comm).get(self.header)

    def agreed_lengths(self):
        """[The tokens of every rank]; raises on every rank if the ranks' values differ."""
        if self.lengths is not None:
            return self.lengths
        headers = self.headers()
        counts = headers[:, DIGEST:].copy().view(np.int64)
        if self.error is None and (headers[:, :DIGEST] == headers[0, :DIGEST]).all():
            self.lengths = counts[:, 0].tolist()
            remember(remembered(LENGTHS, self.comm), self.header, self.lengths)
            return self.lengths
        values_of_ranks = all_values(self.comm, self.text, counts[:, 1])
        raise self.error or Disagreement(f"{self.name}: " + "; ".join(differences(values_of_ranks)))


def header_and_text(tokens, values):
    """(a call's header, the text of its values), as bytes: see `CallComparison`."""
    text = json.dumps(values).encode()
    digest = hashlib.blake2b(text, digest_size=DIGEST).digest()
    return digest + np.array([tokens, len(text)], np.int64).tobytes(), text


def remembered(by_engine, comm) -> dict:
    """The dictionary of the engine `comm` in HEADERS or LENGTHS."""
    try:
        return by_engine.setdefault(comm, {})
    except TypeError:  # an engine without a hash or weak references
        return {}


def remember(calls, key, value):
    """Stores a value in a dictionary that `remembered` has returned."""
    if len(calls) >= REMEMBERED:
        calls.clear()
    calls[key] = value


def all_values(comm, text, lengths):
    """[{name: value} of every rank], of which `text` is this rank's JSON text. lengths [ranks]: those of all texts."""
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return [json.loads(row[:length].tobytes()) for row, length in zip(comm.all_gather(padded)(), lengths)]


def differences(values_of_ranks):
    """Yields a phrase for every value in which ranks differ, which says which ranks have which value."""
    for rank, values in enumerate(values_of_ranks):
        if "refused" in values:
            yield f"rank {rank} refused its call: {values['refused']}"
    calls = {rank: values for rank, values in enumerate(values_of_ranks) if "refused" not in values}
    same_call = len({values[CALL] for values in calls.values()}) < 2
    for name in dict.fromkeys(name for values in calls.values() for name in values) if same_call else [CALL]:
        ranks_by_value: dict = {}
        for rank, values in calls.items():
            ranks_by_value.setdefault(values.get(name, "nothing"), []).append(rank)
        if len(ranks_by_value) > 1:
            rarest_first = sorted(ranks_by_value.items(), key=lambda entry: len(entry[1]))
            yield f"{name} is " + ", but ".join(f"{value} on {ranks_in_words(ranks)}" for value, ranks in rarest_first)
