"""Tokenizers of this package's models: single bytes, and the vocabulary of the RWKV World models.

tokenizer = World.installed()
stream = tokenizer.stream()
for token in model.generate(tokenizer.encode("Emma was")):
    print(stream.feed(token), end="")
"""

from __future__ import annotations

import ast
import codecs
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from ..argument_checks import is_int
from ..errors import ContractError, ContractTypeError
from . import files

VOCABULARY = "rwkv_vocab_v20230424.txt"
TOKENS = 65_529
PACKAGES = ("pyrwkv_tokenizer", "rwkv")  # on PyPI, each with the vocabulary beside its modules
MAX_LINE = 1 << 16  # bytes, far more than any token takes
START = 4  # the first START bytes of a text tell which lengths of tokens from START on can begin it
SHORT = (3, 2, 1)  # the lengths below START, which are always tried
LINE = re.compile(rb"""(\d{1,9}) (b?(['"]).*\3) (\d{1,9})""")


class Tokenizer:
    """The base of tokenizers. tokens : {id: its bytes}; size : the largest id plus 1."""

    end: int | None = None  # the id that ends a text; None if the vocabulary has none

    def __init__(self, tokens: dict[int, bytes]):
        self.tokens = tokens
        self.size = max(tokens) + 1

    def encode(self, text: str | bytes) -> list[int]:
        """The ids of `text`, a str in UTF-8."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, with U+FFFD in place of bytes that are not UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`."""
        return b"".join([self.token(id) for id in ids])

    def token(self, id: int) -> bytes:
        """The bytes of an id; ContractError if it is not in the vocabulary."""
        if (type(id) is not int and not is_int(id)) or id not in self.tokens:  # the quick check first: most are int
            self.refuse("decode", f"ids holds {id!r}, expected whole numbers from 0 to {self.size - 1}")
        return self.tokens[id]

    def stream(self) -> Stream:
        """A decoder for ids that come one by one."""
        return Stream(self)

    def utf8(self, text: str | bytes) -> bytes:
        """The bytes of a text."""
        if isinstance(text, bytes):
            return text
        if not isinstance(text, str):
            self.refuse("encode", f"text is a {type(text).__qualname__}, expected str or bytes", ContractTypeError)
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            self.refuse(
                "encode",
                f"text has {text[error.start]!r} at position {error.start}, "
                "which UTF-8 cannot hold; give the bytes themselves",
            )

    def refuse(self, method, complaint, error=ContractError) -> NoReturn:
        raise error(f"{type(self).__name__}.{method}: {complaint}") from None


