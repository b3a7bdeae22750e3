"""Text as it comes: stop strings in pieces, the end of a text, ids without text, and texts side by side."""

from itertools import islice, product

import numpy as np
import pytest

from linattn_np import ContractError
from linattn_np.models import Bytes, Sampling, World
from linattn_np.models.prompt_reading import PIECE, read
from linattn_np.models.text import Request, Text, complete

GREEDY = Sampling(temperature=0)


def fed(tokens, text):
    """What `text` returns until it is finished."""
    pieces = []
    for token in tokens:
        pieces.append(text.feed(token))
        if text.finish:
            break
    return pieces


def before_stop(text, stop):
    """The text before the stop string that is complete first; all of it without one."""
    ends = [(text.index(string) + len(string), text.index(string)) for string in stop if string in text]
    return text[: min(ends)[1]] if ends else text


@pytest.mark.parametrize("stop", [["aba"], ["ab", "b"], ["aab", "abb", "bbb"], ["abab", "ba"], ["aaaa"]], ids=" ".join)
def test_every_text_of_two_letters_is_cut_where_it_must_be(stop):
    for letters in product("ab", repeat=8):
        letters = "".join(letters)
        text = Text(Bytes(), length=8, stop=stop)
        assert "".join(fed(letters.encode(), text)) == before_stop(letters, stop)
        assert text.finish == ("stop" if any(string in letters for string in stop) else "length")


def test_a_token_may_hold_more_than_the_stop_string():
    world = World([bytes([byte]) for byte in range(256)] + [b"abcd", b"xab"])
    text = Text(world, stop=["bc"])
    assert fed(world.encode("xabcd"), text) == ["xa", ""] and text.finish == "stop"
    assert fed(world.encode("abcd"), Text(world, stop=["abcd", "bc"])) == ["a"]  # "bc" is complete first


def test_nothing_is_held_that_no_stop_string_begins_with():
    assert fed(b"no", Text(Bytes(), stop=["\n\n"])) == ["n", "o"]
    assert fed(b"\na", Text(Bytes(), stop=["\n\n"])) == ["", "\na"]


def test_length_gives_back_what_was_held():
    text = Text(Bytes(), length=2, stop=["\n\n"])
    assert fed(b"a\n", text) == ["a", "\n"] and (text.finish, text.count) == ("length", 2)
    assert fed("é".encode()[:1], Text(Bytes(), length=1)) == ["\ufffd"]


def test_the_ending_id_ends_the_text():
    world = World([bytes([byte]) for byte in range(256)])
    text = Text(world, stop=["bb"])
    assert fed([*world.encode("ab"), 0, *world.encode("c")], text) == ["a", "", "b"]
    assert (text.finish, text.count) == ("end", 3)
    assert fed([0], Text(Bytes(), length=1)) == ["\0"]  # a byte like any other


@pytest.mark.parametrize("stop", ["ab", [""], [3]])
def test_stop_strings_that_are_refused(stop):
    with pytest.raises(ContractError, match="Text: stop (is|holds) .*, expected (a sequence of )?strings, none"):
        Text(Bytes(), stop=stop)


def test_ids_past_the_vocabulary_are_never_drawn():
    logits = np.array([0.0, 1.0, 9.0, 9.0])
    assert Sampling(temperature=0, vocabulary=2).sampler()(logits) == 1
    sampler = Sampling(vocabulary=2, seed=0).sampler()
    assert {sampler(logits) for _ in range(50)} == {0, 1}
    for wrong in (0, 1.5, True):
        with pytest.raises(ContractError, match="Sampling: vocabulary is"):
            Sampling(vocabulary=wrong)


def test_a_long_prompt_is_read_in_pieces(austen):
    prompt, seen = list(b"Anne " * 300), []
    rest, state = read(austen, prompt, progress=seen.append)
    assert seen == [PIECE, 2 * PIECE] and rest == prompt[2 * PIECE :]
    pieces, _ = austen.forward([rest], state, last=True)
    whole, _ = austen.forward([prompt], last=True)
    np.testing.assert_allclose(pieces, whole, rtol=0, atol=1e-3)
    assert read(austen, prompt[:PIECE])[0] == prompt[:PIECE]


def test_a_state_that_is_gone_on_from_is_left_alone(austen):
    _, state = austen.forward([list(b"Mr. Kn")])
    before = state.copy()
    requests = [Request(list(b"ight"), GREEDY, 3, state=state), Request(list(b"ight"), GREEDY, 3, state=state)]
    assert [text for _, text, _ in complete(austen, Bytes(), requests, slots=2)] == ["ley", "ley"]
    np.testing.assert_array_equal(state.wkv, before.wkv)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_texts_side_by_side_are_what_they_are_alone(austen, slots):
    prompts, lengths = (b"Miss Woodh", b"Mr. Darc", b"Captain Went", b"It is a tru"), (20, 20, 2, 20)
    requests = [Request(list(prompt), GREEDY, length, [" "]) for prompt, length in zip(prompts, lengths)]
    done = {number: text for number, text, _ in complete(austen, Bytes(), requests, slots)}
    assert done == {
        number: bytes(islice(austen.generate(prompt, temperature=0), length)).decode().split(" ")[0]
        for number, (prompt, length) in enumerate(zip(prompts, lengths))
    }


def test_one_request_that_fails_ends_alone(austen):
    def request(prompt=b"Miss Woodh", how=GREEDY, **others):
        return Request(list(prompt), how, **{"length": 3, **others})

    requests = [
        request(),
        request([256]),
        request(how="hot"),
        request(length=0),
        request(stop=3),
        request(prompt=b""),
        request(state=austen.initial_state(2)),
        request(),
    ]
    done = {number: (piece, text.finish, text.error) for number, piece, text in complete(austen, Bytes(), requests, 2)}
    assert done.pop(0) == done.pop(7) == ("ous", "length", None)
    assert {(piece, finish) for piece, finish, _ in done.values()} == {("", "error")}
    owner = austen.version.owner
    assert [done[number][2].split(", expected")[0] for number in sorted(done)] == [
        f"{owner}: tokens runs from 256 to 256, but the vocabulary has 256 tokens",
        "Request: how is a str",
        "Text: length is 0",
        "Text: stop is 3",
        f"{owner}: tokens is (1, 0)",
        f"{owner}: state.att_shift is (4, 2, 256)",
    ]


def test_nothing_but_requests_that_fail(austen):
    done = list(complete(austen, Bytes(), [Request([256], GREEDY)] * 5, slots=2))
    assert [number for number, _, _ in done] == list(range(5)) and {text.finish for _, _, text in done} == {"error"}


def test_logits_that_are_no_numbers_end_one_text(austen):
    """A state with a NaN in it, as weights that overflow make one, spoils what goes on from it alone."""
    _, lost = austen.forward([list(b"Mr. Kn")])
    lost.wkv[0, 0, 0, 0, 0] = np.nan
    requests = [Request(list(b"Miss Woodh"), GREEDY, 3), Request(list(b"ight"), GREEDY, 3, state=lost)]
    done = {number: (piece, text.finish, text.error) for number, piece, text in complete(austen, Bytes(), requests, 2)}
    assert done == {
        0: ("ous", "length", None),
        1: ("", "error", "logits are nan for token 0, expected numbers below inf"),
    }


def test_a_text_can_be_closed():
    text = Text(Bytes(), stop=["END"])
    assert fed(b"an E", text) == ["a", "n", " ", ""]
    assert (text.close("interrupt"), text.finish) == ("E", "interrupt")


def test_no_request_is_no_text(austen):
    assert list(complete(austen, Bytes(), [], slots=2)) == []
