"""The tokens of one connection: put on `$cbs` once per entity, renewed before they expire, gone with the connection.

Where a token comes from is said in `tokens`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from twinbus.clock import Clock
from twinbus.connect.errors import error_for_token
from twinbus.connect.link_session import RequestLink
from twinbus.connect.tokens import TokenSource
from twinbus.connect.transport import AmqpTransport
from twinbus.values import Timestamp

_log = logging.getLogger(__name__)

# Of its lifetime a token lives this part before it is renewed; the rest is room for a renewal that fails at first.
RENEW_AFTER: Final = 0.75
_RETRY_AFTER: Final = 0.1


class CbsClient:
    def __init__(self, wire: AmqpTransport, source: TokenSource, clock: Clock, name: str) -> None:
        self._wire = wire
        self._source = source
        self._clock = clock
        self._name = name
        self._link: RequestLink | None = None
        self._until: dict[str, int] = {}  # by audience, in epoch seconds
        self._putting = asyncio.Lock()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._renewals: set[asyncio.Task[None]] = set()
        wire.when_lost(self._stop)

    async def ensure(self, audience: str, entity: str) -> None:
        """Whoever comes first puts the token; the caller bounds the wait."""
        if self._is_put(audience):
            return
        async with self._putting:
            if not self._is_put(audience):
                await self._put_token(audience, entity)

    def _is_put(self, audience: str) -> bool:
        return self._until.get(audience, 0) * 1000 > self._clock.now()

    async def _put_token(self, audience: str, entity: str) -> None:
        token = await self._source.token(audience)
        if self._link is None or not self._link.is_open:
            link = RequestLink(self._wire, "$cbs", "$cbs", f"{self._name}-cbs")
            await link.attached()
            self._link = link
        properties = {
            "operation": "put-token",
            "type": token.type,
            "name": audience,
            "expiration": Timestamp(token.expires_at * 1000),
        }
        reply = await self._link.request(properties, token.text)
        if not reply.is_good:
            raise error_for_token(reply.status, reply.description, entity)
        self._until[audience] = token.expires_at
        lifetime = max(0.0, token.expires_at - self._clock.now() / 1000)
        self._arm(audience, entity, lifetime * RENEW_AFTER, lifetime)

    # --- renewal -----------------------------------------------------------------------------------------------

    def _arm(self, audience: str, entity: str, seconds: float, lifetime: float) -> None:
        if self._wire.error is None:
            if (before := self._timers.get(audience)) is not None:
                before.cancel()
            timer = self._wire.loop.call_later(seconds, self._renew, audience, entity, lifetime)
            self._timers[audience] = timer

    def _renew(self, audience: str, entity: str, lifetime: float) -> None:
        task = self._wire.loop.create_task(self._renew_token(audience, entity, lifetime))
        self._renewals.add(task)
        task.add_done_callback(self._renewals.discard)

    async def _renew_token(self, audience: str, entity: str, lifetime: float) -> None:
        pause = max(1.0, lifetime * _RETRY_AFTER)
        try:
            async with asyncio.timeout(pause), self._putting:
                await self._put_token(audience, entity)
        except Exception as error:  # a credential may raise anything; the token at hand still serves for a while
            _log.warning("the token for %s was not renewed: %r", audience, error)
            self._arm(audience, entity, pause, lifetime)

    def _stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for task in self._renewals:
            task.cancel()
