"""The kinds of cases that need one server: JSON bodies, and streams of bytes."""

from collections.abc import Callable, Sequence
from random import Random

from tests.fuzz import bodies, raw
from tests.fuzz.answers import fault
from tests.fuzz.streams import Stream, exchange
from tests.fuzz.target import Target

# Opened by the server when first needed, and kept: pipes and files of libraries.
KEPT_FILES = 8


class Drawn:
    """Streams from `draw_stream` to a server that must answer, log no failure and leak nothing."""

    def __init__(self, name: str, draw_stream: Callable[[Random], Stream], target: Target) -> None:
        self.name = name
        self.draw = draw_stream
        self._target = target
        self._files = target.open_files() + KEPT_FILES
        self._logged = 0

    async def attempt(self, stream: Stream) -> tuple[str | None, bytes, float]:
        got = await exchange(self._target.address, stream)
        return fault(stream, got), got.raw, got.seconds

    def settle(self) -> Sequence[str]:
        failures = self._target.failures(self._logged)
        self._logged = self._target.log.stat().st_size
        return [
            *(f"leak: {each}" for each in self._target.leaks(self._files)),
            *(f"logged: {each}" for each in failures[:3]),
        ]


def bodies_kind(target: Target) -> Drawn:
    return Drawn("bodies", bodies.draw_stream, target)


def raw_kind(target: Target) -> Drawn:
    return Drawn("raw", raw.draw_stream, target)
