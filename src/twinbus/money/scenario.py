"""What a forecast is asked about (M4): a pair, its traffic, the outages of a period, who brings the backlog home.

Names, units and ranges are decided here. What it amounts to is in `course`, what it costs in `forecast`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final

from twinbus.errors import CallerError

_SECOND, _HOUR, _DAY = timedelta(seconds=1), timedelta(hours=1), timedelta(days=1)


class ScenarioError(CallerError):
    """A value that makes no sense, by name."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field.replace('_', '-')} is {value}, and must be {allowed}")
        self.field = field


class SyphonRuns(StrEnum):
    """`standing`: all the time, also while the primary is away. `after`: `twinbus syphon --drain` once it is back."""

    STANDING = "standing"
    AFTER = "after"


class OutageKind(StrEnum):
    """`answering`: calls reach the primary and fail there, and are charged. `unreachable`: nobody hears them."""

    ANSWERING = "answering"
    UNREACHABLE = "unreachable"


class PingKind(StrEnum):
    """G3: a message, or the opening of a link, which is no operation."""

    MESSAGE = "message"
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Of one pair. `rate`, and what follows from it, is for all clients and entities together."""

    tier: str = "standard"
    messaging_units: int = 1
    """Premium: of each of the two namespaces."""
    backlog_queues: int = 10
    entities: int = 1
    """That are sent to, and fail over."""
    subscriptions: int = 0
    """Of each entity; 0: they are queues."""
    clients: int = 1
    """Processes with a pair; each has a sender and a receiver for every entity."""
    rate: float = 10.0
    """Messages a second."""
    message_size: int = 1024
    """Bytes of a message, its properties included."""
    batch: int = 1
    """Messages in one call to send. Each is charged alike; but a call that fails fails with all of them."""
    outage: timedelta = _HOUR
    """How long one lasts."""
    outages: int = 1
    """In the period."""
    outage_kind: OutageKind = OutageKind.ANSWERING
    failover_interval: timedelta = 60 * _SECOND
    ping_interval: timedelta = 60 * _SECOND
    ping_jitter: float = 0.1
    ping: PingKind = PingKind.MESSAGE
    tries: int = 4
    """Of a send that fails: one, and the SDK's retries."""
    backlog_check_interval: timedelta = 300 * _SECOND
    syphons: int = 1
    syphon: SyphonRuns = SyphonRuns.STANDING
    long_poll: timedelta = 900 * _SECOND
    """Y2. Seconds of one receive that brings nothing."""
    count_interval: timedelta = 10 * _SECOND
    """How often a syphon's display asks how much remains while messages move; 0: never, as inside a pair."""
    drain_rate: float = 1000.0
    """Messages a second that the syphons bring home."""
    period: timedelta = 30 * _DAY
    other_operations: int = 0
    """What else the subscription is charged for in a month: it comes first in the bands."""
    bandwidth: str = "inter_region"
    """A scale of the price table, or `none`."""
    sent: int | None = None
    """Messages sent to the primary while it was there, where that is known; otherwise `rate` says."""
    diverted: int | None = None
    """Messages diverted in all outages together, where that is known; otherwise `rate` and the pings say."""

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
