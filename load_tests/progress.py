"""One line about what runs: rewritten in place on a terminal, printed once a run elsewhere."""

from typing import TextIO


class Progress:
    """A line on `out` (standard error, so that the report can be piped)."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._title = ""

    def start(self, title: str) -> None:
        self._title = title
        if self._live:
            self._show(f"{title} …")
        else:
            self._out.write(f"{title}\n")
            self._out.flush()

    def tick(self, answered: int, total: int) -> None:
        if self._live:
            self._show(f"{self._title}: {answered} of {total} answered")

    def clear(self) -> None:
        if self._live:
            self._show("")

    def _show(self, text: str) -> None:
        self._out.write(f"\r\x1b[2K{text}")  # erase the line, then write it anew
        self._out.flush()
