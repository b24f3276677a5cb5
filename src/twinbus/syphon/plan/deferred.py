"""The deferred messages of one backlog queue: which to bring back, and when to scan for unknown ones (Y5).

A message whose destination is not ready is deferred, and its sequence number is stored here by destination. Once the
destination is ready, a *recall* brings some of its messages back. The number of a deferred message can be unknown: an
earlier run or another syphon deferred the message, a settlement was not answered, or there were more than `MAX_NUMBERS`
numbers. A *scan* peeks at the whole queue and finds such messages. No recall starts while a scan runs, and no scan
starts before all recalls have ended: the scan would count the recalled messages as deferred. A drain also needs what a
scan says about the other messages: *unavailable* ones, which another receiver has locked, and scheduled ones (Y11).
Pure: the arguments are only numbers, paths and times.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import Final, NamedTuple, Protocol

from twinbus.syphon.plan.destinations import DestinationRoute, Destinations, destination_key

MAX_NUMBERS: Final = 500_000
SCAN_INTERVAL: Final = 6 * 3600.0
"""Seconds between two scans. A scan finds messages that another syphon deferred and did not bring back."""
RESCAN_AFTER_MISSING: Final = 900.0
"""Seconds from a recall that missed messages to the next scan: another receiver may have locked those messages."""
MAX_UNAVAILABLE: Final = 100_000
"""The most active messages of a scan that are remembered by number."""
RESCAN_AFTER_FAILURE: Final = 90.0
"""Seconds from an unanswered settlement to the next scan. If the message was not settled, its lock has ended then."""
# The key of messages that name no destination. They are brought back so that they can be dead-lettered.
UNADDRESSED: Final = ""


class Recall(NamedTuple):
    """A request to bring deferred messages back. If `probe` is an epoch, one message is the probe of that epoch."""

    path: str
    numbers: tuple[int, ...]
    probe: int | None


class ScannedMessage(Protocol):
    """The properties of a peeked message that a scan uses."""

    @property
    def sequence_number(self) -> int: ...

    @property
    def deferred(self) -> bool: ...

    @property
    def scheduled(self) -> bool: ...

    @property
    def path(self) -> str | None: ...


class _Numbers:
    """The sequence numbers of the messages that wait for one destination, in ascending order.

    The numbers before index `_head` are removed already. A probe recalls `probe_size` messages.
    """

    __slots__ = ("_head", "_numbers", "path", "probe_size")

    def __init__(self, path: str) -> None:
        self.path = path
        self.probe_size = 1
        self._numbers = array("q")
        self._head = 0

    def __len__(self) -> int:
        return len(self._numbers) - self._head

    @property
    def least(self) -> int:
        return self._numbers[self._head]

    def add(self, number: int) -> bool:
        """Add a number. Return False if it was there already."""
        numbers = self._numbers
        if not numbers or number > numbers[-1]:
            numbers.append(number)
            return True
        if number in self:
            return False
        insort(numbers, number, self._head)
        return True

    def __contains__(self, number: int) -> bool:
        at = bisect_left(self._numbers, number, self._head)
        return at < len(self._numbers) and self._numbers[at] == number

    def take(self, count: int) -> tuple[int, ...]:
        """Remove and return the `count` least numbers."""
        taken = tuple(self._numbers[self._head : self._head + count])
        self._head += len(taken)
        if self._head * 2 > len(self._numbers):
            del self._numbers[: self._head]
            self._head = 0
        return taken

    def forget_last(self, count: int) -> int:
        """Remove the `count` greatest numbers. Return the least of the removed numbers."""
        first = max(self._head, len(self._numbers) - count)
        least = self._numbers[first]
        del self._numbers[first:]
        return least


class DeferredMessages:
    """The deferred messages of one backlog queue. All queues of a syphon share `destinations`."""

    def __init__(self, destinations: Destinations, limit: int = MAX_NUMBERS) -> None:
        self._destinations = destinations
        self._limit = limit
        self._numbers: dict[str, _Numbers] = {}
        self._kept = _Numbers("")
        self._forgotten: dict[str, int] = {}
        """By destination, the least number that was removed because there were more than `limit` numbers."""
        self._forgotten_counts: Counter[str] = Counter()
        self._recalls = 0
        self._recalled: Counter[str] = Counter()
        """By destination, how many recalls run."""
        self._count = 0
        self._scan_at = inf
        self._scanning: int | None = None
        self._first_scan_scheduled = False
        self._is_whole_scan = False
        self.is_known = False
        """Whether a scan of the whole queue has ended, and every settlement since then was answered."""
        self.last_scanned = 0
        """The greatest number that a scan has found. A message with a greater number arrived after that scan."""
        self.scheduled: Counter[str] = Counter()
        """By destination, how many messages of the last whole scan become available later."""
        self._active: dict[int, str] = {}
        """By number, the destinations of active messages of the last whole scan that were not received since."""
        self._missing: Counter[str] = Counter()
        """By destination, how many messages of recalls since the last whole scan were missing."""

    def __len__(self) -> int:
        """Return how many numbers are remembered, without those of kept messages (Y10)."""
        return self._count

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def is_scanning(self) -> bool:
        return self._scanning is not None

    def is_empty(self) -> bool:
        """Return whether no number is remembered or forgotten, no recall runs, and no scan runs."""
        return not (self._count or self._recalls or self._forgotten or self._scanning is not None)

    def unavailable(self) -> Counter[str]:
        """Return by destination how many messages another receiver seems to have locked: a scan saw them active, or a
        recall missed them. This pump has received none of these messages.
        """
        return Counter(self._active.values()) + self._missing

    def waiting(self) -> dict[str, tuple[int, int]]:
        """Return for each destination how many numbers are remembered, and the least of these numbers."""
        return {found.path: (len(found), found.least) for found in self._numbers.values() if len(found)}

    def destinations(self) -> set[str]:
        """Return the destinations for which messages are put aside, or are being brought back."""
        return {*self.counts(), *self._recalled}

    def counts(self) -> Counter[str]:
        """Return for each destination how many messages are put aside, with the forgotten ones."""
        counts = Counter({found.path: len(found) for found in self._numbers.values() if len(found)})
        return counts + self._forgotten_counts

    # --- numbers -----------------------------------------------------------------------------------------------------

    def add(self, path: str | None, numbers: Collection[int]) -> None:
        """Remember messages that were deferred for `path`. `path` is None for messages that name no destination."""
        if not numbers:
            return
        key = UNADDRESSED if path is None else destination_key(path)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = _Numbers(path or "")
        self._count += sum(found.add(number) for number in numbers)
        while self._count > self._limit:
            self._forget_some()

    def keep(self, numbers: Iterable[int]) -> None:
        """Remember deferred messages that this syphon does not bring back (Y10)."""
        for number in numbers:
            self._kept.add(number)

    def received(self, numbers: Iterable[int]) -> None:
        """Report messages that this pump has received: another receiver has not locked these."""
        if self._active:
            for number in numbers:
                self._active.pop(number, None)

    def recall(self, now: float, count: int) -> Recall | None:
        """Return the next messages to bring back, at most `count`; None if there are none now.

        The caller calls `recall_ended` when all these messages are settled.
        """
        if self._scanning is not None or now >= self._scan_at:
            return None
        for key, found in self._numbers.items():
            if key == UNADDRESSED:
                return self._recall(key, found, count, None)
            decision = self._destinations.route(found.path, now)
            if decision.route is DestinationRoute.PROBE:
                return self._recall(key, found, min(count, found.probe_size), decision.epoch)
            if decision.route is not DestinationRoute.PUT_ASIDE:
                return self._recall(key, found, count, None)
        return None

    def recall_ended(self, recall: Recall, missing: int, now: float) -> None:
        """Report that a recall has ended. `missing` messages did not exist or were locked by another receiver."""
        self._recalls -= 1
        self._recalled -= Counter([recall.path])
        if missing:
            self._missing[recall.path] += missing
            self._scan_at = min(self._scan_at, now + RESCAN_AFTER_MISSING)
            if missing == len(recall.numbers) and recall.probe is not None:
                self._destinations.void(recall.path, recall.probe)
                if (found := self._numbers.get(destination_key(recall.path))) is not None:
                    # Another syphon may have recalled many of these messages: try more numbers with the next probe.
                    found.probe_size = 4 * len(recall.numbers)

    def due(self, now: float) -> float:
        """Return the time at which `recall` or `next_scan` will return something, if nothing is reported before."""
        if self._scanning is not None or now >= self._scan_at or self._forgotten_from() is not None:
            return inf if self._recalls else now
        return max(now, min(self.recall_due(now), self._scan_at))

    def recall_due(self, now: float) -> float:
        """Return the time at which messages can be brought back; inf if none is put aside."""
        return min(
            (self._destinations.due(one.path) if key else now for key, one in self._numbers.items()), default=inf
        )

    # --- scanning ----------------------------------------------------------------------------------------------------

    def schedule_first_scan(self, now: float) -> None:
        """Call when no active message is left. The first call schedules a scan, for messages of earlier runs."""
        if not self._first_scan_scheduled:
            self._first_scan_scheduled = True
            self._scan_at = now

    def schedule_scan(self, at: float) -> None:
        """Schedule a scan at this time. A drain needs a scan before it may report that no message is left."""
        self._scan_at = min(self._scan_at, at)

    def schedule_rescan(self, now: float) -> None:
        """Schedule a scan after RESCAN_AFTER_FAILURE seconds, and end a running scan.

        Call this when the queue did not answer, so that it is not known which messages are deferred.
        """
        self._scanning = None
        self.is_known = False
        self._scan_at = min(self._scan_at, now + RESCAN_AFTER_FAILURE)

    def next_scan(self, now: float) -> int | None:
        """Return the number from which the caller has to peek now; None for no peek. The result goes to `scanned`."""
        if self._scanning is None and not self._recalls:
            if now >= self._scan_at:
                self._scanning, self._forgotten = 0, {}
                self._forgotten_counts.clear()
                self._scan_at = now + SCAN_INTERVAL
                self._is_whole_scan, self.is_known = True, False
                self._active.clear()
                self._missing.clear()
                self.scheduled.clear()
            elif (least := self._forgotten_from()) is not None:
                self._scanning, self._is_whole_scan = least, False
                self._forgotten = {key: number for key, number in self._forgotten.items() if number < least}
                self._forgotten_counts = Counter(
                    {path: n for path, n in self._forgotten_counts.items() if destination_key(path) in self._forgotten}
                )
        return self._scanning

    def scanned(self, messages: Sequence[ScannedMessage]) -> None:
        """Report one page of a scan. An empty page ends the scan."""
        if not messages:
            self._scanning = None
            self.is_known = self.is_known or self._is_whole_scan
            return
        for message in messages:
            number = message.sequence_number
            if number in self._kept:
                continue
            if message.deferred:
                self.add(message.path, (number,))
            elif message.scheduled:
                self.scheduled[message.path or ""] += self._is_whole_scan
            elif self._is_whole_scan and len(self._active) < MAX_UNAVAILABLE:
                self._active[number] = message.path or ""
        self._scanning = messages[-1].sequence_number + 1
        self.last_scanned = max(self.last_scanned, messages[-1].sequence_number)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _recall(self, key: str, found: _Numbers, count: int, probe: int | None) -> Recall:
        numbers = found.take(count)
        self._count -= len(numbers)
        self._recalls += 1
        self._recalled[found.path] += 1
        del self._numbers[key]
        if len(found):
            self._numbers[key] = found  # now the last one in the dict, so that destinations alternate
        return Recall(found.path, numbers, probe)

    def _forget_some(self) -> None:
        """Remove an eighth of the numbers of the destination that has the most numbers."""
        key, found = max(self._numbers.items(), key=lambda entry: len(entry[1]))
        count = max(1, len(found) // 8)
        least = found.forget_last(count)
        self._count -= count
        if not len(found):
            del self._numbers[key]
        self._forgotten[key] = min(least, self._forgotten.get(key, least))
        self._forgotten_counts[found.path] += count

    def _forgotten_from(self) -> int | None:
        """Return the number from which to scan for forgotten messages; None if there is no need now.

        There is a need if the destination of forgotten messages is ready and has no remembered numbers.
        """
        wanted = [
            number
            for key, number in self._forgotten.items()
            if key not in self._numbers and self._destinations.due(key) == -inf
        ]
        return min(wanted, default=None)
