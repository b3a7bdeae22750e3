"""Before a call sends or writes anything, its ranks compare what they mean by it."""

from __future__ import annotations

import hashlib
import json
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import ContractError
from .engine import Disagreement, begin, those

DIGEST = 16  # bytes
REMEMBERED = 256  # calls of an engine
CALL = "the call"  # where ranks differ in this, nothing else is compared
MEANT: WeakKeyDictionary = WeakKeyDictionary()  # by engine: {key of a call: (header, text)}
ANSWERS: WeakKeyDictionary = WeakKeyDictionary()  # by engine: {header: the last answer to it}


def agree(comm, name, check):
    """(what this rank's check() returned, [the tokens of every rank]), once all ranks mean the same: see `Question`."""
    question = Question(comm, name, lambda _: check())
    return question.checked, question.answer()


class Question:
    """Asks the others whether they mean the same call. Until they have answered nothing else is sent to them.

    `check` returns (anything, its tokens, {what must be the same on all ranks: its value}), or raises ContractError,
    which then ends the call on all ranks. What goes out at first is a digest, 32 bytes. Calls of one `key` mean the
    same: `check(False)` need not say it again.
    """

    def __init__(self, comm, name, check, key=None):
        self.comm, self.name = comm, name
        begin(comm, name)
        self.checked, self.error, self.lengths = None, None, None
        known = remembered(MEANT, comm)
        self.header, self.text = known.get(key, (None, None))
        try:
            self.checked, tokens, meaning = check(self.header is None)
            if self.header is None:
                meaning = {CALL: name} | {what: str(value) for what, value in meaning.items()}
                self.header, self.text = in_words(tokens, meaning)
                if key is not None:
                    keep(known, key, (self.header, self.text))
        except ContractError as refusal:
            self.error = refusal
            self.header, self.text = in_words(0, {"refused": f"{type(refusal).__name__}: {refusal}"})
        self.headers = comm.all_gather(np.frombuffer(self.header, np.uint8).copy())
        if self.error is not None:
            self.answer()

    def expected(self):
        """[The tokens of every rank] as they were when this rank meant the same before, or None."""
        return remembered(ANSWERS, self.comm).get(self.header)

    def answer(self):
        """[The tokens of every rank]; raises on all of them where one means another call."""
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


def in_words(tokens, meaning):
    """(what goes out at first, all of it)."""
    text = json.dumps(meaning).encode()
    digest = hashlib.blake2b(text, digest_size=DIGEST).digest()
    return digest + np.array([tokens, len(text)], np.int64).tobytes(), text


def remembered(what, comm) -> dict:
    """Of an engine, by keys."""
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
            yield f"{key} is " + ", but ".join(f"{value} on {those(ranks)}" for value, ranks in rarest_first)
