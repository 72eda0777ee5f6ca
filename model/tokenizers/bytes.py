"""Tables from tokens to bytes, and the alphabet of byte-level vocabularies.

Knows no file format. Both tokenizer implementations store their bytes in a TokenTable.
"""

import re
from collections.abc import Iterable, Sequence

_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


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
