"""An AMQP connection (amqp-core-transport §2.4) for client and server, without I/O.

The driver of a socket uses a `Connection` like this:

    events = connection.receive(data, now)        # bytes from the socket
    parts = connection.data_to_send()             # bytes for the socket, after every call
    at = connection.next_timer()                  # when to call `handle_timer`
    events = connection.handle_timer(now)

`now` is in seconds on a monotonic clock. Whatever bytes the peer sends, `receive` raises no exception: after a
violation of AMQP the connection sends the close frame that the standard demands and reports ConnectionClosed. A
violation inside a session ends only the session or the link.

The modules of the core: `negotiation` handles protocol headers and SASL, before the first frame. This module opens and
closes the connection, sets its timers, and finds the session of a frame by the frame's channel. `session` finds the
link of a frame and counts the session windows. `link` handles credit and messages. Every message needs the frames
transfer, disposition and flow: `fast_frames` reads these three. `described_types` reads all other frames, and also
these three in unusual encodings.
"""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

from twinbus.amqp.described_types import decode_described
from twinbus.amqp.errors import AmqpError, DecodeError
from twinbus.amqp.events import ConnectionClosed, ConnectionEvent, Opened, SessionBegun
from twinbus.amqp.fast_frames import (
    TRUNCATION_ERRORS,
    disposition_fields,
    flow_fields,
    read_disposition,
    read_flow,
    read_transfer,
    transfer_fields,
)
from twinbus.amqp.frames import (
    FRAME_HEADER,
    HEARTBEAT,
    MIN_MAX_FRAME_SIZE,
    frame_body,
    frame_size,
    performative_frame,
)
from twinbus.amqp.limits import MIB, SESSION_BYTES, LimitExceededError, Limits, memory_of
from twinbus.amqp.link import Link
from twinbus.amqp.negotiation import (
    MECHANISMS,
    ClientSasl,
    Negotiation,
    PeerRefusedError,
    SaslCredential,
    SaslVerifier,
    ServerSasl,
)
from twinbus.amqp.performatives import (
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Error,
    Flow,
    Open,
    Transfer,
)
from twinbus.amqp.session import Session, SessionState, SessionViolationError
from twinbus.values import Condition

_SERVER_LIMITS = Limits(enforce_credit=False)
_CLIENT_LIMITS = Limits()
_FLOW, _TRANSFER, _DISPOSITION = 0x13, 0x14, 0x15


