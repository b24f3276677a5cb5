"""The input of a forecast (M4): a pair, its traffic, the outages of a period and the syphons, with units and ranges."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final

from twinbus.errors import CallerError
from twinbus.money.observed import Observed

_SECOND, _HOUR, _DAY = timedelta(seconds=1), timedelta(hours=1), timedelta(days=1)


class ScenarioError(CallerError):
    """A field of a scenario is out of range. The text names the field as the command line spells it."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field.replace('_', '-')} is {value}, and must be {allowed}")
        self.field = field


class SyphonRuns(StrEnum):
    """When syphons run.

    `standing`: all the time, also during outages. `after`: only after an outage, as `twinbus syphon --drain`.
    """

    STANDING = "standing"
    AFTER = "after"


class OutageKind(StrEnum):
    """How the primary fails.

    `answering`: calls reach the primary, fail there and are charged. `unreachable`: calls do not reach the primary.
    """

    ANSWERING = "answering"
    UNREACHABLE = "unreachable"


class PingKind(StrEnum):
    """What a ping is (G3): a message, or the opening of a link, which is not an operation."""

    MESSAGE = "message"
    LINK = "link"


class SharedStateIn(StrEnum):
    """Where processes share failovers and holds (S16).

    `secondary`: in a queue of the secondary, which pairs and syphons peek at. `folder`: in a folder, or nowhere. This
    needs no operation.
    """

    SECONDARY = "secondary"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The use of one pair in a period of time. `rate` is for all clients and entities together."""

    tier: str = "standard"
    messaging_units: int = 1
    """Messaging units of each of the two namespaces (premium)."""
    backlog_queues: int = 10
    entities: int = 1
    """Number of entities to which messages are sent. All of them fail over in an outage."""
    subscriptions: int = 0
    """Subscriptions of each entity; 0 if the entities are queues."""
    clients: int = 1
    """Number of processes with a pair. Each process has a sender and a receiver for every entity."""
    rate: float = 10.0
    """Messages per second."""
    message_size: int = 1024
    """Bytes of a message, its properties included."""
    batch: int = 1
    """Messages in one send call. A failed call is charged for all of its messages."""
    outage: timedelta = _HOUR
    """Length of one outage."""
    outages: int = 1
    """Number of outages in the period."""
    outage_kind: OutageKind = OutageKind.ANSWERING
    failover_interval: timedelta = 60 * _SECOND
    ping_interval: timedelta = 60 * _SECOND
    ping_jitter: float = 0.1
    ping: PingKind = PingKind.MESSAGE
    tries: int = 4
    """Tries of a send that fails: the first, and the SDK's retries."""
    backlog_check_interval: timedelta = 300 * _SECOND
    state: SharedStateIn = SharedStateIn.FOLDER
    """Where pairs and syphons share their state."""
    syphons: int = 1
    syphon: SyphonRuns = SyphonRuns.STANDING
    long_poll: timedelta = 900 * _SECOND
    """Length of a receive that finds no message (Y2)."""
    count_interval: timedelta = 10 * _SECOND
    """Time between two counts of the remaining messages for the display of a syphon; 0 for no display, as in a pair."""
    drain_rate: float = 1000.0
    """Messages per second that the syphons move."""
    period: timedelta = 30 * _DAY
    other_operations: int = 0
    """Other operations per month of the same Azure subscription. They use the first units of the price bands."""
    bandwidth: str = "inter_region"
    """Name of a bandwidth scale in the price table, or `none`."""
    sent: int | None = None
    """Messages sent to the primary while it was reachable, if known; otherwise computed from `rate`."""
    diverted: int | None = None
    """Messages diverted in all outages together, if known; otherwise computed from `rate` and the pings."""
    observed: Observed | None = None
    """What a ledger shows. It replaces `outage`, `outages`, `message_size`, `subscriptions`, `sent` and `diverted`."""

    def __post_init__(self) -> None:
        for field, least in _LEAST.items():
            value = getattr(self, field)
            if value is not None and not value >= least:
                raise ScenarioError(field, _shown(value), f"{_shown(least)} or more")
        for field in ("rate", "drain_rate"):
            if getattr(self, field) in (float("inf"), float("nan")):
                raise ScenarioError(field, getattr(self, field), "finite")
        if not 0 <= self.ping_jitter <= 1:
            raise ScenarioError("ping_jitter", self.ping_jitter, "from 0 to 1")


_LEAST: Final[dict[str, int | float | timedelta]] = {
    "messaging_units": 1,
    "backlog_queues": 1,
    "entities": 1,
    "subscriptions": 0,
    "clients": 1,
    "rate": 0,
    "message_size": 0,
    "batch": 1,
    "outage": timedelta(0),
    "outages": 0,
    "failover_interval": timedelta(0),
    "ping_interval": _SECOND / 100,
    "tries": 1,
    "backlog_check_interval": timedelta(0),
    "syphons": 0,
    "long_poll": _SECOND / 100,
    "count_interval": timedelta(0),
    "drain_rate": 0.001,
    "period": _SECOND,
    "other_operations": 0,
    "sent": 0,
    "diverted": 0,
}


def _shown(value: object) -> str:
    return f"{value.total_seconds():g} s" if isinstance(value, timedelta) else str(value)
