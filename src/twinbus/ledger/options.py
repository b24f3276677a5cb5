"""The options of a ledger: names, units, ranges and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from twinbus.errors import CallerError

_MIB = 1024 * 1024
_RANGES = {
    "group_interval": (timedelta(milliseconds=1), timedelta(minutes=1)),
    "segment_age": (timedelta(seconds=1), timedelta(days=7)),
}


class LedgerOptionError(CallerError, ValueError):
    """An option of the ledger is out of range or has a wrong type."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option} is {value!r}; it must be {allowed}")
        self.option = option
        self.value = value
        self.allowed = allowed


@dataclass(frozen=True, kw_only=True)
class LedgerOptions:
    """How a ledger is written. Raises LedgerOptionError for a value out of range."""

    on_error: Literal["go_on", "stop"] = "go_on"
    """What operations do while the ledger cannot be written: go on, or stop. In both cases an error is logged."""
    durability: Literal["process", "lazy"] = "process"
    """When an entry is written to its file. "process": before the call that records it returns, so that the entry
    survives the end of the process at any instant. "lazy": together with others, every `group_interval`; this costs
    less CPU, and a process that is killed loses the entries of its last moments. In both cases an entry survives a
    power loss only after the next sync; `flush` waits for it."""
    group_interval: timedelta = timedelta(seconds=1)
    """The longest time until an entry is synced together with others (1 ms to 1 min). About 1000 waiting entries are
    synced earlier."""
    segment_bytes: int = 64 * _MIB
    """A segment is sealed when it reaches this size (at least 4096)."""
    segment_age: timedelta = timedelta(hours=1)
    """A segment is sealed when it reaches this age (1 s to 7 days), also if it is smaller than `segment_bytes`."""
    budget_bytes: int = 8192 * _MIB
    """Disk space for all segments of one role on one host (at least two segments). If they need more, the oldest
    segments are removed."""
    buffer_bytes: int = 16 * _MIB
    """Memory for entries while the ledger cannot be written (at least 4096). If the memory is full, further entries are
    dropped, and a gap entry reports how many."""

    def __post_init__(self) -> None:
        _check("on_error", self.on_error, self.on_error in ("go_on", "stop"), "go_on or stop")
        _check("durability", self.durability, self.durability in ("process", "lazy"), "process or lazy")
        for option, (shortest, longest) in _RANGES.items():
            value = getattr(self, option)
            is_within = isinstance(value, timedelta) and shortest <= value <= longest
            _check(option, value, is_within, f"from {shortest} to {longest}")
        for option, least in (
            ("segment_bytes", 4096),
            ("buffer_bytes", 4096),
            ("budget_bytes", 2 * self.segment_bytes),
        ):
            value = getattr(self, option)
            _check(option, value, type(value) is int and value >= least, f"an integer from {least}")


def _check(option: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise LedgerOptionError(option, value, allowed)
