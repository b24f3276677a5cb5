"""Progress of a syphon (Y9): counts by destination, the current rate, an estimate of the time left.

Pure: the pumps report events to a `ProgressCounter`. Times are seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from twinbus.syphon.plan import DestinationStatus, Readiness

if TYPE_CHECKING:
    from twinbus.syphon.left_messages import LeftMessages

_RATE_SECONDS: Final = 10.0
MAX_COUNTED_DESTINATIONS: Final = 10_000
"""The number of destinations that have their own counts. All further destinations share the counts `(others)`."""
OTHER_DESTINATIONS: Final = "(others)"


@dataclass(slots=True)
class MessageCounts:
    """Counts of messages, for one destination or for all.

    `deferred` is the number of deferrals: a message that was deferred twice counts twice. `Progress.aside` is the
    number of messages that are deferred now. `kept` messages stay in the backlog, because the transport would change
    them (Y10). `possible_duplicates` counts a message for each send of unknown outcome, and for each completion that
    failed after its delivery: the message is sent again. After a drain on Spark with a ledger, these are
    counted by message instead, as in the balance. `dead_letter_reasons` has the dead-lettered messages by reason.
    """

    returned: int = 0
    deferred: int = 0
    dead_lettered: int = 0
    kept: int = 0
    possible_duplicates: int = 0
    bytes: int = 0
    dead_letter_reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a syphon at one time.

    `rate` is in messages per second. `held` messages are locked by the syphon. `aside_by_destination` has the numbers
    of messages that are deferred now. `remaining` is the number of messages in the backlog that can move; messages that
    are put aside, kept or scheduled cannot. `seconds_left` is the time for these. Both are None if unknown. `left` says
    what a drain that ended by itself has left, and why (Y11). `lanes_lost` is the number of lanes of a syphon on Spark
    that died. `lanes_uncounted` is how many of these are not in these numbers: with a ledger none, because what they
    moved is counted from the ledger. `audit` is what the audit after a drain found (L3), if there was one.
    """

    seconds: float
    total: MessageCounts
    by_destination: dict[str, MessageCounts]
    states: tuple[DestinationStatus, ...]
    operations: dict[str, int]
    rate: float
    held: int
    aside_by_destination: Mapping[str, int]
    remaining: int | None
    seconds_left: float | None
    state: str
    lanes_lost: int = 0
    lanes_uncounted: int = 0
    left: tuple[LeftMessages, ...] = ()
    audit: Mapping[str, Any] | None = None

    @property
    def aside(self) -> int:
        """How many messages are put aside now, for all destinations."""
        return sum(self.aside_by_destination.values())

    @property
    def not_ready(self) -> tuple[DestinationStatus, ...]:
        return tuple(one for one in self.states if one.readiness is not Readiness.READY)


def messages_that_can_move(backlog: int | None, stuck: int) -> int | None:
    """Return how many of the messages in the backlog can move, if `stuck` of them cannot; None if it is not known."""
    return None if backlog is None else max(0, backlog - stuck)


@dataclass(slots=True)
class ProgressCounter:
    """Counts what the pumps report."""

    began: float
    total: MessageCounts = field(default_factory=MessageCounts)
    by_destination: dict[str, MessageCounts] = field(default_factory=dict)
    operations: Counter[str] = field(default_factory=Counter)
    _recent: deque[tuple[float, int]] = field(default_factory=deque)
    """Times, each with the number of messages that were returned then. `rate` uses these numbers."""

    def returned(self, path: str, messages: int, size: int, now: float) -> None:
        for counts in (self.total, self._of(path)):
            counts.returned += messages
            counts.bytes += size
        if self._recent and now - self._recent[-1][0] < _RATE_SECONDS / 20:
            at, before = self._recent[-1]
            self._recent[-1] = (at, before + messages)
        else:
            self._recent.append((now, messages))
        self._forget_old(now)

    def deferred(self, path: str, messages: int) -> None:
        self.total.deferred += messages
        self._of(path).deferred += messages

    def dead_lettered(self, path: str, messages: int, reason: str) -> None:
        for counts in (self.total, self._of(path)):
            counts.dead_lettered += messages
            counts.dead_letter_reasons[reason] = counts.dead_letter_reasons.get(reason, 0) + messages

    def kept(self, path: str, messages: int) -> None:
        self.total.kept += messages
        self._of(path).kept += messages

    def possible_duplicates(self, path: str, messages: int) -> None:
        self.total.possible_duplicates += messages
        self._of(path).possible_duplicates += messages

    def recount_possible_duplicates(self, by_path: Mapping[str, int]) -> None:
        """Replaces the numbers of possible duplicates by these."""
        for counts in (self.total, *self.by_destination.values()):
            counts.possible_duplicates = 0
        for path, messages in by_path.items():
            self.possible_duplicates(path, messages)

    def rate(self, now: float) -> float:
        """Messages per second over the last 10 seconds."""
        self._forget_old(now)
        span = min(max(now - self.began, 0.001), _RATE_SECONDS)
        return sum(messages for _, messages in self._recent) / span

    def _forget_old(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - _RATE_SECONDS:
            self._recent.popleft()

    def _of(self, path: str) -> MessageCounts:
        found = self.by_destination.get(path)
        if found is None:
            if len(self.by_destination) >= MAX_COUNTED_DESTINATIONS:
                return self.by_destination.setdefault(OTHER_DESTINATIONS, MessageCounts())
            found = self.by_destination[path] = MessageCounts()
        return found
