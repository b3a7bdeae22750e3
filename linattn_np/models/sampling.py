"""How the next token is drawn from a model's logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ContractError
from .checks import real, shown, whole

AT_ONCE = 1 << 16  # logits of several sequences that one call of NumPy looks at: more would leave a core's cache
PENALTY = "a finite number from -1e30 to 1e30"  # so that a penalty, times its count, stays a float32


def moderate(x):
    return abs(x) <= 1e30


@dataclass(frozen=True)
class Sampling:
    """What decides the next token.

    Parameters
    ----------
    temperature : float
        0 takes the likeliest token, 1 the model's distribution, more flattens it.
    top_k : int
        Draw from so many of the likeliest tokens; 0 is all.
    top_p : float
        Draw from the likeliest tokens that together hold this much probability.
    presence, frequency : float
        Subtracted from the logit of a token that was drawn before: once, and times its count (OpenAI's presence and
        frequency penalties).
    fading : float
        The factor by which the counts fade with every token.
    seed : int, or what else `numpy.random.default_rng` takes
        Equal seeds draw equal tokens; None is another draw every time.
    vocabulary : int, optional
        Draw from ids below it; a model may have logits for more than its tokenizer knows.

    Example
    -------
    >>> sampler = Sampling(temperature=0, presence=10.0).sampler()
    >>> logits = np.array([1.0, 3.0, 2.0])
    >>> [sampler(logits) for _ in range(3)]                 # a token that was taken counts for less
    [1, 2, 0]
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    fading: float = 1.0
    seed: Any = None
    vocabulary: int | None = None

    def __post_init__(self):
        for name, fits, wanted in (
            ("temperature", lambda x: x >= 0, "a number from 0 up"),
            ("top_p", lambda x: 0 < x <= 1, "a number above 0 and up to 1"),
            ("presence", moderate, PENALTY),
            ("frequency", moderate, PENALTY),
            ("fading", lambda x: 0 <= x <= 1, "a number from 0 to 1"),
        ):
            object.__setattr__(self, name, real("Sampling", name, getattr(self, name), wanted, fits))
        whole("Sampling", "top_k", self.top_k, 0)
        if self.vocabulary is not None:
            whole("Sampling", "vocabulary", self.vocabulary, 1)
        try:
            np.random.default_rng(self.seed)
        except (TypeError, ValueError):
            raise ContractError(
                f"Sampling: seed is {shown(self.seed)}, expected None, a whole number from 0 up, or "
                "what else numpy.random.default_rng takes"
            ) from None

    @property
    def of_all(self) -> bool:
        """Whether any token can be drawn, by the model's distribution alone."""
        return bool(self.temperature and self.top_k == 0 and self.top_p == 1 and not (self.presence or self.frequency))

    def sampler(self) -> Sampler:
        """One sequence's drawing: it has the random numbers and remembers what was drawn."""
        return Sampler(self)


class Sampler:
    """Called with host logits [V], draws a token. ContractError, and nothing is drawn, where `complaint` finds one."""

    def __init__(self, how: Sampling):
        self.how, self.rng = how, np.random.default_rng(how.seed)
        self.counts: dict[int, float] = {}

    def complaint(self, logits) -> str | None:
        """Why no token can be drawn from `logits`: one is NaN or inf, or all are -inf."""
        logits = np.asarray(logits[: self.how.vocabulary])
        greatest = logits.max()  # NaN if one of them is
        if np.isfinite(greatest):
            return None
        if greatest == -np.inf:
            return f"logits are -inf for all {len(logits)} tokens, expected one that can be drawn"
        wrong = np.isnan(logits) | (logits == np.inf)
        token = int(wrong.argmax())
        return f"logits are {logits[token]} for token {token}, expected numbers below inf"

    def __call__(self, logits) -> int:
        if complaint := self.complaint(logits):
            raise ContractError(f"Sampling: {complaint}")
        return self.drawn(self.draw(self.penalized(np.asarray(logits[: self.how.vocabulary], np.float32))))

    def drawn(self, token) -> int:
        """The token, which counts from now on."""
        if self.how.fading != 1:
            self.counts = {other: count * self.how.fading for other, count in self.counts.items()}
        self.counts[token] = self.counts.get(token, 0.0) + 1
        return token

    def penalized(self, logits):
        how = self.how
        if not (how.presence or how.frequency) or not self.counts:
            return logits
        logits = logits.copy()
        logits[list(self.counts)] -= how.presence + how.frequency * np.array(list(self.counts.values()))
        return logits

    def draw(self, logits) -> int:
        how = self.how
        if how.temperature == 0:
            return int(logits.argmax())
        p = probabilities(logits, how.temperature)
        order = likeliest(p, how.top_k, how.top_p)
        cumulated = np.cumsum(p[order], dtype=np.float64)
        return int(order[self.place(cumulated, how.top_p * (cumulated[-1] if how.top_k else 1))])

    def place(self, cumulated, bound) -> int:
        """Where the next random number falls among probabilities that are added up, as far as they reach a bound."""
        kept = cumulated.searchsorted(bound) + 1  # the token that crosses it is still in
        cumulated = cumulated[:kept]
        return int(cumulated.searchsorted(self.rng.random() * cumulated[-1], side="right"))


