"""Which backlog queues a syphon empties: all of one primary's, those beyond the pair's count included (Y2, P6).

By listing where the credential may, otherwise by looking for one index after the other. Creates nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from twinbus.pairing.administration import Administration, AioAdministration, failure_of
from twinbus.pairing.failures import FailureKind
from twinbus.pairing.paths import backlog_queue_index, backlog_queue_path, extra_backlog_queues
from twinbus.syphon.transport import BacklogFailedError, Transport

_log = logging.getLogger(__name__)

# So many missing in a row, beyond those a pair has by default, end the search.
_GAP: Final = 10
_REFUSED: Final = frozenset({FailureKind.UNAUTHORIZED, FailureKind.AUTHENTICATION})


class Discovery(Protocol):
    async def queues(self) -> Sequence[str]:
        """In the order of their indices. Raises what the secondary raised where it could not be asked."""

    async def remaining(self) -> int | None:
        """Messages in all of them, dead-lettered ones not counted; None where nobody can tell."""

    async def close(self) -> None: ...


class Listed:
    """With the Manage right."""

    def __init__(self, name: str, administration: AioAdministration) -> None:
        self._name = name
        self._administration = administration

    async def queues(self) -> Sequence[str]:
        found: list[tuple[int, str]] = []

        async def walk(**keywords: object) -> None:
            async for queue in self._administration.client.list_queues(**keywords):
                if (index := backlog_queue_index(self._name, queue.name)) is not None:
                    found.append((index, queue.name))

        await self._administration.ask(walk)
        return [path for _, path in sorted(found)]

    async def remaining(self) -> int | None:
        total = 0

        async def walk(**keywords: object) -> None:
            nonlocal total
            async for queue in self._administration.client.list_queues_runtime_properties(**keywords):
                if backlog_queue_index(self._name, queue.name) is not None:
                    total += (queue.total_message_count or 0) - (queue.dead_letter_message_count or 0)

        try:
            await self._administration.ask(walk)
        except Exception as error:
            _log.info("nobody tells how many messages remain: %s", failure_of(error))
            return None
        return total

    async def close(self) -> None:
        await self._administration.close()


class ListedInThread:
    """The same with a sync client, whose requests must not hold up the loop."""

    def __init__(self, name: str, administration: Administration) -> None:
        self._name = name
        self._administration = administration

    async def queues(self) -> Sequence[str]:
        def listed(**keywords: object) -> list[str]:
            return [queue.name for queue in self._administration.client.list_queues(**keywords)]

        paths = await asyncio.to_thread(self._administration.ask, listed)
        return extra_backlog_queues(self._name, 0, paths)

    async def remaining(self) -> int | None:
        return None

    async def close(self) -> None:
        await asyncio.to_thread(self._administration.close)


class Searched:
    """Without it: a queue that lets itself be peeked at is there."""

    def __init__(self, name: str, transport: Transport) -> None:
        self._name = name
        self._transport = transport

    async def queues(self) -> Sequence[str]:
        found: list[str] = []
        index = missing = 0
        while missing < _GAP:
            path = backlog_queue_path(self._name, index)
            if await self._exists(path):
                found.append(path)
                missing = 0
            else:
                missing += 1
            index += 1
        return found

    async def remaining(self) -> int | None:
        return None

    async def close(self) -> None:
        pass

    async def _exists(self, path: str) -> bool:
        backlog = self._transport.backlog(path)
        try:
            await backlog.peek(0, 1)
        except BacklogFailedError as error:
            if error.kind is FailureKind.ENTITY_NOT_FOUND:
                return False
            raise
        finally:
            await backlog.close()
        return True


class ListedOrSearched:
    """The first way that is allowed."""

    def __init__(self, listed: Discovery, searched: Discovery) -> None:
        self._ways = [listed, searched]
        self._listed = listed

    async def queues(self) -> Sequence[str]:
        if len(self._ways) > 1:
            try:
                return await self._listed.queues()
            except Exception as error:
                if failure_of(error).kind not in _REFUSED:
                    raise
                _log.info("the secondary may not be listed: backlog queues are looked for one by one")
                self._ways = self._ways[1:]
        return await self._ways[0].queues()

    async def remaining(self) -> int | None:
        return await self._ways[0].remaining()

    async def close(self) -> None:
        await self._listed.close()


class Named:
    """Exactly these."""

    def __init__(self, queues: Sequence[str], count: Callable[[], Awaitable[int | None]] | None = None) -> None:
        self._queues = tuple(queues)
        self._count = count

    async def queues(self) -> Sequence[str]:
        return self._queues

    async def remaining(self) -> int | None:
        return None if self._count is None else await self._count()

    async def close(self) -> None:
        pass
