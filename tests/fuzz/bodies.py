"""Draws JSON bodies for every POST route: mostly right ones, each spoilt in a few places."""

from collections.abc import Callable, Mapping, Sequence
from json import dumps
from random import Random
from typing import Any

from tests.fuzz.streams import Ending, Stream

Draw = Callable[[Random], Any]


class Raw(str):
    """Stands in a body as it is, whether or not it is JSON."""


# Texts, numbers and shapes that have broken servers.
NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 255, 4095, 4096, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63,
    -(2**63), -(2**63) - 1, 10**30, 0.5, -0.5, 1e-300, 1e308, 5.0, Raw("-0"), Raw("-0.0"),
    Raw("1e999"), Raw("-1e999"), Raw("1E5"), Raw("NaN"), Raw("-Infinity"), Raw("9" * 5000),
    Raw("01"), Raw("1."), Raw("+1"), Raw("0x1"), Raw("'a'"), Raw("undefined"), Raw(""),
    "", " ", "5", "true", "null", "a", "\0", "\x7f", "\x1b[31m", "é", "e\u0301", "🌍", "\u202e",
    "\u2028", "\ufeff", "\ufffd", "\U0010ffff", "ﷺ", "ß" * 300, "a" * 257, "a" * 4000, " " * 3000,
    "a b " * 700, "\n" * 500, "<|im_end|>", "<s>", "</s>", "{{ 7*7 }}", "{% for %}", "%s%n",
    "../../etc/passwd", "ropewalk-rope", "ropewalk-t5", "http://localhost/", "data: [DONE]\n\n",
    Raw('"\\ud800"'), Raw('"\\udc00\\ud800"'), Raw('"\\u0000"'), Raw('"\\x"'), Raw('"a\nb"'),
    [], [[]], [None], [""], [0], [-1], [4096], ["a", 0], [0, "a"], [[0], "a"], [[0], []],
    [True], [0.0], list(range(600)), ["a"] * 20, [[1]] * 17, {}, {"": None}, {"a": {}},
    {"0": 1}, {"0": 101}, {"-1": 0}, {"01": 0}, {"4096": -100}, {"1e3": 0}, {"type": "text"},
    Raw("[" * 40 + "]" * 40), Raw("[" * 5000 + "]" * 5000), Raw('{"a":' * 50 + "0" + "}" * 50),
    Raw("[" * 2000), Raw('{"a":0,"a":1}'),
)  # fmt: skip
NAMES = (
    "x", "", "Model", "max_completion_tokens", "grammar", "chat_template", "__class__", "é" * 99,
)  # fmt: skip
WORDS = ("The sky", " is", " blue", "\n", "ROMEO:", " 12", " é", " 🌍", "  ", "a", "<|im_start|>")


def _text(draw: Random) -> str:
    return "".join(draw.choices(WORDS, k=draw.choice((1, 3, 8, 40))))


def _id(draw: Random) -> int:
    return draw.randrange(4096)


def _ids(draw: Random) -> list[int]:
    return [_id(draw) for _ in range(draw.choice((1, 2, 17, 60)))]


def _several(one: Draw, most: int) -> Draw:
    return lambda draw: [one(draw) for _ in range(draw.randint(1, most))]


def _any(*draws: Draw) -> Draw:
    return lambda draw: draw.choice(draws)(draw)


def _of(*values: Any) -> Draw:
    return lambda draw: draw.choice(values)


def _between(low: float, high: float) -> Draw:
    return lambda draw: draw.choice((low, high, draw.uniform(low, high)))


def _message(draw: Random) -> dict[str, Any]:
    content: Any = _text(draw)
    if draw.random() < 0.2:
        content = [{"type": "text", "text": _text(draw)} for _ in range(draw.randint(1, 3))]
    message = {
        "role": draw.choice(("system", "developer", "user", "assistant", "tool")),
        "content": content,
    }
    if message["role"] == "tool":
        message["tool_call_id"] = "a"
    elif message["role"] == "assistant" and draw.random() < 0.3:
        function = {"name": "f", "arguments": draw.choice(("", "{}", _text(draw)))}
        message["tool_calls"] = [{"id": "a", "type": "function", "function": function}]
    return message


def _tool(draw: Random) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": draw.choice(("string", "integer"))}}}
    return {
        "type": "function",
        "function": {
            "name": draw.choice(("f", "g", "get-it")),
            "parameters": schema,
            "description": _text(draw),
            "strict": draw.choice((True, False)),
        },
    }


