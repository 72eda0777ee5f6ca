"""How the server's log is written: lines of text, or one JSON object per line."""

import json
import logging
from datetime import UTC, datetime

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


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


def configure(level: str, form: str) -> None:
    """Send all logs, those of libraries too, to standard error. `form` is text or json."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(form == "json")
    logging.getLogger("uvicorn.error").addFilter(_says_why)


def _says_why(record: logging.LogRecord) -> bool:
    """Not uvicorn's line for bytes that are no HTTP: server/http/access_log.py writes a better."""
    return record.msg != "Invalid HTTP request received."
