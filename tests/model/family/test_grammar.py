"""Which sentences are judged, and that the judgement is the parser's."""

import random
import shutil

import pytest

from tests.model.family.grammar import PARSER, sentences, shuffled, taken

NEEDS_PARSER = pytest.mark.skipif(
    shutil.which(PARSER) is None, reason=f"{PARSER} is not installed (Debian: link-grammar)"
)
GOOD = (
    "The captain looked at the sea and saw his sons.",
    "And he went up to the house of the king.",
    "Have you ever seen such a thing before?",
)
BAD = ("His sanctify him, whom he had.", "Of sea the house king up and went.")


def test_sentences_end_and_have_so_many_words() -> None:
    text = (
        'CHAPTER I\n\nThe old man\nsaid: "Come here, Mr. Elton, at once!" She came. '
        "He went into\nthe house and slept? Then he said that it was 3.5 and went on to the"
    )
    assert sentences(text) == [
        "The old man said: Come here, Mr. Elton, at once!",
        "He went into the house and slept?",
    ]
    assert sentences(f"{'word ' * 39}end.") and not sentences(f"{'word ' * 40}end.")


def test_shuffled_words_are_the_same_ones() -> None:
    mixed = shuffled("And he went up, to the house of the king.", random.Random(0))
    assert sorted(mixed[:-1].lower().split()) == sorted(
        ["and", "he", "went", "up", "to", "the", "house", "of", "the", "king"]
    )
    assert mixed[0].isupper() and mixed[-1] == "."


@NEEDS_PARSER
def test_the_parser_tells_sentences_from_others() -> None:
    parser = shutil.which(PARSER)
    given = [*GOOD, *BAD, "!exit now and say nothing more.", "* Stars are no commands here."]
    assert taken(given, parser)[: len(GOOD) + len(BAD)] == [True] * len(GOOD) + [False] * len(BAD)
    assert taken([], parser) == []


def test_a_parser_that_fails_is_told() -> None:
    with pytest.raises(ValueError, match="judged 0"):
        taken(["He went home to her."], "false")
