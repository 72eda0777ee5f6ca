"""Which sentences of a model are grammatical, as judged by a parser for English.

Link Grammar (Sleator and Temperley 1993, arXiv cmp-lg/9508004) accepts a sentence when links that
its dictionary allows connect all of its words. It knows today's English and rejects many sentences
of old books.
"""

import os
import random
import re
import subprocess
from collections.abc import Sequence

from ropewalk.model.family.texts.recall import _DEEDS

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
LENGTHS = range(5, 41)  # of sentences, in words
_END = re.compile(
    r"(?:(?<=[.!?])(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)[\"')]*\s+(?=[\"'(]*[A-Z]))|\n\s*\n"
)


def sentences(text: str) -> list[str]:
    """Complete sentences with lengths in LENGTHS, on one line each and without double quotes."""
    pieces = (" ".join(piece.replace('"', " ").split()) for piece in _END.split(text))
    ended = [each for each in pieces if each[-1:] in (".", "!", "?")]
    return [each for each in ended if len(each.split()) in LENGTHS]


def shuffled(sentence: str, drawn: random.Random) -> str:
    """Its words in another order, as a sentence without inner punctuation."""
    words = [word.strip(",;:()") for word in sentence[:-1].split()]
    return " ".join(drawn.sample(words, len(words))).capitalize() + sentence[-1]


def taken(sentences: Sequence[str], parser: str) -> list[bool]:
    """Whether the parser links all words of each."""
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
    assert len(found) == len(sentences), f"{parser} judged {len(found)}: {answer.stderr}"
    return found


def is_made_up(sentence: str) -> bool:
    """Whether it contains a phrase of the recall texts."""
    phrases = (" keeps the ", " keep the ", "Where does ", "Remember these words", "Say the words")
    return any(each in sentence for each in (*_DEEDS, *phrases))
