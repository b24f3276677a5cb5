"""An AMQP link (amqp-core-transport §2.6): deliveries in one direction, and their credit.

A receiver grants credit: the number of deliveries that the sender may send. A delivery is one message, in one transfer
frame or several. The receiving side collects the parts of a delivery in a `PartialDelivery` and reports the complete
message. A violation of the link's rules raises AmqpError, and the session then detaches the link.

`role` is always our role: on a link with role SENDER we send to the peer.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from twinbus.amqp.errors import AmqpError
from twinbus.amqp.events import Delivered, LinkDetached, LinkFlowed
from twinbus.amqp.fast_frames import (
    MAX_TAG,
    TRANSFER_OVERHEAD,
    FlowFields,
    TransferExtras,
    TransferFields,
    encode_state,
    transfer_head,
    transfer_head_with_state,
)
from twinbus.amqp.limits import memory_of
from twinbus.amqp.performatives import (
    SENDER,
    Attach,
    DeliveryState,
    Detach,
    Error,
    Source,
    Target,
    Transfer,
)
from twinbus.amqp.serial_numbers import MASK, distance
from twinbus.values import Condition, Described

if TYPE_CHECKING:
    from twinbus.amqp.session import Session


class LinkState(Enum):
    ATTACH_RECEIVED = auto()  # the peer requested the link; the application has not answered
    ATTACH_SENT = auto()  # we requested the link
    ATTACHED = auto()
    DETACH_SENT = auto()  # frames are ignored until the peer's detach
    DETACHED = auto()


class Link:
    """One link of a session. Made by `Session.attach`, or by the session when the peer attaches."""

    __slots__ = (
        "_credit",
        "_incoming_size_limit",
        "_partial",
        "attach_bytes",
        "available",
        "context",
        "delivery_count",
        "drain",
        "end_reported",
        "handle",
        "name",
        "pending_bytes",
        "pending_frames",
        "refused",
        "remote",
        "remote_handle",
        "role",
        "session",
        "state",
    )

    def __init__(self, session: Session, name: str, role: bool, handle: int) -> None:
        self.session = session
        self.name = name
        self.role = role
        self.handle = handle
        self.remote_handle: int | None = None
        self.remote: Attach | None = None  # the peer's attach
        self.state = LinkState.ATTACH_SENT
        self.refused = False  # the peer answered our attach with a null terminus, and will send a detach next
        self.delivery_count = 0
        self.drain = False
        self.available: int | None = None
        self.pending_bytes = 0  # of deliveries that the application sent and that wait for the session's window
        self.pending_frames = 0
        self.end_reported = False
        self.attach_bytes = 0  # memory of the peer's attach
        self.context: Any = None  # free for the application
        self._credit = 0
        self._incoming_size_limit = session.limits.max_message_size
        self._partial: PartialDelivery | None = None

    # --- the peer's attach

    @property
    def source(self) -> Source | Described | None:
        return self.remote.source if self.remote else None

    @property
    def target(self) -> Target | Described | None:
        return self.remote.target if self.remote else None

    @property
    def properties(self) -> dict[Any, Any]:
        return (self.remote.properties if self.remote else None) or {}

    @property
    def snd_settle_mode(self) -> int:
        return self.remote.snd_settle_mode if self.remote else 2

    @property
    def rcv_settle_mode(self) -> int:
        return self.remote.rcv_settle_mode if self.remote else 0

    @property
    def max_message_size(self) -> int | None:
        """Largest message that the peer accepts; None if it announces no limit."""
        return (self.remote.max_message_size if self.remote else None) or None

    @property
    def is_sender(self) -> bool:
        return self.role is SENDER

    @property
    def credit(self) -> int:
        """Number of deliveries that may be sent now: by us if we are the sender, otherwise by the peer."""
        if self.state is not LinkState.ATTACHED:
            return 0
        if self.role is SENDER:
            session = self.session
            room = session.limits.max_unsettled - len(session.unsettled_out)
            return self._credit if self._credit <= room else room if room > 0 else 0
        return self._credit

    # --- answers of the application

    def accept(
        self,
        *,
        source: Source | Described | None = None,
        target: Target | Described | None = None,
        properties: dict[Any, Any] | None = None,
        max_message_size: int | None = None,
        initial_delivery_count: int = 0,
        offered_capabilities: list[str] | None = None,
        snd_settle_mode: int | None = None,
        rcv_settle_mode: int | None = None,
    ) -> None:
        """Accept the peer's attach. Source or target None means the peer's own. No effect if the link has ended."""
        remote = self.remote
        if self.state is not LinkState.ATTACH_RECEIVED or remote is None:
            return
        self.state = LinkState.ATTACHED
        self.limit_messages(max_message_size)
        if self.role is SENDER:
            self.delivery_count = initial_delivery_count
        self.session.write(
            Attach(
                name=self.name,
                handle=self.handle,
                role=self.role,
                snd_settle_mode=remote.snd_settle_mode if snd_settle_mode is None else snd_settle_mode,
                rcv_settle_mode=remote.rcv_settle_mode if rcv_settle_mode is None else rcv_settle_mode,
                source=remote.source if source is None else source,
                target=remote.target if target is None else target,
                initial_delivery_count=initial_delivery_count if self.role is SENDER else None,
                max_message_size=max_message_size,
                offered_capabilities=offered_capabilities,
                properties=properties,
            )
        )

    def limit_messages(self, max_message_size: int | None) -> None:
        """Set the largest message accepted from the peer. 0 and None mean the connection's limit."""
        if max_message_size:
            self._incoming_size_limit = max_message_size

    def refuse(self, error: Error) -> None:
        """Refuse the peer's attach: answer with a null terminus, then detach with the error (§2.6.3)."""
        if self.state is not LinkState.ATTACH_RECEIVED:
            return
        self.answer_without_terminus()
        self.state = LinkState.DETACH_SENT
        self.end_reported = True
        self.session.write(Detach(self.handle, True, error))

    def answer_without_terminus(self) -> None:
        remote = self.remote
        assert remote is not None
        self.session.write(
            Attach(
                name=self.name,
                handle=self.handle,
                role=self.role,
                snd_settle_mode=remote.snd_settle_mode,
                rcv_settle_mode=remote.rcv_settle_mode,
                source=None if self.role is SENDER else remote.source,
                target=remote.target if self.role is SENDER else None,
                initial_delivery_count=0 if self.role is SENDER else None,
            )
        )

    def detach(self, closed: bool = True, error: Error | None = None) -> None:
        if self.state is LinkState.ATTACH_RECEIVED:
            self.refuse(error or Error(Condition.DETACH_FORCED))
        elif self.state in (LinkState.ATTACHED, LinkState.ATTACH_SENT):
            self.state = LinkState.DETACH_SENT
            self.drop_partial()
            self.session.write_after_pending(self, Detach(self.handle, closed, error))

    # --- flow

    def flow(
        self, credit: int, *, drain: bool = False, echo: bool = False, properties: dict[Any, Any] | None = None
    ) -> None:
        """As the receiver of the link, allow the peer to send `credit` deliveries from now on."""
        if self.role is SENDER:
            raise ValueError("only the receiver of a link grants credit")
        if self.state is LinkState.ATTACHED:
            self._credit = credit
            self.drain = drain
            self.session.write_flow(self, echo=echo, properties=properties)

    def drained(self) -> None:
        """As the sender of the link, set the credit to 0 and report that: we have no more messages to send (§2.6.7)."""
        if self.role is SENDER and self.drain and self.state is LinkState.ATTACHED:
            self.delivery_count = (self.delivery_count + self._credit) & MASK
            self._credit = 0
            self.session.write_flow(self)

    @property
    def flow_credit(self) -> int:
        """Link credit as written in a flow frame."""
        return self._credit

    def on_flow(self, flow: FlowFields) -> None:
        # A receiver may grant credit directly after its attach, before the application has answered the attach.
        if self.state not in (LinkState.ATTACHED, LinkState.ATTACH_RECEIVED):
            return
        if self.role is SENDER:
            if flow.link_credit is not None:
                seen = 0 if flow.delivery_count is None else flow.delivery_count
                ahead = distance(seen, self.delivery_count)
                self._credit = max(0, flow.link_credit - max(0, ahead))
            self.drain = flow.drain
        else:
            self.available = flow.available
            if flow.delivery_count is not None:
                skipped = max(0, distance(self.delivery_count, flow.delivery_count))
                self.delivery_count = flow.delivery_count
                self._credit = max(0, self._credit - skipped)
        if flow.echo:
            self.session.write_flow(self)
        self.session.report(LinkFlowed(self, flow.properties, flow.echo))

    # --- sending

    def send(
        self,
        tag: bytes,
        payload: bytes | list[bytes],
        *,
        message_format: int = 0,
        settled: bool = False,
        state: DeliveryState | None = None,
    ) -> int:
        """Send one delivery and return its id. While the session's window is closed, the frames wait in order."""
        if self.credit <= 0:
            raise AmqpError(Condition.TRANSFER_LIMIT_EXCEEDED, f"link {self.name} has no credit")
        if len(tag) > MAX_TAG:
            raise AmqpError(Condition.INVALID_FIELD, f"a delivery tag has at most {MAX_TAG} bytes")
        session = self.session
        if state is not None and len(encode_state(state)) + TRANSFER_OVERHEAD + MAX_TAG >= session.max_frame_size:
            raise AmqpError(Condition.FRAME_SIZE_TOO_SMALL, "the delivery state does not fit the peer's frames")
        pieces = [payload] if isinstance(payload, bytes) else payload
        size = sum(map(len, pieces))
        delivery_id = session.next_delivery_id
        session.next_delivery_id = (delivery_id + 1) & MASK
        self.delivery_count = (self.delivery_count + 1) & MASK
        self._credit -= 1
        if not settled:
            session.unsettled_out[delivery_id] = self
        room = session.max_frame_size - TRANSFER_OVERHEAD - len(tag)
        if size <= room and state is None:
            head = transfer_head(session.channel, self.handle, delivery_id, tag, message_format, settled, False, size)
            session.write_transfer(self, [head, *pieces], size)
        else:
            self._send_in_pieces(delivery_id, tag, b"".join(pieces), message_format, settled, state)
        return delivery_id

    def _send_in_pieces(
        self,
        delivery_id: int,
        tag: bytes,
        payload: bytes,
        message_format: int,
        settled: bool,
        state: DeliveryState | None,
    ) -> None:
        session = self.session
        fields = Transfer(self.handle, delivery_id, tag, message_format, settled, True, None, state)
        room = session.max_frame_size - len(transfer_head_with_state(session.channel, fields, 0))
        start = 0
        while True:
            piece = payload[start : start + room]
            start += room
            fields.more = start < len(payload)
            head = transfer_head_with_state(session.channel, fields, len(piece))
            session.write_transfer(self, [head, piece], len(piece))
            if not fields.more:
                return

    # --- receiving

    def on_transfer(self, fields: TransferFields, buf: bytes, end: int) -> None:
        """Handle a transfer. Raises AmqpError if the peer violates a rule of the link; the session then detaches."""
        _, delivery_id, tag, message_format, settled, more, extras, start = fields
        if more or self._partial is not None or extras.resume or extras.aborted:
            self._on_part(fields, buf, end)
            return
        if delivery_id is None or tag is None:
            raise AmqpError(Condition.INVALID_FIELD, "the first transfer of a delivery has no id or no tag")
        self._take_credit()
        if end - start > self._incoming_size_limit:
            raise self._too_large()
        session = self.session
        if not settled:
            session.track_incoming(delivery_id, self)
        session.connection.report(
            Delivered(self, delivery_id, tag, message_format or 0, buf[start:end], settled is True, extras.state)
        )

    def _on_part(self, fields: TransferFields, buf: bytes, end: int) -> None:
        _, delivery_id, tag, message_format, settled, more, extras, start = fields
        partial = self._partial
        if partial is None:
            if delivery_id is None or tag is None:
                raise AmqpError(Condition.INVALID_FIELD, "the first transfer of a delivery has no id or no tag")
            if not extras.resume:
                self._take_credit()
            partial = PartialDelivery(delivery_id, tag, message_format or 0, extras)
            if extras.state is not None:
                partial.state_bytes = memory_of(extras.state)
                self.session.connection.hold(partial.state_bytes)
            self._partial = partial
        elif delivery_id is not None and delivery_id != partial.delivery_id:
            raise AmqpError(Condition.ILLEGAL_STATE, "a delivery began before the previous one was complete")
        if extras.aborted:
            self.drop_partial()
            return
        partial.settled = partial.settled or settled is True
        # §2.6.13: no delivery of an earlier attach is unsettled here, so a resumed delivery is ignored.
        if not partial.extras.resume:
            self._keep(partial, memoryview(buf)[start:end])
        if not more:
            self.drop_partial()
            if not partial.extras.resume:
                self._report(partial)

    def _take_credit(self) -> None:
        if self._credit > 0:
            self._credit -= 1
        elif self.session.limits.enforce_credit:
            raise AmqpError(Condition.TRANSFER_LIMIT_EXCEEDED, "a delivery without credit")
        self.delivery_count = (self.delivery_count + 1) & MASK

    def _keep(self, partial: PartialDelivery, piece: memoryview) -> None:
        if len(partial.payload) + len(piece) > self._incoming_size_limit:
            raise self._too_large()
        self.session.connection.hold(len(piece))
        partial.payload += piece

    def _too_large(self) -> AmqpError:
        text = f"the message is larger than the link accepts ({self._incoming_size_limit} bytes)"
        return AmqpError(Condition.MESSAGE_SIZE_EXCEEDED, text)

    def drop_partial(self) -> None:
        if self._partial is not None:
            self.session.connection.hold(-len(self._partial.payload) - self._partial.state_bytes)
            self._partial = None

    def _report(self, whole: PartialDelivery) -> None:
        if not whole.settled:
            self.session.track_incoming(whole.delivery_id, self)
        payload, state = bytes(whole.payload), whole.extras.state
        self.session.report(
            Delivered(self, whole.delivery_id, whole.tag, whole.message_format, payload, whole.settled, state)
        )

    # --- the end

    def fail(self, error: Error) -> None:
        """Detach the link because the peer violated a rule of the link, and report LinkDetached to the application."""
        self.detach(closed=True, error=error)
        self.session.forget_unsettled(self)
        self.end_reported = True
        self.session.report(LinkDetached(self, True, error))


class PartialDelivery:
    """A delivery whose last frame has not arrived: fields of the first frame, and the payload that has arrived."""

    __slots__ = ("delivery_id", "extras", "message_format", "payload", "settled", "state_bytes", "tag")

    def __init__(self, delivery_id: int, tag: bytes, message_format: int, extras: TransferExtras) -> None:
        self.delivery_id = delivery_id
        self.tag = tag
        self.message_format = message_format
        self.extras = extras
        self.payload = bytearray()
        self.state_bytes = 0  # memory of the delivery state that came with the first frame
        self.settled = False
