"""How the next token is drawn from a model's logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..argument_checks import is_real
from ..errors import ContractError
from .helper_threads import count
from .number_checks import checked_int, checked_number, shown

AT_ONCE = 1 << 16  # the most logits in one call of NumPy for several sequences; more do not fit in a core's cache
MOST_BITS = np.int64((1 << 30) - 1)  # no probability has more: the bits of a float32 up to 1, read as an integer
PENALTY = "a finite number from -1e30 to 1e30"  # a larger one, times a token's count, could be beyond float32's range


def checked_bias(bias) -> dict[int, float]:
    """`bias` sorted by id; ContractError if it is no mapping of ids to numbers below inf."""
    if not isinstance(bias, Mapping):
        raise ContractError(f"Sampling: bias is a {type(bias).__name__}, expected a mapping from ids to numbers")
    by_id = {}
    for id, value in bias.items():
        id = checked_int("Sampling", "an id of bias", id, 0)
        banned = is_real(value) and value == -np.inf
        by_id[id] = (
            -np.inf if banned else checked_number("Sampling", f"bias[{id}]", value, f"-inf, or {PENALTY}", moderate)
        )
    return dict(sorted(by_id.items()))


def no_such_id(id, count) -> str:
    """The complaint of an id with a bias that is not below the `count` of logits."""
    return f"bias has the id {id}, expected one below {count}"


def moderate(x):
    """Whether x is a PENALTY."""
    return abs(x) <= 1e30


class Group(NamedTuple):
    """What sequences have in common whose tokens are drawn together; `limits` are top_k, top_p and min_p, `adjusts`:
    whether penalties or biases change the logits."""

    vocabulary: int | None
    temperature: float
    temperature_last: bool
    limits: tuple[int, float, float]
    adjusts: bool


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from logits.

    Parameters
    ----------
    temperature : float
        0 takes the likeliest token, and the first one if several are. Otherwise the logits are divided by it: 1 leaves
        the model's distribution as it is, more flattens it. It is applied before `top_k`, `top_p` and `min_p`, as in
        Hugging Face's transformers. If it is so small that probabilities are below float32's range, the likeliest
        tokens remain.
    temperature_last : bool
        Whether the temperature is applied to the tokens that `top_k`, `top_p` and `min_p` have chosen, as in RWKV's
        PIPELINE and llama.cpp. A high temperature then draws from no more tokens than a low one.
    top_k : int
        Draw from so many of the likeliest tokens; 0 is all.
    top_p : float
        Draw from the fewest of the likeliest tokens whose probabilities sum to at least so much, after `top_k`.
    min_p : float
        Draw from tokens that have at least this part of the likeliest one's probability; 0 is all.
    presence, frequency : float
        Subtracted from the logit of a token that was drawn before: `presence` once, `frequency` times its count
        (OpenAI's penalties of these names).
    fading : float
        The factor by which each token multiplies the counts of the tokens before it.
    repetition : float
        Divides the logit of a token that was drawn before if the logit is positive, else multiplies it (Keskar et al.,
        "CTRL", 2019); 1 does nothing. Tokens of the prompt do not count as drawn; in Hugging Face's transformers they
        do.
    bias : mapping from ids to numbers
        Added to the logits; -inf bans a token.
    logprobs : bool
        Whether `Sampler.logprobs` gets the natural log of each drawn token's probability in the model's own
        distribution: without temperature, penalties and biases.
    seed : int, or anything else that `numpy.random.default_rng` takes
        Equal seeds draw equal tokens; with None every sampler draws others.
    vocabulary : int, optional
        Draw from ids below it; a model may have logits for more ids than its tokenizer knows.

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
    min_p: float = 0.0
    temperature_last: bool = False
    presence: float = 0.0
    frequency: float = 0.0
    fading: float = 1.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: bool = False
    seed: Any = None
    vocabulary: int | None = None

    def __post_init__(self):
        for name, fits, wanted in (
            ("temperature", lambda x: x >= 0, "a number from 0 up"),
            ("top_p", lambda x: 0 < x <= 1, "a number above 0 and up to 1"),
            ("min_p", lambda x: 0 <= x <= 1, "a number from 0 to 1"),
            ("repetition", lambda x: 1e-3 <= x <= 1e3, "a number from 0.001 to 1000"),
            ("presence", moderate, PENALTY),
            ("frequency", moderate, PENALTY),
            ("fading", lambda x: 0 <= x <= 1, "a number from 0 to 1"),
        ):
            object.__setattr__(self, name, checked_number("Sampling", name, getattr(self, name), wanted, fits))
        for name in ("temperature_last", "logprobs"):
            if not isinstance(value := getattr(self, name), (bool, np.bool_)):
                raise ContractError(f"Sampling: {name} is {shown(value)}, expected True or False")
        checked_int("Sampling", "top_k", self.top_k, 0)
        if self.vocabulary is not None:
            checked_int("Sampling", "vocabulary", self.vocabulary, 1)
        object.__setattr__(self, "bias", checked_bias(self.bias))
        if self.vocabulary and self.bias and (largest := [*self.bias][-1]) >= self.vocabulary:
            raise ContractError(f"Sampling: {no_such_id(largest, self.vocabulary)}")
        if self.seed is None or type(self.seed) is int and self.seed >= 0:
            return
        try:
            np.random.default_rng(self.seed)
        except (TypeError, ValueError):
            raise ContractError(
                f"Sampling: seed is {shown(self.seed)}, expected None, a whole number from 0 up, or "
                "what else numpy.random.default_rng takes"
            ) from None

    @cached_property
    def group(self) -> Group:
        """Tokens of sequences with equal groups are drawn by the same calls of NumPy."""
        limits, adjusts = (self.top_k, self.top_p, self.min_p), self.penalizes or bool(self.bias)
        return Group(self.vocabulary, self.temperature, self.temperature_last, limits, adjusts)

    @cached_property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens that were drawn before."""
        return bool(self.presence or self.frequency) or self.repetition != 1

    def sampler(self) -> Sampler:
        """The sampler of one sequence."""
        return Sampler(self)


