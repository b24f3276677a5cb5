"""Request/response nodes (`$cbs`, `<entity>/$management`): requests out, replies back by correlation, many in flight.

What an operation means is said in `claims` and `management`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from twinbus.amqp.errors import DecodeError
from twinbus.amqp.events import Delivered
from twinbus.amqp.link import Link
from twinbus.amqp.message_builder import message
from twinbus.amqp.message_sections import Properties, split
from twinbus.amqp.performatives import RCV_FIRST, RECEIVER, SENDER, SND_SETTLED, Source, Target
from twinbus.connect.attachment import Attachment
from twinbus.connect.errors import ServiceBusError, ServiceBusProtocolError
from twinbus.connect.wire import Wire

_CREDIT: Final = 200


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    description: str | None
    condition: str | None
    body: Any

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300


class RequestLink(Attachment):
    """Both links to one node. The deadline of a request is its caller's."""

    def __init__(self, wire: Wire, address: str, entity: str, name: str) -> None:
        super().__init__(wire, entity)
        self._reply_to = f"{name}-replies"
        self._sent = 0
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._outbox: deque[tuple[str, bytes]] = deque()
        modes = {"snd_settle_mode": SND_SETTLED, "rcv_settle_mode": RCV_FIRST}
        self._requests = self.attach(name, SENDER, source=Source(name), target=Target(address), **modes)
        self._replies = self.attach(
            self._reply_to, RECEIVER, source=Source(address), target=Target(self._reply_to), **modes
        )

    async def request(self, properties: Mapping[str, object], body: object) -> Reply:
        if self.error is not None:
            raise self.error.again(self.entity)
        self._sent += 1
        number = str(self._sent)
        payload = message(
            properties=Properties(message_id=number, reply_to=self._reply_to),
            application_properties=properties,
            value=body,
        )
        reply: asyncio.Future[Reply] = self.wire.loop.create_future()
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


def _read(payload: bytes) -> tuple[str, Reply]:
    sections = split(payload)
    properties = sections.application_properties
    status = properties.get("statusCode", properties.get("status-code"))
    if not isinstance(status, int):
        raise DecodeError("it has no status code")
    description = properties.get("statusDescription", properties.get("status-description"))
    condition = properties.get("errorCondition")
    body = sections.value if sections.body_kind == "value" else None
    return str(sections.properties.correlation_id), Reply(
        int(status), description, None if condition is None else str(condition), body
    )
