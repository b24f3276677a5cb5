"""Structured logs on stderr: one line for each record, for people or as JSON.

No log record of Twinbus contains secrets or message bodies. As a second protection, keys and signatures are searched
for in all records, also of other libraries, and are removed from them.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, TextIO

from twinbus.printable import printable

REDACTED: Final = "[redacted]"

# `=` may be percent-encoded once or twice, because tokens are sent inside URLs.
_SECRET: Final = re.compile(
    r"((?:SharedAccessKey|SharedAccessSignature|sig)(?:=|%(?:25)?3D))[^;&\s\"'\\<>,)]+", re.IGNORECASE
)
_SHORTEST_KEY: Final = 8
_OWN_FIELDS: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}


class LogFormat(StrEnum):
    """The format of a line."""

    HUMAN = "human"
    JSON = "json"


class Redaction(logging.Filter):
    """Removes keys and signatures from a log record before a handler formats the record.

    The texts in `keys` are removed from all parts of a record.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        super().__init__()
        self._keys: set[str] = set()
        self._known: re.Pattern[str] | None = None
        self.add(keys)

    def add(self, keys: Iterable[str]) -> None:
        """Remove these texts, too, from now on."""
        self._keys |= {key for key in keys if len(key) >= _SHORTEST_KEY}
        known = sorted(self._keys, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def clean(self, text: str) -> str:
        text = _SECRET.sub(rf"\1{REDACTED}", text)
        return self._known.sub(REDACTED, text) if self._known else text

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            # The arguments do not match the placeholders in the text. They are left out: they may contain a secret.
            message = str(record.msg)
        record.msg, record.args = self.clean(message), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = self.clean(record.exc_text)
        for name, value in extras(record).items():
            setattr(record, name, self._cleaned(value))
        return True

    def _cleaned(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        return self.clean(value if isinstance(value, str) else str(value))


def extras(record: logging.LogRecord) -> dict[str, Any]:
    """Return the `extra` fields of a record."""
    return {name: value for name, value in record.__dict__.items() if name not in _OWN_FIELDS}


class JsonLogFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _instant(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **extras(record),
        }
        if record.exc_text:
            line["exception"] = record.exc_text
        return printable(json.dumps(line, ensure_ascii=False, default=str))


class HumanLogFormatter(logging.Formatter):
    """Formats a record as time, level, text, and its extra fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in extras(record).items())
        text = " ".join(record.getMessage().splitlines())
        line = f"{_instant(record):%H:%M:%S.%f}"[:-3] + f" {record.levelname.lower():<8}{text}{fields}"
        trace = f"\n{printable(record.exc_text, newlines=True)}" if record.exc_text else ""
        return printable(line) + trace


class _CurrentStderr:
    """Writes to the `sys.stderr` of the moment.

    A live table replaces `sys.stderr` while it is on the screen, so that other text is printed above the table.
    """

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_logging(
    level: str, form: LogFormat = LogFormat.HUMAN, *, keys: Iterable[str] = (), stream: TextIO | None = None
) -> None:
    """Set up logging: records of Twinbus of at least `level`, and warnings of other libraries, go to `stream`.

    The default of `stream` is stderr. The texts in `keys` are removed from all records.
    """
    handler = logging.StreamHandler(stream or _CurrentStderr())
    handler.setFormatter(JsonLogFormatter() if form is LogFormat.JSON else HumanLogFormatter())
    handler.addFilter(Redaction(keys))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("twinbus").setLevel(level.upper())


def redact_also(keys: Iterable[str]) -> None:
    """Remove further keys from all records. The keys that were given before stay removed."""
    keys = tuple(keys)
    for handler in logging.getLogger().handlers:
        for each in handler.filters:
            if isinstance(each, Redaction):
                each.add(keys)


def _instant(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)
