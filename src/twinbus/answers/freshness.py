"""Decides whether results are up to date (D7), and as of when they are true. Pure: time and ledgers come as arguments.

Results are up to date if every sealed segment of each ledger is in them, and if the open segments were looked at within
a maximum age. The pipeline looks at open segments when it ingests. A reader that can read the ledger looks at them
again: if nothing was written since, the results are true as of now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LedgerState:
    """One of the ledgers that went into the tables: what is known about it now. Times are milliseconds."""

    ledger: str
    """The path of the ledger."""
    looked_at: int | None
    """All lines that were in the ledger at this time are in the results; 0 if the time is not known.

    None if the results have nothing of this ledger.
    """
    at_hand: bool = False
    """Whether the ledger can be read here. If not, the fields below are unknown."""
    unread_sealed: str | None = None
    """The name of a sealed segment with lines that the results do not have."""
    unread_open: str | None = None
    """The name of an open segment with lines that the results do not have."""
    same_writers: bool = True
    """Whether the writers that are dead now are those that the results take for dead."""


@dataclass(frozen=True, slots=True)
class ResultState:
    """What is known about the results."""

    computed_at: int
    silence: float
    """Seconds of silence after which a writer counts as dead."""
    has_undecided: bool = False
    """Whether the results depend on the time since the last entry of a writer."""


@dataclass(frozen=True, slots=True)
class Freshness:
    """Whether results are up to date."""

    as_of: int | None
    """All lines that were in the ledgers at this time are in the results. None if the time is not known."""
    reason: str | None = None
    """Why the results are not up to date; None if they are."""

    @property
    def is_up_to_date(self) -> bool:
        return self.reason is None


def judge_freshness(
    result: ResultState | None, ledgers: Sequence[LedgerState], now: int, max_age: float, silence: float | None = None
) -> Freshness:
    """Returns whether results are up to date, and as of when.

    `result` is None if there are no results. `now` is in milliseconds, `max_age` in seconds. `silence` is given for
    results that depend on which writers are dead: the seconds that the user wants.
    """
    if result is None:
        return Freshness(None, "there are no results in the tables")
    as_of = min((_as_of(one, result, now, silence) for one in ledgers), default=0) or None
    reason = _unread(ledgers)
    if reason is None and silence is not None and silence != result.silence:
        reason = f"the results take a writer for dead after {result.silence:g} s of silence"
    if reason is None and as_of is None:
        reason = "it is not known when the ledger was looked at"
    if reason is None and as_of is not None and now - as_of > max_age * 1000:
        reason = f"the results are {age_text(now - as_of)} old"
    return Freshness(as_of, reason)


def _unread(ledgers: Sequence[LedgerState]) -> str | None:
    for one in ledgers:
        if one.looked_at is None:
            return f"the results have nothing of {one.ledger}"
        if one.unread_sealed is not None:
            return f"the results do not have all of {one.unread_sealed}"
    return None


def _as_of(ledger: LedgerState, result: ResultState, now: int, silence: float | None) -> int:
    looked_at = ledger.looked_at or 0
    depends_on_time = silence is not None and (not ledger.same_writers or result.has_undecided)
    if ledger.at_hand and ledger.unread_sealed is None and ledger.unread_open is None:
        # Nothing was written since. But a writer may have died, or been silent for too long.
        return max(looked_at, result.computed_at) if depends_on_time else now
    return looked_at


def age_text(milliseconds: int) -> str:
    """Returns a length of time as people say it: `12 s`, `3 min`, `5 h`, `2 days`."""
    seconds = max(milliseconds, 0) // 1000
    for length, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds // length:,} {name}"
    return f"{seconds} s"