class Stream:
    """Decodes ids one by one. It holds back the bytes of a character until its last byte is there.

    The results of `feed` and `flush`, joined, are what the tokenizer's `decode` returns for all ids.

    Example
    -------
    >>> stream = Bytes().stream()
    >>> [stream.feed(id) for id in "né".encode()] + [stream.flush()]
    ['n', '', 'é', '']
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        """Adds an id; returns the further characters that are complete now, maybe none."""
        return self.decoder.decode(self.tokenizer.token(id))

    def flush(self) -> str:
        """Ends the text: returns U+FFFD if the last character is not complete, else "". Another text may follow."""
        return self.decoder.decode(b"", final=True)


class Bytes(Tokenizer):
    """Every byte is its own id, 0 to 255.

    Example
    -------
    >>> Bytes().encode("né")
    [110, 195, 169]
    """

    def __init__(self):
        super().__init__({byte: bytes([byte]) for byte in range(256)})

    def encode(self, text: str | bytes) -> list[int]:
        """The bytes of `text`, a str in UTF-8."""
        return list(self.utf8(text))


class World(Tokenizer):
    """The vocabulary of the RWKV World models. A text is encoded from left to right; each id is that of the longest
    token with which the rest of the text begins.

    Tokens are bytes, and every single byte is one, so that every text can be encoded, and `decode_bytes` returns it.
    Id 0 ends a text; no text is encoded to it, and it decodes to nothing.

    Parameters
    ----------
    tokens : the bytes of all tokens in the order of their ids, from id 1; no two are equal

    Example
    -------
    >>> world = World.from_file("rwkv_vocab_v20230424.txt")     # doctest: +SKIP
    >>> world.encode("The quick brown fox")                     # doctest: +SKIP
    [6699, 39418, 37917, 21704]
    """

    end = 0

    def __init__(self, tokens: Sequence[bytes]):
        super().__init__({self.end: b"", **dict(enumerate(tokens, 1))})
        self.ids = {token: id for id, token in enumerate(tokens, 1)}
        if missing := 256 - sum(bytes([byte]) in self.ids for byte in range(256)):
            raise ContractError(f"World: tokens lack {missing} of the 256 single bytes, expected all of them")
        lengths = defaultdict(set)
        for token in tokens:
            if len(token) >= START:
                lengths[token[:START]].add(len(token))
        # {the first START bytes of tokens: the lengths of those tokens and SHORT, falling}
        self.lengths = {start: (*sorted(several, reverse=True), *SHORT) for start, several in lengths.items()}

    @classmethod
    def from_file(cls, path: str | Path) -> World:
        """The vocabulary in a text file with lines `id 'literal' length`.

        ContractError for a damaged line, which it names, and for a FIFO or a device; OSError if it cannot be read.
        """
        return cls(read_vocabulary(path))

    @classmethod
    def installed(cls) -> World:
        """The vocabulary that an installed package `pyrwkv-tokenizer` or `rwkv` contains; it is not imported."""
        for package in PACKAGES:
            spec = importlib.util.find_spec(package)
            for folder in (spec and spec.submodule_search_locations) or ():
                if (path := Path(folder) / VOCABULARY).is_file():
                    return cls.from_file(path)
        raise FileNotFoundError(
            f"World.installed: no installed package bundles {VOCABULARY}: "
            "pip install 'linattn-np[world]', or give its path to World.from_file (--vocab)"
        )

    def encode(self, text: str | bytes) -> list[int]:
        """The ids of `text`, a str in UTF-8."""
        # The next START bytes leave few lengths to try. Looking these up in a dict is faster than a trie in Python.
        data, ids, lengths = self.utf8(text), self.ids, self.lengths
        ids_of_text, start = [], 0
        while start < len(data):
            for length in lengths.get(data[start : start + START], SHORT):
                id = ids.get(data[start : start + length])
                if id is not None:
                    ids_of_text.append(id)
                    start += length  # more than the token's bytes only if it ends the text, and so the loop
                    break
        return ids_of_text


def read_vocabulary(path) -> list[bytes]:
    """The tokens in a vocabulary's file, in the order of their ids: at least TOKENS. Fewer are a file that was cut
    off; more are tokens that were added to the published ones."""
    line_of_token: dict[bytes, int] = {}  # the line of each token so far
    try:
        with files.opened(path) as file:
            for number, line in files.lines(file, MAX_LINE):
                token = parse(line.rstrip(b"\r\n"), number)
                if token in line_of_token:
                    earlier = f"the token {shortened(token)} of line {line_of_token[token]}"
                    refuse_line(number, f"has {earlier} again, expected a new one")
                line_of_token[token] = number
    except ContractError as error:
        # `refuse_line` and files.lines begin with the line, other errors (of files.opened) with a verb.
        comma = "," if str(error).startswith("line ") else ""
        raise ContractError(f"World.from_file: {path}{comma} {error}") from None
    if len(line_of_token) < TOKENS:
        raise ContractError(f"World.from_file: {path} ends after {len(line_of_token)} lines, expected {TOKENS}")
    return list(line_of_token)


def parse(line: bytes, number: int) -> bytes:
    """The token of a line. Ids must be the lines' numbers, so that a missing line is noticed."""
    match = LINE.fullmatch(line)
    if not match:
        refuse_line(number, f"is {shortened(line)}, expected: id 'literal' length")
    id, literal, _, length = match.groups()
    if int(id) != number:
        refuse_line(number, f"has id {int(id)}, expected {number}")
    try:
        token = ast.literal_eval(literal.decode())
        token = token.encode() if isinstance(token, str) else token
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        token = None
    if not isinstance(token, bytes) or not token:
        refuse_line(number, f"has the literal {shortened(literal)}, expected str or bytes of at least one byte")
    if len(token) != int(length):
        refuse_line(number, f"has the token {shortened(token)}: {len(token)} bytes, it declares {int(length)}")
    return token


def refuse_line(number, complaint) -> NoReturn:
    raise ContractError(f"line {number} {complaint}")


def shortened(text: bytes) -> str:
    return repr(text if len(text) <= 60 else text[:60] + b"...")
