"""Links of the client, each group of links on an AMQP session of its own.

`LinkSession` is one session with the links for one purpose. It attaches once and ends once. When it ends, `error` is
set and the subclass fails every call that waits. Because a link shares its session with no other sender or receiver,
its deliveries have consecutive ids, and one frame can settle many deliveries.

`RequestLink` is the pair of links to a request/response node (`$cbs`, `<entity>/$management`). Many requests may wait
for a reply at the same time; the correlation id of a reply names its request.
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

_REPLY_CREDIT: Final = 200


class LinkSession:
    """An AMQP session with links, open from the return of `attached` until `error` is set.

    Subclasses override the `on_…` methods.
    """

    def __init__(self, transport: AmqpTransport, entity: str) -> None:
        if transport.error is not None:
            raise transport.error.copy(entity)
        self.transport = transport
        self.entity = entity
        self.error: ServiceBusError | None = None
        self.session = transport.begin_session(self)
        self._unanswered: set[Link] = set()
        self._attached: asyncio.Future[None] = transport.loop.create_future()
        self._ended: asyncio.Future[None] = transport.loop.create_future()

    @property
    def is_open(self) -> bool:
        return self.error is None

    def attach(self, name: str, role: bool, **arguments: Any) -> Link:
        """Send an attach. The method `attached` waits for the peer's answer."""
        link = self.session.attach(name, role, **arguments)
        self._unanswered.add(link)
        self.transport.flush_soon()
        return link

    async def attached(self) -> None:
        """Wait until the peer has accepted every link. The caller sets a timeout.

        If the peer refuses a link, raises the peer's error. If the attach is refused or cancelled, the session ends.
        """
        try:
            await self._attached
        except asyncio.CancelledError:
            self.fail(ConnectionClosedError("the attach was given up", entity=self.entity))
            raise
        except ServiceBusError as error:
            raise error.copy(self.entity) from None

    async def close(self) -> None:
        """Detach, and wait for the peer's answer. The caller sets a timeout."""
        if self.error is None:
            for link in self.session.links:
                link.detach()
            self.transport.flush_soon()
            self._finish(ConnectionClosedError("closed by its owner", entity=self.entity), end_session=False)
            try:
                await self._ended
            finally:
                self._end_session()

    def fail(self, error: ServiceBusError) -> None:
        """End the session without waiting for the peer. Every call that waits fails with `error`."""
        if self.error is None:
            self._finish(error, end_session=True)
        else:
            self._set_ended()

    # --- from the transport ------------------------------------------------------------------------------------

    def on_accepted(self, link: Link) -> None:
        self._unanswered.discard(link)
        self.on_usable(link)
        if not self._unanswered and not self._attached.done():
            self._attached.set_result(None)

    def on_detached(self, link: Link, error: Error | None) -> None:
        self.fail(peer_error(error, f"the link to {self.entity} was detached", self.entity))

    def on_ended(self, error: Error | None) -> None:
        self.fail(peer_error(error, f"the session to {self.entity} was ended", self.entity))

    # --- for subclasses ----------------------------------------------------------------------------------------

    def on_usable(self, link: Link) -> None:
        """The peer accepted the link."""

    def on_flow(self, link: Link) -> None:
        """The link's credit changed."""

    def on_delivery(self, event: Delivered) -> None:
        """A message arrived."""

    def on_disposition(self, event: Disposed) -> None:
        """The peer reported the state of deliveries."""

    def on_failed(self, error: ServiceBusError) -> None:
        """The links have ended: fail every call that waits."""

    # --- the end -----------------------------------------------------------------------------------------------

    def _finish(self, error: ServiceBusError, *, end_session: bool) -> None:
        self.error = error.copy()
        self.error.cut_off = True
        if not self._attached.done():
            self._attached.set_exception(error)
            self._attached.exception()  # Marked as retrieved: otherwise asyncio logs an exception that no task awaits.
        self.on_failed(self.error)
        if end_session:
            self._end_session()

    def _end_session(self) -> None:
        self.transport.remove(self)
        self._set_ended()
        if self.transport.error is None:
            self.session.end()
            self.transport.flush_soon()

    def _set_ended(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


@dataclass(frozen=True, slots=True)
class RequestReply:
    """Reply of a request/response node."""

    status: int
    description: str | None
    condition: str | None
    body: Any

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class RequestLink(LinkSession):
    """The two links, one in each direction, to a request/response node. Callers of `request` set the timeout."""

    def __init__(self, transport: AmqpTransport, address: str, entity: str, name: str) -> None:
        super().__init__(transport, entity)
        self._reply_to = f"{name}-replies"
        self._request_count = 0
        self._waiters: dict[str, asyncio.Future[RequestReply]] = {}
        self._outbox: deque[tuple[str, bytes]] = deque()
        modes = {"snd_settle_mode": SND_SETTLED, "rcv_settle_mode": RCV_FIRST}
        self._requests = self.attach(name, SENDER, source=Source(name), target=Target(address), **modes)
        self._replies = self.attach(
            self._reply_to, RECEIVER, source=Source(address), target=Target(self._reply_to), **modes
        )

    async def request(self, properties: Mapping[str, object], body: object) -> RequestReply:
        """Send a request and return the reply, also a reply with an error status. Raises if the links have ended."""
        if self.error is not None:
            raise self.error.copy(self.entity)
        self._request_count += 1
        request_id = str(self._request_count)
        payload = build_message(
            properties=Properties(message_id=request_id, reply_to=self._reply_to),
            application_properties=properties,
            value=body,
        )
        reply: asyncio.Future[RequestReply] = self.transport.loop.create_future()
        self._waiters[request_id] = reply
        self._outbox.append((request_id, payload))
        self._send_outbox()
        try:
            return await reply
        except ServiceBusError as error:
            raise error.copy(self.entity) from None
        finally:
            self._waiters.pop(request_id, None)

    # --- from the transport ------------------------------------------------------------------------------------

    def on_usable(self, link: Link) -> None:
        if link is self._replies:
            link.flow(_REPLY_CREDIT)

    def on_flow(self, link: Link) -> None:
        self._send_outbox()

    def on_delivery(self, event: Delivered) -> None:
        if event.link.credit <= _REPLY_CREDIT // 2:
            event.link.flow(_REPLY_CREDIT)
        if not event.settled:
            self.session.dispose(RECEIVER, event.delivery_id, settled=True)
        try:
            request_id, reply = _read_reply(event.payload)
        except DecodeError as error:
            self.fail(ServiceBusProtocolError(f"a reply cannot be read: {error}", entity=self.entity))
            return
        waiter = self._waiters.get(request_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def on_failed(self, error: ServiceBusError) -> None:
        self._outbox.clear()
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(error)

    def _send_outbox(self) -> None:
        while self._outbox and self._requests.credit > 0:
            request_id, payload = self._outbox.popleft()
            if request_id in self._waiters:  # Otherwise the caller no longer waits.
                self._requests.send(request_id.encode(), payload, settled=True)
        self.transport.flush_soon()


def _read_reply(payload: bytes) -> tuple[str, RequestReply]:
    """Return the correlation id and the reply. Raises DecodeError if there is no status code."""
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
