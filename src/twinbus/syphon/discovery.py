"""Finds the backlog queues of one primary (Y2, P6), also if there are more than the pair uses now. Creates nothing.

With the Manage right, the queues of the secondary are listed. Without this right, a queue is searched for each index,
by an attempt to connect to the queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

from twinbus.backlog import (
    CREDENTIAL_REFUSED,
    FailureKind,
    backlog_queue_index,
    backlog_queue_path,
    extra_backlog_queues,
)
from twinbus.syphon.progress import MessageCounts
from twinbus.syphon.transport import BacklogFailedError, Transport

if TYPE_CHECKING:
    from twinbus.pairing import Administration, AioAdministration

_log = logging.getLogger(__name__)

# A search ends after this number of missing indices in a row. A pair has this number of queues by default.
_GAP: Final = 10
# Queues in one answer of the management API.
_LISTING_PAGE: Final = 100
_COUNT_SECONDS: Final = 10.0


class Discovery(Protocol):
    async def queues(self) -> Sequence[str]:
        """Return the backlog queues in the order of their indices. Raises what the secondary's client raised."""

    async def remaining(self) -> int | None:
        """Return the number of messages in all backlog queues, without dead letters; None if it is not known."""

    def lock_seconds(self, queue: str) -> float | None:
        """Return the lock duration of a queue that `queues` has returned; None if it is not known."""

    async def close(self) -> None: ...


class RemainingMessages:
    """The number of messages that are still in the backlog. `last` is the last answer of the secondary.

    A request is sent at most every 10 seconds, and only if messages were moved since the last request. So a syphon
    without messages costs only its long polls (Y2).
    """

    def __init__(self, discovery: Discovery) -> None:
        self.last: int | None = None
        self._discovery = discovery
        self._asked: tuple[float, int] | None = None

    async def count(self, total: MessageCounts, now: float) -> int | None:
        moved = total.returned + total.deferred + total.dead_lettered
        if self._asked is None or (now - self._asked[0] > _COUNT_SECONDS and moved != self._asked[1]):
            try:
                self.last = await self._discovery.remaining()
            except Exception as error:  # the number is only shown: a syphon goes on without it
                _log.info("how many messages remain is not known: %r", error)
                self.last = None
            self._asked = (now, moved)
        return self.last


class ListedDiscovery:
    """Lists the queues of the secondary, which needs the Manage right."""

    def __init__(self, name: str, administration: AioAdministration) -> None:
        self._name = name
        self._administration = administration
        self._locks: dict[str, float] = {}

    async def queues(self) -> Sequence[str]:
        async def list_queues(**keywords: object) -> list[Any]:
            return [queue async for queue in self._administration.client.list_queues(**keywords)]

        began = time.monotonic()
        found = await self._administration.request(list_queues)
        _record_further_pages(self._administration, found, began)
        self._locks = _lock_durations(found)
        return extra_backlog_queues(self._name, 0, [queue.name for queue in found])

    def lock_seconds(self, queue: str) -> float | None:
        return self._locks.get(queue)

    async def remaining(self) -> int | None:
        async def list_properties(**keywords: object) -> list[Any]:
            return [one async for one in self._administration.client.list_queues_runtime_properties(**keywords)]

        began = time.monotonic()
        try:
            found = await self._administration.request(list_properties)
        except Exception as error:
            _log.info("how many messages remain is not known: %s", _failure_kind(error))
            return None
        _record_further_pages(self._administration, found, began)
        return sum(
            (queue.total_message_count or 0) - (queue.dead_letter_message_count or 0)
            for queue in found
            if backlog_queue_index(self._name, queue.name) is not None
        )

    async def close(self) -> None:
        await self._administration.close()


