"""Which entities an operator holds, from the shared state (S15). The syphon treats a held entity as not ready (Y5).

A syphon may run when the operator sets a hold. So it reads the state before it routes messages that it has received,
if its last reading is older than `max_age`. An idle syphon reads nothing. While something is held, the syphon also
reads the state every `interval`: a release must not wait for the next message.

A state that cannot be read changes nothing: what was held stays held. At the start, nothing is held (S16).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from twinbus.syphon.plan import HeldEntities

if TYPE_CHECKING:
    # A syphon without a shared state does not load the room of pairing.
    from twinbus.pairing import KnownState, StateReading

_log = logging.getLogger(__name__)

READ_SECONDS: Final = 10.0
"""The longest time that messages wait for a reading. Their locks last longer."""


class SharedHolds:
    """The holds in a shared state. `read` returns the state, or raises."""

    def __init__(
        self,
        read: Callable[[], Awaitable[StateReading]],
        *,
        max_age: float,
        interval: float,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._read = read
        self._max_age = max_age
        self._interval = interval
        self._now = now or asyncio.get_running_loop().time
        self._state: KnownState | None = None
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._has_failed = False
        # Whether holds changed since `on_change` was called last. Each reading may notice it, not only that of `watch`.
        self._has_changed = False
        self._unreadable: tuple[str, ...] = ()
        self._something_held = asyncio.Event()

    @classmethod
    def of_state(cls, read: Callable[[], Awaitable[StateReading]], *, in_secondary: bool) -> SharedHolds:
        """Return the holds of a state. A reading of the secondary costs operations, so it may be 2 seconds old."""
        return cls(read, max_age=2.0 if in_secondary else 0.0, interval=15.0 if in_secondary else 1.0)

    def is_held(self, path: str) -> bool:
        """Return whether the last reading held the entity."""
        return self._state is not None and self._state.hold_of(path) is not None

    def held(self) -> HeldEntities:
        """Return which entities the last reading held."""
        from twinbus.pairing import EVERY_ENTITY  # noqa: PLC0415 - see above

        known = self._state
        if known is None:
            return HeldEntities()
        own = frozenset(path for path in known.holds if path != EVERY_ENTITY)
        return HeldEntities(own, EVERY_ENTITY in known.holds, known.released)

    @property
    def _held(self) -> tuple[object, object] | None:
        """What the last reading held, to compare. None: nothing."""
        known = self._state
        return (known.holds, known.released) if known is not None and known.holds else None

    async def refresh(self) -> None:
        """Return after a reading that began at most `max_age` before this call. Calls at the same time share one."""
        wanted = self._now() - self._max_age
        while self._read_at < wanted:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read_now())
            await asyncio.shield(self._reading)

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Read the state regularly while something is held, until cancelled. Calls `on_change` when holds changed."""
        while True:
            await self._something_held.wait()
            await asyncio.sleep(self._interval)
            await self._read_now()
            if self._has_changed:
                self._has_changed = False
                on_change()

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading

    async def _read_now(self) -> None:
        began = self._now()
        try:
            async with asyncio.timeout(READ_SECONDS):
                reading = await self._read()
        except FileNotFoundError:
            # Nobody has written to the folder yet, or it is gone: what was held stays held.
            self._read_at = max(self._read_at, began)
        except Exception as error:
            if not self._has_failed:
                _log.warning("the shared state was not read; what was held stays held: %s", error)
            self._has_failed, self._read_at = True, max(self._read_at, began)
        else:
            # A reading that began later may have answered earlier: it knows better.
            if began >= self._read_at:
                self._learn(reading, began)

    def _learn(self, reading: StateReading, began: float) -> None:
        if reading.unreadable != self._unreadable:
            for text in reading.unreadable:
                _log.warning("a part of the shared state is unreadable; what was held stays held: %s", text)
        self._unreadable, self._has_failed, self._read_at = reading.unreadable, False, began
        before, held_before, state = self._state, self._held, reading.state
        if reading.hides_holds and before is not None:
            # What was held stays held; new holds are known.
            released = before.released.difference(state.holds)
            state = replace(state, holds={**before.holds, **state.holds}, released=released)
        self._state = state
        self._has_changed |= held_before is not None and self._held != held_before
        if self._held is not None:
            self._something_held.set()
        else:
            self._something_held.clear()
