"""Grammars of answers with calls: the family's markers around arguments that satisfy a schema."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from ropewalk.model.tokenizers.base import Tokenizer
from ropewalk.server.structured.grammar import Grammar, Kind, prepared
from ropewalk.server.tools.formats import SPECIAL, Format

Schemas = Mapping[str, Mapping[str, Any]]  # of arguments, by the functions' names

MAX_CALLS = 16  # that an answer has to consist of


def calls_or_form(
    schemas: Schemas,
    format: Format,
    tokenizer: Tokenizer,
    ends: Collection[int],
    *,
    thinking: bool,
    several: bool,
    form: Grammar | None = None,
) -> Grammar:
    """One call or `several`, or JSON of that form, and nothing else but reasoning before.

    ends: tokens that end an answer. thinking: the prompt ends within reasoning.
    """
    lark = _Lark(tokenizer, ends)
    written = format.written
    answers = []
    if schemas:
        more = f"({lark.spelled(written.between)} call){{0,{MAX_CALLS - 1}}}" if several else ""
        answers.append(f"{lark.spelled(written.begin)} call {more} {lark.spelled(written.end)}")
    if form is not None:
        try:
            schema = prepared(json.loads(form.text or '{"type": "object"}'), form.whitespace)
        except (ValueError, RecursionError):
            return form  # for the compiler to refuse
        answers.append(f"{lark.spelled(format.text)} form")
        lark.add(f"form: %json {json.dumps(schema)}", "the answer's schema")
    start = f"({' | '.join(answers)})"
    if format.think is not None:
        opened, closed = map(lark.spelled, format.think)
        turn = lark.spelled(format.turn) if format.turn else r"/\n{1,2}/?"
        reasoning = f"{lark.up_to('thought', closed)} {turn}"
        start = f"{reasoning if thinking else f'({opened} {reasoning})?'} {start}"
    call = lark.call(schemas, format, written.before) if schemas else ""
    return lark.grammar(start, call, "tools" if form is None else form.param)


def strict_calls(
    schemas: Schemas, format: Format, tokenizer: Tokenizer, ends: Collection[int]
) -> Grammar | None:
    """Free text, in which whatever begins as a call is one. None where nothing begins it."""
    lark = _Lark(tokenizer, ends)
    written = format.written
    text = f"{written.begin}{written.before}"
    trigger = next((each for each in format.opens if text.startswith(each)), None)
    if trigger is None:
        return None
    begun = text.removeprefix(trigger)
    inside = written.begin.startswith(trigger)
    head = written.begin.removeprefix(trigger) if inside else ""
    more = f"({lark.spelled(written.between)} call)*" if inside else ""
    calls = f"{lark.spelled(head)} call {more} {lark.spelled(written.end)}"
    start = f"({lark.up_to('free', lark.spelled(trigger))} {calls})* TEXT"
    call = lark.call(schemas, format, written.before if inside else begun)
    return lark.grammar(start, call, "tools")


class _Lark:
    """Lark as llguidance reads it. Special tokens stand in it by their ids."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int]) -> None:
        self._rules = [r"TEXT: /(.|\n)*/"]
        self._places: dict[int, str] = {}  # by the rules' indices
        self._tokenizer = tokenizer
        self._ends = ends

    def grammar(self, start: str, call: str, param: str) -> Grammar:
        head = ("%llguidance {}", f"start: {start}", f"call: {call}" if call else "")
        places = {len(head) + index + 1: place for index, place in self._places.items()}
        return Grammar(Kind.LARK, "\n".join((*head, *self._rules)), param=param, places=places)

    def call(self, schemas: Schemas, format: Format, before: str) -> str:
        for index, (name, schema) in enumerate(schemas.items()):
            head = self.spelled(f"{before}{name}{format.written.middle}")
            arguments = f"%json {json.dumps(prepared({'type': 'object', **schema}))}"
            after = self.spelled(format.written.after)
            self._rules.append(f"call_{index}: {head} arguments_{index} {after}")
            self.add(f"arguments_{index}: {arguments}", f"the parameters of {name}")
        return " | ".join(f"call_{index}" for index in range(len(schemas)))

    def add(self, rule: str, place: str) -> None:
        """A rule of what a client wrote in that place."""
        self._places[len(self._rules)] = place
        self._rules.append(rule)

    def up_to(self, name: str, end: str) -> str:
        """Any text and its end: a text that is looked for, or special tokens, which no text is."""
        if not end.startswith('"'):
            return f"TEXT {end}"
        self._rules.append(f"{name}[lazy]: TEXT {end}")
        return name

    def spelled(self, text: str) -> str:
        """The text, but for tokens that end an answer: those may follow any complete one."""
        parts: list[str] = []
        plain = ""
        for part in re.split(f"({SPECIAL.pattern})", text):
            token = self._special(part)
            if token is None:
                plain += part
                continue
            parts += [json.dumps(plain)] * bool(plain)
            parts += [f"<[{token}]>"] * (token not in self._ends)
            plain = ""
        return " ".join(parts + [json.dumps(plain)] * bool(plain))

    def _special(self, name: str) -> int | None:
        if SPECIAL.fullmatch(name):
            tokens = self._tokenizer.encode(name, bos=False)
            if len(tokens) == 1 and not self._tokenizer.token_bytes(tokens[0], first=False):
                return tokens[0]
        return None
