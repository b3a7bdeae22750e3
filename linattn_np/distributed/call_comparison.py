"""Ranks compare a call's arguments before the call sends an array or writes a result."""

from __future__ import annotations

import hashlib
import json
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import ContractError
from .engine import Disagreement, begin, ranks_in_words

DIGEST = 16  # bytes
REMEMBERED = 256  # calls of an engine
CALL = "the call"  # where ranks differ in this, nothing else is compared
MEANT: WeakKeyDictionary = WeakKeyDictionary()  # by engine: {key of a call: (header, text)}
ANSWERS: WeakKeyDictionary = WeakKeyDictionary()  # by engine: {header: the last answer to it}


def agree(comm, name, check):
    """(what this rank's check() returned, [the tokens of every rank]), once all ranks make the same call."""
    comparison = CallComparison(comm, name, lambda _: check())
    return comparison.check_result, comparison.agreed_lengths()


class CallComparison:
    """Asks the other ranks whether they make the same call. Nothing else is sent before they have answered.

    `check` returns (anything, this rank's tokens, {name: value that must be the same on all ranks}), or raises
    ContractError, which then ends the call on all ranks. The first message is a digest of these values, 32 bytes. Calls
    with the same `key` have the same values, so that `check(False)` need not return them.
    """

    def __init__(self, comm, name, check, key=None):
        self.comm, self.name = comm, name
        begin(comm, name)
        self.check_result, self.error, self.lengths = None, None, None
        known = remembered(MEANT, comm)
        self.header, self.text = known.get(key, (None, None))
        try:
            self.check_result, tokens, meaning = check(self.header is None)
            if self.header is None:
                meaning = {CALL: name} | {what: str(value) for what, value in meaning.items()}
                self.header, self.text = header_and_text(tokens, meaning)
                if key is not None:
                    keep(known, key, (self.header, self.text))
        except ContractError as refusal:
            self.error = refusal
            self.header, self.text = header_and_text(0, {"refused": f"{type(refusal).__name__}: {refusal}"})
        self.headers = comm.all_gather(np.frombuffer(self.header, np.uint8).copy())
        if self.error is not None:
            self.agreed_lengths()

    def remembered_lengths(self):
        """[The tokens of every rank] in the last call of this rank with the same values, or None."""
        return remembered(ANSWERS, self.comm).get(self.header)

    def agreed_lengths(self):
        """[The tokens of every rank]; raises on every rank if the ranks' values differ."""
        if self.lengths is not None:
            return self.lengths
        headers = self.headers()
        counts = headers[:, DIGEST:].copy().view(np.int64)
        if self.error is None and (headers[:, :DIGEST] == headers[0, :DIGEST]).all():
            self.lengths = counts[:, 0].tolist()
            keep(remembered(ANSWERS, self.comm), self.header, self.lengths)
            return self.lengths
        meanings = all_texts(self.comm, self.text, counts[:, 1])
        raise self.error or Disagreement(f"{self.name}: " + "; ".join(differences(meanings)))


def header_and_text(tokens, meaning):
    """(the first message: digest, tokens, length of the text; the text that the digest is of)."""
    text = json.dumps(meaning).encode()
    digest = hashlib.blake2b(text, digest_size=DIGEST).digest()
    return digest + np.array([tokens, len(text)], np.int64).tobytes(), text


def remembered(what, comm) -> dict:
    """The dict of one engine in `what`."""
    try:
        return what.setdefault(comm, {})
    except TypeError:  # an engine without hash or weak references
        return {}


def keep(known, key, value):
    if len(known) >= REMEMBERED:
        known.clear()
    known[key] = value


def all_texts(comm, text, lengths):
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return [json.loads(row[:length].tobytes()) for row, length in zip(comm.all_gather(padded)(), lengths)]


def differences(meanings):
    """A phrase for everything in which ranks differ, with who has what."""
    for rank, meaning in enumerate(meanings):
        if "refused" in meaning:
            yield f"rank {rank} refused its call: {meaning['refused']}"
    calls = {rank: meaning for rank, meaning in enumerate(meanings) if "refused" not in meaning}
    alike = len({meaning[CALL] for meaning in calls.values()}) < 2
    for key in dict.fromkeys(key for meaning in calls.values() for key in meaning) if alike else [CALL]:
        having: dict = {}
        for rank, meaning in calls.items():
            having.setdefault(meaning.get(key, "nothing"), []).append(rank)
        if len(having) > 1:
            rarest_first = sorted(having.items(), key=lambda entry: len(entry[1]))
            yield f"{key} is " + ", but ".join(f"{value} on {ranks_in_words(ranks)}" for value, ranks in rarest_first)
