"""Tokenizers: ids against the published packages' ones, damaged vocabularies, text that streams.

The ids in data/world_ids.json were made by the `rwkv` package with data/world_ids.py. Comparing with them takes
the official vocabulary, which the `test` extra installs with pyrwkv-tokenizer, a wheel of 1.4 MB without
dependencies. All else is tested on a vocabulary made here.
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from linattn_np import ContractError
from linattn_np.models.tokenizers import TOKENS, VOCABULARY, Bytes, World

GOLDEN = json.loads((Path(__file__).parent / "data" / "world_ids.json").read_text())
TEXTS = {name: case["text"] for name, case in GOLDEN["texts"].items()}
SINGLE = [bytes([byte]) for byte in range(256)]
LONGER = [
    b"ab",
    b"abc",
    b"abcabc",
    b"bca",
    b"cc",
    b"c" * 9,
    "é".encode(),
    "日本".encode(),
    b"\xa5\xe6",
    b"'\"\\'",
    b"\r\n",
]
FILLING = [f"<{number}>".encode() for number in range(TOKENS - len(SINGLE + LONGER))]


def line(id, token):
    """As in the official file: a str where the bytes are UTF-8."""
    try:
        literal = token.decode()
    except UnicodeDecodeError:
        literal = token
    return f"{id} {literal!r} {len(token)}"


@pytest.fixture(scope="module")
def lines():
    """A whole vocabulary in its text form."""
    return [line(id, token) for id, token in enumerate(SINGLE + LONGER + FILLING, 1)]


@pytest.fixture
def written(tmp_path, lines):
    """A function that writes the vocabulary, or other lines, to a file."""

    def write(lines=lines, newline="\n"):
        path = tmp_path / VOCABULARY
        path.write_bytes("".join(line + newline for line in lines).encode())
        return path

    return write


@pytest.fixture(scope="module")
def small():
    return World(SINGLE + LONGER)


@pytest.fixture(scope="module")
def official():
    try:
        return World.installed()
    except FileNotFoundError as why:
        pytest.skip(str(why))


@pytest.fixture(params=["Bytes", "World"])
def tokenizer(request, small):
    return {"Bytes": Bytes(), "World": small}[request.param]


# -- ids of the published packages ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TEXTS)
def test_ids_of_text_are_the_published_ones(official, name):
    assert official.encode(TEXTS[name]) == GOLDEN["texts"][name]["ids"]


def test_ids_of_random_bytes_are_the_published_ones(official):
    assert official.encode(bytes.fromhex(GOLDEN["bytes"]["hex"])) == GOLDEN["bytes"]["ids"]


def test_ids_of_random_text_are_the_published_ones(official, rng):
    peer = pytest.importorskip("pyrwkv_tokenizer", reason="its package is not installed").RWKVTokenizer()
    for highest in (0x7F, 0x7FF, 0xD7FF, 0x10FFFF):
        points = rng.integers(0, highest + 1, 2000)
        text = "".join(map(chr, points[(points < 0xD800) | (points > 0xDFFF)]))
        assert official.encode(text) == peer.encode(text)


def test_official_vocabulary(official):
    assert (len(official.tokens) - 1, official.size, official.end) == (65_529, 65_530, 0)
    assert all(official.encode(token) == [id] for id, token in official.tokens.items() if id)


# -- encode and decode ----------------------------------------------------------------------------------------------
def test_every_id_is_the_longest_match(small):
    for text in map(bytes, product(b"abc", repeat=7)):
        rest = text
        for id in small.encode(text):
            token = max(filter(rest.startswith, SINGLE + LONGER), key=len)
            assert small.tokens[id] == token
            rest = rest[len(token) :]
        assert not rest


def test_ids_of_a_known_text(small):
    assert small.encode("abcabcé日本z") == [259, 263, 264, 123]
    assert small.encode(b"c" * 20) == [262, 262, 261]
    assert Bytes().encode("aé") == [97, 195, 169]


@pytest.mark.parametrize("name", TEXTS)
def test_text_comes_back(tokenizer, name):
    ids = tokenizer.encode(TEXTS[name])
    for same in (ids, np.array(ids, np.int32), iter(ids)):
        assert tokenizer.decode(same) == TEXTS[name]
    assert all(type(id) is int and 0 <= id < tokenizer.size for id in ids)


def test_random_bytes_come_back(tokenizer, rng):
    for length in range(100):
        data = rng.bytes(length)
        assert tokenizer.decode_bytes(tokenizer.encode(data)) == data


def test_bad_utf8_is_replaced(tokenizer):
    assert tokenizer.decode(tokenizer.encode(b"a\xffb\xe6\x97")) == "a\ufffdb\ufffd"


def test_the_end_of_a_text_has_no_text(small):
    assert small.decode([98, small.end, 99]) == "ab"
    assert small.end not in small.encode(bytes(range(256)))
    assert Bytes.end is None


@pytest.mark.parametrize(
    "ids", [[-1], [97, 268], [10**30], [1.0], [True], ["a"], [None], np.zeros((2, 2), int)], ids=repr
)
def test_wrong_ids_are_refused(tokenizer, ids):
    wanted = f"expected whole numbers from 0 to {tokenizer.size - 1}"
    with pytest.raises(ContractError, match=rf"decode: ids holds .*, {wanted}"):
        tokenizer.decode(ids)


def test_wrong_texts_are_refused(tokenizer):
    with pytest.raises(TypeError, match="encode: text is a list, expected str or bytes"):
        tokenizer.encode([97])
    with pytest.raises(ContractError, match=r"encode: text has '\\ud83d' at position 2, which UTF-8"):
        tokenizer.encode("ab\ud83d")


# -- streams --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TEXTS)
def test_a_stream_never_breaks_a_character(tokenizer, name):
    stream = tokenizer.stream()
    pieces = [stream.feed(id) for id in tokenizer.encode(TEXTS[name])]
    assert "".join(pieces) == TEXTS[name] and not any("\ufffd" in piece for piece in pieces)
    assert stream.flush() == ""


def test_a_stream_gives_a_character_with_its_last_byte():
    stream = Bytes().stream()
    assert [stream.feed(id) for id in "aé😀".encode()] == ["a", "", "é", "", "", "", "😀"]


def test_a_stream_of_random_bytes_is_their_text(tokenizer, rng):
    stream = tokenizer.stream()  # one for all: a flushed stream is as new
    for length in range(300):
        data = bytes(rng.choice(list(b"a\x80\xbf\xc3\xe6\x97\xa5\xed\xf0\x9f\xf4\xff"), length).tolist())
        streamed = "".join(map(stream.feed, tokenizer.encode(data))) + stream.flush()
        assert streamed == tokenizer.decode(tokenizer.encode(data)) == data.decode("utf-8", "replace")


def test_a_stream_cut_within_a_character(tokenizer):
    stream = tokenizer.stream()
    assert [stream.feed(id) for id in tokenizer.encode(b"\xf0\x9f")] == ["", ""]
    assert (stream.flush(), stream.flush()) == ("\ufffd", "")
    with pytest.raises(ContractError, match="ids holds 999"):
        stream.feed(999)


# -- vocabularies ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_vocabulary_is_read_from_its_file(written, newline):
    world = World.from_file(str(written(newline=newline)))
    assert list(world.tokens.values()) == [b"", *SINGLE, *LONGER, *FILLING]


DAMAGE = {  # line 300, or what stands in its place, and the complaint
    "empty": ("", r"is b'', expected: id 'literal' length"),
    "no literal": ("300 9", r"is b'300 9', expected: id"),
    "no length": ("300 'spam'", r"is b.*, expected: id 'literal' length"),
    "cut within the literal": ("300 'sp", r"is b.*, expected: id 'literal' length"),
    "not ASCII digits": ("३०० 'spam' 4", r"is b.*, expected: id 'literal' length"),
    "negative length": ("300 'spam' -4", r"is b.*, expected: id 'literal' length"),
    "binary": ("\0" * 1000, r"is b'(\\x00){60}\.\.\.', expected: id"),
    "code": ("300 __import__('os').abort() 4", r"is b.*, expected: id 'literal' length"),
    "code between quotes": ("300 ''.join('spam') + '' 4", r"has the literal .*, expected str or bytes"),
    "f-string": ("300 f'{spam}' 4", r"is b.*, expected: id 'literal' length"),
    "two literals": ("300 'sp', 'am' 4", r"has the literal .*, expected str or bytes"),
    "an escape cut short": ("300 '\\x' 1", r"has the literal .*, expected str or bytes"),
    "half of a surrogate pair": ("300 '\\ud83d' 3", r"has the literal .*, expected str or bytes"),
    "deep": ("300 '' + " + "(" * 5000 + "'' 0", r"has the literal .*, expected str or bytes"),
    "no bytes": ("300 '' 0", r"has the literal b\"''\", expected str or bytes of at least one byte"),
    "wrong length": ("300 'spam' 5", r"has the token b'spam': 4 bytes, it declares 5"),
    "length in characters": ("300 'é!' 2", r"has the token .*: 3 bytes, it declares 2"),
    "an id twice": ("299 'spam' 4", r"has id 299, expected 300"),
    "a token twice": ("300 'ab' 2", r"has the token b'ab' of line 257 again, expected a new one"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_refused(written, lines, damage):
    found, complaint = DAMAGE[damage]
    with pytest.raises(ContractError, match=rf"World\.from_file: .*{VOCABULARY}, line 300 {complaint}"):
        World.from_file(written([*lines[:299], found, *lines[300:310]]))


def test_a_lost_line_is_refused(written, lines):
    with pytest.raises(ContractError, match=r"line 300 has id 301, expected 300"):
        World.from_file(written(lines[:299] + lines[300:]))


@pytest.mark.parametrize("count", [0, 299, TOKENS - 1])
def test_a_file_that_was_cut_short_is_refused(written, lines, count):
    with pytest.raises(ContractError, match=rf"ends after {count} lines, expected {TOKENS}"):
        World.from_file(written(lines[:count]))


def test_what_goes_on_for_ever_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero", tmp_path):
        with pytest.raises(ContractError, match=f"World.from_file: {path} is a folder or a device, expected a file"):
            World.from_file(path)
    (tmp_path / "long").write_bytes(b"1 '" + b"a" * 3_000_000 + b"' 3000000\n")
    with pytest.raises(ContractError, match="World.from_file: .*long, line 1 has more than 65536 bytes, expected"):
        World.from_file(tmp_path / "long")


def test_every_byte_must_be_a_token():
    with pytest.raises(ContractError, match="tokens lack 2 of the 256 single bytes"):
        World(SINGLE[1:-1] + LONGER)


def test_a_bundled_vocabulary_is_read_without_importing_its_package(written, monkeypatch, tmp_path):
    package = tmp_path / "pyrwkv_tokenizer"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    written().rename(package / VOCABULARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyrwkv_tokenizer", raising=False)
    assert World.installed().size == TOKENS + 1


def test_no_bundled_vocabulary():
    """In a process of its own, where no other test has imported such a package."""
    script = (
        "import sys; from linattn_np.models.tokenizers import World; sys.path.clear()\n"
        "try: World.installed()\n"
        "except FileNotFoundError as error: print(error)"
    )
    printed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "no installed package bundles" in printed and "pip install 'linattn-np[world]'" in printed
