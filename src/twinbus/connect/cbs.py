"""Claims-based security: the client sends tokens to the `$cbs` node of one connection.

The client puts one token for each entity before the first link to the entity attaches, and renews the token after
three quarters of its lifetime. If a renewal fails, the client tries again after a tenth of the lifetime; the old token
is still valid then. When the transport ends, no token is renewed any more.
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

RENEW_AFTER: Final = 0.75  # of the token's lifetime
_RETRY_AFTER: Final = 0.1  # of the token's lifetime
# A credential may give the same token again until shortly before it expires, with less and less time left. In seconds.
_LEAST_PAUSE: Final = 0.25


class CbsClient:
    """Puts and renews tokens on one transport."""

    def __init__(self, transport: AmqpTransport, source: TokenSource, clock: Clock, name: str) -> None:
        self._transport = transport
        self._source = source
        self._clock = clock
        self._name = name
        self._link: RequestLink | None = None
        self._valid_until: dict[str, int] = {}  # by audience, in epoch seconds
        self._put_lock = asyncio.Lock()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._renewals: set[asyncio.Task[None]] = set()
        transport.when_lost(self._stop)

    async def ensure_token(self, audience: str, entity: str) -> None:
        """Put a token for `audience`, unless a token that was put before is still valid. The caller sets a timeout."""
        if self._has_valid_token(audience):
            return
        async with self._put_lock:
            if not self._has_valid_token(audience):
                await self._put_token(audience, entity)

    def _has_valid_token(self, audience: str) -> bool:
        return self._valid_until.get(audience, 0) * 1000 > self._clock.now()

    async def _put_token(self, audience: str, entity: str) -> None:
        token = await self._source.token(audience)
        if self._link is None or not self._link.is_open:
            link = RequestLink(self._transport, "$cbs", "$cbs", f"{self._name}-cbs")
            await link.attached()
            self._link = link
        properties = {
            "operation": "put-token",
            "type": token.type,
            "name": audience,
            "expiration": Timestamp(token.expires_at * 1000),
        }
        reply = await self._link.request(properties, token.text)
        if not reply.is_success:
            raise error_for_token(reply.status, reply.description, entity)
        self._valid_until[audience] = token.expires_at
        lifetime = max(0.0, token.expires_at - self._clock.now() / 1000)
        self._schedule_renewal(audience, entity, max(_LEAST_PAUSE, lifetime * RENEW_AFTER), lifetime)

    # --- renewal -----------------------------------------------------------------------------------------------

    def _schedule_renewal(self, audience: str, entity: str, seconds: float, lifetime: float) -> None:
        if self._transport.error is None:
            if (earlier := self._timers.get(audience)) is not None:
                earlier.cancel()
            timer = self._transport.loop.call_later(seconds, self._start_renewal, audience, entity, lifetime)
            self._timers[audience] = timer

    def _start_renewal(self, audience: str, entity: str, lifetime: float) -> None:
        task = self._transport.loop.create_task(self._renew(audience, entity, lifetime))
        self._renewals.add(task)
        task.add_done_callback(self._renewals.discard)

    async def _renew(self, audience: str, entity: str, lifetime: float) -> None:
        pause = max(1.0, lifetime * _RETRY_AFTER)
        try:
            async with asyncio.timeout(pause), self._put_lock:
                await self._put_token(audience, entity)
        except Exception as error:  # A credential may raise anything. The old token is still valid.
            _log.warning("the token for %s was not renewed: %r", audience, error)
            self._schedule_renewal(audience, entity, pause, lifetime)

    def _stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for task in self._renewals:
            task.cancel()