MODEL: Draw = _of("ropewalk-rope", "ropewalk-t5", "ropewalk-alibi")
OPERATION = _of("append", "fork", "truncate", "evict_keep", "evict_renumber", "move_span")
NOBODY = "seq-" + 32 * "0"
GENERATION: Mapping[str, Draw] = {
    "min_tokens": _of(0, 1),
    "temperature": _between(0, 2),
    "top_p": _between(0.01, 1),
    "top_k": _of(-1, 0, 1, 40),
    "min_p": _between(0, 1),
    "repetition_penalty": _between(0.01, 2),
    "presence_penalty": _between(-2, 2),
    "frequency_penalty": _between(-2, 2),
    "stop": _any(_text, _several(_text, 4)),
    "stop_token_ids": _several(_id, 4),
    "include_stop_str_in_output": _of(True, False),
    "ignore_eos": _of(True, False),
    "seed": _of(-1, 0, 7, 2**63 - 1),
    "n": _of(1, 2, 3),
    "logit_bias": lambda draw: {str(_id(draw)): draw.uniform(-100, 100) for _ in range(3)},
    "stream": _of(True, False),
    "overflow": _of("refuse", "shift", "slide"),
    "keep": _of(True, False),
    "cache_salt": _of("a", "b"),
    "user": _text,
    "priority": _of(0),
    "tools": _of([]),
    "response_format": _of({"type": "text"}),
}
TRANSLATED = {name: GENERATION[name] for name in ("temperature", "top_k", "seed", "stream", "stop")}
ITEMS: Sequence[Any] = (
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "2"},
)
TURNS: Sequence[Any] = (
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": "2"},
            {"type": "text", "text": "a"},
        ],
    },
)
# By path: the fields that are always there, and those that may be.
ROUTES: Mapping[str, tuple[Mapping[str, Draw], Mapping[str, Draw]]] = {
    "/v1/completions": (
        {
            "model": MODEL,
            "prompt": _any(_text, _several(_text, 3), _ids, _several(_ids, 3)),
            "max_tokens": _of(1, 1, 2, 3, 4),
        },
        {
            **GENERATION,
            "echo": _of(True, False),
            "logprobs": _of(0, 1, 20),
            "add_special_tokens": _of(True, False),
            "sequence": _of(NOBODY),
        },
    ),
    "/v1/chat/completions": (
        {
            "model": MODEL,
            "messages": _several(_message, 4),
            "max_tokens": _of(1, 1, 2, 3, 4),
        },
        {
            **GENERATION,
            "logprobs": _of(True, False),
            "top_logprobs": _of(0, 1, 20),
            "add_generation_prompt": _of(True, False),
            "tools": _several(_tool, 3),
            "tool_choice": _of(
                "auto", "none", "required", {"type": "function", "function": {"name": "f"}}
            ),
            "parallel_tool_calls": _of(True, False),
            "reasoning_effort": _of("low"),
        },
    ),
    "/v1/embeddings": (
        {"model": MODEL, "input": _any(_text, _several(_text, 3), _ids, _several(_ids, 3))},
        {
            "dimensions": _of(1, 8, 1000),
            "encoding_format": _of("float", "base64"),
            "pooling": _of("last", "mean"),
            "add_special_tokens": _of(True, False),
        },
    ),
    "/v1/responses": (
        {
            "model": MODEL,
            "input": _any(_text, _several(_any(_message, *map(_of, ITEMS)), 5)),
            "max_output_tokens": _of(1, 1, 2, 3, 4),
        },
        {**TRANSLATED, "instructions": _text, "reasoning": _of({"effort": "low"})},
    ),
    "/v1/messages": (
        {
            "model": MODEL,
            "messages": _several(_any(_message, *map(_of, TURNS)), 4),
            "max_tokens": _of(1, 1, 2, 3, 4),
        },
        {**TRANSLATED, "system": _text, "stop_sequences": _several(_text, 4)},
    ),
    "/v1/responses/input_tokens": (
        {"model": MODEL, "input": _any(_text, _several(_any(_message, *map(_of, ITEMS)), 5))},
        {"instructions": _text},
    ),
    "/v1/messages/count_tokens": (
        {"model": MODEL, "messages": _several(_any(_message, *map(_of, TURNS)), 4)},
        {"system": _text},
    ),
    "/tokenize": (
        {"model": MODEL, "prompt": _text},
        {
            "add_special_tokens": _of(True, False),
            "return_token_strs": _of(True, False),
        },
    ),
    "/detokenize": ({"model": MODEL, "tokens": _ids}, {}),
    "/v1/cache/plan": (
        {
            "model": MODEL,
            "operation": OPERATION,
            "tokens": _of(1, 16, 100, 500),
        },
        {
            "first": _of(0, 1, 16),
            "count": _of(1, 16),
            "offset": _of(1, 16),
        },
    ),
    "/v1/cache/flush": ({}, {"model": MODEL}),
    "/v1/cache/sequences": (
        {"model": MODEL, "prompt": _any(_text, _ids)},
        {"parent": _of(NOBODY), "add_special_tokens": _of(True, False), "cache_salt": _of("a")},
    ),
    f"/v1/cache/sequences/{NOBODY}/operations": (
        {"operation": OPERATION, "count": _of(1, 16)},
        {"first": _of(0, 1, 16), "onto": _of(NOBODY), "prompt": _any(_text, _ids)},
    ),
    "/v1/positions/explain": (
        {"model": MODEL, "input": _any(_text, _ids)},
        {
            "layer": _of(0, 1, 3, 4),
            "query": _of(0, 1, 300),
            "key": _of(0, 1, 300),
            "add_special_tokens": _of(True, False),
        },
    ),
    "/v1/positions/audit": (
        {"model": MODEL, "prompt": _any(_text, _ids), "append": _any(_of(1, 3, 129), _ids)},
        {
            "arm": _of("own", "rope:dynamic", "alibi", "nothing"),
            "layers": _of(1, 9),
            "steps": _of(1, 9),
            "trained_length": _of(1, 9),
        },
    ),
}
_WEIGHTS = (8, 6, 3, 4, 4, 1, 1, 3, 3, 3, 0.2, 2, 0.5, 2, 0.3)


