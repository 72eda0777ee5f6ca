"""What a confined process does with grammars: shows that the library can compile and follow them.

The library bounds neither time nor memory of compiling. What passes here is compiled again in the
server.
"""

import json
import random
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from ropewalk.model.confined.inside import answer
from ropewalk.server.structured.grammar import Kind, prepared
from ropewalk.server.structured.matcher import LIMITS, mask_of
from ropewalk.server.structured.vocabulary import read

STEPS = 64  # tokens of a trial


class Refused(Exception):
    """Why, as far as whoever wrote the grammar can tell."""


class Trial:
    """The first piece of work is the vocabulary; each other is a JSON object with a grammar."""

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None

    def __call__(self, work: bytes) -> bytes:
        """{"grammar": …}, as the library reads it, or {"error": …}."""
        if self._tokenizer is None:
            vocabulary = read(work)
            self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.ends)
            return b"{}"
        given = json.loads(work)
        try:
            grammar = written(Kind(given["kind"]), given["text"], given["whitespace"])
            _try(grammar, self._tokenizer)
        except Refused as error:
            return json.dumps({"error": str(error)}).encode()
        return json.dumps({"grammar": grammar}).encode()


def _try(grammar: str, tokenizer: LLTokenizer) -> None:
    """Compile it and follow it at random, a little. Raises Refused."""
    matcher = LLMatcher(tokenizer, grammar, limits=LLParserLimits(**LIMITS), log_level=0)
    draw = random.Random(0)
    for _ in range(STEPS):
        if matcher.is_error():
            raise Refused(_reason(matcher.get_error()))
        if matcher.is_stopped():
            return
        mask = mask_of(matcher)
        if mask is not None:
            matcher.consume_token(_any_of(mask, draw))


def _any_of(mask: bytes, draw: random.Random) -> int:
    """One of its tokens, found from a random place on."""
    start = draw.randrange(len(mask))
    rest = mask[start:].lstrip(b"\0") or mask.lstrip(b"\0")
    places = [bit for bit in range(8) if rest[0] >> bit & 1]
    return (len(mask) - len(rest)) * 8 + draw.choice(places)


def written(kind: Kind, text: str, whitespace: str | None) -> str:
    """A grammar as llguidance reads it. Raises Refused."""
    if kind is Kind.REGEX:
        digits = "d"  # \d is 0 to 9, not any script's digits
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, digits)}/")
    if kind is Kind.CHOICE:
        texts = " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(text))
        texts = texts.replace("\x7f", "\\u007f")  # which llguidance does not take as it is
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    if kind is Kind.LARK:
        return LLMatcher.grammar_from_lark(text)
    if kind is Kind.GBNF:
        try:
            return LLMatcher.grammar_from_lark(any_to_lark(text))
        except Exception as error:  # nesting too deep for the converter is no error of its own
            raise Refused(f"the GBNF cannot be read ({_reason(str(error))})") from None
    return json.dumps({"grammars": [{"json_schema": _schema(kind, text, whitespace)}]})


def _schema(kind: Kind, text: str, whitespace: str | None) -> Any:
    try:
        schema = {"type": "object"} if kind is Kind.JSON_OBJECT else json.loads(text)
        return prepared(schema, whitespace)
    except (ValueError, RecursionError):
        raise Refused("the schema is not JSON, or is nested too deeply") from None


def _reason(error: str) -> str:
    """In one line, without the state of the library."""
    return " ".join(error.partition("<state>")[0].split())


if __name__ == "__main__":
    answer(Trial())
