"""Where time comes from: the one place that reads a clock. Pure parts get instants as arguments."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time in milliseconds since the epoch, for what is stored and spoken; never runs backwards."""

    def now(self) -> int: ...


class SystemClock:
    """The machine's wall clock. A step back of the machine's clock holds it still instead."""

    def __init__(self) -> None:
        self._last = 0

    def now(self) -> int:
        self._last = max(self._last, int(time.time() * 1000))
        return self._last