def draw_stream(draw: Random) -> Stream:
    """One POST with a body, on a connection of its own."""
    path = draw.choices(list(ROUTES), _WEIGHTS)[0]
    body = _spelled(draw, _body(draw, path))
    media = "application/json"
    if draw.random() < 0.02:
        media = draw.choice(
            ("text/plain", "application/json; charset=utf-16", "", "APPLICATION/JSON")
        )
    lines = (
        f"POST {path} HTTP/1.1",
        "host: localhost",
        f"content-type: {media}",
        f"content-length: {len(body)}",
        "connection: close",
    )
    data = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    return Stream(((0.0, data),), draw.choice((Ending.WAIT, Ending.WAIT, Ending.HALF)))


def _body(draw: Random, path: str) -> list[tuple[str, Any]]:
    always, maybe = ROUTES[path]
    share = draw.choice((0, 0.1, 0.3))
    pairs = [(name, value(draw)) for name, value in always.items()]
    pairs += [(name, value(draw)) for name, value in maybe.items() if draw.random() < share]
    if dict(pairs).get("stream") is True and draw.random() < 0.5:
        pairs.append(("stream_options", {"include_usage": True}))
    for _ in range(draw.choice((0, 0, 0, 1, 1, 1, 2, 3))):
        _spoil(draw, pairs)
    if dict(pairs).get("overflow") in ("shift", "slide"):
        # Answers that are as long as they are asked to be would only be waited for.
        pairs = [(name, _at_most(64, value) if "max" in name else value) for name, value in pairs]
    return pairs


def _at_most(limit: int, value: Any) -> Any:
    if value == "1E5":  # of the nasty ones, the one that is a large number of tokens
        return Raw("6E1")
    return min(limit, value) if type(value) is int else value


def _spoil(draw: Random, pairs: list[tuple[str, Any]]) -> None:
    kind = draw.random()
    if not pairs or kind < 0.1:
        name = draw.choice(
            (
                "x",
                "",
                "max_completion_tokens",
                "Model",
                "grammar",
                "chat_template",
                "__class__",
                "é" * 99,
            )
        )
        pairs.append((name, draw.choice(NASTY)))
        return
    at = draw.randrange(len(pairs))
    name, value = pairs[at]
    if kind < 0.17:
        del pairs[at]
    elif kind < 0.24:
        pairs.append((name, draw.choice((value, draw.choice(NASTY)))))
    elif kind < 0.31:
        pairs[at] = (name, draw.choice((str(value), [value], {"a": value}, {name: value})))
    elif kind < 0.45 and isinstance(value, list | dict) and value:
        pairs[at] = (name, _spoilt_inside(draw, value))
    else:
        pairs[at] = (name, draw.choice(NASTY))


def _spoilt_inside(draw: Random, value: Any) -> Any:
    """The same value with something nasty somewhere inside of it."""
    if isinstance(value, dict) and value:
        key = draw.choice(list(value))
        if draw.random() < 0.3:
            return {**value, draw.choice(("x", "name", "type", "tool_calls")): draw.choice(NASTY)}
        return {**value, key: _spoilt_inside(draw, value[key])}
    if isinstance(value, list) and value:
        at = draw.randrange(len(value))
        return [*value[:at], _spoilt_inside(draw, value[at]), *value[at + 1 :]]
    return draw.choice(NASTY)


def _spelled(draw: Random, pairs: list[tuple[str, Any]]) -> bytes:
    data = _json(pairs).encode()
    if draw.random() > 0.08:
        return data
    at = draw.randrange(len(data) + 1)
    junk = draw.choice((b"\0", b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b'"', b"}", b",", b"\\"))
    return draw.choice(
        (
            data[:at],
            data[:at] + junk + data[at:],
            data[:at] + junk + data[at + 1 :],
            data[at:],
            b"",
            b"\xef\xbb\xbf" + data,
            data.decode().encode("utf-16"),
            b"[" + data + b"]",
            data + data,
            b" \r\n\t" + data + b"\n",
            b"null",
        )
    )


def _json(value: Any) -> str:
    """Like json.dumps, with Raw as it is; pairs are an object, whose keys may be there twice."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, list) and value and all(isinstance(each, tuple) for each in value):
        return "{" + ",".join(f"{_json(key)}:{_json(each)}" for key, each in value) + "}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_json(key)}:{_json(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_json(each) for each in value) + "]"
    return dumps(value)
