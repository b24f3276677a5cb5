"""One session with the links of one purpose on it: attached, used, and gone exactly once.

A session of its own keeps its delivery ids consecutive, so that they settle in runs. What the links carry is said by
the subclasses; whatever waits on a link that is gone fails there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from twinbus.amqp import (
    RCV_FIRST,
    RECEIVER,
    SENDER,
    SND_SETTLED,
    DecodeError,
    Delivered,
    Disposed,
    Error,
    Link,
    Properties,
    Source,
    Target,
    build_message,
    split_sections,
)
from twinbus.connect.errors import ConnectionClosedError, ServiceBusError, ServiceBusProtocolError
from twinbus.connect.transport import AmqpTransport, peer_error


class LinkSession:
    """Open from `attached` until `error` is set."""

    def __init__(self, wire: AmqpTransport, entity: str) -> None:
        if wire.error is not None:
            raise wire.error.again(entity)
        self.wire = wire
        self.entity = entity
        self.error: ServiceBusError | None = None
        self.session = wire.core.begin()
        self.session.context = self
        self._awaited: set[Link] = set()
        self._attached: asyncio.Future[None] = wire.loop.create_future()
        self._gone: asyncio.Future[None] = wire.loop.create_future()
        wire.add(self)

    @property
    def is_open(self) -> bool:
        return self.error is None

    def attach(self, name: str, role: bool, **arguments: Any) -> Link:
        link = self.session.attach(name, role, **arguments)
        self._awaited.add(link)
        self.wire.flush_soon()
        return link

    async def attached(self) -> None:
        """Waits until the peer took every link; the caller bounds the wait. Given up or refused, nothing is left."""
        try:
            await self._attached
        except asyncio.CancelledError:
            self.fail(ConnectionClosedError("the attach was given up", entity=self.entity))
            raise
        except ServiceBusError as error:
            raise error.again(self.entity) from None

    async def close(self) -> None:
        """Detaches and waits for the peer's answer; the caller bounds the wait."""
        if self.error is None:
            for link in self.session.links:
                link.detach()
            self.wire.flush_soon()
            self._finish(ConnectionClosedError("closed by its owner", entity=self.entity), end=False)
            try:
                await self._gone
            finally:
                self._end()

    def fail(self, error: ServiceBusError) -> None:
        """Ends it at once, with the reason for everything that waits."""
        if self.error is None:
            self._finish(error, end=True)
        else:
            self._set_gone()

    # --- from the wire -----------------------------------------------------------------------------------------

    def accepted(self, link: Link) -> None:
        self._awaited.discard(link)
        self.link_accepted(link)
        if not self._awaited and not self._attached.done():
            self._attached.set_result(None)

    def detached(self, link: Link, error: Error | None) -> None:
        self.fail(peer_error(error, f"the link to {self.entity} was detached", self.entity))

    def ended(self, error: Error | None) -> None:
        self.fail(peer_error(error, f"the session to {self.entity} was ended", self.entity))

    # --- for the subclasses ------------------------------------------------------------------------------------

    def link_accepted(self, link: Link) -> None:
        """A link can be used from now on."""

    def flowed(self, link: Link) -> None:
        """Credit came, or was used up."""

    def delivered(self, event: Delivered) -> None:
        """A message came."""

    def disposed(self, event: Disposed) -> None:
        """The peer told the state of deliveries."""

    def failed(self, error: ServiceBusError) -> None:
        """The links are gone: fail what waits."""

    # --- the end -----------------------------------------------------------------------------------------------

    def _finish(self, error: ServiceBusError, *, end: bool) -> None:
        self.error = error.again()
        self.error.cut_off = True
        if not self._attached.done():
            self._attached.set_exception(error)
            self._attached.exception()  # whoever waited for it may have given up
        self.failed(self.error)
        if end:
            self._end()

    def _end(self) -> None:
        self.wire.remove(self)
        self._set_gone()
        if self.wire.error is None:
            self.session.end()
            self.wire.flush_soon()

    def _set_gone(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)


_CREDIT: Final = 200


@dataclass(frozen=True, slots=True)
class RequestReply:
    status: int
    description: str | None
    condition: str | None
    body: Any

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300


class RequestLink(LinkSession):
    """Both links to one node. The deadline of a request is its caller's."""

    def __init__(self, wire: AmqpTransport, address: str, entity: str, name: str) -> None:
        super().__init__(wire, entity)
        self._reply_to = f"{name}-replies"
        self._sent = 0
        self._waiting: dict[str, asyncio.Future[RequestReply]] = {}
        self._outbox: deque[tuple[str, bytes]] = deque()
        modes = {"snd_settle_mode": SND_SETTLED, "rcv_settle_mode": RCV_FIRST}
        self._requests = self.attach(name, SENDER, source=Source(name), target=Target(address), **modes)
        self._replies = self.attach(
            self._reply_to, RECEIVER, source=Source(address), target=Target(self._reply_to), **modes
        )

    async def request(self, properties: Mapping[str, object], body: object) -> RequestReply:
        if self.error is not None:
            raise self.error.again(self.entity)
        self._sent += 1
        number = str(self._sent)
        payload = build_message(
            properties=Properties(message_id=number, reply_to=self._reply_to),
            application_properties=properties,
            value=body,
        )
        reply: asyncio.Future[RequestReply] = self.wire.loop.create_future()
        self._waiting[number] = reply
        self._outbox.append((number, payload))
        self._send()
        try:
            return await reply
        except ServiceBusError as error:
            raise error.again(self.entity) from None
        finally:
            self._waiting.pop(number, None)

    # --- from the wire -----------------------------------------------------------------------------------------

    def link_accepted(self, link: Link) -> None:
        if link is self._replies:
            link.flow(_CREDIT)

    def flowed(self, link: Link) -> None:
        self._send()

    def delivered(self, event: Delivered) -> None:
        if event.link.credit <= _CREDIT // 2:
            event.link.flow(_CREDIT)
        if not event.settled:
            self.session.dispose(RECEIVER, event.delivery_id, settled=True)
        try:
            number, reply = _read(event.payload)
        except DecodeError as fault:
            self.fail(ServiceBusProtocolError(f"a reply cannot be read: {fault}", entity=self.entity))
            return
        waiter = self._waiting.get(number)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def failed(self, error: ServiceBusError) -> None:
        self._outbox.clear()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)

    def _send(self) -> None:
        while self._outbox and self._requests.credit > 0:
            number, payload = self._outbox.popleft()
            if number in self._waiting:  # else its caller has given up
                self._requests.send(number.encode(), payload, settled=True)
        self.wire.flush_soon()


def _read(payload: bytes) -> tuple[str, RequestReply]:
    sections = split_sections(payload)
    properties = sections.application_properties
    status = properties.get("statusCode", properties.get("status-code"))
    if not isinstance(status, int):
        raise DecodeError("it has no status code")
    description = properties.get("statusDescription", properties.get("status-description"))
    condition = properties.get("errorCondition")
    body = sections.value if sections.body_kind == "value" else None
    return str(sections.properties.correlation_id), RequestReply(
        int(status), description, None if condition is None else str(condition), body
    )
