"""Who waits for messages and with how much credit. A feed is one front of rows and the receivers that share it.

What is delivered, and when, is decided in `serving`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from twinbus.namespace.engine.window import Window

if TYPE_CHECKING:
    from twinbus.namespace.engine.sessions import HeldSession


class Consumer:
    """A receiver as the engine sees it. `limit` and `taken` count from its attach, like link credit does."""

    __slots__ = ("drain", "fed", "feed", "hungry", "limit", "peek_lock", "receiver", "room", "taken")

    def __init__(self, receiver: Any, peek_lock: bool) -> None:
        self.receiver = receiver
        self.peek_lock = peek_lock
        self.limit = 0
        self.taken = 0
        self.room = 0
        """Bytes it may still be given; at most one message more."""
        self.drain = False
        self.hungry = False
        self.fed = False
        """Something was delivered under the present grant of credit."""
        self.feed: Feed | None = None
        """None while it waits for a session."""


class Feed:
    """Rows in order, and the receivers with credit for them, in turn."""

    __slots__ = ("attending", "hungry", "onward", "session", "window")

    def __init__(self, window: Window, session: HeldSession | None = None) -> None:
        self.window = window
        self.session = session
        self.attending = 0
        self.onward: str | None = None
        """The entity that all rows of this feed are forwarded to."""
        self.hungry: deque[Consumer] = deque()

    def enter(self, consumer: Consumer) -> None:
        consumer.feed = self
        self.attending += 1
        self.window.attend(True)

    def exit(self) -> None:
        self.attending -= 1
        if not self.attending:
            self.window.attend(False)

    def queue_up(self, consumer: Consumer) -> None:
        if not consumer.hungry:
            consumer.hungry = True
            self.hungry.append(consumer)

    def leave(self, consumer: Consumer) -> None:
        if consumer.hungry:
            consumer.hungry = False
            self.hungry.remove(consumer)
