"""Lock tokens: 16 random bytes each, drawn from the system a thousand at a time."""

from __future__ import annotations

import os

_DRAW = 16 * 1024


class LockTokens:
    """Call it for a fresh token."""

    def __init__(self) -> None:
        self._drawn = b""
        self._used = 0

    def __call__(self) -> bytes:
        if self._used == len(self._drawn):
            self._drawn, self._used = os.urandom(_DRAW), 0
        token = self._drawn[self._used : self._used + 16]
        self._used += 16
        return token
