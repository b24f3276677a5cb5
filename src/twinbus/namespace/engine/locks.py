"""Who holds which message, until when. In memory only: after a restart every message is free again.

A lock knows its message without the body. Locks of a session's messages end with the session's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twinbus.namespace.engine.deadlines import Deadlines
from twinbus.namespace.engine.rows import Row

if TYPE_CHECKING:
    from twinbus.namespace.engine.sessions import HeldSession

_NO_RAW: Final = (b"",)


class Lock:
    """One message held under one token."""

    __slots__ = ("row", "session", "token", "until")

    def __init__(self, token: bytes, row: Row, until: int, session: HeldSession | None) -> None:
        self.token = token
        self.row = row
        self.until = until
        self.session = session


class Locks:
    """The locks of one queue, its dead-letter sub-queue included."""

    __slots__ = ("by_seq", "by_token", "deadlines")

    def __init__(self) -> None:
        self.by_token: dict[bytes, Lock] = {}
        self.by_seq: dict[int, Lock] = {}
        self.deadlines: Deadlines[bytes] = Deadlines()

    def take(self, token: bytes, row: Row, until: int, session: HeldSession | None) -> None:
        lock = Lock(token, tuple.__new__(Row, row[:12] + _NO_RAW), until, session)
        self.by_token[token] = lock
        self.by_seq[row.seq] = lock
        if session is None:
            self.deadlines.set(token, until)
        else:
            session.locks[token] = lock

    def held(self, token: bytes, now: int) -> Lock | None:
        """The lock of this token, unless its time is up, even if nobody has noticed yet."""
        lock = self.by_token.get(token)
        if lock is None or (lock.until if lock.session is None else lock.session.until) <= now:
            return None
        return lock

    def drop(self, lock: Lock) -> None:
        token = lock.token
        del self.by_token[token]
        del self.by_seq[lock.row.seq]
        if lock.session is None:
            self.deadlines.clear(token)
        else:
            del lock.session.locks[token]

    def renew(self, lock: Lock, until: int) -> None:
        lock.until = until
        self.deadlines.set(lock.token, until)
