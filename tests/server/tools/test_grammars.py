"""Answers drawn from the grammars: the parser finds calls in them, whose arguments are valid."""

import json
import random
import re
from functools import cache

import numpy as np
import pytest
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ropewalk.server.structured.grammar import Grammar, Kind
from ropewalk.server.structured.vocabulary import vocabulary_of
from ropewalk.server.tools.formats import HERMES, KNOWN, Format
from ropewalk.server.tools.grammars import calls_or_form, strict_calls
from ropewalk.server.tools.parser import Parser
from tests.server.tools.families import Read, joined

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "days": {"$ref": "#/$defs/few"},
            "unit": {"enum": ["C", "</tool_call>"]},
        },
        "required": ["days", "unit"],
        "additionalProperties": False,
        "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 3}},
    },
    "now": {"properties": {}, "additionalProperties": False},
}
VALIDATORS = {name: validator_for(schema)(schema) for name, schema in SCHEMAS.items()}
FORMATS = [*(format for _, format in KNOWN), HERMES]
END = 256


class Named:
    """Bytes, an end, and the names of special tokens."""

    bos = None
    eos = frozenset({END})

    def __init__(self, names: frozenset[str]) -> None:
        self.names = {name: END + 1 + place for place, name in enumerate(sorted(names))}
        self.vocab_size = END + 1 + len(names)

    def encode(self, text: str, *, bos: bool) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, self.names)) + ")", text)
        return [
            token
            for part in (parts if self.names else [text])
            for token in ([self.names[part]] if part in self.names else part.encode())
        ]

    def token_bytes(self, token: int, *, first: bool) -> bytes:
        return bytes([token]) if token < END else b""

    def name(self, token: int) -> str:
        return "<end>" if token == END else list(self.names)[token - END - 1]


@cache
def vocabulary(names: frozenset[str]) -> tuple[Named, LLTokenizer]:
    tokenizer = Named(names)
    return tokenizer, LLTokenizer(
        TokenizerWrapper(vocabulary_of(tokenizer, tokenizer.vocab_size, {END}))
    )


def drawn(grammar: Grammar, names: frozenset[str], seed: int, begin: str = "") -> str:
    """A text that the grammar allows, after `begin`; printable for the most part."""
    tokenizer, library = vocabulary(names)
    matcher, draw = LLMatcher(library, grammar.text), random.Random(seed)
    assert not matcher.is_error(), matcher.get_error()
    taken = tokenizer.encode(begin, bos=False)
    assert matcher.consume_tokens(taken)
    while len(taken) < 3000 and not matcher.is_stopped():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        may = np.flatnonzero(mask[: tokenizer.vocab_size]).tolist()
        if END in may and (len(may) == 1 or draw.random() < 0.3):
            break
        may.remove(END) if END in may else None
        token = draw.choice([t for t in may if 32 <= t < 127] * (draw.random() < 0.8) or may)
        matcher.consume_token(token)
        taken.append(token)
    pieces = [tokenizer.token_bytes(t, first=False) or tokenizer.name(t).encode() for t in taken]
    return b"".join(pieces).decode(errors="replace")


def parsed(format: Format, text: str, **options) -> Read:
    parser = Parser(format, SCHEMAS, **options)
    return joined(parser.push(text) + parser.finish())


def check_calls(read: Read) -> None:
    for name, arguments in read.calls:
        VALIDATORS[name].validate(json.loads(arguments))


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {}}, {"{}"}),  # and no properties that nobody has named
        ({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, {'{"a": 1}'}),
        ({"required": ["b"], "properties": {"a": {"const": 1}}}, None),
        ({"properties": {}, "anyOf": [{"required": ["b"]}]}, None),
    ],
)
def test_arguments_are_those_that_the_schema_names(schema, arguments) -> None:
    tokenizer, _ = vocabulary(frozenset())
    options = {"thinking": False, "several": False}
    grammar = calls_or_form({"f": schema}, HERMES, tokenizer, {END}, **options)
    found = {
        re.sub(r"\s+", " ", parsed(HERMES, drawn(grammar, frozenset(), seed)).calls[0][1])
        for seed in range(5)
    }
    if arguments is None:
        assert all("b" in json.loads(each) for each in found)
    else:
        assert {json.dumps(json.loads(each)) for each in found} == arguments


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.opens[0])
def test_a_required_call_is_one_of_its_schema(format: Format, special: bool) -> None:
    names = format.named if special else frozenset()
    tokenizer, _ = vocabulary(names)
    for thinking, several in ((False, False), (False, True), (True, False)):
        if thinking and not format.think:
            continue
        options = {"thinking": thinking, "several": several}
        grammar = calls_or_form(SCHEMAS, format, tokenizer, {END}, **options)
        for seed in range(3):
            begin = f"Hm.{format.think[1]}{format.turn}" if thinking and not special else ""
            if not thinking and not special:  # by its text it would begin to think, and never end
                begin = (format.written.begin or format.written.before)[:12]
            read = parsed(format, drawn(grammar, names, seed, begin), thinking=thinking)
            assert read.content == "" and (len(read.calls) == 1 or (several and read.calls))
            check_calls(read)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.opens[0])
def test_a_form_or_a_call(format: Format) -> None:
    form = Grammar(Kind.JSON_SCHEMA, json.dumps(SCHEMAS["weather"]))
    tokenizer, _ = vocabulary(format.named)
    met = set()
    for seed in range(12):
        options = {"thinking": False, "several": False, "form": form}
        grammar = calls_or_form(SCHEMAS, format, tokenizer, {END}, **options)
        read = parsed(format, drawn(grammar, format.named, seed))
        check_calls(read)
        met.add(bool(read.calls))
        if not read.calls:
            VALIDATORS["weather"].validate(json.loads(read.content))
    assert False in met


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.opens[0])
def test_strict_functions_are_called_by_their_schemas(format: Format) -> None:
    tokenizer, _ = vocabulary(format.named)
    grammar = strict_calls(SCHEMAS, format, tokenizer, {END})
    if grammar is None:
        assert format.bare or format.noise
        return
    written = format.written.begin + format.written.before
    for seed in range(5):
        trigger = next(each for each in format.opens if written.startswith(each))
        read = parsed(format, drawn(grammar, format.named, seed, f"So: {trigger}"))
        assert read.calls and read.content.startswith("So:")
        check_calls(read)


def test_what_a_client_wrote_is_found_by_its_line() -> None:
    tokenizer, _ = vocabulary(HERMES.named)
    options = {"thinking": False, "several": False}
    form = Grammar(Kind.JSON_SCHEMA, json.dumps(SCHEMAS["now"]))
    grammar = calls_or_form(SCHEMAS, HERMES, tokenizer, {END}, form=form, **options)
    found = {place: grammar.text.split("\n")[line - 1] for line, place in grammar.places.items()}
    assert {place: rule.partition(":")[0] for place, rule in found.items()} == {
        "the answer's schema": "form",
        "the parameters of weather": "arguments_0",
        "the parameters of now": "arguments_1",
    }
