"""An AMQP session (amqp-core-transport §2.5): windows, handles, delivery ids and dispositions.

A session finds the link of a frame by the frame's handle. While the peer's incoming window is open, the session sends
transfers; while the window is closed, transfers wait in order. A violation of the session's rules raises
SessionViolationError, and the connection then ends the session. A violation of a link's rules detaches the link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, Any

from twinbus.amqp.errors import AmqpError
from twinbus.amqp.events import (
    ConnectionEvent,
    Disposed,
    LinkAccepted,
    LinkAttached,
    LinkDetached,
    SessionEnded,
)
from twinbus.amqp.fast_frames import FlowFields, TransferFields, disposition_frame, flow_frame
from twinbus.amqp.frames import performative_frame
from twinbus.amqp.limits import LINK_BYTES, LimitExceededError, memory_of
from twinbus.amqp.link import Link, LinkState
from twinbus.amqp.performatives import (
    RCV_FIRST,
    RCV_SECOND,
    RECEIVER,
    SENDER,
    SND_MIXED,
    Attach,
    Begin,
    DeliveryState,
    Detach,
    End,
    Error,
    Source,
    Target,
)
from twinbus.amqp.serial_numbers import MASK, distance
from twinbus.values import Condition, Described

if TYPE_CHECKING:
    from twinbus.amqp.connection import Connection
if TYPE_CHECKING:
    from twinbus.amqp.link import Link


# The outgoing window that we announce. It is so large that it is no limit: the application limits how many transfers
# wait.
OUTGOING_WINDOW = 0x7FFFFFFF


class SessionState(Enum):
    BEGIN_SENT = auto()
    MAPPED = auto()
    END_SENT = auto()  # frames are ignored until the peer's end
    ENDED = auto()


class SessionViolationError(AmqpError):
    """The peer violated a rule of the session. The session ends; the connection continues."""


class Session:
    def __init__(self, connection: Connection, channel: int, first_outgoing_id: int) -> None:
        self.connection = connection
        self.channel = channel
        self.limits = connection.limits
        self.state = SessionState.BEGIN_SENT
        self.remote_channel: int | None = None
        self.remote_handle_max = MASK
        self.next_outgoing_id = first_outgoing_id
        self.next_delivery_id = first_outgoing_id
        self.next_incoming_id: int | None = None
        self.incoming_window = self.limits.incoming_window
        self.remote_incoming_window = 0
        self.unsettled_out = UnsettledDeliveries()
        self.unsettled_in = UnsettledDeliveries()
        self.context: Any = None  # free for the application
        self._first_outgoing_id = first_outgoing_id
        self._handles = HandleTable()
        self._end_reported = False
        self._low_window = self.incoming_window // 2
        # Frames that wait for the peer's window: (link, parts, payload size). Size -1 marks a detach, which is sent
        # after the transfers of its link.
        self._pending: deque[tuple[Link, list[bytes], int]] = deque()

    @property
    def links(self) -> list[Link]:
        return self._handles.links

    @property
    def is_live(self) -> bool:
        return self.state in (SessionState.BEGIN_SENT, SessionState.MAPPED)

    @property
    def max_frame_size(self) -> int:
        return self.connection.remote_max_frame_size

    @property
    def report(self) -> Callable[[ConnectionEvent], None]:
        return self.connection.report

    # --- beginning and ending

    def write_begin(self) -> None:
        self.write(
            Begin(
                remote_channel=self.remote_channel,
                next_outgoing_id=self.next_outgoing_id,
                incoming_window=self.incoming_window,
                outgoing_window=OUTGOING_WINDOW,
                handle_max=self.limits.handle_max,
            )
        )

    def on_begin(self, begin: Begin, channel: int) -> None:
        if self.state is SessionState.BEGIN_SENT:
            self.state = SessionState.MAPPED
        self.remote_channel = channel
        self.next_incoming_id = begin.next_outgoing_id
        self.remote_incoming_window = begin.incoming_window
        self.remote_handle_max = begin.handle_max

    def end(self, error: Error | None = None) -> None:
        if self.is_live:
            self.release()
            self.write(End(error))
            self.state = SessionState.END_SENT

    def fail(self, error: Error) -> None:
        """End the session because the peer violated a rule of the session, and report SessionEnded."""
        links = self.links
        self.end(error)
        self._end_reported = True
        self.report(SessionEnded(self, error, links))

    def on_end(self, end: End) -> None:
        links = self.links
        if self.is_live:
            self.write(End())
        self.release()
        if not self._end_reported:
            self.report(SessionEnded(self, end.error, links))

    def release(self) -> None:
        """Forget all links, transfers and deliveries."""
        for link in self.links:
            link.drop_partial()
            link.state = LinkState.DETACHED
            self._remove(link)
        self.connection.pending_bytes -= sum(size for _, _, size in self._pending if size > 0)
        self._pending.clear()
        self.unsettled_in.clear()
        self.unsettled_out.clear()
        self.state = SessionState.ENDED

    # --- links

    def attach(
        self,
        name: str,
        role: bool,
        *,
        source: Source | Described | None = None,
        target: Target | Described | None = None,
        snd_settle_mode: int = SND_MIXED,
        rcv_settle_mode: int = RCV_FIRST,
        properties: dict[Any, Any] | None = None,
        initial_delivery_count: int = 0,
        max_message_size: int | None = None,
        desired_capabilities: list[str] | None = None,
    ) -> Link:
        """Request a link in which we have `role`. The peer's answer is the event LinkAccepted or LinkDetached."""
        if not self.is_live:
            raise AmqpError(Condition.ILLEGAL_STATE, "the session has ended")
        if self._handles.named(name, role) is not None:
            raise ValueError(f"this session has a link named {name} already")
        link = self._new_link(name, role, 0)
        if link.handle > self.remote_handle_max:
            self._remove(link)
            raise AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, "the peer accepts no more links on this session")
        link.delivery_count = initial_delivery_count
        link.limit_messages(max_message_size)
        self.write(
            Attach(
                name=name,
                handle=link.handle,
                role=role,
                snd_settle_mode=snd_settle_mode,
                rcv_settle_mode=rcv_settle_mode,
                source=source,
                target=target,
                initial_delivery_count=initial_delivery_count if role is SENDER else None,
                max_message_size=max_message_size,
                desired_capabilities=desired_capabilities,
                properties=properties,
            )
        )
        return link

    def on_attach(self, attach: Attach) -> None:
        handle = attach.handle
        if handle > self.limits.handle_max:  # §2.7.2
            raise AmqpError(Condition.FRAMING_ERROR, f"handle {handle} is above the handle-max of the session")
        if attach.snd_settle_mode > SND_MIXED or attach.rcv_settle_mode > RCV_SECOND:
            raise SessionViolationError(Condition.INVALID_FIELD, "a settle mode of the attach is unknown")
        if attach.role is SENDER and attach.initial_delivery_count is None:  # §2.7.3
            raise SessionViolationError(Condition.INVALID_FIELD, "a sender's attach has no initial-delivery-count")
        holder = self._handles.find(handle)
        if holder is not None:
            # The Python SDK never answers the detach of a refused link, and uses the link's handle for another link.
            if holder.state is not LinkState.DETACH_SENT:
                raise SessionViolationError(Condition.HANDLE_IN_USE, f"handle {handle} is attached already")
            self._remove(holder)
        known = self._handles.named(attach.name, not attach.role)
        if known is not None and known.remote is None:
            self._on_answer(known, attach)
            return
        if known is not None and known.state is not LinkState.DETACH_SENT:
            known.fail(Error(Condition.LINK_STOLEN, "the link was attached again under its name"))
        link = self._new_link(attach.name, not attach.role, handle)
        link.state = LinkState.ATTACH_RECEIVED
        self._bind(link, attach, LINK_BYTES + memory_of(attach))
        if (exceeded := self.connection.exceeded_by_links()) is not None:
            self._note(exceeded)
            link.refuse(Error.of(exceeded))
            # Remove the link without waiting for the peer's detach: a peer that never sends the detach would otherwise
            # make us keep the link in memory.
            self._remove(link)
            self._handles.mark_refused(handle)
        else:
            self.report(LinkAttached(link))

    def _on_answer(self, link: Link, attach: Attach) -> None:
        self._bind(link, attach, 0)
        if link.state is LinkState.DETACH_SENT:
            return
        link.state = LinkState.ATTACHED
        link.refused = (attach.target if link.role is SENDER else attach.source) is None
        if not link.refused:
            self.report(LinkAccepted(link))

    def _bind(self, link: Link, attach: Attach, memory: int) -> None:
        link.remote = attach
        link.attach_bytes = memory
        self.connection.attach_bytes += memory
        if link.role is RECEIVER:
            link.delivery_count = attach.initial_delivery_count or 0
        self._handles.bind(link, attach.handle)

    def on_detach(self, detach: Detach) -> None:
        link = self._handles.unbind(detach.handle)
        if link is None:
            if self._handles.was_bound(detach.handle):
                return
            raise SessionViolationError(
                Condition.UNATTACHED_HANDLE, f"detach of handle {detach.handle}, which is not attached"
            )
        link.drop_partial()
        self.forget_unsettled(link)
        state, link.state = link.state, LinkState.DETACHED
        if state is LinkState.ATTACH_RECEIVED:
            link.answer_without_terminus()
        if state is not LinkState.DETACH_SENT:
            self.write_after_pending(link, Detach(link.handle, detach.closed))
        elif not link.pending_frames:
            self._remove(link)
        if not link.end_reported:
            link.end_reported = True
            self.report(LinkDetached(link, detach.closed, detach.error))

    def _new_link(self, name: str, role: bool, preferred_handle: int) -> Link:
        link = Link(self, name, role, self._handles.free(preferred_handle))
        self._handles.add(link)
        self.connection.link_count += 1
        return link

    def _remove(self, link: Link) -> None:
        if self._handles.remove(link):
            self.connection.link_count -= 1
            self.connection.attach_bytes -= link.attach_bytes

    def forget_unsettled(self, link: Link) -> None:
        (self.unsettled_out if link.role is SENDER else self.unsettled_in).forget(link)

    # --- transfers and windows

    def on_transfer(self, fields: TransferFields, buf: bytes, end: int) -> None:
        if self.incoming_window <= 0:
            raise SessionViolationError(Condition.WINDOW_VIOLATION, "a transfer came while the window was closed")
        self.incoming_window -= 1
        self.next_incoming_id = ((self.next_incoming_id or 0) + 1) & MASK
        if self.incoming_window == self._low_window:
            self.connection.replenish_due.append(self)
        link = self._handles.find(fields[0])
        if link is None:
            if self._handles.was_refused(fields[0]):
                return
            raise SessionViolationError(
                Condition.UNATTACHED_HANDLE, f"transfer on handle {fields[0]}, which is not attached"
            )
        if link.role is SENDER:
            raise SessionViolationError(Condition.NOT_ALLOWED, "a transfer from the receiver of a link")
        if link.state is LinkState.ATTACHED:
            try:
                link.on_transfer(fields, buf, end)
            except SessionViolationError:
                raise
            except AmqpError as fault:
                if isinstance(fault, LimitExceededError):
                    self._note(fault)
                link.fail(Error.of(fault))
        elif link.state is LinkState.ATTACH_RECEIVED:
            error = Error(Condition.TRANSFER_LIMIT_EXCEEDED, "a transfer before the attach was answered")
            link.refuse(error)
            self.report(LinkDetached(link, True, error))

    def _note(self, exceeded: LimitExceededError) -> None:
        """Record that the peer exceeded a limit. Before authentication, raise the error: it ends the connection."""
        if not self.connection.is_authenticated:
            raise exceeded
        self.connection.exceeded.append(exceeded)

    def track_incoming(self, delivery_id: int, link: Link) -> None:
        if len(self.unsettled_in) >= self.limits.max_unsettled:
            most = f"A session has at most {self.limits.max_unsettled} unsettled deliveries"
            text = f"{most}{self.connection.until_authenticated}. Wait until earlier ones are settled."
            self._note(LimitExceededError("unsettled-deliveries", text))
            raise SessionViolationError(Condition.RESOURCE_LIMIT_EXCEEDED, text)
        self.unsettled_in[delivery_id] = link

    def replenish(self) -> None:
        """Announce the full incoming window to the peer again."""
        if self.state is SessionState.MAPPED:
            self.write_flow()

    def write_transfer(self, link: Link, parts: list[bytes], size: int) -> None:
        """Send a transfer, or append it to the waiting frames if the peer's window is closed."""
        if self.remote_incoming_window > 0 and not self._pending:
            self.remote_incoming_window -= 1
            self.next_outgoing_id = (self.next_outgoing_id + 1) & MASK
            self.connection.out += parts
        else:
            link.pending_bytes += size
            link.pending_frames += 1
            self.connection.pending_bytes += size
            self._pending.append((link, parts, size))

    def write_after_pending(self, link: Link, detach: Detach) -> None:
        """Send a detach after the link's waiting transfers: without these transfers a delivery id would be missing."""
        if link.pending_frames:
            self._pending.append((link, [performative_frame(self.channel, detach)], -1))
            return
        self.write(detach)
        if link.state is LinkState.DETACHED:
            self._remove(link)

    def _flush(self) -> None:
        pending = self._pending
        while pending:
            link, parts, size = pending[0]
            if size >= 0:
                if self.remote_incoming_window <= 0:
                    return
                self.remote_incoming_window -= 1
                self.next_outgoing_id = (self.next_outgoing_id + 1) & MASK
                link.pending_bytes -= size
                link.pending_frames -= 1
                self.connection.pending_bytes -= size
            elif link.state is LinkState.DETACHED:
                self._remove(link)
            pending.popleft()
            self.connection.out += parts

    def on_flow(self, flow: FlowFields) -> None:
        seen = self._first_outgoing_id if flow.next_incoming_id is None else flow.next_incoming_id
        self.remote_incoming_window = flow.incoming_window - max(0, distance(seen, self.next_outgoing_id))
        self.next_incoming_id = flow.next_outgoing_id
        self._flush()
        if flow.handle is None:
            if flow.echo:
                self.write_flow()
            return
        link = self._handles.find(flow.handle)
        if link is not None:
            link.on_flow(flow)
        elif not self._handles.was_bound(flow.handle):
            raise SessionViolationError(
                Condition.UNATTACHED_HANDLE, f"flow on handle {flow.handle}, which is not attached"
            )

    def write_flow(
        self, link: Link | None = None, *, echo: bool = False, properties: dict[Any, Any] | None = None
    ) -> None:
        self.incoming_window = self.limits.incoming_window
        flow = FlowFields(
            self.next_incoming_id,
            self.incoming_window,
            self.next_outgoing_id,
            OUTGOING_WINDOW,
            link.handle if link else None,
            link.delivery_count if link else None,
            link.flow_credit if link else None,
            link.available if link else None,
            link.drain if link else False,
            echo,
            properties,
        )
        self.connection.out.append(flow_frame(self.channel, flow))

    # --- dispositions

    def dispose(
        self, role: bool, first: int, last: int | None = None, *, settled: bool, state: DeliveryState | None = None
    ) -> None:
        """Send the state of deliveries `first` to `last`. `role` is our role: RECEIVER for deliveries we received."""
        if self.state is not SessionState.MAPPED:
            return
        last = first if last is None else last
        if settled:
            (self.unsettled_in if role is RECEIVER else self.unsettled_out).settle(first, last)
        self.connection.out.append(disposition_frame(self.channel, role, first, last, settled, state))

    def on_disposition(self, role: bool, first: int, last: int, settled: bool, state: DeliveryState | None) -> None:
        unsettled = self.unsettled_out if role is RECEIVER else self.unsettled_in
        found = unsettled.settle(first, last) if settled else unsettled.within(first, last)
        self.report(Disposed(self, role, first, last, settled, state, found))

    def write(self, performative: Any) -> None:
        self.connection.out.append(performative_frame(self.channel, performative))