class Connection:
    def __init__(
        self,
        negotiation: Negotiation,
        local: Open,
        limits: Limits,
        first_outgoing_id: int,
        limits_before: Limits | None = None,
    ) -> None:
        """Make a connection from its parts. Callers use the class methods `client` and `server` instead."""
        self.local = local
        self.limits = limits_before or limits
        self.remote: Open | None = None  # the peer's open
        self.remote_max_frame_size = MIN_MAX_FRAME_SIZE
        self.out: list[bytes] = []  # frames that wait until open was sent
        self.replenish_due: list[Session] = []  # sessions whose incoming window is renewed with the next output
        self.link_count = 0
        self.attach_bytes = 0
        self.partial_bytes = 0
        self.pending_bytes = 0  # of transfers that wait for the peer's session windows
        self.exceeded: list[LimitExceededError] = []  # limits that the peer exceeded; the application clears this list
        self.is_closed = False
        self.has_failed = False  # we closed the connection: the peer violated AMQP or a limit, or was too slow
        self._limits_after = limits
        self._open_bytes = 0
        self._received = 0  # counted only while `limits.received_bytes` is set
        self._negotiation = negotiation
        self._first_outgoing_id = first_outgoing_id
        self._timers = ConnectionTimers(local.idle_time_out, self.limits)
        self._open_sent = False
        self._closing = False
        self._buffer = bytearray()
        self._needed = 8
        self._events: list[ConnectionEvent] = []
        self._channels = ChannelTable(local.channel_max)

    @classmethod
    def client(
        cls,
        container_id: str,
        hostname: str | None,
        *,
        max_frame_size: int = MIB,
        channel_max: int = 4999,
        idle_timeout: float | None = None,
        sasl: SaslCredential | None = "ANONYMOUS",
        properties: dict[Any, Any] | None = None,
        limits: Limits = _CLIENT_LIMITS,
        first_outgoing_id: int = 0,
    ) -> Connection:
        """Return a client's connection. `sasl=None` skips SASL. `idle_timeout` is announced to the peer (§2.4.5)."""
        sasl_layer = None if sasl is None else ClientSasl(sasl, hostname)
        negotiation = Negotiation(sasl_layer, bare_allowed=False)
        local = Open(container_id, hostname, max_frame_size, channel_max, _ms(idle_timeout), properties=properties)
        connection = cls(negotiation, local, limits, first_outgoing_id)
        negotiation.start_client()
        connection._open_if_possible()
        return connection

    @classmethod
    def server(
        cls,
        container_id: str,
        *,
        max_frame_size: int = MIB,
        channel_max: int = 4999,
        idle_timeout: float | None = 240.0,
        mechanisms: tuple[str, ...] = MECHANISMS,
        verifier: SaslVerifier | None = None,
        bare_allowed: bool = False,
        properties: dict[Any, Any] | None = None,
        limits: Limits = _SERVER_LIMITS,
        limits_before: Limits | None = None,
        first_outgoing_id: int = 0,
    ) -> Connection:
        """Return a server's connection.

        `verifier(mechanism, response)` returns whether the server accepts the client's SASL response. Without a
        verifier, every response is accepted. `bare_allowed=True` accepts clients without SASL. `limits_before` apply
        until `authenticate` is called, `limits` afterwards.
        """
        negotiation = Negotiation(ServerSasl(mechanisms, verifier), bare_allowed=bare_allowed)
        local = Open(container_id, None, max_frame_size, channel_max, _ms(idle_timeout), properties=properties)
        return cls(negotiation, local, limits, first_outgoing_id, limits_before)

    # --- for the driver

    def receive(self, data: bytes, now: float) -> list[ConnectionEvent]:
        """Handle bytes from the transport and return the events. No bytes from the peer make this method raise."""
        if self.is_closed or not data:
            return []
        self._timers.heard(now)
        events = self._events = []
        if self.limits.received_bytes is not None:
            if self._received > self.limits.received_bytes:
                text = f"A connection sends at most {self.limits.received_bytes} bytes{self.until_authenticated}."
                self._fail(LimitExceededError("received-bytes", text))
                return events
            self._received += len(data)
        buf = bytes(data)
        if self._buffer:
            if len(self._buffer) + len(data) < self._needed:
                self._buffer += data
                return events
            buf = b"".join((self._buffer, data))
            self._buffer.clear()
        try:
            pos = self._consume(buf)
            if not self.is_closed:
                self._buffer += memoryview(buf)[pos:]
        except AmqpError as fault:
            self._fail(fault)
        except TRUNCATION_ERRORS:
            self._fail(DecodeError("a frame ends inside a value"))
        return events

    def data_to_send(self) -> list[bytes]:
        """Return the bytes to write, in order. The next call returns only newer bytes."""
        if self.replenish_due:
            for session in self.replenish_due:
                session.replenish()
            self.replenish_due.clear()
        first_parts = self._negotiation.output
        if not self._open_sent:
            self._negotiation.output = []
            return first_parts
        parts, self.out = self.out, []
        if first_parts:
            self._negotiation.output = []
            return first_parts + parts
        return parts

    def next_timer(self) -> float | None:
        """Return the time at which to call `handle_timer`, or None if no timer is set."""
        return None if self.is_closed else self._timers.next()

    def handle_timer(self, now: float) -> list[ConnectionEvent]:
        """Send a heartbeat if it is due; end the connection if the peer is silent or too slow (§2.4.5)."""
        events = self._events = []
        if self.is_closed:
            return events
        fault = self._timers.expired(now)
        if fault is not None:
            self._fail(fault)
        elif self._timers.heartbeat_due(now):
            self.out.append(HEARTBEAT)
        return events

    def close(self, error: Error | None = None) -> None:
        """Send close. ConnectionClosed is reported when the peer answers, or after `limits.closing_seconds`."""
        if self.is_closed or self._closing:
            return
        for session in self.sessions:
            session.release()
        if not self._negotiation.amqp_header_sent:
            self.is_closed = True
            return
        self._send_open()
        self.out.append(performative_frame(0, Close(error)))
        self._closing = True
        self._timers.closing()

    @property
    def links(self) -> list[Link]:
        return [link for session in self.sessions for link in session.links]

    @property
    def sessions(self) -> list[Session]:
        return self._channels.sessions

    @property
    def buffered_bytes(self) -> int:
        """Memory, in bytes, for data that the peer sent: incomplete frames, incomplete deliveries, and attaches."""
        return len(self._buffer) + self.partial_bytes + self.attach_bytes

    @property
    def held_bytes(self) -> int:
        """Memory, in bytes, that the core uses because of the peer.

        These are `buffered_bytes`, the peer's open, the sessions, and transfers that wait for the peer's session
        windows.
        """
        sessions = SESSION_BYTES * len(self._channels)
        return self.buffered_bytes + self._open_bytes + sessions + self.pending_bytes

    def authenticate(self) -> None:
        """The peer is authenticated: apply the larger limits from now on."""
        self.limits = self._limits_after
        self._timers.authenticated(self.limits)
        for session in self.sessions:
            session.limits = self.limits

    def drop(self) -> None:
        """The transport is gone: release all memory. Reports no events."""
        self.is_closed = True
        self._release()
        self._negotiation.drop()
        self._events = []
        self.out.clear()

    def begin(self) -> Session:
        """Begin a session. The caller need not wait for the peer's answer (SessionBegun) before it sends frames."""
        if self.is_closed or self._closing:
            raise AmqpError(Condition.ILLEGAL_STATE, "the connection is closed")
        session = self._new_session(0)
        session.write_begin()
        return session

    # --- for sessions and links

    def report(self, event: ConnectionEvent) -> None:
        self._events.append(event)

    def hold(self, size: int) -> None:
        """Add `size`, which may be negative, to the bytes of unfinished deliveries. Raises LimitExceededError."""
        most = self.limits.partial_bytes
        if size > 0 and self.partial_bytes + size > most:
            text = f"Unfinished deliveries of a connection hold at most {most} bytes{self.until_authenticated}. "
            raise LimitExceededError("unfinished-bytes", text + "Finish one delivery before the next.")
        self.partial_bytes += size

    def exceeded_by_links(self) -> LimitExceededError | None:
        """Return a LimitExceededError if the links of the connection exceed a limit, otherwise None."""
        limits = self.limits
        if self.link_count > limits.max_links:
            text = f"A connection has at most {limits.max_links} links{self.until_authenticated}. Detach some."
            return LimitExceededError("links", text)
        if self.attach_bytes + self._open_bytes > limits.attach_bytes:
            text = (
                f"The attaches of a connection take at most {limits.attach_bytes} bytes of memory"
                f"{self.until_authenticated}. Send fewer properties, or detach some links."
            )
            return LimitExceededError("attach-bytes", text)
        return None

    @property
    def is_authenticated(self) -> bool:
        return self.limits is self._limits_after

    @property
    def until_authenticated(self) -> str:
        """The words to add to an error about a limit before authentication; "" after authentication."""
        return "" if self.is_authenticated else " until a token was accepted"

    # --- frames

    def _consume(self, buf: bytes) -> int:
        pos = 0
        if not self._negotiation.is_done:
            pos, self._needed = self._negotiation.receive(buf, pos, self.report)
            self._open_if_possible()
            if not self._negotiation.is_done:
                return pos
        total = len(buf)
        max_frame_size = self.limits.max_frame_size or self.local.max_frame_size
        while total - pos >= 8:
            size, doff, kind, channel = FRAME_HEADER.unpack_from(buf, pos)
            if size > max_frame_size or size < 8 or doff != 2 or kind != 0:
                frame_size(buf, pos, self.local.max_frame_size)
                if size > max_frame_size:
                    text = f"A frame has at most {max_frame_size} bytes{self.until_authenticated}; this one has {size}."
                    raise LimitExceededError("frame-size", text)
            end: int = pos + size
            if end > total:
                self._needed = size
                return pos
            body = pos + 8 if doff == 2 and kind == 0 else frame_body(buf, pos, size, 0)[1]
            if body < end:
                self._on_frame(buf, body, end, channel)
                if self.is_closed:
                    return end
            pos = end
        self._needed = 8
        return pos

    def _on_frame(self, buf: bytes, pos: int, end: int, channel: int) -> None:
        session = self._channels.find(channel)
        if session is not None and session.state is SessionState.MAPPED and buf[pos] == 0 and buf[pos + 1] == 0x53:
            code = buf[pos + 2]
            try:  # The three frames that every message needs.
                if code == _TRANSFER:
                    session.on_transfer(read_transfer(buf, pos + 3, end), buf, end)
                    return
                if code == _DISPOSITION:
                    session.on_disposition(*read_disposition(buf, pos + 3, end))
                    return
                if code == _FLOW:
                    session.on_flow(read_flow(buf, pos + 3, end))
                    return
            except SessionViolationError as fault:
                session.fail(Error.of(fault))
                return
        most = self.limits.performative_bytes
        if most is not None and end - pos > most:
            text = (
                f"A frame without payload has at most {most} bytes{self.until_authenticated}; this one has {end - pos}."
            )
            raise LimitExceededError("performative-bytes", f"{text} Send fewer properties.")
        performative, payload = decode_described(buf, pos)
        if payload > end or (payload < end and not isinstance(performative, Transfer)):
            raise DecodeError("a performative does not end where its frame ends")
        self._on_performative(performative, channel, FrameSpan(buf, payload, end))

    def _on_performative(self, performative: Any, channel: int, span: FrameSpan) -> None:
        if self._closing and not isinstance(performative, (Open, Close)):
            return
        if self.remote is None and not isinstance(performative, (Open, Close)):
            raise AmqpError(Condition.ILLEGAL_STATE, f"{type(performative).__name__} before open")
        match performative:
            case Open():
                self._on_open(performative)
            case Begin():
                self._on_begin(performative, channel)
            case Close():
                self._on_close(performative)
            case Attach() | Flow() | Transfer() | Disposition() | Detach() | End():
                self._on_session_frame(performative, channel, span)
            case _:
                raise DecodeError("a frame with an unknown performative")

    def _on_session_frame(self, performative: SessionFrame, channel: int, span: FrameSpan) -> None:
        session = self._channels.find(channel)
        if session is None:
            # The Python SDK detaches the links of a session after it has ended the session.
            if self._channels.has_ended(channel) and not isinstance(performative, (Attach, Transfer)):
                return
            raise AmqpError(
                Condition.NOT_ALLOWED, f"{type(performative).__name__} on channel {channel}, which has no session"
            )
        if isinstance(performative, End):
            self._channels.remove(session, channel)
        elif session.state is not SessionState.MAPPED:
            return
        try:
            dispatch_session_frame(session, performative, span)
        except SessionViolationError as fault:
            session.fail(Error.of(fault))

    def _on_open(self, remote: Open) -> None:
        if self.remote is not None:
            raise AmqpError(Condition.ILLEGAL_STATE, "a second open")
        if remote.max_frame_size < MIN_MAX_FRAME_SIZE:
            raise AmqpError(Condition.INVALID_FIELD, f"max-frame-size {remote.max_frame_size} is below 512")
        self._timers.opened(remote.idle_time_out)
        self._open_bytes = memory_of(remote)
        if (exceeded := self.exceeded_by_links()) is not None:
            raise exceeded
        self.remote = remote
        self.remote_max_frame_size = remote.max_frame_size
        self._send_open()
        if not self._closing:
            self.report(Opened(remote))

    def _on_begin(self, begin: Begin, channel: int) -> None:
        answered = self._channels.check_begin(begin, channel)
        session = answered or self._new_session(channel)
        was_live = session.is_live
        session.on_begin(begin, channel)
        self._channels.bind(session, channel)
        if answered is None:
            session.write_begin()
        if was_live:
            self.report(SessionBegun(session))

    def _new_session(self, preferred: int) -> Session:
        if len(self._channels) >= self.limits.max_sessions:
            text = f"A connection has at most {self.limits.max_sessions} sessions{self.until_authenticated}. End some."
            raise LimitExceededError("sessions", text)
        channel = self._channels.free(preferred, self.remote.channel_max if self.remote else 0xFFFF)
        session = Session(self, channel, self._first_outgoing_id)
        self._channels.add(session)
        return session

    # --- opening and closing

    def _open_if_possible(self) -> None:
        """Send a client's open after its AMQP header. A server sends its open in answer to the client's open."""
        if self._negotiation.amqp_header_sent and self._negotiation.is_client:
            self._send_open()

    def _send_open(self) -> None:
        if not self._open_sent:
            self._open_sent = True
            self._negotiation.output.append(performative_frame(0, self.local))

    def _on_close(self, close: Close) -> None:
        self._release()
        if not self._closing:
            self._send_open()
            self.out.append(performative_frame(0, Close()))
        self.is_closed = True
        self.report(ConnectionClosed(close.error))

    def _release(self) -> None:
        for session in self.sessions:
            session.release()
        self._channels.clear()
        self.replenish_due.clear()
        self._buffer = bytearray()
        self._open_bytes = 0

    def fail(self, fault: AmqpError) -> list[ConnectionEvent]:
        """End the connection because the peer is at fault: send close with the error, without waiting for an answer."""
        events = self._events = []
        if not self.is_closed:
            self._fail(fault)
        return events

    def _fail(self, fault: AmqpError) -> None:
        error = Error.of(fault)
        # The stack frames in the traceback refer to `fault`. This reference cycle would stay in memory until the
        # garbage collector runs.
        fault.__traceback__ = None
        if isinstance(fault, LimitExceededError):
            self.exceeded.append(fault)
        self._release()
        if self._negotiation.amqp_header_sent and not self._closing and not isinstance(fault, PeerRefusedError):
            self._send_open()
            self.out.append(performative_frame(0, Close(error)))
        self.is_closed = self.has_failed = True
        self.report(ConnectionClosed(error))


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, int(seconds * 1000))


