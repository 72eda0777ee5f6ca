"""Seeded prompts with an exact token count, all different. Knows no tokenizer.

With token ids the count is exact by construction. In text each word is one token in the common
byte-level vocabularies; the server's own count (`usage.prompt_tokens`) is compared afterwards.

Or a user's own, from JSON lines: each has `prompt`, a text or a list of token ids, and optionally
`max_tokens`. Errors name the file and the line.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Form = Literal["ids", "text"]
Prompt = str | tuple[int, ...]

_ATTEMPTS = 100
_FIELDS = {"prompt", "max_tokens"}

_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office door health person art war history party result change "
    "reason research girl moment air teacher force education foot boy age policy music market "
    "sense death north south east west field summer winter spring river forest window table chair "
    "paper letter picture color light stone metal glass wood fire earth wind rain snow cloud sun "
    "moon star bird dog cat horse fish tree flower grass bread milk sugar salt meat fruit apple "
    "road street bridge train plane ship boat engine wheel machine computer phone radio camera "
    "signal map plan price cost bank trade farm mill factory tool coat hat ring gold iron coal "
    "oil gas"
)
WORDS = _TEXT.split()


class PromptMaker:
    """Makes prompts that differ from all it made before; the same seed makes the same ones."""

    def __init__(self, seed: str, form: Form, vocab_size: int = 32_000) -> None:
        self.random = random.Random(seed)  # for a workload's own random choices
        self._form = form
        # Special tokens are at the ends of a vocabulary.
        self._ids = range(vocab_size // 10, vocab_size - vocab_size // 10)
        self._made: set[Prompt] = set()

    def prompt(self, tokens: int, prefix: Sequence[str | int] = ()) -> Prompt:
        """A prompt of `tokens` pieces: `prefix`, then new ones.

        Raises ValueError when no unused prompt of that length is found.
        """
        for _ in range(_ATTEMPTS):
            prompt = self._join([*prefix, *self.pieces(tokens - len(prefix))])
            if prompt not in self._made:
                self._made.add(prompt)
                return prompt
        raise ValueError(
            f"no more distinct prompts of {tokens} tokens: ask for longer ones or fewer"
        )

    def pieces(self, count: int) -> Sequence[str | int]:
        """`count` random words or token ids, for instance a prefix to share."""
        if self._form == "text":
            return self.random.choices(WORDS, k=count)
        return self.random.choices(self._ids, k=count)

    def _join(self, pieces: Sequence[str | int]) -> Prompt:
        if self._form == "text":
            return " ".join(str(piece) for piece in pieces)
        return tuple(int(piece) for piece in pieces)


def pieces_of(prompt: Prompt) -> Sequence[str | int]:
    """The words or token ids it was made of: a prefix for the prompt that continues it."""
    return prompt.split(" ") if isinstance(prompt, str) else prompt


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
