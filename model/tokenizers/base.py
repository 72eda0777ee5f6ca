"""The interface of tokenizers, tables of tokens' bytes, and incremental decoding of tokens to text.

Text is the UTF-8 decoding of the tokens' bytes, so any tokenizer that can give a token's bytes
streams exactly. Knows no file format and no tokenizer library.
"""

import codecs
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ropewalk.model.tokenizers.stops import StopFinder

MAX_IDS = 1 << 20  # tokens of a vocabulary; the largest published ones have some 900,000
MAX_FILE = 64 << 20  # bytes of a tokenizer's file; the largest published ones have some 35 MB
MAX_GROWTH = 64  # how many times longer a tokenizer may make a text before it splits it
_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded or served: one sentence with the cause and a next step."""


class InvalidText(ValueError):
    """Text that has no tokens: not valid Unicode, or the tokenizer fails on it."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in the text before the model splits it."""

    id: int
    text: str
    special: bool  # has no bytes
    lstrip: bool = False  # includes white space before it
    rstrip: bool = False  # includes white space after it
    normalized: bool = False  # is found in the normalised text
    single_word: bool = False  # is not found inside a word


class Tokenizer(Protocol):
    """Text to tokens, and each token to the bytes it adds to a text."""

    vocab_size: int  # ids are 0 .. vocab_size - 1
    bos: int | None  # the declared id; encode(bos=True) prepends it only to models trained with it
    eos: frozenset[int]  # ids that end a text

    def encode(self, text: str, *, bos: bool) -> list[int]:
        """Raises InvalidText. Text without any token gives an empty list."""
        ...

    def token_bytes(self, token: int, *, first: bool) -> bytes:
        """Exactly the bytes that this token adds to a text; none for control tokens.

        `first` means that no token before it had bytes; some tokenizers drop a space there.
        Ids without a token, such as padding rows of an embedding, have no bytes.
        """
        ...

    def name(self, token: int) -> str:
        """What a token without bytes is called, such as <|im_end|>; empty for ids without one."""
        ...


def refuse_ids(highest: int) -> None:
    """Raises TokenizerError for a vocabulary that has no place in memory."""
    if highest >= MAX_IDS:
        raise TokenizerError(
            f"The tokenizer has the id {highest}, but at most {MAX_IDS} tokens are supported: "
            "correct its ids."
        )


def require_unicode(text: str) -> None:
    """Raises InvalidText when the text cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidText(
            f"The text has a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}, which is not valid Unicode: send whole characters."
        ) from None


class StopText:
    """Text that goes on up to a stop string. Held back is what may still become part of one."""

    stopped_by: str | None  # the stop string

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self.stopped_by = None
        self._finder = StopFinder(stops) if stops else None
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain with this piece; empty once stopped."""
        if self._finder is None:
            return text
        if self.stopped_by is not None:
            return ""
        ready = self._held + text
        found = self._finder.feed(text)
        if found is not None:
            self.stopped_by = found.stop
            self._held = ""
            end = len(ready) - len(text) + found.end
            return ready[:end] if self._include_stop else ready[: end - len(found.stop)]
        keep = len(ready) - self._finder.pending
        self._held = ready[keep:]
        return ready[:keep]

    def finish(self) -> str:
        """The rest; empty once stopped."""
        held, self._held = self._held, ""
        return held


class Detokenizer:
    """Converts the tokens of one completion to text, piece by piece.

    The joined pieces equal the whole text decoded with `errors="replace"`. Held back are at most
    three bytes of an unfinished character. `first` says that the tokens start a text; the default
    is a completion, which continues a prompt and so keeps its leading space. `named` are special
    tokens that are part of the text, by their names.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, first: bool = False, named: Collection[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._first = first
        self._named = named
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        data = self._tokenizer.token_bytes(token, first=self._first)
        if self._first:
            self._first = not self._tokenizer.token_bytes(token, first=False)
        text = self._decoder.decode(data)
        if self._named and not data and (name := self._tokenizer.name(token)) in self._named:
            text += self.finish() + name
        return text

    def finish(self) -> str:
        """The rest; bytes of an unfinished character become U+FFFD."""
        return self._decoder.decode(b"", final=True)


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of a whole token list; invalid UTF-8 becomes U+FFFD."""
    detokenizer = Detokenizer(tokenizer, first=True)
    return "".join(map(detokenizer.push, tokens)) + detokenizer.finish()


def _alphabet() -> dict[str, int]:
    """Printable Latin-1 characters stand for their own byte, U+0100 and up for the other bytes."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    characters = {chr(byte): byte for byte in own}
    return characters | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


BYTE_OF = _alphabet()


def from_byte_level(piece: str) -> bytes:
    """The bytes of a byte-level piece; a piece outside the alphabet is plain text."""
    try:
        return bytes([BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def byte_of_fallback(piece: str) -> int | None:
    """0..255 for a byte piece such as <0x0A>, else None."""
    match = _FALLBACK.fullmatch(piece)
    return int(match[1], 16) if match else None


class TokenTable:
    """The bytes of every token, at the start of a text and elsewhere."""

    def __init__(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Per id: its usual bytes, and its bytes where it is the first token with any."""
        plain: list[bytes] = []
        self._first: dict[int, bytes] = {}
        for token, (usual, at_start) in enumerate(entries):
            plain.append(usual)
            if at_start != usual:
                self._first[token] = at_start
        self._plain: Sequence[bytes] = tuple(plain)

    def __len__(self) -> int:
        return len(self._plain)

    def get(self, token: int, *, first: bool) -> bytes:
        if first and token in self._first:
            return self._first[token]
        return self._plain[token] if 0 <= token < len(self._plain) else b""
