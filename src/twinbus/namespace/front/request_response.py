"""Request/response nodes (`$cbs`, `$management`): receives requests, sends replies, and limits both.

A client opens two links to a node: it sends requests on the first link and receives replies on the second. A
`NodeRequestLink` decodes a request and passes the request to the connection's handler, together with the function
`answer`, which sends the reply. `cbs` and `management_requests` handle requests.

A reply waits until the peer grants credit and reads the earlier replies. Two classes limit the memory of waiting
replies:

    NodeReplies   counts the unread replies of a connection; if there are too many, the peer's reply link is detached
    ReadQueue     limits the requests whose replies carry messages ("reads"). A read starts only while fewer than 4
                  reads run and fewer than 4 MiB of replies are unread. Other reads wait. While reads wait, request
                  links get no new credit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from twinbus.amqp import (
    KIB,
    MIB,
    DecodeError,
    Delivered,
    LimitExceededError,
    Link,
    Properties,
    Rejected,
    Session,
    Target,
    build_message,
    memory_of,
    read_transactional,
    split_sections,
)
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.front import refusals
from twinbus.namespace.front.addresses import LinkAddress
from twinbus.namespace.front.backpressure import ConnectionOutput
from twinbus.namespace.front.transaction_coordinator import Transactions
from twinbus.namespace.resources import ConnectionAccount
from twinbus.values import Condition, Int, Symbol

_CREDIT = 100


class _Limit(NamedTuple):
    number: int
    size: int
    """In bytes."""


# The most unread replies of one connection: with an accepted token, and without.
_MAX_UNREAD = _Limit(10_000, 16 * MIB)
_MAX_UNREAD_UNAUTHENTICATED = _Limit(128, 64 * KIB)
# The most reads that run at the same time. The reply of each read may have a megabyte.
_MAX_RUNNING_READS = 4
# With this many bytes of unread replies, no read starts. The limit is so far below _MAX_UNREAD that the replies of all
# running reads fit between the two limits.
_MAX_UNREAD_FOR_READS = 4 * MIB
# The most waiting reads of one connection. Further reads are refused.
_MAX_WAITING_READS = _Limit(1000, 4 * MIB)


# --- requests and replies ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """A request to a node. `answer` sends the reply."""

    link: Link
    address: LinkAddress
    operation: str
    properties: dict[str, Any]
    body: Any
    answer: Callable[[NodeReply], None]


@dataclass(frozen=True, slots=True)
class NodeReply:
    """The reply to a request. `status` is an HTTP status code."""

    status: int
    description: str = "OK"
    body: Any = None
    condition: str | None = None
    more_units: int = 0
    """Billable units that the encoded messages of the reply have beyond those by their stored sizes (M2)."""

    @classmethod
    def refused(cls, refusal: Refusal) -> NodeReply:
        return cls(refusals.status_code(refusal), refusal.description, None, refusal.condition.value)


def _encode(reply: NodeReply, request: Properties) -> bytes:
    description = refusals.shortened(reply.description)
    status: dict[str, Any] = {
        # Both spellings are sent: clients of `$cbs` read the first pair, clients of `$management` the second.
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


# --- links -------------------------------------------------------------------------------------------------------


class NodeRequestLink:
    """A link on which requests arrive."""

    required_claim = None

    def __init__(
        self,
        link: Link,
        address: LinkAddress,
        handle: Callable[[NodeRequest], None],
        output: ConnectionOutput,
        replies: NodeReplies,
        transactions: Transactions,
    ) -> None:
        self._link = link
        self._address = address
        self._handle = handle
        self._output = output
        self._replies = replies
        self._transactions = transactions

    def grant(self) -> None:
        """Let the peer send more requests."""
        self._link.flow(_CREDIT)

    def flowed(self) -> None:
        """Do nothing: flows of a peer that sends requests need no reaction."""

    def detached(self) -> None:
        """Do nothing: running requests continue, and are answered if their reply link is still attached."""

    def delivered(self, delivery: Delivered) -> None:
        """Handle one request."""
        if self._link.credit <= _CREDIT // 2:
            if self._replies.reads.has_waiting:
                self._replies.reads.grant_later(self)
            else:
                self.grant()
        if (transactional := read_transactional(delivery.state)) is not None:
            # A request takes effect before the transaction ends, so the transaction could not roll it back.
            refusal = Refusal(Condition.NOT_IMPLEMENTED, "Requests to a node cannot be part of a transaction.")
            self._transactions.mark_rollback_only(transactional.transaction, refusal)
            self._reject(delivery, refusal)
            return
        try:
            sections = split_sections(delivery.payload)
            properties, application = sections.properties, sections.application_properties
            body = sections.value
        except DecodeError as error:
            self._reject(delivery, Refusal(Condition.DECODE_ERROR, error.description))
            return
        if not delivery.settled:
            self._output.accept(self._link.session, delivery.delivery_id)

        def answer(reply: NodeReply) -> None:
            payload = _encode(reply, properties)
            self._replies.send(self._link.session, self._address, properties.reply_to, payload)

        operation = str(application.get("operation", ""))
        self._handle(NodeRequest(self._link, self._address, operation, application, body, answer))

    def _reject(self, delivery: Delivered, refusal: Refusal) -> None:
        state = Rejected(refusals.amqp_error(refusal))
        self._output.dispose_received(self._link.session, delivery.delivery_id, state)


class NodeReplyLink:
    """A link on which the peer receives replies.

    Replies wait while the peer grants no credit, or while the connection's output is full.
    """

    required_claim = None

    def __init__(self, link: Link, address: LinkAddress, output: ConnectionOutput, replies: NodeReplies) -> None:
        self._link = link
        self.address = address
        self._output = output
        self._replies = replies
        self._unread: deque[bytes] = deque()
        self._sent = 0

    def flowed(self) -> None:
        """Send waiting replies with the credit that the peer granted."""
        self._send_unread()
        if self._link.drain:
            self._link.drained()

    def resume(self) -> None:
        """Send waiting replies, because the connection has room again."""
        self._send_unread()

    def detached(self) -> None:
        """Remove the link from the reply links, and drop its unread replies."""
        self._replies.links.remove(self._link, self)
        self._replies.unread_changed(-len(self._unread), -sum(map(len, self._unread)))
        self._unread.clear()

    def send(self, payload: bytes) -> bool:
        """Send a reply, or let it wait for credit. Returns False if the connection has too many unread replies."""
        if not self._unread and self._link.credit > 0 and not self._output.is_full:
            self._send(payload)
            return True
        self._unread.append(payload)
        is_allowed = self._replies.unread_changed(1, len(payload))
        self._send_unread()
        return is_allowed

    @property
    def names(self) -> set[str]:
        """The values of reply-to in a request that mean this link: the link's name, and the address of its target."""
        target = self._link.target.address if isinstance(self._link.target, Target) else None
        return {self._link.name, target} if isinstance(target, str) else {self._link.name}

    def _send_unread(self) -> None:
        while self._unread and self._link.credit > 0:
            if self._output.is_full:
                self._output.stall(self)
                return
            payload = self._unread.popleft()
            self._replies.unread_changed(-1, -len(payload))
            self._send(payload)
        self._output.flush_soon()

    def _send(self, payload: bytes) -> None:
        self._link.send(self._sent.to_bytes(8, "big"), payload, message_format=0, settled=True)
        self._sent += 1


