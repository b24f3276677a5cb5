"""One AMQP connection to the namespace: events of the protocol core in, links and requests out to their rooms.

Holds what links of one connection share: claims, unsettled deliveries, outgoing bytes, timers. Decides nothing
about messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from typing import assert_never

from twinbus.amqp import (
    RECEIVER,
    SENDER,
    Accepted,
    Connection,
    ConnectionClosed,
    ConnectionEvent,
    Delivered,
    DeliveryState,
    Disposed,
    Error,
    LimitExceededError,
    Limits,
    Link,
    LinkAccepted,
    LinkAttached,
    LinkDetached,
    LinkFlowed,
    Opened,
    Rejected,
    Released,
    SaslReceived,
    Session,
    SessionBegun,
    SessionEnded,
    consecutive_runs,
    memory_of,
    read_transactional,
)
from twinbus.namespace.engine import limits
from twinbus.namespace.engine.effects import MESSAGE_LOCK_LOST, Refusal, session_lock_lost
from twinbus.namespace.engine.registry import Entity
from twinbus.namespace.engine.topic import Topic
from twinbus.namespace.faults import Fault, FaultPoint
from twinbus.namespace.front import link_attach, refusals
from twinbus.namespace.front.addresses import LinkAddress, NodeKind
from twinbus.namespace.front.byte_stream import ByteStream
from twinbus.namespace.front.cbs import GrantedClaims, put_token
from twinbus.namespace.front.context import NamespaceContext
from twinbus.namespace.front.fault_effects import BlackHoles, FaultableOperation, carry_out
from twinbus.namespace.front.incoming_link import IncomingLink
from twinbus.namespace.front.management_operations import reads_messages, translate
from twinbus.namespace.front.outgoing_link import OutgoingLink, outcome_of
from twinbus.namespace.front.request_response import (
    NodeReply,
    NodeReplyLink,
    NodeReplyLinks,
    NodeRequest,
    NodeRequestLink,
)
from twinbus.namespace.front.transactions import CoordinatorLink, Transactions
from twinbus.namespace.resources import ConnectionAccount
from twinbus.values import Condition, Symbol

_log = logging.getLogger(__name__)

AttachedLink = IncomingLink | OutgoingLink | NodeRequestLink | NodeReplyLink | CoordinatorLink
_ACCEPTED = Accepted()
_RELEASED = Released()
# Each time a session has so many more unsettled deliveries, those whose lock is gone are let go.
_MANY_UNSETTLED = 4096
# The Python SDK's sender grants itself new credit, so credit cannot be held against a sender.
_LIMITS = Limits(enforce_credit=False, max_message_size=limits.MIB, partial_bytes=16 * limits.MIB)
# A client needs one session and two links to put a token of up to 32 KB. Some put each link into a session of its own.
_LIMITS_BEFORE = replace(
    _LIMITS,
    max_frame_size=64 * limits.KIB,
    performative_bytes=4 * limits.KIB,
    received_bytes=128 * limits.KIB,
    max_sessions=8,
    max_links=16,
    attach_bytes=64 * limits.KIB,
    max_unsettled=128,
    partial_bytes=64 * limits.KIB,
)
# Replies that a peer asked for and does not take, of one connection: their number and bytes.
_MOST_UNREAD = (10_000, 16 * limits.MIB)
_MOST_UNREAD_BEFORE = (128, 64 * limits.KIB)
# Bytes that wait for the peer's session windows from which no more are added.
_MOST_PENDING_BYTES = 4 * limits.MIB
# Bytes that the engine may be deciding to deliver on all links together. At most this share of what a connection may
# hold: each link may exceed its room by one message.
_MOST_DECIDING_BYTES, _DECIDING_SHARE = 8 * limits.MIB, 8
# Bytes of messages that wait to be stored from which no more of this peer is read.
_MOST_INCOMING_BYTES = 4 * limits.MIB
# Requests whose replies may have a megabyte each ("reads"), under way at a time.
_MOST_READS = 4
# Bytes of unread replies from which no further read begins. Far enough below _MOST_UNREAD for the reads under way.
_MOST_UNREAD_FOR_READS = 4 * limits.MIB
# Reads of one connection that wait: their number and the memory of their requests. A read beyond that is refused.
_MOST_WAITING_READS = (1000, 4 * limits.MIB)
# Memory of a delivery that waits to be settled, here and in the core, and of a token that was accepted.
_UNSETTLED_BYTES = 512
_GRANT_BYTES = 512
# The account is told of changes of at least so much: less is not worth a call for each message.
_WORTH_TELLING = 4 * limits.KIB
# A pair knows by it that pings are hidden here (G3).
_PROPERTIES = {Symbol("product"): "Twinbus"}


class AmqpConnection:
    """The speaker of AMQP on one channel."""

    def __init__(
        self,
        site: NamespaceContext,
        channel: ByteStream,
        account: ConnectionAccount,
        *,
        peer_is_loopback: bool,
        arrived_at: str | None = None,
    ) -> None:
        """`arrived_at` is the address of this end of the connection."""
        self.site = site
        self.runtime = site.runtime
        self.channel = channel
        self.account = account
        self.claims = GrantedClaims(
            site.verifier, site.runtime.namespace, peer_is_loopback=peer_is_loopback, arrived_at=arrived_at
        )
        self._arrived_at = arrived_at
        self._core = Connection.server(
            site.name,
            limits=_LIMITS,
            limits_before=_limits_before(site.resources.limits.authentication_seconds),
            bare_allowed=True,
            verifier=self._may_open,
            properties=_PROPERTIES,
        )
        self._loop = asyncio.get_running_loop()
        self._links: dict[Link, AttachedLink] = {}
        self._reply_links = NodeReplyLinks()
        self._unsettled: defaultdict[Session, dict[int, tuple[OutgoingLink, bytes]]] = defaultdict(dict)
        self._look_again_at: dict[Session, int] = {}
        self._let_go: set[Session] = set()
        self._accepted: defaultdict[Session, list[int]] = defaultdict(list)
        self._stalled: dict[OutgoingLink | NodeReplyLink, None] = {}  # in the order in which they stalled
        self._is_resume_scheduled = False
        self._waits_for_room = False
        self._is_paused = False
        self._deciding_bytes = 0  # room of the grants that the engine is deciding about
        self._unflushed_bytes = 0  # of messages since the last flush
        self._most_deciding = min(_MOST_DECIDING_BYTES, site.resources.limits.connection_memory // _DECIDING_SHARE)
        self._flushing = False
        self._unread = [0, 0]  # replies that wait for the peer, and their bytes
        self._incoming_bytes = 0  # of messages that wait to be stored
        self._unsettled_count = 0
        self._told = 0  # what the account knows of what the core holds
        self._told_unsettled = 0
        self._reads = 0
        self._waiting_reads: deque[tuple[NodeRequest, int]] = deque()  # with the memory of each request
        self._waiting_read_bytes = 0
        self._is_read_scheduled = False
        self._links_without_credit: set[NodeRequestLink] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._token_timer: asyncio.TimerHandle | None = None
        self._black_holes = BlackHoles(site.faults)
        self.transactions = Transactions(site.runtime, account, site.refuse)

    # --- the channel -------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        for event in self._core.receive(data, self._loop.time()):
            self._handle(event)
        if self._stalled:
            self._resume()
        self._flush()
        self._arm()

    def eof_received(self) -> bool:
        """The peer will send no more: the transport closes."""
        return False

    def connection_lost(self) -> None:
        for timer in (self._timer, self._token_timer):
            if timer is not None:
                timer.cancel()
        self._black_holes.forget()
        self._waiting_reads.clear()
        self._links_without_credit.clear()
        self._forget(list(self._links))
        self.transactions.forget()
        # Nothing of a connection may wait for the garbage collector, which seldom runs here.
        self._core.drop()
        self._unsettled.clear()
        self._accepted.clear()
        self._stalled.clear()

    def evict(self, exceeded: LimitExceededError) -> None:
        """End the connection for what it makes the process hold."""
        for event in self._core.fail(exceeded):
            self._handle(event)
        self._core.exceeded.clear()  # counted already
        self._flush()

    def shut_down(self) -> None:
        """Tell the peer that the namespace stops. Its own close ends the connection."""
        self._core.close(Error(Condition.CONNECTION_FORCED.value, "The namespace is shutting down."))
        self._flush()

    def flush_soon(self) -> None:
        """Send what is there at the end of this turn of the loop, all in one write."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._unflushed_bytes >= self._most_deciding:
            self._resume_soon()
        self._unflushed_bytes = 0
        for session, ids in self._accepted.items():
            for first, last in consecutive_runs(ids):
                session.dispose(RECEIVER, first, last, settled=True, state=_ACCEPTED)
        self._accepted.clear()
        if parts := self._core.data_to_send():
            self.channel.write(parts)
        if self._core.exceeded:
            for exceeded in self._core.exceeded:
                self.site.refuse(exceeded)
            self._core.exceeded.clear()
        if self._core.is_closed:
            if self._core.has_failed:
                self.channel.refuse()
            else:
                self.channel.close()
        else:
            self._tell_account()
            if self.channel.is_full and not self._is_paused and self.channel.unsent_bytes > self._most_deciding:
                self._pause_links()

    def _tell_account(self) -> None:
        """Charge what the core and this connection hold, when that has changed enough."""
        held = self._core.held_bytes
        if held != self._told and (held < _WORTH_TELLING or abs(held - self._told) >= _WORTH_TELLING or not held):
            self._told = held
            self.account.hold("unfinished frames, deliveries and links", held)
        if abs(self._unsettled_count - self._told_unsettled) * _UNSETTLED_BYTES >= _WORTH_TELLING:
            self._told_unsettled = self._unsettled_count
            self.account.hold("unsettled deliveries", self._unsettled_count * _UNSETTLED_BYTES)

    def _arm(self) -> None:
        at = self._core.next_timer()
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        for event in self._core.handle_timer(self._loop.time()):
            self._handle(event)
        self._flush()
        self._arm()

    # --- events of the core ------------------------------------------------------------------------------------

    def _handle(self, event: ConnectionEvent) -> None:
        match event:
            case Delivered():
                link = self._links.get(event.link)
                if isinstance(link, IncomingLink | NodeRequestLink | CoordinatorLink):
                    link.delivered(event)
            case Disposed():
                self._settle(event)
            case LinkFlowed():
                if (link := self._links.get(event.link)) is not None:
                    link.flowed()
            case LinkAttached():
                link_attach.attach(self, event.link)
            case LinkDetached():
                self._forget([event.link])
            case SessionEnded():
                self._forget(event.links)
                self._unsettled_count -= len(self._unsettled.pop(event.session, ()))
                self._accepted.pop(event.session, None)
                self._look_again_at.pop(event.session, None)
                self._let_go.discard(event.session)
            case ConnectionClosed():
                if event.error is not None:
                    _log.info("connection closed: %s %s", event.error.condition, event.error.description)
                self._forget(list(self._links))
            case Opened():
                self._check_name(event.remote.hostname)
            case SaslReceived() | SessionBegun() | LinkAccepted():
                pass
            case _:
                assert_never(event)

    def _check_name(self, given: str | None) -> None:
        """Grant nothing to a peer whose open is for a name that is not this namespace's (X3).

        The peer learns why when it puts its token: official clients report that at once as an authentication error,
        while they would try again after a close.
        """
        if not given or self.site.names.is_own(given, self._arrived_at):
            return
        text = self.site.names.refusal(given, self._arrived_at)
        if self.claims.forbid(text):
            # Its key came with SASL, so it will put no token.
            self._core.close(Error(Condition.UNAUTHORIZED_ACCESS.value, text))

    def _settle(self, event: Disposed) -> None:
        """Settlements by the receiving peer, link by link in runs."""
        if event.role != RECEIVER:
            return
        if not event.settled and not event.delivery_ids and event.session in self._let_go:
            # The peer's words crossed ours: it waits for an answer.
            self.dispose_sent(event.session, event.first, event.last, Rejected(refusals.amqp_error(MESSAGE_LOCK_LOST)))
            return
        unsettled = self._unsettled.get(event.session)
        if not unsettled:
            return
        transactional = read_transactional(event.state)
        state = event.state if transactional is None else transactional.outcome
        outcome = outcome_of(state, settled=event.settled)
        if outcome is None:
            return
        by_link: dict[OutgoingLink, tuple[list[int], list[bytes]]] = {}
        keeps = transactional is not None and not event.settled
        for delivery_id in event.delivery_ids:
            held = unsettled.get(delivery_id) if keeps else unsettled.pop(delivery_id, None)
            if held is not None:
                self._unsettled_count -= not keeps
                ids, tokens = by_link.setdefault(held[0], ([], []))
                ids.append(delivery_id)
                tokens.append(held[1])
        for link, (ids, tokens) in by_link.items():
            if transactional is None:
                link.settled(event, outcome, ids, tuple(tokens))
            else:
                link.settled_in(transactional.transaction, event, outcome, dict(zip(ids, tokens, strict=True)))

    def _forget(self, links: list[Link]) -> None:
        known = {link: attached for link in links if (attached := self._links.pop(link, None)) is not None}
        outgoing: defaultdict[Session, set[OutgoingLink]] = defaultdict(set)
        for link, attached in known.items():
            if isinstance(attached, OutgoingLink):
                outgoing[link.session].add(attached)
            elif isinstance(attached, NodeReplyLink):
                self._reply_links.remove(link, attached)
        for session, gone in outgoing.items():
            self._forget_unsettled(session, gone)
        for attached in known.values():
            attached.detached()

    def _forget_unsettled(self, session: Session, links: set[OutgoingLink]) -> None:
        """Deliveries of links that are gone are settled through `$management`, if at all."""
        unsettled = self._unsettled.get(session)
        if unsettled:
            kept = self._unsettled[session] = {key: held for key, held in unsettled.items() if held[0] not in links}
            self._unsettled_count -= len(unsettled) - len(kept)

    # --- for the links -----------------------------------------------------------------------------------------

    def attached(self, link: Link, attached: AttachedLink) -> None:
        """The link is in use from now on."""
        self._links[link] = attached
        if isinstance(attached, NodeReplyLink):
            self._reply_links.add(link, attached)

    def accept(self, session: Session, delivery_id: int) -> None:
        """Accept a received delivery; neighbours leave in one frame."""
        self._accepted[session].append(delivery_id)
        self.flush_soon()

    def dispose_received(self, session: Session, delivery_id: int, state: DeliveryState) -> None:
        session.dispose(RECEIVER, delivery_id, settled=True, state=state)
        self.flush_soon()

    def dispose_sent(
        self, session: Session, first: int, last: int, state: DeliveryState | None, *, settled: bool = True
    ) -> None:
        session.dispose(SENDER, first, last, settled=settled, state=state)
        self.flush_soon()

    def settled(self, session: Session, ids: list[int], disposition: Disposed) -> None:
        """A transaction has settled these deliveries."""
        for delivery_id in ids:
            if self._unsettled.get(session, {}).pop(delivery_id, None) is not None:
                self._unsettled_count -= 1
            if not disposition.settled:
                self.dispose_sent(session, delivery_id, delivery_id, disposition.state)

    def remember(self, session: Session, deliveries: dict[int, tuple[OutgoingLink, bytes]]) -> None:
        """Deliveries left and wait to be settled."""
        unsettled = self._unsettled[session]
        unsettled.update(deliveries)
        self._unsettled_count += len(deliveries)
        if len(unsettled) >= self._look_again_at.get(session, _MANY_UNSETTLED):
            self._let_go_of_lapsed(session, unsettled)

    def _let_go_of_lapsed(self, session: Session, unsettled: dict[int, tuple[OutgoingLink, bytes]]) -> None:
        """Settle, from this side, deliveries whose lock ran out or that were settled otherwise."""
        lapsed = [delivery_id for delivery_id, (link, token) in unsettled.items() if not link.is_locked(token)]
        for delivery_id in lapsed:
            del unsettled[delivery_id]
        self._unsettled_count -= len(lapsed)
        for first, last in consecutive_runs(lapsed):
            self.dispose_sent(session, first, last, _RELEASED)
        if lapsed:
            self._let_go.add(session)
        self._look_again_at[session] = len(unsettled) + _MANY_UNSETTLED

    @property
    def link_count(self) -> int:
        return max(1, len(self._links))

    @property
    def is_full(self) -> bool:
        """Whether the peer has so much left to read that it should not be sent more."""
        return self.channel.is_full or self._core.pending_bytes > _MOST_PENDING_BYTES

    def unread_changed(self, replies: int, size: int) -> bool:
        """Replies that wait for the peer's credit became more or fewer; False if they are too many."""
        self._unread[0] += replies
        self._unread[1] += size
        self.account.hold("unread replies", self._unread[1])
        self._read_soon()
        most, most_bytes = _MOST_UNREAD if self.account.is_authenticated else _MOST_UNREAD_BEFORE
        return self._unread[0] <= most and self._unread[1] <= most_bytes

    def storing(self, size: int) -> None:
        """A message of this size waits to be stored."""
        self._incoming_bytes += size
        if self._incoming_bytes > _MOST_INCOMING_BYTES:
            self.channel.pause_reading("incoming")
            self.account.hold("messages that wait to be stored", self._incoming_bytes)

    def stored(self, size: int) -> None:
        """It waits no longer."""
        most = _MOST_INCOMING_BYTES
        was_too_much = self._incoming_bytes > most
        self._incoming_bytes -= size
        if was_too_much and self._incoming_bytes <= most:
            self.channel.resume_reading("incoming")
            self.account.hold("messages that wait to be stored", 0)

    def stall(self, link: OutgoingLink | NodeReplyLink) -> None:
        """The peer does not read as fast as it grants credit: this link goes on when it does."""
        self._stalled[link] = None
        self._resume_when_room()

    def _resume_when_room(self) -> None:
        if self.channel.is_full and not self._waits_for_room:
            self._waits_for_room = True
            self.channel.when_room(self._room_again)

    def _room_again(self) -> None:
        self._waits_for_room = False
        self._resume()

    def _resume_soon(self) -> None:
        if self._stalled and not self._is_resume_scheduled:
            self._is_resume_scheduled = True
            self._loop.call_soon(self._resume)

    def _pause_links(self) -> None:
        """Has all links wait, also those whose entities have no message yet."""
        self._is_paused = True
        self._resume_when_room()
        for attached in list(self._links.values()):
            if isinstance(attached, OutgoingLink):
                attached.pause()

    def _resume(self) -> None:
        self._is_resume_scheduled = False
        if self.has_room:
            self._is_paused = False
        for link in list(self._stalled):
            if not self.has_room:
                self._resume_when_room()
                return
            if link in self._stalled:
                del self._stalled[link]
                link.resume()

    @property
    def has_room(self) -> bool:
        """Whether the engine may decide about deliveries on one more link."""
        return not self.is_full and self._deciding_bytes + self._unflushed_bytes < self._most_deciding

    def deciding(self, entity: Entity, room: int) -> None:
        """The engine was granted so much room on a link of this entity. It counts until the engine has used it."""
        self._deciding_bytes += room
        self.runtime.after(entity, lambda: self._decided(room))

    def _decided(self, room: int) -> None:
        self._deciding_bytes -= room
        if self._stalled:
            # The flush comes first: what was delivered may fill the channel.
            self.flush_soon()
            self._resume_soon()

    def delivering(self, size: int) -> None:
        """Messages of so many bytes were handed to the core."""
        self._unflushed_bytes += size

    def detach(self, link: Link, refusal: Refusal) -> None:
        """End a link from this side."""
        self._forget([link])
        link.detach(closed=True, error=refusals.amqp_error(refusal))
        self.flush_soon()

    def accept_session(self, link: Link, session: str, locked_until: int) -> None:
        link_attach.accept_session(link, session, locked_until)
        self.flush_soon()

    def trigger(self, point: FaultPoint, entity: str, link: str) -> Fault | None:
        """The fault that hits this operation, if any."""
        return self.site.faults.trigger(point, entity, link) if self.site.faults.active else None

    def suffer(self, fault: Fault, operation: FaultableOperation) -> None:
        carry_out(fault, operation, self._black_holes)

    def hold(self, fault: Fault, go_on: Callable[[], None]) -> None:
        """Have `go_on` called when this black hole is over."""
        self._black_holes.hold(fault, go_on)

    def faults_changed(self) -> None:
        self._black_holes.let_go()

    # --- requests ----------------------------------------------------------------------------------------------

    def request(self, request: NodeRequest) -> None:
        """Carry out a request to `$cbs` or `$management`."""
        if request.address.node is NodeKind.CBS:
            reply = put_token(request, self.claims, self.runtime.now())
            if reply.status == HTTPStatus.ACCEPTED:
                self._authenticated()
                self.account.hold("tokens", len(self.claims) * _GRANT_BYTES)
            request.answer(reply)
            self._expire_tokens()
            return
        fault = self.trigger(FaultPoint.REQUEST, request.address.entity, request.link.name)
        if fault is not None:
            self._suffer_request(fault, request)
        elif not reads_messages(request):
            self._manage(request)
        elif self._may_read and not self._waiting_reads:
            self._read(request)
        else:
            self._read_later(request)

    @property
    def has_waiting_reads(self) -> bool:
        return bool(self._waiting_reads)

    def grant_later(self, link: NodeRequestLink) -> None:
        """Grant credit to this link when no read waits any more."""
        self._links_without_credit.add(link)

    @property
    def _may_read(self) -> bool:
        return self._reads < _MOST_READS and self._unread[1] < _MOST_UNREAD_FOR_READS

    def _read(self, request: NodeRequest) -> None:
        """Carry out a request whose reply may be large."""
        self._reads += 1

        def answer(reply: NodeReply) -> None:
            self._reads -= 1
            request.answer(reply)
            self._read_soon()

        self._manage(replace(request, answer=answer))

    def _read_later(self, request: NodeRequest) -> None:
        size = memory_of(request.properties) + memory_of(request.body)
        most, most_bytes = _MOST_WAITING_READS
        if len(self._waiting_reads) >= most or self._waiting_read_bytes + size > most_bytes:
            text = (
                f"Too many requests for messages are waiting: {most} requests or {most_bytes} bytes may wait on a "
                "connection. Read the replies before you send more."
            )
            self.site.refuse(LimitExceededError("waiting-requests", text))
            request.answer(NodeReply.refused(Refusal(Condition.SERVER_BUSY, text)))
            return
        self._waiting_reads.append((request, size))
        self._waiting_read_bytes += size
        self.account.hold("requests that wait", self._waiting_read_bytes)

    def _read_soon(self) -> None:
        """Begin the next waiting read in the next turn of the event loop, if one may begin.

        Not at once: a reply that needs no disk comes before `_read` returns, and is flushed at the end of the turn.
        """
        if self._waiting_reads and self._may_read and not self._is_read_scheduled:
            self._is_read_scheduled = True
            self._loop.call_soon(self._read_next)

    def _read_next(self) -> None:
        self._is_read_scheduled = False
        if not self._waiting_reads or not self._may_read:
            return
        request, size = self._waiting_reads.popleft()
        self._waiting_read_bytes -= size
        self.account.hold("requests that wait", self._waiting_read_bytes)
        self._read(request)
        self._read_soon()
        if not self._waiting_reads:
            links, self._links_without_credit = self._links_without_credit, set()
            for link in links:
                link.grant()
            self.flush_soon()

    def _suffer_request(self, fault: Fault, request: NodeRequest) -> None:
        struck = FaultableOperation(
            go_on=lambda: self._manage(request),
            refuse=lambda refusal: request.answer(NodeReply.refused(refusal)),
            detach=lambda refusal: self.detach(request.link, refusal),
            unanswered=lambda call: self._manage(replace(request, answer=lambda _: call())),
        )
        self.suffer(fault, struck)

    def reply(self, session: Session, address: LinkAddress, reply_to: str | None, payload: bytes) -> None:
        """Send a reply on the link that was opened for it."""
        found = self._reply_links.find(session, address, reply_to)
        if found is None:
            return  # the asker has left
        link, attached = found
        if not attached.send(payload):
            most, most_bytes = _MOST_UNREAD if self.account.is_authenticated else _MOST_UNREAD_BEFORE
            until = "" if self.account.is_authenticated else " until a token was accepted"
            text = (
                f"Too many replies are waiting to be read: {most} replies or {most_bytes} bytes may wait on a "
                f"connection{until}. Grant credit to the reply link and read it."
            )
            exceeded = LimitExceededError("unread-replies", text)
            self.site.refuse(exceeded)
            self.detach(link, Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text))
        self.flush_soon()

    def _manage(self, request: NodeRequest) -> None:
        name = request.address.entity
        translated = translate(request)
        if isinstance(translated, Refusal):
            request.answer(NodeReply.refused(translated))
        elif not self.claims.allow(translated.claim, request.address.path, self.runtime.now()):
            request.answer(NodeReply.refused(refusals.unauthorized(translated.claim, name)))
        elif (entity := self.runtime.namespace.find(name)) is None:
            request.answer(NodeReply.refused(refusals.not_found(name)))
        elif translated.held is not None and not self._may_hold(entity, translated.held):
            request.answer(NodeReply.refused(session_lock_lost(translated.held)))
        else:
            respond = translated.respond

            def answered(result: object) -> None:
                request.answer(NodeReply.refused(result) if isinstance(result, Refusal) else respond(result))

            self.runtime.submit(entity, translated.event(answered))

    def _may_hold(self, entity: Entity, session: str) -> bool:
        """Whether a link of this connection has the session; where there are none, the entity says so itself."""
        if isinstance(entity, Topic) or not entity.description.requires_session:
            return True
        return any(
            isinstance(attached, OutgoingLink) and attached.entity is entity and attached.session == session
            for attached in self._links.values()
        )

    # --- keys and tokens ----------------------------------------------------------------------------------------

    def _may_open(self, mechanism: str, response: bytes) -> bool:
        """Other mechanisms than PLAIN open nothing yet: tokens do."""
        if mechanism != "PLAIN":
            return True
        is_known = self.claims.put_key(response)
        if is_known:
            self._authenticated()
        return is_known

    def _authenticated(self) -> None:
        """A token or key was accepted: the larger limits hold from now on."""
        if not self.account.is_authenticated:
            self._core.authenticate()
            self.account.authenticate()
            self.channel.authenticated()

    def _expire_tokens(self) -> None:
        """Whenever a token came, or the next one ends: one that has just ended must not be left to a new timer."""
        now = self.runtime.now()
        for link, attached in list(self._links.items()):
            claim = link_attach.claim_of(attached)
            if claim is not None and not self.claims.allow(*claim, now):
                expired = Refusal(Condition.UNAUTHORIZED_ACCESS, "The token has expired; put a new one on $cbs.")
                self.detach(link, expired)
        if self._token_timer is not None:
            self._token_timer.cancel()
        at = self.claims.next_expiry(now)
        if at is not None:
            self._token_timer = self._loop.call_later(min((at - now) / 1000 + 0.001, 86_400), self._expire_tokens)


@cache
def _limits_before(authentication_seconds: float) -> Limits:
    return replace(_LIMITS_BEFORE, authentication_seconds=authentication_seconds)
