"""The deferred messages of one backlog queue: which to bring back, and when to look for those nobody remembers (Y5).

A message whose destination is not ready is deferred, and its sequence number is remembered here by destination. Once
the destination is ready, a *recall* brings some of its messages back. Numbers can be unknown: an earlier run or another
syphon deferred the message, a settlement was not answered, or there were more than `MAX_NUMBERS`. A *scan* peeks
through the queue and finds them again. No recall starts while a scan runs, and no scan while a recall is out: a scan
would see the recalled messages where they were. Pure: only numbers and times come in.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import Final, NamedTuple, Protocol

from twinbus.syphon.plan.destinations import DestinationRoute, Destinations, destination_key

MAX_NUMBERS: Final = 500_000
SCAN_INTERVAL: Final = 6 * 3600.0
"""Seconds between two scans: finds messages that another syphon deferred and left behind."""
RESCAN_AFTER_MISSING: Final = 900.0
"""Seconds to the next scan after a recall missed messages: another receiver held them and may not have finished."""
RESCAN_AFTER_FAILURE: Final = 90.0
"""Seconds to the next scan after a settlement was not answered: by then the lock has ended if it was not done."""
# The key of messages that name no destination: they are recalled to be dead-lettered.
UNADDRESSED: Final = ""


class Recall(NamedTuple):
    """Bring these messages back. If `probe` is an epoch, send one of them as that probe."""

    path: str
    numbers: tuple[int, ...]
    probe: int | None


class ScannedMessage(Protocol):
    """What a scan needs of a peeked message."""

    @property
    def sequence_number(self) -> int: ...

    @property
    def deferred(self) -> bool: ...

    @property
    def path(self) -> str | None: ...


class _Numbers:
    """Sequence numbers in ascending order; those before `_head` are taken. A probe recalls `probe_size` of them."""

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
        """Returns whether it was not there yet."""
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
        """Remove and return the least."""
        taken = tuple(self._numbers[self._head : self._head + count])
        self._head += len(taken)
        if self._head * 2 > len(self._numbers):
            del self._numbers[: self._head]
            self._head = 0
        return taken

    def forget_last(self, count: int) -> int:
        """Remove the greatest; returns the least of them."""
        first = max(self._head, len(self._numbers) - count)
        least = self._numbers[first]
        del self._numbers[first:]
        return least


class DeferredMessages:
    """Of one backlog queue. All queues of a syphon share `destinations`."""

    def __init__(self, destinations: Destinations, limit: int = MAX_NUMBERS) -> None:
        self._destinations = destinations
        self._limit = limit
        self._numbers: dict[str, _Numbers] = {}
        self._kept = _Numbers("")
        self._forgotten: dict[str, int] = {}
        """By destination, the least number that was forgotten for want of room."""
        self._recalls = 0
        self._count = 0
        self._scan_at = inf
        self._scanning: int | None = None
        self._first_scan_scheduled = False
        self._is_whole_scan = False
        self._scan_found_any = False
        self.clean = False
        """The last scan of the whole queue found only kept messages, and nothing was deferred since."""

    def __len__(self) -> int:
        """How many are remembered, without kept ones (Y10)."""
        return self._count

    @property
    def kept(self) -> int:
        return len(self._kept)

    def is_empty(self) -> bool:
        """Nothing is remembered or forgotten, no recall is out, and no scan runs."""
        return not (self._count or self._recalls or self._forgotten or self._scanning is not None)

    def waiting(self) -> dict[str, tuple[int, int]]:
        """By destination: how many are remembered, and their least number."""
        return {found.path: (len(found), found.least) for found in self._numbers.values() if len(found)}

    # --- numbers -----------------------------------------------------------------------------------------------------

    def add(self, path: str | None, numbers: Collection[int]) -> None:
        """Remember messages that were deferred for `path`; None for those that name no destination."""
        if not numbers:
            return
        self.clean = False
        key = UNADDRESSED if path is None else destination_key(path)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = _Numbers(path or "")
        self._count += sum(found.add(number) for number in numbers)
        while self._count > self._limit:
            self._forget_some()

    def keep(self, numbers: Iterable[int]) -> None:
        """Y10: these are deferred, and this syphon does not bring them back."""
        for number in numbers:
            self._kept.add(number)

    def recall(self, now: float, count: int) -> Recall | None:
        """The next messages to bring back, if any. The caller reports `recall_ended` when all of them are settled."""
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
        """Report that a recall is over. `missing` of its messages were gone or locked by another receiver."""
        self._recalls -= 1
        if missing:
            self._scan_at = min(self._scan_at, now + RESCAN_AFTER_MISSING)
            if missing == len(recall.numbers) and recall.probe is not None:
                self._destinations.void(recall.path, recall.probe)
                if (found := self._numbers.get(destination_key(recall.path))) is not None:
                    # Another syphon has taken many of them: do not try one after the other.
                    found.probe_size = 4 * len(recall.numbers)

    def due(self, now: float) -> float:
        """When `recall` or `next_scan` will have something, if nothing is reported before."""
        if self._scanning is not None or now >= self._scan_at or self._forgotten_from() is not None:
            return inf if self._recalls else now
        due = [self._destinations.due(one.path) if key else now for key, one in self._numbers.items()]
        return max(now, min([*due, self._scan_at]))

    # --- scanning ----------------------------------------------------------------------------------------------------

    def schedule_first_scan(self, now: float) -> None:
        """Call when no active message is left. The first call schedules a scan for what earlier runs deferred."""
        if not self._first_scan_scheduled:
            self._first_scan_scheduled = True
            self._scan_at = now

    def schedule_scan(self, now: float) -> None:
        """A drain needs one before it may report that nothing is left."""
        self._scan_at = min(self._scan_at, now)

    def schedule_rescan(self, now: float) -> None:
        """Call when the queue did not answer: what was deferred or scanned is not known. Ends a scan that runs."""
        self._scanning = None
        self._scan_at = min(self._scan_at, now + RESCAN_AFTER_FAILURE)

    def next_scan(self, now: float) -> int | None:
        """The number to peek from now, or None. The caller reports what it found with `scanned`."""
        if self._scanning is None and not self._recalls:
            if now >= self._scan_at:
                self._scanning, self._forgotten = 0, {}
                self._scan_at = now + SCAN_INTERVAL
                self._is_whole_scan, self._scan_found_any, self.clean = True, False, False
            elif (least := self._forgotten_from()) is not None:
                self._scanning, self._is_whole_scan = least, False
                self._forgotten = {key: number for key, number in self._forgotten.items() if number < least}
        return self._scanning

    def scanned(self, messages: Sequence[ScannedMessage]) -> None:
        """Report one page of a scan. An empty page ends it."""
        if not messages:
            self._scanning = None
            self.clean = self._is_whole_scan and not self._scan_found_any
            return
        for message in messages:
            if message.sequence_number in self._kept:
                continue
            self._scan_found_any = True
            if message.deferred:
                self.add(message.path, (message.sequence_number,))
        self._scanning = messages[-1].sequence_number + 1

    # --- inside ------------------------------------------------------------------------------------------------------

    def _recall(self, key: str, found: _Numbers, count: int, probe: int | None) -> Recall:
        numbers = found.take(count)
        self._count -= len(numbers)
        self._recalls += 1
        del self._numbers[key]
        if len(found):
            self._numbers[key] = found  # behind the others: destinations take turns
        return Recall(found.path, numbers, probe)

    def _forget_some(self) -> None:
        """Forget numbers of the destination that has the most, so that it does not crowd out the others."""
        key, found = max(self._numbers.items(), key=lambda entry: len(entry[1]))
        count = max(1, len(found) // 8)
        least = found.forget_last(count)
        self._count -= count
        if not len(found):
            del self._numbers[key]
        self._forgotten[key] = min(least, self._forgotten.get(key, least))

    def _forgotten_from(self) -> int | None:
        """From where to scan for forgotten messages whose destination is ready and has no others; None if not now."""
        wanted = [
            number
            for key, number in self._forgotten.items()
            if key not in self._numbers and self._destinations.due(key) == -inf
        ]
        return min(wanted, default=None)
