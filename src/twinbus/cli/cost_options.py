"""The options of `twinbus cost forecast|actual`: one for every field of a Scenario, and how its values are written.

What a field means and may be is decided in `twinbus.money.scenario`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from datetime import timedelta
from typing import Annotated, Any, Final

import typer

from twinbus.errors import OperatorError
from twinbus.money import OutageKind, PingKind, Scenario, SyphonRuns

_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d|)")
_SECONDS: Final = {"ms": 0.001, "s": 1, "": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(b|kb|mb|)")
_BYTES: Final = {"b": 1, "": 1, "kb": 1024, "mb": 1024 * 1024}


def parse_duration(text: str | timedelta) -> timedelta:
    """`90`, `90s`, `15m`, `8h` or `30d`."""
    if isinstance(text, timedelta):
        return text
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError
    return timedelta(seconds=float(found[1]) * _SECONDS[found[2]])


def parse_size(text: str | int) -> int:
    """`1024`, `64KB` or `1MB`."""
    found = _SIZE.fullmatch(str(text).strip().lower())
    if found is None:
        raise ValueError
    return int(float(found[1]) * _BYTES[found[2]])


def as_option_text(value: object) -> str:
    """A value as it would be written."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        unit = next((unit for unit in ("d", "h", "m") if seconds and not seconds % _SECONDS[unit]), "s")
        return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value)


_HELP: Final[Mapping[str, str]] = {
    "tier": "Of the price table: basic, standard, premium.",
    "messaging_units": "Premium: of each of the two namespaces.",
    "backlog_queues": "backlog_queue_count of the pair.",
    "entities": "Queues or topics that are sent to, and fail over.",
    "subscriptions": "Of each entity, which is a topic then.",
    "clients": "Processes with a pair.",
    "rate": "Messages a second, of all clients and entities together.",
    "message_size": "Of one message: 1024, 64KB, 1MB.",
    "batch": "Messages in one call to send: one that fails fails with all of them.",
    "outage": "How long one lasts: 90s, 15m, 8h.",
    "outages": "How many in the period.",
    "outage_kind": "Whether calls reach the primary and fail there, and are charged, or nobody hears them.",
    "failover_interval": "Of the pair.",
    "ping_interval": "Of the pair.",
    "ping_jitter": "Of the pair.",
    "ping": "A message, or the opening of a link, which is not charged.",
    "tries": "Of a send that fails: one, and its retries.",
    "backlog_check_interval": "Of the pair; 0: never.",
    "syphons": "How many run.",
    "syphon": "All the time, or `twinbus syphon --drain` once the primary is back.",
    "long_poll": "Of a syphon's receive that brings nothing.",
    "count_interval": "Of a syphon's display, which asks how much remains while messages move; 0: never, as in a pair.",
    "drain_rate": "Messages a second that the syphons bring home.",
    "period": "That is paid for: 30d.",
    "other_operations": "What else the subscription is charged for in a month.",
    "bandwidth": "Of the price table: inter_region, internet; or none.",
    "sent": "Messages sent to the primary, where that is known.",
    "diverted": "Messages diverted in all, where that is known.",
}
_READERS: Final[Mapping[type, Callable[[str], Any]]] = {
    timedelta: parse_duration,
    int: int,
    float: float,
    str: str,
    OutageKind: OutageKind,
    PingKind: PingKind,
    SyphonRuns: SyphonRuns,
}
_KINDS: Final = {
    field.name: int if field.default in (None, MISSING) else type(field.default) for field in fields(Scenario)
}


def read(field: str, text: str) -> Any:
    """A field from a text, as --compare has it."""
    reader = parse_size if field == "message_size" else _READERS[_KINDS[field]]
    try:
        return reader(text.strip())
    except ValueError:
        raise OperatorError(f"{field.replace('_', '-')}={text} cannot be read", _HELP[field]) from None


def field_of(option: str) -> str:
    """The field that an option names."""
    field = option.strip().removeprefix("--").replace("-", "_")
    if field not in _HELP:
        known = ", ".join(name.replace("_", "-") for name in _HELP)
        raise OperatorError(f"{option!r} is no option of a forecast", f"Choose from {known}.")
    return field


def with_scenario(default: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A verb whose `**asked` are the fields that were given. `default`: what is said of those that are not."""

    def made(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        more = [_option(field.name, field.default, default) for field in fields(Scenario)]
        verb.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined] # typer reads it
        verb.__annotations__ = {one.name: one.annotation for one in (*own, *more)} | {"return": None}
        return verb

    return made


def given(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in asked.items() if value is not None}


def _option(field: str, value: Any, default: str | None) -> inspect.Parameter:
    kind = _KINDS[field]
    shown = default or ("none" if value is None else as_option_text(value))
    option = f"--{field.replace('_', '-')}"
    if kind is timedelta or field == "message_size":
        parser, metavar = (parse_duration, "SPAN") if kind is timedelta else (parse_size, "SIZE")
        said = typer.Option(option, parser=parser, metavar=metavar, help=_HELP[field], show_default=shown)
    else:
        said = typer.Option(option, help=_HELP[field], show_default=shown)
    annotation = Annotated[kind | None, said]  # type: ignore[valid-type] # a type that is known only now
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