class Sampler:
    """Draws the tokens of one sequence: it has the random numbers, and counts the tokens that were drawn. One thread at
    a time may use it.

    Called with host logits [V], it returns a token; ContractError, before anything is drawn, if there is a `complaint`.
    """

    def __init__(self, how: Sampling):
        self.how, self.rng = how, np.random.default_rng(how.seed)
        self.counts: dict[int, float] = {}
        self.logprobs: list[float] = []
        self.biased_ids, self.biases = [*how.bias], np.array([*how.bias.values()], np.float32)

    def complaint(self, logits) -> str | None:
        """Why no token can be drawn from `logits`: one is NaN or inf, all are -inf, or an id with a bias has none."""
        logits = np.asarray(logits[: self.how.vocabulary])
        if self.biased_ids:
            if (largest := self.biased_ids[-1]) >= len(logits):
                return no_such_id(largest, len(logits))
            logits = self.adjusted(logits)
        greatest = logits.max()  # NaN if a logit is NaN
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
        return draw_each([self], [np.asarray(logits)])[0]

    def count(self, token: int):
        if self.how.fading != 1:
            self.counts = {other: count * self.how.fading for other, count in self.counts.items()}
        self.counts[token] = self.counts.get(token, 0.0) + 1

    def adjusted(self, logits):
        """A copy of `logits` with penalties and biases."""
        how, logits = self.how, logits.copy()
        if self.counts and how.penalizes:
            ids, counts = list(self.counts), np.array(list(self.counts.values()))
            if how.repetition != 1:
                drawn = logits[ids]
                logits[ids] = np.where(drawn > 0, drawn / how.repetition, drawn * how.repetition)
            logits[ids] -= how.presence + how.frequency * counts
        if self.biased_ids:
            logits[self.biased_ids] += self.biases
        return logits


# -- many sequences ----------------------------------------------------------------------------------------------------
def complaints(samplers, logits) -> dict[int, str]:
    """{index of a sampler: its `complaint`}, for the samplers that cannot draw from their row of `logits`."""
    by_index = {}
    groups = [(sampler.how.vocabulary, bool(sampler.biased_ids)) for sampler in samplers]
    for (_, biased), indices, rows in grouped_rows(logits, groups):
        finite = np.zeros(len(rows), bool) if biased else np.isfinite(rows.max(axis=1))  # biased rows: looked at singly
        for row in np.flatnonzero(~finite):
            if complaint := samplers[indices[row]].complaint(logits[indices[row]]):
                by_index[indices[row]] = complaint
    return by_index


def draw_each(samplers, logits) -> list[int]:
    """The token that each sampler draws from its row of `logits`, an array [N, V] or N rows.

    Tokens do not depend on the other samplers: samplers only share calls of NumPy and the host's cores. The caller has
    made sure that there are no `complaints`.
    """
    uniforms = [sampler.rng.random() if sampler.how.temperature else 0.0 for sampler in samplers]

    def draw(part):
        group, indices, rows = part
        rows = rows.astype(np.float32, copy=group.adjusts)
        if group.adjusts:
            for row, index in enumerate(indices):
                rows[row] = samplers[index].adjusted(rows[row])
        if group.temperature == 0:
            return rows.argmax(axis=1)
        last, temperature = group.temperature_last, group.temperature
        before_limits, after_limits = (1.0, temperature) if last else (temperature, 1.0)
        p = probabilities(rows, before_limits)
        return drawn_ids(p, *group.limits, [uniforms[index] for index in indices], after_limits)

    parts = list(grouped_rows(logits, [sampler.how.group for sampler in samplers]))
    tokens: dict[int, int] = {}
    for (_, indices, rows), drawn in zip(parts, in_threads(draw, parts)):
        tokens.update(zip(indices, drawn.tolist()))
        for row, index in zip(rows, indices):
            if samplers[index].how.penalizes:
                samplers[index].count(tokens[index])
            if samplers[index].how.logprobs:
                samplers[index].logprobs.append(logprob(row, tokens[index]))
    return [tokens[index] for index in range(len(samplers))]


