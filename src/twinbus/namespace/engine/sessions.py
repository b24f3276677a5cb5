"""Who holds which session, who waits for one, and which comes next.

The lock of a session is in memory only. What a session's holder is given is decided in `serving`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from twinbus.namespace.engine.deadlines import Deadlines

if TYPE_CHECKING:
    from twinbus.namespace.engine.locks import Lock
    from twinbus.namespace.engine.receivers import Consumer, Feed

PAGE: Final = 64


class HeldSession:
    """A session under lock, with the messages its holder has not settled."""

    __slots__ = ("consumer", "feed", "id", "locks", "until")

    feed: Feed

    def __init__(self, session: str, consumer: Consumer, until: int) -> None:
        self.id = session
        self.consumer = consumer
        self.until = until
        self.locks: dict[bytes, Lock] = {}


class Waiter:
    """A receiver that takes whichever session comes."""

    __slots__ = ("consumer", "deadline")

    def __init__(self, consumer: Consumer, deadline: int) -> None:
        self.consumer = consumer
        self.deadline = deadline


class Sessions:
    """The session locks of one entity and the receivers that wait for one, first come first served."""

    __slots__ = ("_arrivals", "deadlines", "held", "rotation", "search", "wait_deadlines", "waiting")

    def __init__(self) -> None:
        self.held: dict[str, HeldSession] = {}
        self.deadlines: Deadlines[str] = Deadlines()
        self.waiting: OrderedDict[int, Waiter] = OrderedDict()
        self.wait_deadlines: Deadlines[int] = Deadlines()
        self._arrivals = 0
        self.search = False
        """There may be a free session with messages for those who wait."""
        self.rotation = ""
        """The session given out last: the next search begins after it."""

    def wait(self, consumer: Consumer, deadline: int) -> None:
        self._arrivals += 1
        self.waiting[self._arrivals] = Waiter(consumer, deadline)
        self.wait_deadlines.set(self._arrivals, deadline)

    def first_waiting(self) -> Consumer:
        number = next(iter(self.waiting))
        self.wait_deadlines.clear(number)
        return self.waiting.pop(number).consumer

    def stop_waiting(self, consumer: Consumer) -> None:
        for number, waiter in self.waiting.items():
            if waiter.consumer is consumer:
                del self.waiting[number]
                self.wait_deadlines.clear(number)
                return
