"""How long a quiet receiver waits before it returns nothing, so that a loop around it does not spin."""

from __future__ import annotations

from typing import Final

LONGEST_PAUSE: Final = 1.0


def quiet_pause(max_wait_time: float | None) -> float:
    return LONGEST_PAUSE if max_wait_time is None else min(max_wait_time, LONGEST_PAUSE)
