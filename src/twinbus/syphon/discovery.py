"""Which backlog queues a syphon empties: all of one primary's, those beyond the pair's count included (Y2, P6).

By listing where the credential may, otherwise by looking for one index after the other. Creates nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from twinbus.backlog import (
    CREDENTIAL_REFUSED,
    FailureKind,
    backlog_queue_index,
    backlog_queue_path,
    extra_backlog_queues,
)
from twinbus.pairing import ALL_ENTITIES, Administration, AioAdministration, management_failure
from twinbus.syphon.progress import MessageCounts
from twinbus.syphon.transport import BacklogFailedError, Transport

_log = logging.getLogger(__name__)

# So many missing in a row, beyond those a pair has by default, end the search.
_GAP: Final = 10
# The management API answers with so many at a time.
_PAGE: Final = 100
_COUNT_SECONDS: Final = 10.0


class Discovery(Protocol):
    async def queues(self) -> Sequence[str]:
        """In the order of their indices. Raises what the secondary raised where it could not be asked."""

    async def remaining(self) -> int | None:
        """Messages in all of them, dead-lettered ones not counted; None where nobody can tell."""

    async def close(self) -> None: ...


class RemainingMessages:
    """What is left, for those who look on: `told` is what the secondary said last.

    It is asked every few seconds at most, and only if something was moved since: idle, a syphon costs its polls (Y2).
    """

    def __init__(self, discovery: Discovery) -> None:
        self.told: int | None = None
        self._discovery = discovery
        self._asked: tuple[float, int] | None = None

    async def count(self, total: MessageCounts, now: float) -> int | None:
        moved = total.returned + total.deferred + total.dead_lettered
        if self._asked is None or (now - self._asked[0] > _COUNT_SECONDS and moved != self._asked[1]):
            self.told = await self._discovery.remaining()
            self._asked = (now, moved)
        return self.told


def _further_pages(asked: Administration | AioAdministration, found: Sequence[object], began: float) -> None:
    """A listing took a request more for each page that was full."""
    if pages := len(found) // _PAGE:
        asked.recording.managed(ALL_ENTITIES, began, pages)


class ListedDiscovery:
    """With the Manage right."""

    def __init__(self, name: str, administration: AioAdministration) -> None:
        self._name = name
        self._administration = administration

    async def queues(self) -> Sequence[str]:
        async def walk(**keywords: object) -> list[str]:
            return [queue.name async for queue in self._administration.client.list_queues(**keywords)]

        began = time.monotonic()
        paths = await self._administration.ask(walk)
        _further_pages(self._administration, paths, began)
        return extra_backlog_queues(self._name, 0, paths)

    async def remaining(self) -> int | None:
        async def walk(**keywords: object) -> list[Any]:
            return [one async for one in self._administration.client.list_queues_runtime_properties(**keywords)]

        began = time.monotonic()
        try:
            found = await self._administration.ask(walk)
        except Exception as error:
            _log.info("nobody tells how many messages remain: %s", management_failure(error))
            return None
        _further_pages(self._administration, found, began)
        return sum(
            (queue.total_message_count or 0) - (queue.dead_letter_message_count or 0)
            for queue in found
            if backlog_queue_index(self._name, queue.name) is not None
        )

    async def close(self) -> None:
        await self._administration.close()


class ThreadedListedDiscovery:
    """The same with a sync client, whose requests must not hold up the loop."""

    def __init__(self, name: str, administration: Administration) -> None:
        self._name = name
        self._administration = administration

    async def queues(self) -> Sequence[str]:
        def listed(**keywords: object) -> list[str]:
            return [queue.name for queue in self._administration.client.list_queues(**keywords)]

        began = time.monotonic()
        paths = await asyncio.to_thread(self._administration.ask, listed)
        _further_pages(self._administration, paths, began)
        return extra_backlog_queues(self._name, 0, paths)

    async def remaining(self) -> int | None:
        return None

    async def close(self) -> None:
        await asyncio.to_thread(self._administration.close)


class SearchedDiscovery:
    """Without it: a queue that can be connected to is there. That is an operation nobody is charged for (Y2)."""

    def __init__(self, name: str, transport: Transport) -> None:
        self._name = name
        self._transport = transport
        self._known: dict[str, int] = {}

    def know(self, paths: Sequence[str]) -> None:
        """These are there, and are not looked for again."""
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
    """Listed once, where that is allowed; from then on only searched beside those: an idle syphon costs its receives
    and nothing else (Y2).
    """

    def __init__(self, listed: Discovery, searched: SearchedDiscovery) -> None:
        self._listed = listed
        self._searched = searched
        self._may_list = True
        self._did_list = False

    async def queues(self) -> Sequence[str]:
        if self._may_list and not self._did_list:
            try:
                found = await self._listed.queues()
            except Exception as error:
                if management_failure(error).kind not in CREDENTIAL_REFUSED:
                    raise
                _log.info("the secondary may not be listed: backlog queues are looked for one by one")
                self._may_list = False
            else:
                self._searched.know(found)
                self._did_list = True
                return found
        return await self._searched.queues()

    async def remaining(self) -> int | None:
        return await self._listed.remaining() if self._may_list else None

    async def close(self) -> None:
        await self._listed.close()
