"""Texts that models write: decoded token by token, ended by stop strings, and many texts in one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ..errors import ContractError, ContractTypeError
from .batch import Batch
from .number_checks import checked_int, shown
from .protocols import Model, State
from .sampling import Sampling
from .tokenizers import Tokenizer

LONGEST = (1 << 31) - 1  # the most tokens of a text


class Text:
    """The text of tokens that arrive one by one. It ends at a stop string, at the id that ends a text, or at a length.

    The results of `feed`, and of `close` if the caller ends the text, are the text when joined. `feed` holds back what
    may be the beginning of a stop string, and the bytes of a character until all of them are there, so that no text
    that it has returned is ever wrong.

    length : the most tokens, up to 2^31 - 1; None is no limit
    stop : strings that end the text and are no part of it; if there are several, the one that is complete first
    finish : None while the text goes on, then "stop", "end" or "length"; or the argument of `close`
    error : the error of a text whose `finish` is "error"
    count : the number of tokens so far, with those of a stop string and the id that ends the text
    logprobs : the log of each token's probability, if `Sampling` asks for them and `complete` wrote the text

    Example
    -------
    >>> from linattn_np.models import Bytes
    >>> text = Text(Bytes(), stop=["END"])
    >>> [text.feed(token) for token in b"an EEND"], text.finish
    (['a', 'n', ' ', '', 'E', '', ''], 'stop')
    """

    def __init__(self, tokenizer: Tokenizer, length: int | None = None, stop: Sequence[str] = ()):
        if length is not None:
            checked_int("Text", "length", length, 1, LONGEST)
        self.length, self.stop, self.end, self.tokenizer = length, checked_stops(stop), tokenizer.end, tokenizer
        self.error: str | None = None
        self.logprobs: list[float] = []
        self.stream, self.held = tokenizer.stream(), ""  # held: text that `feed` has decoded but not returned
        self.finish: str | None = None
        self.count = 0
        self.pieces: list[str] = []  # text that `take` has decoded
        self.tokens: list[int] = []  # tokens that `take` has got and not decoded

    def take(self, token: int):
        """Adds a token. For callers that do not use `feed`, but read the text by `whole` once it has ended. Without
        stop strings tokens are decoded only then, all at once."""
        if self.stop:
            self.pieces.append(self.feed(token))
            return
        self.count += 1
        if token == self.end:
            self.finish = "end"
            return
        self.tokens.append(token)
        if self.count == self.length:
            self.finish = "length"

    def whole(self) -> str:
        """The text of all tokens that `take` has got."""
        return "".join(self.pieces) + self.tokenizer.decode(self.tokens)

    def feed(self, token: int) -> str:
        """Adds a token; returns the further text that is certain now."""
        self.count += 1
        if self.end is not None and token == self.end:
            return self.close("end")
        text = self.held + self.stream.feed(token)
        ends_and_starts = [(start + len(string), start) for string in self.stop if (start := text.find(string)) >= 0]
        if ends_and_starts:
            self.finish = "stop"
            return text[: min(ends_and_starts)[1]]
        if self.count == self.length:
            self.finish = "length"
            return text + self.stream.flush()
        certain = len(text) - self.possible_stop(text)
        self.held = text[certain:]
        return text[:certain]

    def close(self, finish: str, error: str | None = None) -> str:
        """Ends a text that has not ended; returns what was held back."""
        self.finish, self.error = finish, error
        return self.held + self.stream.flush()

    def possible_stop(self, text):
        """The length of the longest end of `text` with which a stop string begins."""
        longest = min(len(text), max(map(len, self.stop), default=1) - 1)
        lengths = (n for n in range(longest, 0, -1) if any(string.startswith(text[-n:]) for string in self.stop))
        return next(lengths, 0)


def checked_stops(stop) -> tuple[str, ...]:
    """The argument `stop` as a tuple; ContractError unless it is a sequence of strings, none of them empty."""
    if isinstance(stop, str) or not isinstance(stop, Iterable):
        raise ContractError(f"Text: stop is {shown(stop)}, expected a sequence of strings, none of them empty")
    strings = tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ContractError(f"Text: stop holds {shown(string)}, expected strings, none of them empty")
    return strings


@dataclass
class Request:
    """A text to be written: its prompt (at least one id), how tokens are drawn, `Text`'s limits, and the state before
    the prompt; None starts a sequence. `complete` checks it."""

    prompt: Sequence[int]
    how: Sampling
    length: int | None = None
    stop: Sequence[str] = ()
    state: State | None = None


def complete(
    model: Model,
    tokenizer: Tokenizer,
    requests: Iterable[Request],
    slots: int,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[tuple]:
    """Yields ``(number of the request, its text, its `Text`)`` for every request, in the order in which they end.

    At most `slots` texts are written at a time; the next request joins as soon as a text has ended. A request that
    fails a check of `checked_request`, or whose logits are not finite, ends alone: its `Text` has the finish "error",
    and `error` says why.

    interrupted : called before every step of all running texts; if it returns True, this ends, and unfinished texts are
        dropped

    Example
    -------
    >>> from linattn_np.models import RWKV6, Bytes
    >>> model = RWKV6.from_file("examples/data/austen-x060/model.safetensors")
    >>> requests = [Request(prompt, Sampling(temperature=0), stop=[" "]) for prompt in (b"Miss Woodh", b"Mr. Darc")]
    >>> sorted((number, text) for number, text, _ in complete(model, Bytes(), requests, slots=2))
    [(0, 'ouse,'), (1, 'y')]
    """
    batch, waiting = Batch(model, slots), enumerate(requests)
    running: dict[int, tuple[int, Text]] = {}  # {slot: (number of the request, its text)}
    while not interrupted():
        taken, joining = list(islice(waiting, batch.free)), []
        for number, request in taken:
            try:
                joining.append((number, *checked_request(model, tokenizer, request)))
            except ContractError as error:
                text = Text(tokenizer)
                yield number, text.close("error", str(error)), text
        if joining:
            numbers, texts, samplings, prompts, states = zip(*joining)
            joined = batch.join(list(prompts), list(samplings), list(states))
            running |= dict(zip(joined, zip(numbers, texts)))
        if not taken and not running:
            return
        for slot, complaint in batch.complaints().items():
            number, text = running.pop(slot)
            batch.leave(slot)
            text.pieces.append(text.close("error", complaint))
            yield number, text.whole(), text
        for slot, token in batch.advance().items():  # meanwhile the device computes the following logits
            number, text = running[slot]
            text.take(token)
            if text.finish:
                text.logprobs = batch.sequences[slot].sampler.logprobs
                batch.leave(slot)
                del running[slot]
                yield number, text.whole(), text


def checked_request(model, tokenizer, request):
    """(the request's `Text`, its `Sampling`, its prompt, the state before the prompt), after checking all."""
    text = Text(tokenizer, request.length, request.stop)
    if not isinstance(request.how, Sampling):
        raise ContractTypeError(f"Request: how is a {type(request.how).__name__}, expected a Sampling")
    model.checked([list(request.prompt)])
    state = request.state if request.state is None else model.on_device(request.state, rows=1)
    return text, request.how, request.prompt, state
