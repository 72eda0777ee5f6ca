"""Reads a request body strictly: bytes, one JSON object, known fields, a schema.

JSON that two parsers could read differently is refused: invalid UTF-8, a byte order mark, duplicate
keys, NaN and numbers beyond float, lone surrogates, deep nesting.

Ropewalk never ignores a field that would change the answer. A field it knows and does not support
is accepted with its neutral value and refused otherwise; a field it does not know is refused by
name. `null` always means "not given". README.md points users here.
"""

import json
import re
from collections.abc import Collection, Mapping
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, NoReturn, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from ropewalk.server.errors import (
    DuplicateKey,
    InvalidBody,
    InvalidField,
    MissingField,
    UnknownField,
    UnsupportedField,
    quoted,
)
from ropewalk.server.long_work import off_loop
from ropewalk.server.openai.schemas import AnyBody

MAX_DEPTH = 64


async def body_of(request: Request, schema: type[AnyBody]) -> AnyBody:
    """A request's body. A long one is read in a thread. Raises InvalidField or a subclass."""
    data = await request.body()
    return await off_loop(lambda: read_body(schema, parse_object(data)), len(data), LONG)


# Fields that clients send back from an earlier answer; they mean nothing when empty.
_EMPTY_MESSAGE_FIELDS = (
    "annotations",
    "audio",
    "function_call",
    "reasoning",
    "reasoning_content",
    "refusal",
    "tool_calls",
)


def read_body(schema: type[AnyBody], body: Mapping[str, Any]) -> AnyBody:
    """`body` as `schema`. Raises InvalidField or a subclass, naming the field at fault."""
    fields = supported_fields(body, schema.model_fields)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [_meant(message) for message in messages]
    options = fields.get("stream_options")
    if isinstance(options, dict):
        fields["stream_options"] = {
            name: value for name, value in options.items() if value is not None
        }
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        raise refusal(details[0]) from None


def _meant(message: Any) -> Any:
    """Without the fields that say nothing. An answer without text has an empty one, and the text
    of one that OpenAI refused is its refusal."""
    if not isinstance(message, dict):
        return message
    kept = {
        name: value
        for name, value in message.items()
        if value is not None and not (name in _EMPTY_MESSAGE_FIELDS and value == [])
    }
    if kept.get("role") == "assistant" and isinstance(refused := kept.get("refusal"), str):
        del kept["refusal"]
        kept.setdefault("content", refused)
    if "tool_calls" in kept or kept.keys() & {"reasoning", "reasoning_content"}:
        kept.setdefault("content", "")
    return kept


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. Raises InvalidBody or DuplicateKey."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidBody("the body is not valid UTF-8; send JSON encoded as UTF-8") from None
    try:
        value = _decoder(text).decode(text)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise InvalidBody(
            f"the body is not valid JSON at character {error.pos}: {error.msg.lower()}"
        ) from None
    except ValueError:
        # int() refuses thousands of digits; no field takes such a number.
        raise InvalidBody(
            "the body has a number with too many digits; send a smaller one"
        ) from None
    if not isinstance(value, dict):
        raise InvalidBody('the body must be a JSON object, such as {"model": ...}')
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if "\\u" in text:
        _check_surrogates(value)
    return cast(dict[str, Any], value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKey(f"the key {quoted(key)} appears twice; send it once")
            seen.add(key)
    return value


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise InvalidBody(f"the number {quoted(text)} is too large; send a finite one")
    return value


def _constant(text: str) -> NoReturn:
    raise InvalidBody(f"{text} is not JSON; send a finite number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_float, parse_constant=_constant)

# The decoder is C, which keeps the interpreter from other threads until it is done, or calls into
# Python: so a long body's integers are read by Python. One that has very many other parts, as few
# honest ones do, is left to the decoder that is all Python.
LONG = 1 << 16  # characters, which take up to some milliseconds
_MANY = 1 << 14  # texts, lists and objects


def _integer(text: str) -> int:
    return int(text)


_PATIENT = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_float, parse_constant=_constant, parse_int=_integer
)
_SLOW = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_float, parse_constant=_constant)
_SLOW.scan_once = py_make_scanner(_SLOW)  # type: ignore[attr-defined]


def _decoder(text: str) -> json.JSONDecoder:
    if len(text) <= LONG:
        return _DECODER
    parts = text.count("[") + text.count("{") + text.count('"') // 2
    return _PATIENT if parts <= _MANY else _SLOW