class ThreadedListedDiscovery:
    """Lists the queues with a sync client, in a thread, because its requests would block the event loop."""

    def __init__(self, name: str, administration: Administration) -> None:
        self._name = name
        self._administration = administration
        self._locks: dict[str, float] = {}

    async def queues(self) -> Sequence[str]:
        def list_queues(**keywords: object) -> list[Any]:
            return list(self._administration.client.list_queues(**keywords))

        began = time.monotonic()
        found = await asyncio.to_thread(self._administration.request, list_queues)
        _record_further_pages(self._administration, found, began)
        self._locks = _lock_durations(found)
        return extra_backlog_queues(self._name, 0, [queue.name for queue in found])

    def lock_seconds(self, queue: str) -> float | None:
        return self._locks.get(queue)

    async def remaining(self) -> int | None:
        return None

    async def close(self) -> None:
        await asyncio.to_thread(self._administration.close)


def _failure_kind(error: Exception) -> FailureKind:
    # Imported here, because `pairing` loads azure-servicebus, and only a process that lists queues needs that package.
    from twinbus.pairing import management_failure  # noqa: PLC0415

    return management_failure(error).kind


def is_credential_refused(error: Exception) -> bool:
    """Return whether the secondary refused a listing because the credential has no right to list."""
    return _failure_kind(error) in CREDENTIAL_REFUSED


def _lock_durations(queues: Sequence[Any]) -> dict[str, float]:
    """Return the lock durations of listed queues, in seconds. The SDK may return one as a text: then it is left out."""
    locks = {queue.name: queue.lock_duration for queue in queues}
    return {name: lock.total_seconds() for name, lock in locks.items() if isinstance(lock, timedelta)}


def _record_further_pages(
    administration: Administration | AioAdministration, found: Sequence[object], began: float
) -> None:
    """Record the requests of a listing after its first: one for each full page of 100 queues."""
    from twinbus.pairing import ALL_ENTITIES  # noqa: PLC0415 - as above

    if pages := len(found) // _LISTING_PAGE:
        administration.recorder.management(ALL_ENTITIES, began, pages)


class SearchedDiscovery:
    """Finds the queues without the Manage right.

    A queue exists if a receiver can connect to the queue. Connecting is not charged (Y2).
    """

    def __init__(self, name: str, transport: Transport) -> None:
        self._name = name
        self._transport = transport
        self._known: dict[str, int] = {}

    def add_known(self, paths: Sequence[str]) -> None:
        """Add queues that exist. `queues` returns the added queues without connecting to them."""
        found = {path: backlog_queue_index(self._name, path) for path in paths}
        self._known |= {path: index for path, index in found.items() if index is not None}

    async def queues(self) -> Sequence[str]:
        index = missing = 0
        indices = set(self._known.values())
        while missing < _GAP:
            path = backlog_queue_path(self._name, index)
            if index in indices or await self._exists(path):
                self._known.setdefault(path, index)
                missing = 0
            else:
                missing += 1
            index += 1
        return sorted(self._known, key=lambda path: self._known[path])

    def lock_seconds(self, queue: str) -> float | None:
        return None

    async def remaining(self) -> int | None:
        return None

    async def close(self) -> None:
        pass

    async def _exists(self, path: str) -> bool:
        backlog = self._transport.backlog(path)
        try:
            await backlog.open()
        except BacklogFailedError as error:
            if error.kind is FailureKind.ENTITY_NOT_FOUND:
                return False
            raise
        finally:
            await backlog.close()
        return True


class ListedOrSearchedDiscovery:
    """Lists the queues once if the credential has the Manage right. After that, finds queues by connecting to them.

    Connecting is not charged, so a syphon without messages costs only its receives (Y2).
    """

    def __init__(self, listed: Discovery, searched: SearchedDiscovery) -> None:
        self._listed = listed
        self._searched = searched
        self._may_list = True
        self._has_listed = False

    async def queues(self) -> Sequence[str]:
        if self._may_list and not self._has_listed:
            try:
                found = await self._listed.queues()
            except Exception as error:
                if not is_credential_refused(error):
                    raise
                _log.info("the credential may not list the secondary: backlog queues are searched one by one")
                self._may_list = False
            else:
                self._searched.add_known(found)
                self._has_listed = True
                return found
        return await self._searched.queues()

    def lock_seconds(self, queue: str) -> float | None:
        return self._listed.lock_seconds(queue)

    async def remaining(self) -> int | None:
        return await self._listed.remaining() if self._may_list else None

    async def close(self) -> None:
        await self._listed.close()