# --- replies of one connection -----------------------------------------------------------------------------------


_LinkKey = tuple[LinkAddress, str | None, Session | None]


class NodeReplyLinks:
    """The reply links of one connection.

    Each link is stored under several keys: its address; its address and session; its address and each of its names; and
    all three. So the link for a reply is found without a search through all links (X1).
    """

    def __init__(self) -> None:
        self._listed: dict[_LinkKey, dict[Link, NodeReplyLink]] = {}

    def add(self, link: Link, reply_link: NodeReplyLink) -> None:
        """Add a link that was attached."""
        for key in self._keys(link, reply_link):
            self._listed.setdefault(key, {})[link] = reply_link

    def remove(self, link: Link, reply_link: NodeReplyLink) -> None:
        """Remove a link that is gone."""
        for key in self._keys(link, reply_link):
            listed = self._listed.get(key, {})
            listed.pop(link, None)
            if not listed:
                self._listed.pop(key, None)

    def find(self, session: Session, address: LinkAddress, reply_to: str | None) -> tuple[Link, NodeReplyLink] | None:
        """Return the link for a reply. Prefers the link that `reply_to` names, then a link of the same session."""
        for name in (None,) if reply_to is None else (reply_to, None):
            for owner in (session, None):
                if listed := self._listed.get((address, name, owner)):
                    return next(iter(listed.items()))
        return None

    def _keys(self, link: Link, reply_link: NodeReplyLink) -> Iterator[_LinkKey]:
        for name in (None, *reply_link.names):
            for session in (link.session, None):
                yield reply_link.address, name, session