def probabilities(logits, temperature):
    """Of float32 logits [..., V], each row by itself."""
    with np.errstate(over="ignore"):  # a quotient of -inf is what a small temperature means
        p = np.exp(
            np.divide(logits - logits.max(axis=-1, keepdims=True), temperature, dtype=np.float64).astype(np.float32)
        )
    p /= p.sum(axis=-1, keepdims=True)
    return p


def likeliest(p, top_k, top_p):
    """Ids from the likeliest on, `top_k` of them or at least as many as hold `top_p`: few are sorted, of many."""
    if top_k == 0 and top_p == 1:
        return np.arange(len(p))  # any order will do
    if top_k:
        least = -np.partition(-p, min(top_k, len(p)) - 1)[min(top_k, len(p)) - 1]
    else:
        least = (1 - top_p) / len(p)  # all that are less hold less than 1 - top_p together
    ids = np.flatnonzero(p >= least)
    return ids[np.argsort(-p[ids], kind="stable")][: top_k or None]


# -- many sequences ----------------------------------------------------------------------------------------------------
def complaints(samplers, logits) -> dict[int, str]:
    """{number: its `complaint`} of the samplers that cannot draw from their row of `logits`."""
    found = {}
    for _, numbers, rows in alike(logits, [(sampler.how.vocabulary,) for sampler in samplers]):
        for place in np.flatnonzero(~np.isfinite(rows.max(axis=1))):
            found[numbers[place]] = samplers[numbers[place]].complaint(logits[numbers[place]])
    return found


def draw_each(samplers, logits) -> list[int]:
    """The token of each sampler from its row of `logits`, as it draws it alone, in fewer calls of NumPy.

    None of them has a complaint.
    """
    tokens = {}
    kinds = [(sampler.how.vocabulary, sampler.how.temperature) if sampler.how.of_all else None for sampler in samplers]
    for (_, temperature), numbers, rows in alike(logits, kinds):
        p = probabilities(rows.astype(np.float32, copy=False), temperature)
        for number, cumulated in zip(numbers, np.cumsum(p, axis=1, dtype=np.float64)):
            tokens[number] = samplers[number].drawn(samplers[number].place(cumulated, 1))
    return [tokens[n] if n in tokens else sampler(row) for n, (sampler, row) in enumerate(zip(samplers, logits))]


def alike(logits, kinds) -> Iterator[tuple]:
    """(kind, numbers, their rows of `logits`) of one kind, (vocabulary, ...), each; None is no kind."""
    by_kind: dict[tuple, list[int]] = {}
    for number, kind in enumerate(kinds):
        if kind is not None:
            by_kind.setdefault(kind, []).append(number)
    for kind, numbers in by_kind.items():
        rows = [logits[number][: kind[0]] for number in numbers]
        count = max(1, AT_ONCE // len(rows[0]))
        for start in range(0, len(rows), count):
            yield kind, numbers[start : start + count], np.stack(rows[start : start + count])
