"""What is printed: logs, messages and bars for slow work, counted nouns, aligned columns."""

import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from tqdm import tqdm

log = logging.getLogger(__name__)

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PATIENCE_S = 2.0  # how long a person waits without a message


@contextmanager
def said_if_long(text: str) -> Iterator[None]:
    """Says `text ...` after PATIENCE_S, unless the block is done by then."""

    def say() -> None:
        if _logs_json():
            log.info(text)
        else:
            print(f"{text} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def bar(
    text: str, total: int, unit: str, *, done: int = 0, log_every_s: float = 10
) -> "tqdm[None]":
    """A progress bar that stays. In a log file it prints a line only every `log_every_s`.

    Where every line is JSON, there is only the beginning's.
    """
    if json_lines := _logs_json():
        log.info("%s: %s %s", text, f"{total:,}", unit)
    return tqdm(
        total=total,
        initial=done,
        desc=text,
        unit=unit,
        unit_scale=unit in ("B", "token"),
        unit_divisor=1024 if unit == "B" else 1000,
        mininterval=0.2 if sys.stderr.isatty() else log_every_s,
        disable=json_lines,
    )


def bar_if_long(text: str, total: int, unit: str) -> "tqdm[None]":
    """A progress bar that appears after PATIENCE_S and is erased at the end."""
    return tqdm(
        total=total,
        desc=text,
        unit=unit,
        delay=PATIENCE_S,
        leave=False,
        disable=None,  # unless standard error is a terminal
        file=sys.stderr,
    )


def discard_output() -> None:
    """Drop whatever standard output holds or gets: at its end, Python tries again to write it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def counted(count: int, noun: str) -> str:
    """1,024 and "token" as "1,024 tokens"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def line_width() -> int:
    """In characters: the terminal's width, but no more than is comfortable to read."""
    return min(shutil.get_terminal_size((100, 24)).columns, 100)


class JsonLines(logging.Formatter):
    """The keys of a record's `fields`, if it has any, stand beside its message."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        entry = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        return json.dumps(entry, default=str)  # in ASCII: nothing in it ends a line


def configure_logs(level: str, form: str) -> None:
    """Send all logs, those of libraries too, to standard error. `form` is text or json."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(LINE))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(form == "json")
    logging.getLogger("uvicorn.error").addFilter(_says_why)


def _logs_json() -> bool:
    return any(isinstance(each.formatter, JsonLines) for each in logging.getLogger().handlers)


def _says_why(record: logging.LogRecord) -> bool:
    """Not uvicorn's line for bytes that are no HTTP: server/http/access_log.py writes a better."""
    return record.msg != "Invalid HTTP request received."
