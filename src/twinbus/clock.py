"""The wall clock. Modules without I/O do not read this clock: their functions get the time as an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A clock. `now` returns the wall time in milliseconds since the epoch, and never less than the call before."""

    def now(self) -> int: ...


class SystemClock:
    """The machine's wall clock. If the machine's clock is set back, `now` returns the highest time so far."""

    def __init__(self) -> None:
        self._last = 0

    def now(self) -> int:
        self._last = max(self._last, int(time.time() * 1000))
        return self._last
