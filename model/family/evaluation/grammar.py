"""How much of a model's writing is grammatical, as judged by a parser for English.

Link Grammar (Sleator and Temperley 1993, arXiv cmp-lg/9508004) accepts a sentence when links that
its dictionary allows connect all of its words. It knows today's English and rejects many sentences
of old books. So it also judges sentences of the same lengths from held-out texts, written by
people, and these again with their words shuffled.
"""

import os
import random
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.evaluation.reading import Reads
from ropewalk.model.family.evaluation.samples import continuation
from ropewalk.model.family.texts.corpus import Corpus
from ropewalk.model.family.texts.recall import is_made_up
from ropewalk.model.tokenizers.base import Tokenizer
from ropewalk.report.statistics import Estimate, wilson

PARSER = "link-parser"  # Debian's package link-grammar
PROMPTS = (
    "The old man",
    "When the morning came, she",
    "It was a long time before",
    "My dear sister,",
    "The people of this country",
    "He went into the house and",
    "There was once a king who",
    "I have often thought that",
    "The captain looked at the sea and",
    "In the evening they",
    "She had never seen",
    "The government of the United States",
    "We came to a river and",
    "His mother said to him,",
    "The war",
    "Nothing could be more",
    "A young woman",
    "They were both",
    "The great whale",
    "If you will",
)
TOKENS = 160  # after each prompt
TEMPERATURES = (0.7, 1.0)
PEOPLE = 5  # sentences by people for each of a model's
AT_ONCE = 200  # sentences per run of the parser
LENGTHS = (range(5, 21), range(21, 41))  # ranges of sentence lengths in words, judged separately
_END = re.compile(
    r"(?:(?<=[.!?])(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)[\"')]*\s+(?=[\"'(]*[A-Z]))|\n\s*\n"
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """Shares of accepted sentences, with Wilson's intervals."""

    temperature: float
    shortest: int  # sentence length, in words
    longest: int
    sentences: int
    copied: int  # sentences left out: verbatim in the training texts, or like those of recall texts
    written: Estimate  # by the model
    people: Estimate  # from held-out texts
    shuffled: Estimate  # the same, with their words shuffled


@dataclass(frozen=True, slots=True)
class Asked:
    """Sentences of one temperature and range of lengths, for a parser to judge."""

    temperature: float
    lengths: range
    copied: int  # as in Grammar
    written: Sequence[str]
    people: Sequence[str]
    shuffled: Sequence[str]

    def __len__(self) -> int:
        return len(self.written) + len(self.people) + len(self.shuffled)


def write(
    reader: Reads, tokenizer: Tokenizer, draws: int, done: Callable[[int], object]
) -> Mapping[float, Sequence[str]]:
    """Texts by temperature: each prompt `draws` times, with a continuation; `done` after each."""
    texts: dict[float, list[str]] = {}
    for temperature, prompt, seed in product(TEMPERATURES, PROMPTS, range(draws)):
        text = prompt + continuation(reader, tokenizer, prompt, temperature, seed, TOKENS)
        texts.setdefault(temperature, []).append(text)
        done(1)
    return texts


def asked(
    texts: Mapping[float, Sequence[str]], tokenizer: Tokenizer, corpus: Corpus
) -> list[Asked]:
    """For each temperature and each of LENGTHS that occurs, with people's for comparison."""
    trained = corpus.train.tokens.tobytes()
    people = _by_words(sentences(_text(tokenizer, corpus.held_out.tokens.tolist())))
    found = []
    for temperature, own in texts.items():
        written = [one for text in own for one in sentences(text) if len(one.split()) in people]
        copied = {one for one in written if is_made_up(one) or _occurs(tokenizer, one, trained)}
        for lengths in LENGTHS:
            fitting = [one for one in written if len(one.split()) in lengths]
            kept = [one for one in fitting if one not in copied]
            if kept:
                left_out = len(fitting) - len(kept)
                found.append(Asked(temperature, lengths, left_out, kept, *_beside(kept, people)))
    return found


def judge(
    asked: Sequence[Asked], parser: str, done: Callable[[int], object]
) -> tuple[Grammar, ...]:
    """parser: PARSER's path. `done` gets numbers of judged sentences. Raises FamilyError."""

    def linked(sentences: Sequence[str]) -> Estimate:
        hits = 0
        for first in range(0, len(sentences), AT_ONCE):
            part = sentences[first : first + AT_ONCE]
            hits += sum(taken(part, parser))
            done(len(part))
        return wilson(hits, len(sentences))

    return tuple(
        Grammar(
            temperature=one.temperature,
            shortest=one.lengths[0],
            longest=one.lengths[-1],
            sentences=len(one.written),
            copied=one.copied,
            written=linked(one.written),
            people=linked(one.people),
            shuffled=linked(one.shuffled),
        )
        for one in asked
    )


def sentences(text: str) -> list[str]:
    """Complete sentences with lengths in LENGTHS, on one line each and without double quotes."""
    pieces = (" ".join(piece.replace('"', " ").split()) for piece in _END.split(text))
    ended = [each for each in pieces if each[-1:] in (".", "!", "?")]
    return [each for each in ended if any(len(each.split()) in lengths for lengths in LENGTHS)]


def shuffled(sentence: str, drawn: random.Random) -> str:
    """Its words in another order, as a sentence without inner punctuation."""
    words = [word.strip(",;:()") for word in sentence[:-1].split()]
    return " ".join(drawn.sample(words, len(words))).capitalize() + sentence[-1]


def taken(sentences: Sequence[str], parser: str) -> list[bool]:
    """Whether the parser links all words of each. Raises FamilyError when the parser fails."""
    options = ("-batch", "-echo=1", "-spell=0", "-limit=1000", "-timeout=10", "-panic=0")
    # The leading space keeps a sentence from being read as a command; as it is echoed, it also
    # distinguishes sentences from the messages about them.
    lines = "".join(f" {each}\n" for each in sentences)
    answer = subprocess.run(
        [parser, "en", *options],
        input=lines,
        capture_output=True,
        text=True,
        env=os.environ | {"LC_ALL": "C.UTF-8"},
        check=False,
    )
    found: list[bool] = []
    for line in answer.stdout.splitlines():
        if line.startswith(" "):
            found.append(True)
        elif line.startswith("+++++ error"):
            found[-1] = False
    if len(found) != len(sentences):
        raise FamilyError(
            f"{parser} judged {len(found)} of {len(sentences)} sentences: "
            f"{answer.stderr.strip()[-200:]}; is its English dictionary installed?"
        )
    return found


def _beside(written: Sequence[str], people: Mapping[int, list[str]]) -> tuple[list[str], list[str]]:
    """PEOPLE sentences by people for each sentence, of the same length, and these shuffled."""
    drawn = random.Random(0)
    theirs = [drawn.choice(people[len(one.split())]) for one in [*written] * PEOPLE]
    return theirs, [shuffled(one, drawn) for one in theirs]


def _by_words(found: Iterable[str]) -> Mapping[int, list[str]]:
    ordered: dict[int, list[str]] = {}
    for each in found:
        ordered.setdefault(len(each.split()), []).append(each)
    return ordered


def _text(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Decodes tokens; one without bytes starts a document, and so a paragraph."""
    pieces = (tokenizer.token_bytes(token, first=False) or b"\n\n" for token in tokens)
    return b"".join(pieces).decode(errors="replace")


def _occurs(tokenizer: Tokenizer, sentence: str, trained: bytes) -> bool:
    """Whether the sentence occurs, ignoring its first token, which may start a line there."""
    tokens = tokenizer.encode(sentence, bos=False)[1:]
    return np.asarray(tokens, dtype=np.uint16).tobytes() in trained
