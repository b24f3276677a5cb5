"""Request/response nodes (`$cbs`, `$management`): a request link, a reply link, and replies that wait for credit.

Which operation means what is in tokens.py and operations.py; here requests become replies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinbus.amqp import (
    DecodeError,
    Delivered,
    Link,
    Properties,
    Rejected,
    Session,
    Target,
    build_message,
    read_transactional,
    split_sections,
)
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.front import refusals
from twinbus.namespace.front.addresses import LinkAddress
from twinbus.values import Condition, Int, Symbol

if TYPE_CHECKING:
    from twinbus.namespace.front.amqp_connection import AmqpConnection

_CREDIT = 100


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """One request: who asked, what, and where the reply goes."""

    link: Link
    address: LinkAddress
    operation: str
    properties: dict[str, Any]
    body: Any
    answer: Callable[[NodeReply], None]


@dataclass(frozen=True, slots=True)
class NodeReply:
    """The answer to a request, in the words of both nodes."""

    status: int
    description: str = "OK"
    body: Any = None
    condition: str | None = None

    @classmethod
    def refused(cls, refusal: Refusal) -> NodeReply:
        return cls(refusals.status_code(refusal), refusal.description, None, refusal.condition.value)


class NodeReplyLink:
    """The link on which the peer takes replies: as it grants credit, and as it reads."""

    def __init__(self, connection: AmqpConnection, link: Link, address: LinkAddress) -> None:
        self._connection = connection
        self._link = link
        self.address = address
        self._unread: deque[bytes] = deque()
        self._sent = 0

    def flowed(self) -> None:
        self._send_unread()
        if self._link.drain:
            self._link.drained()

    def resume(self) -> None:
        """The peer reads again."""
        self._send_unread()

    def detached(self) -> None:
        self._connection.unread_changed(-len(self._unread), -sum(map(len, self._unread)))
        self._unread.clear()

    def send(self, payload: bytes) -> bool:
        """Send, or keep until the peer takes it; False if the peer leaves too much unread."""
        if not self._unread and self._link.credit > 0 and not self._connection.is_full:
            self._send(payload)
            return True
        self._unread.append(payload)
        is_allowed = self._connection.unread_changed(1, len(payload))
        self._send_unread()
        return is_allowed

    @property
    def names(self) -> set[str]:
        """What a request's reply-to may call this link: its name and its target."""
        target = self._link.target.address if isinstance(self._link.target, Target) else None
        return {self._link.name, target} if isinstance(target, str) else {self._link.name}

    def _send_unread(self) -> None:
        while self._unread and self._link.credit > 0:
            if self._connection.is_full:
                self._connection.stall(self)
                return
            payload = self._unread.popleft()
            self._connection.unread_changed(-1, -len(payload))
            self._send(payload)
        self._connection.flush_soon()

    def _send(self, payload: bytes) -> None:
        self._link.send(self._sent.to_bytes(8, "big"), payload, message_format=0, settled=True)
        self._sent += 1


class NodeReplyLinks:
    """Reply links of one connection, found without a search through all its links.

    Each link is listed under its address alone, with its session, with each of its names, and with both.
    """

    def __init__(self) -> None:
        self._listed: dict[tuple[LinkAddress, str | None, Session | None], dict[Link, NodeReplyLink]] = {}

    def add(self, link: Link, reply_link: NodeReplyLink) -> None:
        for key in self._keys(link, reply_link):
            self._listed.setdefault(key, {})[link] = reply_link

    def remove(self, link: Link, reply_link: NodeReplyLink) -> None:
        for key in self._keys(link, reply_link):
            listed = self._listed.get(key, {})
            listed.pop(link, None)
            if not listed:
                self._listed.pop(key, None)

    def find(self, session: Session, address: LinkAddress, reply_to: str | None) -> tuple[Link, NodeReplyLink] | None:
        """The link for a reply: one that `reply_to` names before others, one of the same session before others."""
        for name in (None,) if reply_to is None else (reply_to, None):
            for owner in (session, None):
                if listed := self._listed.get((address, name, owner)):
                    return next(iter(listed.items()))
        return None

    def _keys(self, link: Link, reply_link: NodeReplyLink) -> Iterator[tuple[LinkAddress, str | None, Session | None]]:
        for name in (None, *reply_link.names):
            for session in (link.session, None):
                yield reply_link.address, name, session


class NodeRequestLink:
    """The link on which requests arrive."""

    def __init__(self, connection: AmqpConnection, link: Link, address: LinkAddress) -> None:
        self._connection = connection
        self._link = link
        self._address = address

    def grant(self) -> None:
        self._link.flow(_CREDIT)

    def flowed(self) -> None:
        """The requesting peer told its state; nothing depends on it."""

    def detached(self) -> None:
        """Requests under way are answered all the same, if the reply link is still there."""

    def delivered(self, delivery: Delivered) -> None:
        """One request arrived."""
        if self._link.credit <= _CREDIT // 2:
            if self._connection.has_waiting_reads:
                self._connection.grant_later(self)
            else:
                self.grant()
        if (transactional := read_transactional(delivery.state)) is not None:
            # Carried out at once, it would count although the transaction does not.
            refusal = Refusal(Condition.NOT_IMPLEMENTED, "Requests to a node cannot be part of a transaction.")
            self._connection.transactions.doom(transactional.transaction, refusal)
            state = Rejected(refusals.amqp_error(refusal))
            self._connection.dispose_received(self._link.session, delivery.delivery_id, state)
            return
        try:
            sections = split_sections(delivery.payload)
            properties, application = sections.properties, sections.application_properties
            body = sections.value
        except DecodeError as error:
            refusal = Refusal(Condition.DECODE_ERROR, error.description)
            state = Rejected(refusals.amqp_error(refusal))
            self._connection.dispose_received(self._link.session, delivery.delivery_id, state)
            return
        if not delivery.settled:
            self._connection.accept(self._link.session, delivery.delivery_id)

        def answer(reply: NodeReply) -> None:
            payload = _encoded(reply, properties)
            self._connection.reply(self._link.session, self._address, properties.reply_to, payload)

        operation = str(application.get("operation", ""))
        self._connection.request(NodeRequest(self._link, self._address, operation, application, body, answer))


def _encoded(reply: NodeReply, request: Properties) -> bytes:
    description = refusals.shortened(reply.description)
    status: dict[str, Any] = {
        # Both spellings: clients of `$cbs` read the first pair, of `$management` the second.
        "status-code": Int(reply.status),
        "status-description": description,
        "statusCode": Int(reply.status),
        "statusDescription": description,
    }
    if reply.condition is not None:
        status["errorCondition"] = Symbol(reply.condition)
    return build_message(
        properties=Properties(correlation_id=request.message_id),
        application_properties=status,
        value=reply.body,
    )
