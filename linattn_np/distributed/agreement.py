"""Before a call does anything, its ranks compare what they mean by it."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from ..errors import ContractError

DIGEST = 16  # bytes


class Disagreement(ContractError):
    """The ranks do not mean the same call; the message says which rank differs in what. Nothing has run."""


def agree(comm, name, check):
    """(what this rank's check() returned, [the tokens of every rank]).

    `check` returns (anything, its tokens, {what must be the same on all ranks: its value}), or raises ContractError,
    which then ends the call on all ranks. What goes out at first is a digest, 32 bytes.
    """
    checked, tokens, error = None, 0, None
    try:
        checked, tokens, meaning = check()
        meaning = {key: str(value) for key, value in meaning.items()}
    except ContractError as refusal:
        error, meaning = refusal, {"refused": f"{type(refusal).__name__}: {refusal}"}
    text = json.dumps(meaning).encode()
    digest = hashlib.blake2b(text, digest_size=DIGEST).digest()
    header = np.frombuffer(digest + np.array([tokens, len(text)], np.int64).tobytes(), np.uint8).copy()
    headers = comm.all_gather(header)()
    counts = headers[:, DIGEST:].copy().view(np.int64)
    if (headers[:, :DIGEST] == headers[0, :DIGEST]).all() and error is None:
        return checked, counts[:, 0].tolist()
    meanings = all_texts(comm, text, counts[:, 1])
    raise error or Disagreement(f"{name}: " + "; ".join(differences(meanings)))


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
    for key in dict.fromkeys(key for meaning in calls.values() for key in meaning):
        having = {}
        for rank, meaning in calls.items():
            having.setdefault(meaning.get(key, "nothing"), []).append(rank)
        if len(having) > 1:
            rarest_first = sorted(having.items(), key=lambda entry: len(entry[1]))
            yield f"{key} is " + ", but ".join(f"{value} on {those(ranks)}" for value, ranks in rarest_first)


def those(ranks):
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
