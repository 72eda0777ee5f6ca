"""A model's tokens as llguidance wants them: their bytes, and how text becomes tokens."""

import json
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache, partial
from typing import cast
from weakref import proxy

from ropewalk.model.tokenizers.base import InvalidText, Tokenizer

KEPT = 4096  # texts
MARK = "\x02"  # stands before a text that continues another: tokenizers may put a space before it


class Vocabulary:
    """Its attributes and its call are what llguidance's TokenizerWrapper asks for."""

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Sequence[int],
        ends: list[int],
        encode: Callable[[str], list[int]] = lambda text: [],
    ) -> None:
        """tokens: by id, special ones by their names. ends: at least one. encode: as it can."""
        self.tokens = tokens
        self.special_token_ids = special
        self.ends = ends
        self.eos_token_id = ends[0]
        self._special = frozenset(special)
        self._encode = encode
        # Keys of a schema come again and again. Weak, so that a vocabulary is freed with its model.
        self._known = lru_cache(KEPT)(partial(Vocabulary._found, cast(Vocabulary, proxy(self))))

    def __call__(self, data: bytes) -> list[int]:
        """The tokens of a text that continues another, which join to exactly its bytes."""
        return self._known(data)

    def _found(self, data: bytes) -> list[int]:
        try:
            text = data.decode()
            for before in ("", MARK):
                tokens = self._without(before.encode(), self._encode(before + text))
                if self._joined(tokens) == data:
                    return tokens
        except InvalidText:
            pass
        return self._longest(data)

    def _without(self, before: bytes, tokens: list[int]) -> list[int]:
        """The tokens after those of `before`."""
        for count in range(len(tokens) + 1):
            if self._joined(tokens[:count]).lstrip() == before:
                return tokens[count:]
        return []

    def _joined(self, tokens: Sequence[int]) -> bytes:
        return b"".join(b"" if token in self._special else self.tokens[token] for token in tokens)

    def _longest(self, data: bytes) -> list[int]:
        """The longest token each time, where the tokenizer's own would join to something else."""
        found = []
        while data:
            known = (data[:size] for size in range(min(len(data), self._most), 0, -1))
            piece = next((piece for piece in known if piece in self._ids), None)
            if piece is None:
                return []
            found.append(self._ids[piece])
            data = data[len(piece) :]
        return found

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {
            token: place for place, token in enumerate(self.tokens) if place not in self._special
        }

    @cached_property
    def _most(self) -> int:
        return max(map(len, self._ids))

    def written(self) -> bytes:
        """For `read`, in another process."""
        tokens = [token.decode("latin-1") for token in self.tokens]
        return json.dumps([tokens, self.special_token_ids, self.ends]).encode()


def read(data: bytes) -> Vocabulary:
    """One that cannot encode as the model's tokenizer does."""
    tokens, special, ends = json.loads(data)
    return Vocabulary([token.encode("latin-1") for token in tokens], special, ends)


def vocabulary_of(tokenizer: Tokenizer, size: int, ends: Collection[int]) -> Vocabulary:
    """size: ids that the model can pick. ends: those that end an answer.

    A model without any gets one that it cannot pick.
    """
    tokens = [tokenizer.token_bytes(token, first=False) for token in range(size)]
    special = [token for token, data in enumerate(tokens) if not data]
    for token in special:
        tokens[token] = (tokenizer.name(token) or f"<{token}>").encode()
    known = sorted(token for token in ends if token < size)
    if not known:
        known = [size]
        special.append(size)
        tokens.append(b"<end>")
    return Vocabulary(tokens, special, known, lambda text: tokenizer.encode(text, bos=False))
