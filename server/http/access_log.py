"""One line in the log for each HTTP request, with the reason where it was refused; never a text.

Refusals are always shown, but no more than a person can read: a flood of them is summed up.
"""

import asyncio
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ropewalk.server.errors import ServeError
from ropewalk.server.metrics.exporter import Metrics

REFUSALS_PER_SECOND = 10  # of one code
MAX_PATH = 200  # characters
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger("ropewalk.http")


def choose_id(given: bytes | None) -> str:
    """A request's id: the client's own if it is harmless."""
    return given.decode() if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer. `route` is the path's template, None for no path of the API."""

    request_id: str
    client: str  # its address
    method: str
    path: str  # as it was sent, percent-encoded
    route: str | None
    status: int | None  # None: the client left before it was answered
    seconds: float
    bytes: int  # of the answer's body


class HttpLog:
    """Logs and counts what became of requests. For one event loop."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        access_log: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`access_log`: requests that were not refused are logged at INFO instead of DEBUG."""
        self._metrics = metrics
        self._level = logging.INFO if access_log else logging.DEBUG
        self._clock = clock
        self._until = 0.0  # the end of the second in which `_seen` counts
        self._seen: Counter[str] = Counter()  # refusals by code
        self._timer: asyncio.TimerHandle | None = None

    def answered(self, exchange: Exchange, *, quiet: bool) -> None:
        """`quiet`: a probe that comes again and again, and is logged at DEBUG only."""
        self._metrics.answered(exchange.route, exchange.method, exchange.status)
        self._write(logging.DEBUG if quiet else self._level, exchange, {})

    def refused(self, exchange: Exchange, error: ServeError, model: str | None = None) -> None:
        """`model` is the one that the request named, if it came that far."""
        self._metrics.answered(exchange.route, exchange.method, exchange.status)
        self._metrics.reject(model or error.model, error)
        if self._admits(error.code):
            why = {"code": error.code, "param": error.param}
            if not error.quotes:
                why["reason"] = error.message
            self._write(logging.INFO, exchange, why)

    def unread(
        self,
        error: ServeError,
        request_id: str,
        client: tuple[str, int] | None,
        method: str,
        path: str,
    ) -> None:
        """Bytes that were refused before they made a request. `method`, `path`: - if unknown."""
        where = client[0] if client else "-"
        size = len(error.body())
        self.refused(
            Exchange(request_id, where, method, path, None, error.status, 0.0, size), error
        )

    def close(self) -> None:
        """Sum up the refusals that were not shown. The log goes on with the next second."""
        left_out = {
            code: count - REFUSALS_PER_SECOND
            for code, count in sorted(self._seen.items())
            if count > REFUSALS_PER_SECOND
        }
        self._seen.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if left_out:
            _log.info(
                "%d more requests were refused within a second: %s",
                sum(left_out.values()),
                ", ".join(f"{count} {code}" for code, count in left_out.items()),
                extra={"fields": {"refused": left_out}},
            )

    def _admits(self, code: str) -> bool:
        now = self._clock()
        if now >= self._until:
            self.close()
            self._until = now + 1
        self._seen[code] += 1
        if self._seen[code] <= REFUSALS_PER_SECOND:
            return True
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._until - now, self.close)
        return False

    def _write(self, level: int, exchange: Exchange, why: dict[str, str | None]) -> None:
        if not _log.isEnabledFor(level):
            return
        line = (
            f"{exchange.method} {_short(exchange.path)} {exchange.status or 'not answered'}, "
            f"{exchange.seconds:.3f} s, {exchange.bytes} bytes, {exchange.client}, "
            f"{exchange.request_id}"
        )
        if why:
            field = f" ({why['param']})" if why["param"] else ""
            line += f": {why['code']}{field}"
            line += f": {why['reason']}" if "reason" in why else ""
        fields = asdict(exchange) | {"seconds": round(exchange.seconds, 6)} | why
        _log.log(level, "%s", line, extra={"fields": fields})


def _short(path: str) -> str:
    return path if len(path) <= MAX_PATH else path[: MAX_PATH - 1] + "…"