class ChannelTable:
    """Sessions by channel number (§2.5.1).

    A session has two channel numbers: each peer chooses its own. The begin that answers a begin names both.
    """

    def __init__(self, channel_max: int) -> None:
        self._channel_max = channel_max
        self._ours: dict[int, Session] = {}
        self._theirs: dict[int, Session] = {}
        self._ended = 0  # one bit for each channel of the peer whose session ended
        self.find = self._theirs.get  # by the peer's channel

    def __len__(self) -> int:
        return len(self._ours)

    @property
    def sessions(self) -> list[Session]:
        return list(self._ours.values())

    def free(self, preferred: int, highest: int) -> int:
        """Return a free channel, `preferred` if possible. Raises AmqpError if all up to `highest` are in use."""
        channel = preferred
        if channel in self._ours:
            channel = next(channel for channel in count() if channel not in self._ours)
        if channel > highest:
            raise AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, "the peer accepts no more sessions")
        return channel

    def add(self, session: Session) -> None:
        self._ours[session.channel] = session

    def check_begin(self, begin: Begin, channel: int) -> Session | None:
        """Return our session that this begin answers, or None if the peer begins a new session."""
        if channel > self._channel_max:  # §2.7.1
            raise AmqpError(Condition.FRAMING_ERROR, f"channel {channel} is above the channel-max")
        if channel in self._theirs:
            raise AmqpError(Condition.NOT_ALLOWED, f"channel {channel} has a session already")
        if begin.remote_channel is None:
            return None
        answered = self._ours.get(begin.remote_channel)
        if answered is None or answered.remote_channel is not None:
            text = f"begin answers channel {begin.remote_channel}, which waits for no answer"
            raise AmqpError(Condition.INVALID_FIELD, text)
        return answered

    def bind(self, session: Session, channel: int) -> None:
        self._theirs[channel] = session

    def remove(self, session: Session, channel: int) -> None:
        """Forget a session that both peers have ended."""
        del self._theirs[channel]
        del self._ours[session.channel]
        self._ended |= 1 << channel

    def has_ended(self, channel: int) -> bool:
        """Return whether a session used this channel of the peer before, and no session uses the channel now."""
        return bool(self._ended >> channel & 1) and channel not in self._theirs

    def clear(self) -> None:
        """Forget all sessions: the connection has ended."""
        self._ours.clear()
        self._theirs.clear()


