"""Values of options that have a unit: spans of time and sizes, as a user writes them and as help shows them."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, Final

import typer

_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d|)")
_SECONDS: Final = {"ms": 0.001, "s": 1, "": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(b|kb|mb|)")
_BYTES: Final = {"b": 1, "": 1, "kb": 1024, "mb": 1024 * 1024}


def parse_duration(text: str | timedelta) -> timedelta:
    """Parse a duration: `90`, `90s`, `15m`, `8h` or `30d`. Raises typer.BadParameter with the accepted forms."""
    if isinstance(text, timedelta):
        return text
    found = _SPAN.fullmatch(text.strip().lower())
    try:
        return timedelta(seconds=float(found[1]) * _SECONDS[found[2]] if found is not None else float("nan"))
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is not a span of time. Give a number with ms, s, m, h or d: 90s, 15m, 8h, 30d."
        ) from None


def parse_size(text: str | int) -> int:
    """Parse a size in bytes: `1024`, `64KB` or `1MB`. Raises typer.BadParameter with the accepted forms."""
    found = _SIZE.fullmatch(str(text).strip().lower())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a size. Give a number with B, KB or MB: 1024, 64KB, 1MB.")
    return int(float(found[1]) * _BYTES[found[2]])


def span_option(help: str, **more: Any) -> Any:
    """Return an option whose value is a span of time. `more` are further arguments of typer.Option."""
    return typer.Option(parser=parse_duration, metavar="SPAN", help=help, **more)


def as_option_text(value: object) -> str:
    """Return a value as the text that a user writes on the command line."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        unit = next((unit for unit in ("d", "h", "m") if seconds and not seconds % _SECONDS[unit]), "s")
        return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value)
