"""Every token is a number one can read, and every text is some tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.model.tokenizers.base import InvalidText, decode
from ropewalk.model.tokenizers.numbers import NumberTokenizer

TOKENIZER = NumberTokenizer(300)


@given(st.lists(st.integers(0, 299)))
def test_what_a_model_writes_becomes_the_same_tokens_again(tokens) -> None:
    assert TOKENIZER.encode(decode(TOKENIZER, tokens), bos=False) == tokens


def test_every_token_has_text_of_its_own() -> None:
    pieces = [TOKENIZER.token_bytes(token, first=True) for token in range(300)]
    assert len(set(pieces)) == 300
    assert all(piece.strip() for piece in pieces)
    assert TOKENIZER.token_bytes(300, first=False) == TOKENIZER.token_bytes(-1, first=False) == b""


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_has_a_token_for_each_word(text) -> None:
    tokens = TOKENIZER.encode(text, bos=True)
    assert len(tokens) == len(text.split())
    assert all(0 <= token < 300 for token in tokens)


def test_words_are_told_apart() -> None:
    words = ["299", "0299", "300", "1" * 5000, "²", "٧", "rope", "walk"]
    tokens = TOKENIZER.encode(" ".join(words), bos=False)
    assert tokens[0] == 299
    assert len(set(tokens)) == len(words)
    assert tokens == TOKENIZER.encode("\n".join(words), bos=False)


def test_half_a_character_is_refused() -> None:
    with pytest.raises(InvalidText):
        TOKENIZER.encode("\ud800", bos=False)
