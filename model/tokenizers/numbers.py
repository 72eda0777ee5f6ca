"""A tokenizer that needs no file: token 17 is the text " 17". For models without a vocabulary."""

import zlib
from collections.abc import Sequence

from ropewalk.model.tokenizers.base import require_unicode


class NumberTokenizer:
    """A number below `vocab_size` is its own token; any other word maps to a fixed token.

    So text that a model generated becomes the same tokens when it is sent back.
    """

    bos: int | None = None
    eos: frozenset[int] = frozenset()
    ends: Sequence[int] = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, bos: bool) -> list[int]:
        """One token per word, whatever white space is between them. Raises InvalidText."""
        require_unicode(text)
        return [self._token(word) for word in text.split()]

    def token_bytes(self, token: int, *, first: bool) -> bytes:
        """The number preceded by a space, at the start of a text too."""
        return f" {token}".encode() if 0 <= token < self.vocab_size else b""

    def name(self, token: int) -> str:
        return ""

    def _token(self, word: str) -> int:
        # Only canonical decimal numbers: "007" and "٧" are words like any other.
        if word.isascii() and word.isdecimal() and len(word) <= len(str(self.vocab_size)):
            number = int(word)
            if number < self.vocab_size and str(number) == word:
                return number
        return zlib.crc32(word.encode()) % self.vocab_size
