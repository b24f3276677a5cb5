"""The options of a ledger: names, units, ranges and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from twinbus.errors import CallerError

_MIB = 1024 * 1024
_SPANS = {
    "group_interval": (timedelta(milliseconds=1), timedelta(minutes=1)),
    "segment_age": (timedelta(seconds=1), timedelta(days=7)),
}


class LedgerOptionError(CallerError, ValueError):
    """An option of the ledger is out of range or of a wrong type."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option} is {value!r}; it must be {allowed}")
        self.option = option
        self.value = value
        self.allowed = allowed


@dataclass(frozen=True, kw_only=True)
class LedgerOptions:
    """How a ledger is kept. Out of range: LedgerOptionError."""

    on_error: Literal["go_on", "stop"] = "go_on"
    """What becomes of operations while it cannot be written; either way it is logged as an error."""
    group_interval: timedelta = timedelta(seconds=1)
    """How long entries are gathered before they are written and synced together (1 ms to 1 min), about 1000 at most."""
    segment_bytes: int = 64 * _MIB
    """A segment is rolled at this size (≥ 4096), …"""
    segment_age: timedelta = timedelta(hours=1)
    """… or at this age (1 s to 7 days)."""
    budget_bytes: int = 8192 * _MIB
    """What all segments of a role on a host may take (at least two segments): the oldest are removed beyond it."""
    buffer_bytes: int = 16 * _MIB
    """What is kept in memory while it cannot be written (≥ 4096); beyond it entries are missing, and a gap says so."""

    def __post_init__(self) -> None:
        _check("on_error", self.on_error, self.on_error in ("go_on", "stop"), "go_on or stop")
        for option, (shortest, longest) in _SPANS.items():
            span = getattr(self, option)
            holds = isinstance(span, timedelta) and shortest <= span <= longest
            _check(option, span, holds, f"from {shortest} to {longest}")
        for option, least in (
            ("segment_bytes", 4096),
            ("buffer_bytes", 4096),
            ("budget_bytes", 2 * self.segment_bytes),
        ):
            value = getattr(self, option)
            _check(option, value, type(value) is int and value >= least, f"an integer from {least}")


def _check(option: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise LedgerOptionError(option, value, allowed)
