"""Which sentences are judged, and that the judgement is the parser's."""

import random
import shutil

import pytest
import torch

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.evaluation import grammar
from ropewalk.model.family.evaluation.grammar import (
    PARSER,
    PEOPLE,
    asked,
    judge,
    sentences,
    shuffled,
    taken,
    write,
)
from ropewalk.model.family.texts.corpus import Corpus, Split
from ropewalk.model.family.texts.prepare import SHIPPED_TOKENIZER
from ropewalk.model.tokenizers.spm import SpmModel, SpmTokenizer
from ropewalk.report.statistics import wilson

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


@pytest.fixture
def program(tmp_path):
    def make(script):
        path = tmp_path / "parser"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        return str(path)

    return make


def test_a_parser_that_fails_is_told(program) -> None:
    with pytest.raises(FamilyError, match=r"judged 0 of 1 sentences: no words; is its English"):
        taken(["He went home to her."], program("echo no words >&2; exit 1"))


def tokenizer():
    return SpmTokenizer(SpmModel(SHIPPED_TOKENIZER.read_bytes()))


class Says:
    """Writes a text after any prompt, whatever is drawn."""

    def __init__(self, spoken, text):
        self._tokens = spoken.encode(text, bos=False)
        self._spoken, self._next = spoken, 0

    def read(self, tokens, *, wanted, start=0):
        self._next = 0 if start == 0 else self._next + 1
        row = torch.full((1, self._spoken.vocab_size), -torch.inf)
        row[0, self._tokens[self._next % len(self._tokens)]] = 0.0
        return row


def split(spoken, text):
    return Split.of([("tales/one", [spoken.bos, *spoken.encode(text, bos=False)])])


def test_shares_are_of_own_sentences_and_of_people_s_as_long(program, monkeypatch) -> None:
    """Of a parser to which a sentence is wrong when it has the word *bad*."""
    spoken = tokenizer()
    said = " went into his house. The whale was a very bad one. The king was a very good one."
    said += " And then the big bad whale said nothing at all."
    monkeypatch.setattr(grammar, "PROMPTS", ("The old man", "A young one"))
    monkeypatch.setattr(grammar, "TOKENS", len(spoken.encode(said, bos=False)))
    held_out = "She had a bad day there too. He had another bad day there too. He had one."
    held_out += " She had one of the very good days at last."
    trained = "It was so. The king was a very good one. He slept."
    corpus = Corpus(split(spoken, trained), split(spoken, held_out), "f" * 64, b"")
    parser = program(
        'while read -r line; do echo " $line"; '
        'case "$line" in *[Bb]ad*) echo "+++++ error 1";; esac; done'
    )
    monkeypatch.setattr(grammar, "AT_ONCE", 7)
    written, judged = [], []
    texts = write(Says(spoken, said), spoken, 3, written.append)
    wanted = asked(texts, spoken, corpus)
    found = judge(wanted, parser, judged.append)
    assert [one.temperature for one in found] == list(grammar.TEMPERATURES)
    assert sum(written) == 2 * 2 * 3
    assert sum(judged) == sum(map(len, wanted)) == 2 * 12 * (1 + 2 * PEOPLE)
    for one in found:
        assert (one.shortest, one.longest) == (5, 20)
        assert (one.sentences, one.copied) == (12, 12)  # one is in the texts, one made up
        assert one.written == wilson(6, 12)
        assert one.people == one.shuffled == wilson(0, 12 * PEOPLE)


def test_without_a_sentence_to_judge_there_is_no_share(program) -> None:
    spoken = tokenizer()
    corpus = Corpus(split(spoken, "It was so."), split(spoken, "He had one."), "f" * 64, b"")
    texts = write(Says(spoken, "and then"), spoken, 1, id)
    assert asked(texts, spoken, corpus) == [] and judge([], program("exit 1"), id) == ()
