"""Grammars for answers that must call: the family's markers around arguments of their schema."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.model.tokenizers.base import Tokenizer
from ropewalk.server.structured.grammar import Grammar, Kind
from ropewalk.server.tools.formats import SPECIAL, Format


def required_calls(
    tools: Mapping[str, Mapping[str, Any]],
    format: Format,
    tokenizer: Tokenizer,
    *,
    thinking: bool,
    several: bool,
    may_think: bool,
) -> Grammar:
    """One call of one of the tools, or `several`, after reasoning if there is any.

    tools: names and their arguments' schemas. thinking: the prompt ends within reasoning, which
    may_think allows to begin, too.
    """

    def spelled(text: str) -> str:
        return _spelled(text, tokenizer)

    written = format.written
    rules = []
    for index, (name, schema) in enumerate(tools.items()):
        head = spelled(f"{written.before}{name}{written.middle}")
        rules.append(f"call_{index}: {head} arguments_{index} {spelled(written.after)}")
        rules.append(f"arguments_{index}: %json {json.dumps(_object(schema))}")
    calls = " | ".join(f"call_{index}" for index in range(len(tools)))
    more = f"({spelled(written.between)} call)*" if several else ""
    start = f"{spelled(written.begin)} call {more} {spelled(written.end)}"
    if format.think is not None and (thinking or may_think):
        opened, closed = format.think
        reasoning = f"THOUGHT {spelled(closed)} {_turn(format, tokenizer)} /\\n*/"
        start = f"{reasoning if thinking else f'({spelled(opened)} {reasoning})?'} {start}"
        rules.append(r"THOUGHT: /(.|\n)*/")
    return Grammar(
        Kind.LARK, "\n".join(("%llguidance {}", f"start: {start}", f"call: {calls}", *rules))
    )


def _object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments are an object, whether or not their schema says so."""
    return schema if "type" in schema else {"type": "object", **schema}


def _turn(format: Format, tokenizer: Tokenizer) -> str:
    return (
        _spelled(format.noise[0], tokenizer) if format.noise[:1] == ("<|start|>assistant",) else ""
    )


def _spelled(text: str, tokenizer: Tokenizer) -> str:
    """Text as Lark has it: special tokens by their ids, the rest in quotes."""
    parts: list[str] = []
    plain = ""
    for part in re.split(f"({SPECIAL.pattern})", text):
        token = _special(part, tokenizer) if SPECIAL.fullmatch(part) else None
        if token is None:
            plain += part
            continue
        parts += [json.dumps(plain)] * bool(plain) + [f"<[{token}]>"]
        plain = ""
    return " ".join(parts + [json.dumps(plain)] * bool(plain))


def _special(name: str, tokenizer: Tokenizer) -> int | None:
    tokens: Sequence[int] = tokenizer.encode(name, bos=False)
    if len(tokens) == 1 and not tokenizer.token_bytes(tokens[0], first=False):
        return tokens[0]
    return None
