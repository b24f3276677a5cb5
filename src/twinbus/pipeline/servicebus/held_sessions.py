"""The sessions of an entity that a stream holds: their locks are accepted, renewed and released here.

Spark calls a stream reader from time to time, and a batch may take longer than the lock of a session. So the receivers
of the sessions run on an event loop in a thread of their own, where the locks are renewed between the calls. All
methods are for the thread that made the object; each waits for its result.

A lock ends when the namespace says so, when the link or the connection breaks, and with this process. Then the session
is no longer held, and any receiver may accept it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from threading import Thread
from typing import Any, TypeVar

from twinbus.connect import (
    NEXT_AVAILABLE,
    OperationTimeoutError,
    Receiver,
    ServiceBusError,
    SessionCannotBeLockedError,
    SessionChoice,
    SessionLockLostError,
)
from twinbus.pipeline.servicebus.broker import (
    LONGEST_LOCK,
    SHORTEST_LOCK,
    Completion,
    complete_received,
    connection,
    repeated,
)
from twinbus.pipeline.servicebus.offsets import SequenceNumbers
from twinbus.pipeline.servicebus.options import SourceOptions

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(eq=False)
class LockedSession:
    """One session whose lock this process holds."""

    id: str
    receiver: Receiver
    inactive_through: int = -1
    """Peeks found no active message of the session up to this number. A message that is not active never becomes active
    again under the same number."""
    renewal: asyncio.Task[None] | None = field(default=None, repr=False)


class HeldSessions:
    """The sessions that one stream reader holds."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._bus = connection(options)
        self._held: dict[str, LockedSession] = {}
        self._renew_within = LONGEST_LOCK
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="twinbus-sessions", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Releases all sessions and ends the thread."""
        if not self._loop.is_closed():
            self.release(self._held)
            self._run(self._bus.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # --- the sessions ------------------------------------------------------------------------------------------

    def __contains__(self, session: str) -> bool:
        held = self._held.get(session)
        return held is not None and held.receiver.is_attached

    def get(self, session: str) -> LockedSession | None:
        """Returns a session; None if its lock was lost in the meantime."""
        return self._held.get(session)

    @property
    def ids(self) -> list[str]:
        """The sessions that are held, in the order in which they were accepted."""
        return [session for session in list(self._held) if session in self]

    # --- accepting and releasing -------------------------------------------------------------------------------

    def accept(self, sessions: Iterable[str]) -> list[str]:
        """Accepts these sessions, without waiting for other receivers. Returns those that are held now."""
        wanted = list(sessions)
        self._repeated(lambda: self._accept([session for session in wanted if session not in self], 1.0))
        return [session for session in wanted if session in self]

    def accept_next(self, count: int, wait: float) -> int:
        """Accepts up to `count` sessions that have messages and no receiver. Returns how many were accepted.

        Waits up to `wait` seconds for such sessions.
        """
        before = set(self.ids)

        def accepted() -> int:
            return len(set(self.ids) - before)

        self._repeated(lambda: self._accept([NEXT_AVAILABLE] * (count - accepted()), wait))
        return accepted()

    async def _accept(self, choices: Iterable[SessionChoice], wait: float) -> None:
        answers = await asyncio.gather(*(self._attach(choice, wait) for choice in choices), return_exceptions=True)
        receivers = [answer for answer in answers if isinstance(answer, Receiver)]
        for receiver in receivers:
            assert receiver.session_id is not None
            if (lost := self._held.get(receiver.session_id)) is not None:
                await self._let_go(lost)
            held = LockedSession(receiver.session_id, receiver)
            held.renewal = self._loop.create_task(self._renew(held))
            self._held[held.id] = held
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _attach(self, session: SessionChoice, wait: float) -> Receiver | None:
        try:
            return await self._bus.receiver(self._options.path, prefetch=0, session=session, session_timeout=wait)
        except SessionCannotBeLockedError:
            return None
        except OperationTimeoutError as error:
            if error.condition is None:  # not the answer of the namespace: there was no answer
                raise
            return None

    def release(self, sessions: Iterable[str]) -> None:
        """Releases sessions, so that other receivers can accept them."""
        self._run(self._release([held for session in list(sessions) if (held := self._held.get(session)) is not None]))

    async def _release(self, sessions: Iterable[LockedSession]) -> None:
        await asyncio.gather(*map(self._let_go, sessions))

    async def _let_go(self, held: LockedSession) -> None:
        if self._held.get(held.id) is held:
            del self._held[held.id]
        if held.renewal is not None and held.renewal is not asyncio.current_task():
            held.renewal.cancel()
        await held.receiver.close()

    async def _lose(self, held: LockedSession, error: ServiceBusError) -> None:
        _log.warning(
            "%s: the lock of session %r was lost: %s. Other receivers may read its messages, too.",
            self._options.address,
            held.id,
            error,
        )
        await self._let_go(held)

    # --- locks -------------------------------------------------------------------------------------------------

    async def _renew(self, held: LockedSession) -> None:
        """Renews the lock of a session until the session is released or the lock is lost."""
        until = held.receiver.session_locked_until
        while True:
            pause = min(_lock_seconds(until), self._renew_within) / 2
            await asyncio.sleep(pause)
            try:
                if not held.receiver.is_attached:
                    raise SessionLockLostError("the link of the session is gone")
                until = await held.receiver.renew_session_lock()
            except SessionLockLostError as error:
                reason = held.receiver.link_error or error
                if isinstance(reason, SessionLockLostError):
                    # If the clock of this machine is behind, a lock seems to last longer than it does.
                    self._renew_within = max(SHORTEST_LOCK, pause)
                await self._lose(held, reason)
                return
            except ServiceBusError as error:
                _log.warning("%s: the lock of session %r was not renewed: %s", self._options.address, held.id, error)
                until = None  # it is tried again soon

    # --- completing --------------------------------------------------------------------------------------------

    def complete(
        self, wanted: Mapping[str, SequenceNumbers], newest: Mapping[str, int | None]
    ) -> dict[str, Completion]:
        """Completes messages of sessions. Returns what was done in each session that was held until the end.

        As with `Broker.complete`, a message that was enqueued after `newest` of its session is a different message.
        """
        return self._run(self._complete(wanted, newest))

    async def _complete(
        self, wanted: Mapping[str, SequenceNumbers], newest: Mapping[str, int | None]
    ) -> dict[str, Completion]:
        sessions = [session for session in wanted if session in self]
        answers = await asyncio.gather(
            *(self._complete_one(self._held[session], wanted[session], newest[session]) for session in sessions)
        )
        return {session: answer for session, answer in zip(sessions, answers, strict=True) if answer is not None}

    async def _complete_one(
        self, held: LockedSession, numbers: SequenceNumbers, newest: int | None
    ) -> Completion | None:
        try:
            return await complete_received(held.receiver, numbers, newest)
        except ServiceBusError as error:
            if held.receiver.is_attached and not isinstance(error, SessionLockLostError):
                raise
            # The link has ended, for whatever reason. If the reason lasts, it is raised when the session is accepted.
            await self._lose(held, error)
            return None

    # --- the loop ----------------------------------------------------------------------------------------------

    def _repeated(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return repeated(lambda: self._run(call()), self._options.timeout, self._options.address)

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def _lock_seconds(until: datetime | None) -> float:
    """Returns how long a lock lasts from now on; the shortest possible time if the clocks differ too much."""
    seconds = 0.0 if until is None else until.timestamp() - time.time()
    return seconds if SHORTEST_LOCK <= seconds <= LONGEST_LOCK else SHORTEST_LOCK
