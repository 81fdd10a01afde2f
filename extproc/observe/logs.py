"""Logs on standard error: one line per event, as text or JSON."""

import json
import logging
import sys
from datetime import UTC, datetime

from extproc.config import LogSettings
from extproc.ground.text import printable

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


def setup(settings: LogSettings) -> None:
    """Log to stderr: events of this package from the configured level on, warnings of other
    packages."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("extproc").setLevel(settings.level.upper())


class JsonFormatter(logging.Formatter):
    """``{"time": …, "level": …, "logger": …, "message": …}`` and every field of ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.000Z INFO message key=value …``."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_word(value)}" for name, value in _fields(record).items())
        line = printable(f"{_time(record)} {record.levelname} {record.getMessage()}{fields}")
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _word(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