def _check_depth(value: Mapping[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidBody:
    return InvalidBody(f"the body is nested deeper than {MAX_DEPTH} levels; flatten it")


def _check_surrogates(value: Mapping[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidBody("the body has an unpaired surrogate; send complete characters") from None


_EMPTY: tuple[object, ...] = ("", [], {})
# Known but not supported: the values that change nothing.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": _EMPTY,
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": _EMPTY,
    "early_stopping": (False,),
    "ebnf": (),
    "function_call": ("none", "auto"),
    "functions": _EMPTY,
    "grammar": (),
    "guided_decoding_backend": (),
    "json_schema": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": _EMPTY,
    "lora": (),
    "lora_path": (),
    "lora_request": (),
    "modalities": (["text"],),
    "no_stop_trim": (False,),  # this and three more: SGLang's, which vllm-router adds to each body
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "stream_reasoning": (True,),
    "suffix": _EMPTY,
    "tool_choice": ("none", "auto"),
    "tools": _EMPTY,
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

_TEXT = (TypeAdapter(str | None), "a string")
_TEXTS = (TypeAdapter(dict[str, str] | None), "a JSON object of strings")
_FLAG = (TypeAdapter(bool | None), "true or false")
_OBJECT = (TypeAdapter(dict[str, Any] | None), "a JSON object")
# Accepted and without effect on the answer; only their form is checked. Variables of a chat
# template are here for where there is none: ChatBody has them as fields of its own.
HARMLESS: Mapping[str, tuple[TypeAdapter[Any], str]] = {
    "chat_template_kwargs": _OBJECT,
    "enable_thinking": _FLAG,
    "metadata": _TEXTS,
    "parallel_tool_calls": _FLAG,
    "prompt_cache_key": _TEXT,
    "reasoning_effort": _TEXT,
    "request_id": _TEXT,
    "safety_identifier": _TEXT,
    "service_tier": _TEXT,
    "spaces_between_special_tokens": _FLAG,
    "store": _FLAG,
    "user": _TEXT,
    "verbosity": _TEXT,
}


def supported_fields(body: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields of `body` named in `known`, without nulls.

    Raises UnknownField, UnsupportedField or InvalidField for the first other field that is
    not known, not neutral or not well-formed.
    """
    kept = {}
    for name, value in body.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif name in UNSUPPORTED:
            if value is not None and not _is_one_of(value, UNSUPPORTED[name]):
                raise UnsupportedField(
                    f"{name} is not supported with the value given; leave it out", name
                )
        elif name in HARMLESS:
            kind, form = HARMLESS[name]
            try:
                kind.validate_python(value, strict=True)
            except ValidationError:
                raise InvalidField(f"{name} should be {form}", name) from None
        elif name == "best_of":
            _check_best_of(value, body.get("n"))
        elif value is not None:  # clients write what is new in an API as null
            raise UnknownField(
                f"{quoted(name)} is not a parameter here; leave it out",
                quoted(name)[1:-1],
            )
    return kept


def _check_best_of(best_of: Any, n: Any) -> None:
    n = 1 if n is None else n
    if best_of is not None and not (type(best_of) in (int, float) and best_of == n):
        raise UnsupportedField(
            "best_of is not supported with a value other than n; leave it out", "best_of"
        )


def _is_one_of(value: object, known: Collection[object]) -> bool:
    return any(type(value) is type(each) and value == each for each in known)


def refusal(details: ErrorDetails) -> InvalidField:
    path = _path(details["loc"])
    kind = details["type"]
    if kind == "missing":
        return MissingField(f"{path} is missing; it is required", path)
    if kind == "extra_forbidden":
        return UnknownField(f"{path} is not a known parameter; leave it out", path)
    if path == "stream_options.include_obfuscation":
        return UnsupportedField(f"{path} is not supported; leave it out or send false", path)
    message = details["msg"].removeprefix("Value error, ").replace(" after validation", "")
    message = re.sub(r"valid dictionary or instance of \w+", "JSON object", message)
    for start in ("Input ", "String ", "List ", "Dictionary "):
        message = message.removeprefix(start)
    return InvalidField(f"{path} {message}", path)


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content", "<list>", 1, "text") as messages[0].content[1].text"""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step == "[key]" or step.startswith("<"):
            continue  # the tag of a union, not something the client wrote
        else:
            safe = step if re.fullmatch(r"[A-Za-z0-9_]{1,64}", step) else "?"
            path += f".{safe}" if path else safe
    return path
