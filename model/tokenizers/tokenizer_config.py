"""A Hugging Face directory's tokenizer settings, besides the vocabulary itself.

Reads tokenizer_config.json, and special_tokens_map.json and added_tokens.json for what that
omits. Knows no tokenizer library.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.model.tokenizers.base import AddedToken, TokenizerError

SpecialTokens = Mapping[str, str | list[str]]  # their texts, by the names that templates use

_NAMED = frozenset(f"{name}_token" for name in ["bos", "eos", "unk", "sep", "pad", "cls", "mask"])
_ID = re.compile("[0-9]{1,9}")
_MORE = ("additional_special_tokens", "extra_special_tokens")  # the older and the newer name


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What is declared; None stands for what is not."""

    special_tokens: SpecialTokens
    found_as: Mapping[str, Mapping[str, bool]]  # by text, of special tokens written as objects
    add_bos: bool | None
    add_eos: bool
    added: tuple[AddedToken, ...]
    older: tuple[AddedToken, ...]  # of added_tokens.json, which states text and id alone
    legacy: bool | None
    tokenizer_class: str | None  # without "Fast"
    chat_template: object  # a string, a list of named ones, or None

    @property
    def bos(self) -> str | None:
        return self._named("bos_token")

    @property
    def eos(self) -> str | None:
        return self._named("eos_token")

    @property
    def all_added(self) -> Iterable[AddedToken]:
        """Of both files, one per id."""
        return {token.id: token for token in (*self.older, *self.added)}.values()

    def named(self) -> frozenset[str]:
        """The text of every special token that has a name."""
        return frozenset(each for each in self.special_tokens.values() if isinstance(each, str))

    def listed(self) -> frozenset[str]:
        """The text of every token in a list of special ones."""
        lists = (each for each in self.special_tokens.values() if not isinstance(each, str))
        return frozenset(text for texts in lists for text in texts)

    def _named(self, key: str) -> str | None:
        value = self.special_tokens.get(key)
        return value if isinstance(value, str) else None


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Raises TokenizerError naming the file and the field."""
    config = read_object(directory / "tokenizer_config.json") or {}
    older = read_object(directory / "added_tokens.json") or {}
    fallback = read_object(directory / "special_tokens_map.json") or {}
    # As in transformers: the older file counts where the newer lists no added tokens.
    sources = (fallback, config) if "added_tokens_decoder" in config else (config, fallback)
    values = {
        key: value for source in sources for key, value in source.items() if value is not None
    }
    name = values.get("tokenizer_class")
    if not isinstance(name, str | None):
        raise _wrong("tokenizer_class", "a name")
    return TokenizerConfig(
        special_tokens=_special_tokens(values),
        found_as=dict(_found_as(values)),
        add_bos=_flag(values, "add_bos_token"),
        add_eos=_flag(values, "add_eos_token") is True,
        added=tuple(_added(values.get("added_tokens_decoder", {}))),
        older=tuple(_added_by_text(older)),
        legacy=_flag(values, "legacy"),
        tokenizer_class=name and name.removesuffix("Fast"),
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


def _special_tokens(values: Mapping[str, Any]) -> SpecialTokens:
    """The usual ones, a model's own such as `image_token`, and those without a name."""
    found: dict[str, str | list[str]] = {}
    for key, value in values.items():
        text = _text_of(value)
        if key in _NAMED and text is None:
            raise _wrong(key, "a token's text")
        if key.endswith("_token") and text is not None:
            found[key] = text
    for key in _MORE:
        more = values.get(key, [])
        if isinstance(more, dict):  # of a model's own, by name
            found |= {name: text for name, one in more.items() if (text := _text_of(one))}
            continue
        texts = [_text_of(one) for one in more] if isinstance(more, list) else [None]
        if None in texts:
            raise _wrong(key, "a list of tokens' texts")
        if texts:
            found[key] = [text for text in texts if text is not None]
    return found


def _found_as(values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, bool]]]:
    lists = (values.get(key) for key in _MORE)
    several = (one for each in lists if isinstance(each, list) for one in each)
    alone = (value for key, value in values.items() if key.endswith("_token"))
    for token in (*several, *alone):
        if isinstance(token, dict) and (text := _text_of(token)):
            yield text, _flags(token)


def _flags(token: Mapping[str, Any]) -> dict[str, bool]:
    return {key: token.get(key) is True for key in ("lstrip", "rstrip", "single_word")}


def _text_of(token: object) -> str | None:
    """The value itself, or `content` where it is an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _flag(values: Mapping[str, Any], key: str) -> bool | None:
    value = values.get(key)
    if not isinstance(value, bool | None):
        raise _wrong(key, "true, false or null")
    return value


def _added_by_text(tokens: Mapping[str, object]) -> Iterator[AddedToken]:
    for text, number in tokens.items():
        if type(number) is not int or number < 0 or not text:
            raise TokenizerError("added_tokens.json must map texts to ids; correct the file.")
        yield AddedToken(number, text, special=False, normalized=True)


def _added(tokens: object) -> Iterator[AddedToken]:
    if not isinstance(tokens, dict):
        raise _wrong("added_tokens_decoder", "an object")
    for number, token in tokens.items():
        if not _ID.fullmatch(number) or not isinstance(token, dict):
            raise _wrong("added_tokens_decoder", "an object of tokens by id")
        text = token.get("content")
        if not isinstance(text, str) or not text:
            raise _wrong("added_tokens_decoder", "an object of tokens with content")
        special = token.get("special") is True
        normalized = token.get("normalized", not special) is True
        yield AddedToken(int(number), text, special, normalized=normalized, **_flags(token))


def _wrong(key: str, wanted: str) -> TokenizerError:
    return TokenizerError(f"tokenizer_config.json: {key} must be {wanted}; correct the file.")
