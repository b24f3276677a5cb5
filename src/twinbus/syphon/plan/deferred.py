"""The messages of one backlog queue that were deferred, by number and destination: what to bring back, when to look for
those nobody remembers (Y5).

Only numbers are kept, at most so many; what is forgotten is found again by peeking. Messages do not come in here.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import Final, NamedTuple

from twinbus.syphon.plan.destinations import DestinationRoute, Destinations, destination_key

LIMIT: Final = 500_000
SCAN_INTERVAL: Final = 6 * 3600.0
"""Messages that another syphon deferred and left behind are looked for at this interval."""
RESCAN_AFTER: Final = 900.0
"""The same, once some were found to be held by another: it may not finish with them."""
UNCERTAIN_AFTER: Final = 90.0
"""The same, once a settlement was not answered: by then its lock has ended, where it was not done."""
# Numbers under this key name no destination: they are brought back to be dead-lettered.
UNADDRESSED: Final = ""


class Recall(NamedTuple):
    """Bring these back. `probe` is the epoch of a probe: of those that come back one is sent."""

    path: str
    numbers: tuple[int, ...]
    probe: int | None


class Seen(NamedTuple):
    """What peeking shows of a message."""

    sequence_number: int
    deferred: bool
    path: str | None


class _Numbers:
    """In order, the least first. Those before `head` are taken. `probed_with`: so many are asked for to probe with."""

    __slots__ = ("_head", "_numbers", "path", "probed_with")

    def __init__(self, path: str) -> None:
        self.path = path
        self.probed_with = 1
        self._numbers = array("q")
        self._head = 0

    def __len__(self) -> int:
        return len(self._numbers) - self._head

    @property
    def least(self) -> int:
        return self._numbers[self._head]

    def add(self, number: int) -> bool:
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
        taken = tuple(self._numbers[self._head : self._head + count])
        self._head += len(taken)
        if self._head * 2 > len(self._numbers):
            del self._numbers[: self._head]
            self._head = 0
        return taken

    def forget_last(self, count: int) -> int:
        """The least of those forgotten."""
        first = max(self._head, len(self._numbers) - count)
        least = self._numbers[first]
        del self._numbers[first:]
        return least


class DeferredMessages:
    """Of one backlog queue. `destinations` is shared with the others."""

    def __init__(self, destinations: Destinations, limit: int = LIMIT) -> None:
        self._destinations = destinations
        self._limit = limit
        self._numbers: dict[str, _Numbers] = {}
        self._kept = _Numbers("")
        self._forgotten: dict[str, int] = {}
        self._out = 0
        self._count = 0
        self._scan_at = inf
        self._scanning: int | None = None
        self._scanned = False
        self._whole_scan = False
        self._saw_something = False
        self.clean = False
        """The last scan of the whole queue saw nothing but what is kept, and nothing was put aside since."""

    def __len__(self) -> int:
        """How many are remembered, those left behind for good (Y10) not counted."""
        return self._count

    @property
    def kept(self) -> int:
        return len(self._kept)

    def is_empty(self) -> bool:
        """Nothing is remembered, brought back just now, or waits to be found again."""
        return not (self._count or self._out or self._forgotten or self._scanning is not None)

    def waiting(self) -> dict[str, tuple[int, int]]:
        """By destination: how many are remembered, and the least number of them."""
        return {found.path: (len(found), found.least) for found in self._numbers.values() if len(found)}

    # --- numbers -----------------------------------------------------------------------------------------------------

    def deferred(self, path: str | None, numbers: Collection[int]) -> None:
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
        """Y10: deferred, and not to be brought back by this syphon."""
        for number in numbers:
            self._kept.add(number)

    def recall(self, now: float, count: int) -> Recall | None:
        """The next to bring back, none while a scan is on. `recalled` has to be told when all of it is settled."""
        if self._scanning is not None or now >= self._scan_at:
            return None
        for key, found in self._numbers.items():
            if key == UNADDRESSED:
                return self._recall(key, found, count, None)
            routed = self._destinations.route(found.path, now)
            if routed.route is DestinationRoute.PROBE:
                return self._recall(key, found, min(count, found.probed_with), routed.epoch)
            if routed.route is not DestinationRoute.PUT_ASIDE:
                return self._recall(key, found, count, None)
        return None

    def recalled(self, recall: Recall, left_out: int, now: float) -> None:
        """It is over: what came back is sent, deferred again or settled; `left_out` is gone or held by another."""
        self._out -= 1
        if left_out:
            self._scan_at = min(self._scan_at, now + RESCAN_AFTER)
            if left_out == len(recall.numbers) and recall.probe is not None:
                self._destinations.void(recall.path, recall.probe)
                if (found := self._numbers.get(destination_key(recall.path))) is not None:
                    # Another syphon has been here: not one by one.
                    found.probed_with = 4 * len(recall.numbers)

    def due(self, now: float) -> float:
        """When `recall` or `scan` will have something, if nothing else happens first."""
        if self._scanning is not None or now >= self._scan_at or self._found_again_at() is not None:
            return inf if self._out else now
        waiting = [self._destinations.due(one.path) if key else now for key, one in self._numbers.items()]
        return max(now, min([*waiting, self._scan_at]))

    # --- peeking -----------------------------------------------------------------------------------------------------

    def ran_dry(self, now: float) -> None:
        """No active message is left: look, once, for those deferred in an earlier life or by another."""
        if not self._scanned:
            self._scanned = True
            self._scan_at = now

    def scan_now(self, now: float) -> None:
        """Before a drain may say that nothing is left."""
        self._scan_at = min(self._scan_at, now)

    def scan(self, now: float) -> int | None:
        """From which number to peek now, if at all; `peeked` has to be told what was seen.

        Not while messages are brought back: they would be seen where they were.
        """
        if self._scanning is None and not self._out:
            if now >= self._scan_at:
                self._scanning, self._forgotten = 0, {}
                self._scan_at = now + SCAN_INTERVAL
                self._whole_scan, self._saw_something, self.clean = True, False, False
            elif (least := self._found_again_at()) is not None:
                self._scanning, self._whole_scan = least, False
                self._forgotten = {key: number for key, number in self._forgotten.items() if number < least}
        return self._scanning

    def peeked(self, seen: Sequence[Seen]) -> None:
        if not seen:
            self._scanning = None
            self.clean = self._whole_scan and not self._saw_something
            return
        for number, deferred, path in seen:
            if number in self._kept:
                continue
            self._saw_something = True
            if deferred:
                self.deferred(path, (number,))
        self._scanning = seen[-1].sequence_number + 1

    def uncertain(self, now: float) -> None:
        """The queue did not answer: what was deferred, or seen, is not known. It is looked for again later."""
        self._scanning = None
        self._scan_at = min(self._scan_at, now + UNCERTAIN_AFTER)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _recall(self, key: str, found: _Numbers, count: int, probe: int | None) -> Recall:
        numbers = found.take(count)
        self._count -= len(numbers)
        self._out += 1
        del self._numbers[key]
        if len(found):
            self._numbers[key] = found  # behind the others: each has its turn
        return Recall(found.path, numbers, probe)

    def _forget_some(self) -> None:
        """The destination with the most of them gives way, so that none is crowded out."""
        key, found = max(self._numbers.items(), key=lambda entry: len(entry[1]))
        count = max(1, len(found) // 8)
        least = found.forget_last(count)
        self._count -= count
        if not len(found):
            del self._numbers[key]
        self._forgotten[key] = min(least, self._forgotten.get(key, least))

    def _found_again_at(self) -> int | None:
        """From where to look for what was forgotten: for destinations that could take it and have nothing else."""
        wanted = [
            number
            for key, number in self._forgotten.items()
            if key not in self._numbers and self._destinations.due(key) == -inf
        ]
        return min(wanted, default=None)