SessionFrame = Attach | Flow | Transfer | Disposition | Detach | End


class FrameSpan(NamedTuple):
    """The payload of a frame: `buf[payload:end]`."""

    buf: bytes
    payload: int
    end: int


def dispatch_session_frame(session: Session, performative: SessionFrame, span: FrameSpan) -> None:
    """Call the session's method that handles this kind of frame."""
    match performative:
        case Attach():
            session.on_attach(performative)
        case Detach():
            session.on_detach(performative)
        case End():
            session.on_end(performative)
        case Transfer():
            session.on_transfer(transfer_fields(performative, span.payload), span.buf, span.end)
        case Disposition():
            session.on_disposition(*disposition_fields(performative))
        case Flow():
            session.on_flow(flow_fields(performative))


class ConnectionTimers:
    """Times of a connection (§2.4.5): heartbeats to the peer, silence of the peer, and time limits for slow peers."""

    def __init__(self, local_idle_ms: int | None, limits: Limits) -> None:
        # §2.4.5: we close the connection after twice the idle-time-out that we announce.
        self._silence_limit = None if local_idle_ms is None else 2 * local_idle_ms / 1000
        self._limits = limits
        self._now = 0.0
        self._handshake_until: float | None = None
        self._authentication_until: float | None = None
        self._opened = False
        self._closing_until: float | None = None
        self._heard: float | None = None
        self._heartbeat_interval: float | None = None
        self._next_heartbeat: float | None = None

    def heard(self, now: float) -> None:
        """Record that bytes arrived from the peer."""
        if self._heard is None and not self._opened:
            self._handshake_until = now + self._limits.handshake_seconds
            if self._limits.authentication_seconds is not None:
                self._authentication_until = now + self._limits.authentication_seconds
        self._now = self._heard = now

    def opened(self, remote_idle_ms: int | None) -> None:
        """Record that the peer's open arrived, with the idle-time-out in it."""
        self._opened = True
        self._handshake_until = None
        if remote_idle_ms:
            if remote_idle_ms / 1000 < self._limits.shortest_idle_seconds:
                raise AmqpError(Condition.NOT_ALLOWED, f"an idle-time-out of {remote_idle_ms} ms is too short")
            self._heartbeat_interval = remote_idle_ms / 2000
            self._next_heartbeat = self._now + self._heartbeat_interval

    def authenticated(self, limits: Limits) -> None:
        """The peer is authenticated: `limits` apply from now on."""
        self._limits = limits
        self._authentication_until = None

    def closing(self) -> None:
        """Record that we sent close: heartbeats stop, and the peer must answer within `limits.closing_seconds`."""
        self._closing_until = self._now + self._limits.closing_seconds
        self._next_heartbeat = None

    def next(self) -> float | None:
        """Return the time of the next heartbeat or time limit, whichever is earlier; None if there is none."""
        times = (
            self._handshake_until,
            self._authentication_until,
            self._closing_until,
            self._silence_ends(),
            self._next_heartbeat,
        )
        return min((time for time in times if time is not None), default=None)

    def _silence_ends(self) -> float | None:
        if self._silence_limit is None or self._heard is None or not self._opened:
            return None
        return self._heard + self._silence_limit

    def expired(self, now: float) -> AmqpError | None:
        """Return the error with which the connection must end now, or None if no time limit has passed."""
        self._now = max(self._now, now)
        if self._handshake_until is not None and now >= self._handshake_until:
            seconds = self._limits.handshake_seconds
            return LimitExceededError(
                "handshake-seconds", f"The connection was not opened within {seconds:g} s. Connect again and send open."
            )
        if self._closing_until is None and self._authentication_until is not None and now >= self._authentication_until:
            seconds = self._limits.authentication_seconds or 0.0
            return LimitExceededError(
                "authentication-seconds",
                f"No token was accepted on this connection within {seconds:g} s. Connect again and put a valid token "
                "on $cbs.",
                Condition.CONNECTION_FORCED,
            )
        if self._closing_until is not None and now >= self._closing_until:
            return AmqpError(Condition.CONNECTION_FORCED, "the peer did not answer close in time")
        silence_ends = self._silence_ends()
        if silence_ends is not None and now >= silence_ends:
            return AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, "the peer was silent for longer than the idle-time-out")
        return None

    def heartbeat_due(self, now: float) -> bool:
        """Return whether to send a heartbeat now. If so, schedule the next heartbeat."""
        if self._next_heartbeat is None or self._heartbeat_interval is None or now < self._next_heartbeat:
            return False
        self._next_heartbeat = now + self._heartbeat_interval
        return True