class UnsettledDeliveries(dict[int, Link]):
    """Links by the ids of their unsettled deliveries, in one direction of a session."""

    def within(self, first: int, last: int) -> list[int]:
        """Return the ids from `first` to `last` that are unsettled.

        Takes time for the unsettled deliveries only, not for all numbers from `first` to `last`.
        """
        if first == last:
            return [first] if first in self else []
        width = distance(first, last) + 1
        if width <= len(self):
            return [number for step in range(width) if (number := (first + step) & MASK) in self]
        return [number for number in self if (number - first) & MASK < width]

    def settle(self, first: int, last: int) -> list[int]:
        """Remove and return the unsettled ids from `first` to `last`."""
        found = self.within(first, last)
        for number in found:
            del self[number]
        return found

    def forget(self, link: Link) -> None:
        for number in [number for number, owner in self.items() if owner is link]:
            del self[number]


class HandleTable:
    """Links of a session by our handle, by the peer's handle, and by name and role (§2.6.2).

    A link has two handles: each peer chooses its own.
    """

    def __init__(self) -> None:
        self._ours: dict[int, Link] = {}
        self._theirs: dict[int, Link] = {}
        self._by_name: dict[tuple[str, bool], Link] = {}
        # Bit sets, one bit for each handle of the peer: a Python set of 8,192 numbers would take 700 KB.
        self._past = 0  # handles that a link has or had
        self._refused = 0  # handles of links that we refused and removed; the peer's detach has not arrived
        self.find = self._theirs.get  # by the peer's handle

    @property
    def links(self) -> list[Link]:
        return list(self._ours.values())

    def named(self, name: str, role: bool) -> Link | None:
        return self._by_name.get((name, role))

    def free(self, preferred: int) -> int:
        """Return a free handle: `preferred` if possible. Equal handles of both peers make traces easier to read."""
        if preferred not in self._ours:
            return preferred
        return next(handle for handle in count() if handle not in self._ours)

    def add(self, link: Link) -> None:
        self._ours[link.handle] = link
        self._by_name[link.name, link.role] = link

    def bind(self, link: Link, handle: int) -> None:
        """Record that the peer attached the link with this handle."""
        link.remote_handle = handle
        self._theirs[handle] = link
        self._past |= 1 << handle
        self._forget_refused(handle)

    def unbind(self, handle: int) -> Link | None:
        """Free this handle, which the peer detached. Returns the handle's link, or None if the handle has none."""
        self._forget_refused(handle)
        return self._theirs.pop(handle, None)

    def was_bound(self, handle: int) -> bool:
        """Return whether a link had this handle of the peer before, and no link has the handle now."""
        return bool(self._past >> handle & 1) and handle not in self._theirs

    def mark_refused(self, handle: int) -> None:
        """Record that the link of this handle was refused and removed: transfers with this handle are ignored."""
        self._refused |= 1 << handle

    def was_refused(self, handle: int) -> bool:
        return bool(self._refused >> handle & 1)

    def _forget_refused(self, handle: int) -> None:
        if self.was_refused(handle):
            self._refused ^= 1 << handle

    def remove(self, link: Link) -> bool:
        """Free the link's handles and name. Returns False if the link was removed before."""
        if self._by_name.get((link.name, link.role)) is link:
            del self._by_name[link.name, link.role]
        if link.remote_handle is not None and self._theirs.get(link.remote_handle) is link:
            self.unbind(link.remote_handle)
        if self._ours.get(link.handle) is not link:
            return False
        del self._ours[link.handle]
        return True
