"""Options of `twinbus cost forecast|actual`: one option for each field of Scenario, and the syntax of their values.

`twinbus.money.scenario` defines what each field means and which values are allowed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from datetime import timedelta
from typing import Annotated, Any, Final

import typer

from twinbus.cli.errors import WrongUsageError
from twinbus.cli.option_values import as_option_text, parse_duration, parse_size
from twinbus.money import OutageKind, PingKind, Scenario, SharedStateIn, SyphonRuns

_HELP: Final[Mapping[str, str]] = {
    "tier": "Tier in the price table: basic, standard, premium.",
    "messaging_units": "Premium: messaging units of each namespace.",
    "backlog_queues": "The pair's backlog_queue_count.",
    "entities": "Queues and topics that are sent to and fail over.",
    "subscriptions": "Subscriptions of each entity; above 0, entities are topics.",
    "clients": "Processes with a pair.",
    "rate": "Messages per second, over all clients and entities.",
    "message_size": "Size of one message: 1024, 64KB, 1MB.",
    "batch": "Messages per send call. A call fails as a whole.",
    "outage": "Duration of one outage: 90s, 15m, 8h.",
    "outages": "Outages in the period.",
    "outage_kind": "Whether failing calls reach the primary, and are charged, or do not.",
    "failover_interval": "The pair's failover_interval.",
    "ping_interval": "The pair's ping_interval.",
    "ping_jitter": "The pair's ping_jitter.",
    "ping": "A ping is a message, or the opening of a link, which is free.",
    "tries": "Tries of a send that fails, retries included.",
    "backlog_check_interval": "The pair's backlog_check_interval; 0: never.",
    "state": "Where pairs and syphons share their state: a folder, or nowhere, costs nothing.",
    "syphons": "Number of syphons.",
    "syphon": "Running all the time, or `twinbus syphon --drain` after each outage.",
    "long_poll": "Duration of a syphon's receive that returns nothing.",
    "count_interval": "How often a syphon counts the remaining messages; 0: never, as in a pair.",
    "drain_rate": "Messages per second that all syphons deliver.",
    "period": "Billing period: 30d.",
    "other_operations": "Other operations that the Azure subscription is charged for, per month.",
    "bandwidth": "Zone in the price table: inter_region, internet; or none.",
    "sent": "Messages sent to the primary, if known.",
    "diverted": "Messages diverted, if known.",
}
_NOT_IN_A_LEDGER: Final = frozenset({"tier", "messaging_units", "drain_rate", "other_operations", "bandwidth"})
_READERS: Final[Mapping[type, Callable[[str], Any]]] = {
    timedelta: parse_duration,
    int: int,
    float: float,
    str: str,
    OutageKind: OutageKind,
    PingKind: PingKind,
    SharedStateIn: SharedStateIn,
    SyphonRuns: SyphonRuns,
}
_KINDS: Final = {
    field.name: int if field.default in (None, MISSING) else type(field.default)
    for field in fields(Scenario)
    if field.name in _HELP
}


def read(field: str, text: str) -> Any:
    """Return the value of a field from a text in the option --compare."""
    reader = parse_size if field == "message_size" else _READERS[_KINDS[field]]
    try:
        return reader(text.strip())
    except (ValueError, typer.BadParameter):
        raise WrongUsageError(f"{field.replace('_', '-')}={text} cannot be read", _HELP[field]) from None


def field_of(option: str) -> str:
    """Return the name of the Scenario field that belongs to an option."""
    field = option.strip().removeprefix("--").replace("-", "_")
    if field not in _HELP:
        known = ", ".join(name.replace("_", "-") for name in _HELP)
        raise WrongUsageError(f"{option!r} is not an option of a forecast", f"Choose from {known}.")
    return field


def with_scenario(*, from_ledger: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds an option for each field of Scenario to a verb. The verb gets them as keywords.

    The help shows the default of each field. With `from_ledger`, it shows which values the verb takes from a ledger.
    """

    def made(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        more = [
            _option(field.name, field.default, from_ledger=from_ledger)
            for field in fields(Scenario)
            if field.name in _HELP
        ]
        verb.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined] # typer reads this attribute
        verb.__annotations__ = {one.name: one.annotation for one in (*own, *more)} | {"return": None}
        return verb

    return made


def given(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in asked.items() if value is not None}


def _option(field: str, value: Any, *, from_ledger: bool) -> inspect.Parameter:
    kind = _KINDS[field]
    shown = "none" if value is None else as_option_text(value)
    if from_ledger and field not in _NOT_IN_A_LEDGER:
        shown = "from the ledger"
    option = f"--{field.replace('_', '-')}"
    if kind is timedelta or field == "message_size":
        parser, metavar = (parse_duration, "SPAN") if kind is timedelta else (parse_size, "SIZE")
        said = typer.Option(option, parser=parser, metavar=metavar, help=_HELP[field], show_default=shown)
    else:
        said = typer.Option(option, help=_HELP[field], show_default=shown)
    annotation = Annotated[kind | None, said]  # type: ignore[valid-type] # a type known only at run time
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
