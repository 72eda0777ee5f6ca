"""A Hugging Face directory's tokenizer settings, besides the vocabulary itself.

Reads tokenizer_config.json, and special_tokens_map.json and added_tokens.json for what that
omits. Knows no tokenizer library.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.tokenizers.base import AddedToken, TokenizerError


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """bos and eos are the tokens' texts."""

    bos: str | None
    eos: str | None
    add_bos: bool | None  # None: not stated
    added: tuple[AddedToken, ...]  # of two with the same id, the later one counts
    chat_template: object  # a string, a list of named ones, or None


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Raises TokenizerError naming the file and the field."""
    config = read_object(directory / "tokenizer_config.json")
    older = read_object(directory / "added_tokens.json") or {}
    fallback = read_object(directory / "special_tokens_map.json") or {}
    values = {**fallback, **{key: v for key, v in (config or {}).items() if v is not None}}
    add_bos = values.get("add_bos_token")
    if not isinstance(add_bos, bool | None):
        raise _wrong("add_bos_token", "true, false or null")
    return TokenizerConfig(
        bos=_token_text(values, "bos_token"),
        eos=_token_text(values, "eos_token"),
        add_bos=add_bos,
        added=(*_added_by_text(older), *_added(values.get("added_tokens_decoder", {}))),
        chat_template=values.get("chat_template"),
    )


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None when there is no such file."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path.name} is not valid JSON ({error}): fetch it again.") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path.name} holds no JSON object: fetch it again.")
    return value


def _token_text(values: Mapping[str, Any], key: str) -> str | None:
    """The token's text: the value itself, or `content` where it is an object."""
    value = values.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if not isinstance(value, str | None):
        raise _wrong(key, "a token's text")
    return value


def _added_by_text(tokens: Mapping[str, object]) -> Iterator[AddedToken]:
    for text, number in tokens.items():
        if not isinstance(number, int) or not text:
            raise TokenizerError("added_tokens.json must map texts to ids; correct the file.")
        yield AddedToken(number, text, special=False)


def _added(tokens: object) -> Iterator[AddedToken]:
    if not isinstance(tokens, dict):
        raise _wrong("added_tokens_decoder", "an object")
    for number, token in tokens.items():
        if not number.isdecimal() or not isinstance(token, dict):
            raise _wrong("added_tokens_decoder", "an object of tokens by id")
        text = token.get("content")
        if not isinstance(text, str) or not text:
            raise _wrong("added_tokens_decoder", "an object of tokens with content")
        special, lstrip, rstrip = (
            token.get(key) is True for key in ("special", "lstrip", "rstrip")
        )
        yield AddedToken(int(number), text, special, lstrip, rstrip)


def _wrong(key: str, wanted: str) -> TokenizerError:
    return TokenizerError(f"tokenizer_config.json: {key} must be {wanted}; correct the file.")
