"""Wall clock. Pure parts do not read it: they get the time as an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time in milliseconds since the epoch. Never runs backwards."""

    def now(self) -> int: ...


class SystemClock:
    """The machine's wall clock. It stands still while the machine's clock is behind an earlier reading."""

    def __init__(self) -> None:
        self._last = 0

    def now(self) -> int:
        self._last = max(self._last, int(time.time() * 1000))
        return self._last
