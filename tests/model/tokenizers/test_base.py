"""Streaming equals decoding the whole, for any split, and nothing of a stop string leaks."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ropewalk.model.tokenizers.base import (
    Detokenizer,
    InvalidText,
    StopText,
    decode,
    require_unicode,
)
from tests.model.tokenizers.samples import BytesTokenizer

pieces = st.lists(
    st.one_of(
        st.text(alphabet="ab €😀", max_size=4).map(str.encode),
        st.sampled_from([bytes([b]) for b in "€😀éab".encode()]),
        st.binary(max_size=3),
    ),
    max_size=30,
)
stops = st.lists(st.text(alphabet="ab €😀\ufffd", min_size=1, max_size=5), max_size=3)


class Stopping:
    """An answer's text: that of its tokens, up to a stop string."""

    def __init__(self, tokenizer, stop_strings=(), *, include_stop=False):
        self.tokens = Detokenizer(tokenizer)
        self.stops = StopText(stop_strings, include_stop=include_stop)

    def push(self, token):
        return self.stops.push(self.tokens.push(token))

    def finish(self):
        return self.stops.push(self.tokens.finish()) + self.stops.finish()

    @property
    def stopped_by(self):
        return self.stops.stopped_by


def cut(text, stop_strings, *, include_stop=False):
    """The text up to the stop string that completes first, found the slow and obvious way."""
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stop_strings if text[:end].endswith(stop)]
        if found:
            return text[: end if include_stop else end - max(found)], True
    return text, False


def held_back(text, stop_strings):
    """How many characters at the end may still become a stop string, the slow way."""
    lengths = [
        size for stop in stop_strings for size in range(1, len(stop)) if text.endswith(stop[:size])
    ]
    return max(lengths, default=0)


@given(pieces, stops, st.booleans())
@example([b"\xf0\x9f\x98", b"a"], ["a"], False)
@example([b"aab"], ["ab", "aaa"], False)
@example([b"ab"], ["b", "ab"], False)
@example([b"x\xe2"], ["\ufffd"], True)
def test_pieces_join_to_the_whole_text_cut_at_the_stop(pieces, stop_strings, include_stop):
    detokenizer = Stopping(BytesTokenizer(pieces), stop_strings, include_stop=include_stop)
    streamed = [detokenizer.push(token) for token in range(len(pieces))]
    streamed.append(detokenizer.finish())
    whole = b"".join(pieces).decode(errors="replace")
    expected, stopped = cut(whole, stop_strings, include_stop=include_stop)
    assert "".join(streamed) == expected
    assert (detokenizer.stopped_by in stop_strings) == stopped
    if stopped:
        assert detokenizer.push(0) == ""
    assert detokenizer.finish() == ""


@given(st.lists(st.text(alphabet="ab€", max_size=3), max_size=20), stops)
def test_no_more_is_held_back_than_may_become_a_stop(texts, stop_strings):
    detokenizer = Stopping(BytesTokenizer([text.encode() for text in texts]), stop_strings)
    known = sent = ""
    for token, text in enumerate(texts):
        known += text
        sent += detokenizer.push(token)
        expected, stopped = cut(known, stop_strings)
        if stopped:
            assert sent == expected
            return
        assert sent == known[: len(known) - held_back(known, stop_strings)]


def test_a_character_is_sent_with_its_last_byte():
    data = "a😀é".encode()
    detokenizer = Detokenizer(BytesTokenizer([bytes([byte]) for byte in data]))
    sent = [detokenizer.push(token) for token in range(len(data))]
    assert sent == ["a", "", "", "", "😀", "", "é"]


def test_an_unfinished_character_is_replaced_at_the_end_only():
    detokenizer = Detokenizer(BytesTokenizer([b"a\xf0\x9f\x98"]))
    assert detokenizer.push(0) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_a_completion_keeps_its_leading_space_and_a_text_does_not():
    tokenizer = BytesTokenizer([b"", b" a", b" b"])
    assert decode(tokenizer, [0, 1, 2]) == "a b"
    for first, expected in [(False, " a b"), (True, "a b")]:
        detokenizer = Detokenizer(tokenizer, first=first)
        assert "".join(map(detokenizer.push, [0, 1, 2])) == expected


def test_a_special_token_may_be_part_of_the_text():
    tokenizer = BytesTokenizer([b"a\xf0\x9f", b"", b"b"])
    tokenizer.name = lambda token: "<end>" if token == 1 else ""
    for named, expected in [(("<end>",), ["a", "\ufffd<end>", "b"]), ((), ["a", "", "\ufffdb"])]:
        assert [*map(Detokenizer(tokenizer, named=named).push, range(3))] == expected


def test_only_one_token_is_the_first():
    assert decode(BytesTokenizer([b" ", b" a"]), [0, 1]) == " a"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        Stopping(BytesTokenizer([]), ["a", ""])


def test_a_lone_surrogate_is_named_with_its_place():
    with pytest.raises(InvalidText, match=r"U\+D83D.* at character 2"):
        require_unicode("ab\ud83d")
    require_unicode("ab\U0001f600")