class NodeReplies:
    """Sends the replies of one connection, and limits the number and bytes of unread replies."""

    def __init__(
        self,
        account: ConnectionAccount,
        output: ConnectionOutput,
        detach: Callable[[Link, Refusal], None],
        limit_exceeded: Callable[[LimitExceededError], None],
    ) -> None:
        """`detach` detaches a link with an error; `limit_exceeded` counts and logs that the peer exceeded a limit."""
        self._account = account
        self._output = output
        self._detach = detach
        self._limit_exceeded = limit_exceeded
        self._unread_number = 0
        self._unread_bytes = 0
        self.links = NodeReplyLinks()
        self.reads = ReadQueue(account, output, limit_exceeded)

    def send(self, session: Session, address: LinkAddress, reply_to: str | None, payload: bytes) -> None:
        """Send a reply, if its link is still attached. Detaches the link if there are too many unread replies."""
        found = self.links.find(session, address, reply_to)
        if found is None:
            return
        link, reply_link = found
        if not reply_link.send(payload):
            most = self._limit
            until = "" if self._account.is_authenticated else " until a token was accepted"
            text = (
                f"Too many replies are waiting to be read: {most.number} replies or {most.size} bytes may wait on a "
                f"connection{until}. Grant credit to the reply link and read it."
            )
            self._limit_exceeded(LimitExceededError("unread-replies", text))
            self._detach(link, Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text))
        self._output.flush_soon()

    def unread_changed(self, number: int, size: int) -> bool:
        """Add `number` and `size` to the count and the bytes of unread replies. Both may be negative.

        Returns False if there are too many unread replies.
        """
        self._unread_number += number
        self._unread_bytes += size
        self._account.hold("unread replies", self._unread_bytes)
        self.reads.unread_bytes_changed(self._unread_bytes)
        most = self._limit
        return self._unread_number <= most.number and self._unread_bytes <= most.size

    @property
    def _limit(self) -> _Limit:
        return _MAX_UNREAD if self._account.is_authenticated else _MAX_UNREAD_UNAUTHENTICATED


class _WaitingRead(NamedTuple):
    start: Callable[[NodeRequest], None]
    request: NodeRequest
    size: int


class ReadQueue:
    """Limits the requests of one connection whose replies carry messages: how many run, and how many wait."""

    def __init__(
        self,
        account: ConnectionAccount,
        output: ConnectionOutput,
        limit_exceeded: Callable[[LimitExceededError], None],
    ) -> None:
        self._account = account
        self._output = output
        self._limit_exceeded = limit_exceeded
        self._loop = asyncio.get_running_loop()
        self._running = 0
        self._waiting: deque[_WaitingRead] = deque()
        self._waiting_bytes = 0
        self._unread_bytes = 0
        self._is_scheduled = False
        self._links_without_credit: set[NodeRequestLink] = set()

    @property
    def has_waiting(self) -> bool:
        """Whether any read waits to be started."""
        return bool(self._waiting)

    def grant_later(self, link: NodeRequestLink) -> None:
        """Grant credit to this link when no read waits any more."""
        self._links_without_credit.add(link)

    def submit(self, request: NodeRequest, start: Callable[[NodeRequest], None]) -> None:
        """Start a read: call `start` with the request. The read waits if it may not start now.

        If too many reads wait already, the request is refused.
        """
        if self._may_start and not self._waiting:
            self._start(request, start)
            return
        size = memory_of(request.properties) + memory_of(request.body)
        most = _MAX_WAITING_READS
        if len(self._waiting) >= most.number or self._waiting_bytes + size > most.size:
            text = (
                f"Too many requests for messages are waiting: {most.number} requests or {most.size} bytes may wait on "
                "a connection. Read the replies before you send more."
            )
            self._limit_exceeded(LimitExceededError("waiting-requests", text))
            request.answer(NodeReply.refused(Refusal(Condition.SERVER_BUSY, text)))
            return
        self._waiting.append(_WaitingRead(start, request, size))
        self._waiting_bytes_changed(size)

    def unread_bytes_changed(self, size: int) -> None:
        """Record that unread replies now have `size` bytes. Below the limit, the next waiting read can start."""
        self._unread_bytes = size
        self._start_soon()

    def clear(self) -> None:
        """Drop all waiting reads: the connection is gone."""
        self._waiting.clear()
        self._links_without_credit.clear()

    @property
    def _may_start(self) -> bool:
        return self._running < _MAX_RUNNING_READS and self._unread_bytes < _MAX_UNREAD_FOR_READS

    def _start(self, request: NodeRequest, start: Callable[[NodeRequest], None]) -> None:
        self._running += 1

        def answer(reply: NodeReply) -> None:
            self._running -= 1
            request.answer(reply)
            self._start_soon()

        start(replace(request, answer=answer))

    def _start_soon(self) -> None:
        """Start the next waiting read in the next turn of the event loop, if one may start.

        If the engine need not read the disk, the reply is made before `_start` returns. But the reply is written to
        the socket only at the end of the turn, so the next read waits for the next turn.
        """
        if self._waiting and self._may_start and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._start_next)

    def _start_next(self) -> None:
        self._is_scheduled = False
        if not self._waiting or not self._may_start:
            return
        waiting = self._waiting.popleft()
        self._waiting_bytes_changed(-waiting.size)
        self._start(waiting.request, waiting.start)
        self._start_soon()
        if not self._waiting:
            links, self._links_without_credit = self._links_without_credit, set()
            for link in links:
                link.grant()
            self._output.flush_soon()

    def _waiting_bytes_changed(self, difference: int) -> None:
        self._waiting_bytes += difference
        self._account.hold("requests that wait", self._waiting_bytes)