def grouped_rows(logits, groups) -> Iterator[tuple]:
    """Yields (group, indices of sequences of this group, their rows of `logits`): at most AT_ONCE logits or one row at
    a time. Callers do not write to the rows, which may be views.

    groups : the group of each sequence, a tuple whose first element is `Sampling.vocabulary`
    """
    if len(set(groups)) == 1 and isinstance(logits, np.ndarray):
        count = max(1, AT_ONCE // logits.shape[1])
        for start in range(0, len(groups), count):
            rows = logits[start : start + count, : groups[0][0]]
            yield groups[0], range(start, start + len(rows)), rows
        return
    members: dict[tuple, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    for group, indices in members.items():
        count = max(1, AT_ONCE // len(logits[indices[0]]))
        for start in range(0, len(indices), count):
            part = indices[start : start + count]
            yield group, part, np.stack([logits[index] for index in part])[:, : group[0]]


def in_threads(work, parts) -> list:
    """[work(part) for part in parts], by several threads if the system gives them: NumPy releases Python's lock."""
    if len(parts) == 1:
        return [work(parts[0])]
    with ThreadPoolExecutor(min(count(), len(parts))) as pool:
        try:
            results = pool.map(work, parts)
        except RuntimeError:  # the system gives no threads
            return list(map(work, parts))
        return list(results)


def probabilities(logits, temperature):
    """The probabilities [N, V] of tokens from float32 logits; each row's largest logit is finite."""
    with np.errstate(over="ignore"):  # with a small temperature quotients become -inf, and probabilities 0
        quotients = np.divide(logits - logits.max(axis=-1, keepdims=True), temperature, dtype=np.float64)
        p = np.exp(quotients.astype(np.float32))
    p /= p.sum(axis=-1, keepdims=True)
    return p


def logprob(logits, token) -> float:
    """The natural log of a token's probability."""
    logits = logits.astype(np.float64)
    logits -= logits.max()
    return float(logits[token] - np.log(np.exp(logits).sum()))


def drawn_ids(p, top_k, top_p, min_p, uniforms, temperature=1.0):
    """The id drawn from each row of probabilities p [N, V]: among the tokens that `top_k`, `top_p` and `min_p` leave,
    with `temperature` applied to these. `uniforms`: a random number for each row, at least 0 and below 1."""
    ids, p, counts = likeliest(p, top_k, top_p, min_p)
    rows, cumulated = np.arange(len(p)), np.cumsum(p, axis=1, dtype=np.float64)
    # top_p is a share of all tokens' probability, or, after top_k, of that of the tokens which top_k leaves.
    bound = top_p * (cumulated[:, -1:] if top_k else 1)
    last = np.minimum((cumulated < bound).sum(axis=1), counts - 1)  # the column at which the sum reaches the bound
    if temperature != 1:
        shares = p / p.max(axis=1, keepdims=True)
        cumulated = np.cumsum(shares.astype(np.float64) ** (1 / temperature), axis=1)
    columns = (cumulated <= (np.array(uniforms) * cumulated[rows, last])[:, None]).sum(axis=1)
    return columns if ids is None else ids[rows, columns]


def likeliest(p, top_k, top_p, min_p=0.0):
    """(ids, their probabilities, their number) for each row of float32 p [N, V], sorted from the likeliest id on. Rows
    with fewer ids than others end with probabilities of 0.

    The ids are the `top_k` likeliest, or at least as many as have the probability `top_p` together, each with at least
    `min_p` times the largest probability. Only these are sorted. None for ids stands for all V in their order.
    """
    V = p.shape[1]
    if top_k == 0 and top_p == 1 and min_p == 0:
        return None, p, V  # drawing from all needs no order
    top_k = min(top_k, V)
    if top_k:
        least = -np.partition(-p, top_k - 1, axis=1)[:, top_k - 1, None]
    else:
        least = (1 - top_p) / V  # the probabilities below it sum to less than 1 - top_p
    if min_p:
        least = np.maximum(least, np.float32(min_p) * p.max(axis=1, keepdims=True))
    row, id = np.divmod(np.flatnonzero(p >= least), V)
    counts = np.bincount(row, minlength=len(p))
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)  # the place of each id in its row
    # A key sorts by falling probability, then by id: float32 numbers from 0 up have the order of their bits.
    keys = np.full((len(p), counts.max()), MOST_BITS << 32)
    keys[row, column] = MOST_BITS - p[row, id].view(np.int32) << 32 | id
    keys.sort(axis=1)
    keys = keys[:, : top_k or None]
    chosen = (MOST_BITS - (keys >> 32)).astype(np.int32).view(np.float32)
    return keys & (1 << 32) - 1, chosen, np.minimum(counts, top_k) if top_k else counts
