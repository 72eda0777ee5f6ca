"""Finding stop strings in text that arrives in pieces, in time linear in the text.

Knows characters only: neither tokens nor bytes.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """A stop string that was found, and where it ends."""

    stop: str  # may have started in an earlier piece
    end: int  # characters of the latest piece, up to the end of the stop string


class StopFinder:
    """Matches all stop strings at once, one character at a time (Knuth–Morris–Pratt)."""

    pending: int  # characters at the end of the text that may still become part of a stop string

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("A stop string must not be empty.")
        self.pending = 0
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)

    def feed(self, piece: str) -> Found | None:
        """The stop string that completes first, the longest if several do; then feed no more."""
        for index, character in enumerate(piece):
            longest = ""
            for which, (stop, borders) in enumerate(self._stops):
                matched = _advance(stop, borders, self._matched[which], character)
                self._matched[which] = matched
                if matched == len(stop):
                    longest = max(longest, stop, key=len)
            if longest:
                return Found(longest, index + 1)
        self.pending = max(self._matched)
        return None


def _advance(stop: str, borders: list[int], matched: int, character: str) -> int:
    while matched and stop[matched] != character:
        matched = borders[matched - 1]
    return matched + (stop[matched] == character)


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in stop[1:]:
        borders.append(_advance(stop, borders, borders[-1], character))
    return borders
