"""One AMQP connection to the namespace: passes the events of the protocol core to links and nodes.

The connection owns the core, the timers, and the parts that its links share (`LinkContext`). The engine decides what
happens to messages.

Until a token or key is accepted, the small limits of `_UNAUTHENTICATED_LIMITS` apply. When the last token that covers a
link expires, or the key that signed the token is rotated, the link is detached. The connection stays open, so that the
peer can put another token.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from typing import assert_never

from twinbus.amqp import (
    KIB,
    MIB,
    Connection,
    ConnectionClosed,
    ConnectionEvent,
    Delivered,
    Disposed,
    Error,
    LimitExceededError,
    Limits,
    LinkAccepted,
    LinkAttached,
    LinkDetached,
    LinkFlowed,
    Opened,
    SaslReceived,
    SaslVerifier,
    SessionBegun,
    SessionEnded,
)
from twinbus.namespace.engine.descriptions import Claim
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.front.addresses import NodeKind
from twinbus.namespace.front.backpressure import ConnectionInput, ConnectionOutput
from twinbus.namespace.front.byte_stream import ByteStream
from twinbus.namespace.front.cbs import GrantedClaims, put_token
from twinbus.namespace.front.context import AttachedLinks, LinkContext, NamespaceContext
from twinbus.namespace.front.fault_effects import FaultEffects
from twinbus.namespace.front.incoming_link import IncomingLink
from twinbus.namespace.front.link_attach import attach_link
from twinbus.namespace.front.management_requests import ManagementNode
from twinbus.namespace.front.request_response import NodeReplies, NodeRequest, NodeRequestLink
from twinbus.namespace.front.transaction_coordinator import CoordinatorLink, Transactions
from twinbus.namespace.front.unsettled import LockedDeliveries
from twinbus.namespace.own_names import HostNames, OwnNames
from twinbus.namespace.resources import ConnectionAccount
from twinbus.values import Condition, Symbol

_log = logging.getLogger(__name__)

# The Python SDK's sender grants itself new credit, so credit cannot be enforced against a sender.
_LIMITS = Limits(enforce_credit=False, max_message_size=MIB, partial_bytes=16 * MIB)
# To put a token of up to 32 KB, a client needs one session and two links. Some clients open a session for each link.
_UNAUTHENTICATED_LIMITS = replace(
    _LIMITS,
    max_frame_size=64 * KIB,
    performative_bytes=4 * KIB,
    received_bytes=128 * KIB,
    max_sessions=8,
    max_links=16,
    attach_bytes=64 * KIB,
    max_unsettled=128,
    partial_bytes=64 * KIB,
)
# The memory that one accepted token takes, in bytes.
_GRANT_BYTES = 512
_MAX_TIMER_SECONDS = 86_400
_EXPIRED = "The token has expired; put a new one on $cbs."
_ROTATED = "The key of the token was rotated, or lost the claim; put a token of another key on $cbs."
# A pair learns from this property that the namespace hides pings from receivers (G3).
_PROPERTIES = {Symbol("product"): "Twinbus"}


class AmqpConnection:
    """Speaks AMQP on one byte stream."""

    def __init__(
        self,
        namespace: NamespaceContext,
        stream: ByteStream,
        account: ConnectionAccount,
        *,
        peer_is_loopback: bool,
        arrived_at: str | None = None,
        core: Connection | None = None,
        names: HostNames | None = None,
    ) -> None:
        """`arrived_at` is the address of this end of the connection.

        `core` is one that has received the peer's open, for `continue_with`. `names` are those that the open may have,
        if they are not those of the namespace.
        """
        self._namespace = namespace
        self._runtime = namespace.runtime
        self._stream = stream
        self._account = account
        self._arrived_at = arrived_at
        self._loop = asyncio.get_running_loop()
        seconds = namespace.resources.limits.authentication_seconds
        self._core = core or server_core(namespace.name, seconds, self._check_sasl)
        self._names: HostNames = names or namespace.names
        self._claims = GrantedClaims(
            namespace.verifier,
            self._runtime.namespace,
            peer_is_loopback=peer_is_loopback,
            arrived_at=arrived_at,
            jwt_verifier=namespace.jwt_verifier,
        )
        self._faults = FaultEffects(namespace.faults)
        exceeded = namespace.limit_exceeded
        memory = namespace.resources.limits.connection_memory
        self._output = ConnectionOutput(self._core, stream, account, exceeded, memory)
        self._unsettled = LockedDeliveries(self._output, account)
        self._links = AttachedLinks(self._output, self._unsettled)
        self._transactions = Transactions(self._runtime, account, self._allow, exceeded)
        self._replies = NodeReplies(account, self._output, self._links.detach, exceeded)
        self._context = LinkContext(
            runtime=self._runtime,
            account=account,
            claims=self._claims,
            faults=self._faults,
            links=self._links,
            output=self._output,
            input=ConnectionInput(stream, account),
            unsettled=self._unsettled,
            transactions=self._transactions,
            replies=self._replies,
        )
        self._management = ManagementNode(self._context)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._token_timer: asyncio.TimerHandle | None = None

    # --- the stream ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        for event in self._core.receive(data, self._loop.time()):
            self._handle(event)
        if self._output.has_stalled:
            self._output.resume_stalled()
        self._output.flush()
        self._set_timer()

    def continue_with(self, events: list[ConnectionEvent], plain: bytes | None) -> None:
        """Handle the events of a core that has received the peer's open. `plain` is the response of SASL PLAIN."""
        if plain is not None and not self._check_sasl("PLAIN", plain):
            self._core.close(Error(Condition.UNAUTHORIZED_ACCESS.value, "the key of SASL PLAIN is not known here"))
        for event in events:
            self._handle(event)
        self._output.flush()
        self._set_timer()

    def eof_received(self) -> bool:
        """Return False, which makes the event loop close the transport. The peer sends no more bytes."""
        return False

    def connection_lost(self) -> None:
        """Release all objects of the connection. The garbage collector seldom runs, so nothing may be left to it."""
        for timer in (self._timer, self._token_timer):
            if timer is not None:
                timer.cancel()
        self._faults.clear()
        self._replies.reads.clear()
        self._links.clear()
        self._transactions.clear()
        self._core.drop()
        self._unsettled.clear()
        self._output.clear()

    def evict(self, exceeded: LimitExceededError) -> None:
        """Close the connection, because it makes the process hold too much memory."""
        for event in self._core.fail(exceeded):
            self._handle(event)
        self._core.exceeded.clear()  # the caller has counted this refusal
        self._output.flush()

    def shut_down(self) -> None:
        """Send a close frame, because the namespace stops. The connection ends when the peer sends its own close."""
        self._core.close(Error(Condition.CONNECTION_FORCED.value, "The namespace is shutting down."))
        self._output.flush()

    def faults_changed(self) -> None:
        """Continue the operations that a `black-hole` fault held back, if that fault has ended."""
        self._faults.faults_changed()

    def keys_changed(self, entity: str | None) -> None:
        """Detach the links that were attached with a key that is no longer valid (X4).

        `entity` is the entity whose authorization rules may have changed, or None for the rules of the namespace.
        """
        if entity is None or self._claims.uses_rules_of(entity):
            self._detach_uncovered(_ROTATED)

    def _set_timer(self) -> None:
        at = self._core.next_timer()
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        for event in self._core.handle_timer(self._loop.time()):
            self._handle(event)
        self._output.flush()
        self._set_timer()

    # --- events of the core --------------------------------------------------------------------------------------

    def _handle(self, event: ConnectionEvent) -> None:
        match event:
            case Delivered():
                attached = self._links.get(event.link)
                if isinstance(attached, IncomingLink | NodeRequestLink | CoordinatorLink):
                    attached.delivered(event)
            case Disposed():
                self._unsettled.disposed(event)
            case LinkFlowed():
                if (attached := self._links.get(event.link)) is not None:
                    attached.flowed()
            case LinkAttached():
                attach_link(self._context, event.link, self._handle_request)
            case LinkDetached():
                self._links.forget([event.link])
            case SessionEnded():
                self._links.forget(event.links)
                self._unsettled.forget_session(event.session)
                self._output.forget_session(event.session)
            case ConnectionClosed():
                if event.error is not None:
                    _log.info("connection closed: %s %s", event.error.condition, event.error.description)
                self._links.clear()
            case Opened():
                self._check_host_name(event.remote.hostname)
            case SaslReceived() | SessionBegun() | LinkAccepted():
                pass
            case _:
                assert_never(event)

    def _handle_request(self, request: NodeRequest) -> None:
        if request.address.node is NodeKind.CBS:
            self._put_token(request)
        else:
            self._management.handle(request)

    # --- keys and tokens -----------------------------------------------------------------------------------------

    def _check_host_name(self, host_name: str | None) -> None:
        """Refuse all tokens of a peer that opened the connection for a name that is not this namespace's (X3).

        The peer gets the reason in the reply to its put-token request. Official clients raise that reply as an
        authentication error without a retry. After a close frame, they would connect again.
        """
        names = self._names
        if not host_name and isinstance(names, OwnNames):
            return  # the port has only one namespace
        if host_name and names.is_own(host_name, self._arrived_at):
            return
        text = names.refusal(host_name or "", self._arrived_at)
        if self._claims.forbid(text):
            # The peer gave its key with SASL, so it puts no token.
            self._core.close(Error(Condition.UNAUTHORIZED_ACCESS.value, text))

    def _check_sasl(self, mechanism: str, response: bytes) -> bool:
        """Return whether SASL succeeds. Mechanisms other than PLAIN grant no claim: the peer must then put tokens."""
        if mechanism != "PLAIN":
            return True
        is_known = self._claims.put_key(response)
        if is_known:
            self._authenticated()
        return is_known

    def _put_token(self, request: NodeRequest) -> None:
        reply = put_token(request, self._claims, self._runtime.now())
        if reply.status == HTTPStatus.ACCEPTED:
            self._authenticated()
            self._account.hold("tokens", len(self._claims) * _GRANT_BYTES)
        request.answer(reply)
        # This call replaces the timer. If the old timer was set for a token that has just expired, that timer does not
        # fire any more, so this call also detaches the links of that token.
        self._detach_uncovered(_EXPIRED)

    def _authenticated(self) -> None:
        """Raise the limits: a token or key was accepted."""
        if not self._core.is_authenticated:  # the account may be: before a WebSocket, by an HTTP request
            self._core.authenticate()
            self._account.authenticate()
            self._stream.authenticated()

    def _allow(self, claim: Claim, path: str) -> bool:
        return self._claims.allow(claim, path, self._runtime.now())

    def _detach_uncovered(self, reason: str) -> None:
        """Detach the links that no token covers any more, and set the timer for the next token that expires."""
        now = self._runtime.now()
        for link, attached in list(self._links.items()):
            required = attached.required_claim
            if required is not None and not self._claims.allow(*required, now):
                self._links.detach(link, Refusal(Condition.UNAUTHORIZED_ACCESS, reason))
        if self._token_timer is not None:
            self._token_timer.cancel()
        at = self._claims.next_expiry(now)
        if at is not None:
            seconds = min((at - now) / 1000 + 0.001, _MAX_TIMER_SECONDS)
            self._token_timer = self._loop.call_later(seconds, self._detach_uncovered, _EXPIRED)


def server_core(container_id: str, authentication_seconds: float, verifier: SaslVerifier) -> Connection:
    """Return the protocol core for a new connection."""
    return Connection.server(
        container_id,
        limits=_LIMITS,
        limits_before=_unauthenticated_limits(authentication_seconds),
        bare_allowed=True,
        verifier=verifier,
        properties=_PROPERTIES,
    )


@cache
def _unauthenticated_limits(authentication_seconds: float) -> Limits:
    return replace(_UNAUTHENTICATED_LIMITS, authentication_seconds=authentication_seconds)
