"""A user's own prompts: JSON lines, each with `prompt` and optionally `max_tokens`.

A prompt is a text or a list of token ids. Errors name the file and the line.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from ropewalk.load_tests.workload.prompts import Prompt

_FIELDS = {"prompt", "max_tokens"}


class FilePrompt(NamedTuple):
    """One line. `max_tokens` is None if not given."""

    prompt: Prompt
    max_tokens: int | None


def read_prompts(path: str) -> tuple[FilePrompt, ...]:
    """The prompts of all lines that are not blank. Raises ValueError for a bad one, and OSError."""
    prompts = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                prompts.append(_read(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path} has no prompts; write one JSON object per line")
    return tuple(prompts)


def _read(line: bytes) -> FilePrompt:
    try:
        fields = json.loads(line)
    except ValueError:  # UnicodeDecodeError is one
        raise ValueError('not JSON; write {"prompt": "…", "max_tokens": 64}') from None
    if not isinstance(fields, dict) or "prompt" not in fields:
        raise ValueError('no "prompt"; write {"prompt": "…", "max_tokens": 64}')
    if unknown := sorted(fields.keys() - _FIELDS):
        raise ValueError(f"{unknown[0]!r} is not known; use prompt and max_tokens")
    max_tokens = fields.get("max_tokens")
    if max_tokens is not None and not _whole(max_tokens, 1):
        raise ValueError(f"max_tokens is {max_tokens!r}; use a whole number from 1 up")
    return FilePrompt(_prompt(fields["prompt"]), max_tokens)


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_whole(token, 0) for token in value):
        return tuple(value)
    raise ValueError("the prompt is neither a text nor a list of token ids, or it is empty")


def _whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least
