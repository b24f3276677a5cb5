"""Limits the data of one AMQP connection in memory: frames that are not sent yet, and messages that are not stored yet.

Output. A peer may grant credit for thousands of messages and then read slowly. If a link passed all credit to the
engine, the engine would decide about deliveries that the peer does not read, and their bytes would fill the memory. So
a link passes credit on in portions, and `ConnectionOutput` decides when a link may pass on the next portion.
`ConnectionOutput` adds up three amounts:

    deciding    bytes of the portions that the engine has not used yet
    unflushed   bytes of deliveries that were handed to the protocol core since the last flush
    unsent      bytes in the socket's buffer, and bytes that wait for the peer's session windows

A link that has to wait calls `stall`. Stalled links resume in the order in which they stalled, when the stream has room
again or the engine has used a portion. If the stream is full and holds too many bytes, all receiving links are paused,
also links whose entities have no message yet: otherwise each of these links could add one portion as soon as a message
arrives.

Frames are written once per turn of the event loop. `accept` collects delivery ids, so that consecutive ids are settled
with one frame.

Input. `ConnectionInput` adds up the bytes of messages that the peer sent and the store has not stored. It stops reading
from the peer while their sum is above a limit.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from twinbus.amqp import (
    KIB,
    MIB,
    RECEIVER,
    SENDER,
    Accepted,
    Connection,
    DeliveryState,
    LimitExceededError,
    Session,
    consecutive_runs,
)
from twinbus.namespace.engine.registry import Entity
from twinbus.namespace.front.byte_stream import ByteStream
from twinbus.namespace.resources import ConnectionAccount
from twinbus.namespace.runtime import NamespaceRuntime

_ACCEPTED = Accepted()
HELD_BY_CORE = "unfinished frames, deliveries and links"
"""The kind of memory that a protocol core holds because of its peer, in the connection's account."""
# Bytes that wait for the peer's session windows. With more bytes than this, `is_full` is True.
_MAX_PENDING_BYTES = 4 * MIB
# The sum of deciding and unflushed bytes is limited to the first figure, and to one eighth of the memory that the
# connection may hold, because each link may exceed its portion by one message.
_MAX_DECIDING_BYTES, _DECIDING_SHARE = 8 * MIB, 8
# Bytes of messages that wait to be stored. With more bytes than this, the namespace does not read from the peer.
_MAX_UNSTORED_BYTES = 4 * MIB
# Changes of fewer bytes are not reported to the account: a call for each message would take too much time.
_ACCOUNT_STEP = 4 * KIB


class StallableLink(Protocol):
    """A link that can wait until the peer has read what was sent."""

    def resume(self) -> None:
        """Continue to send, because the connection has room again."""


class PausableLink(StallableLink, Protocol):
    """A link on which the peer receives messages."""

    def pause(self) -> None:
        """Take back the credit that was passed to the engine, and stall."""


class ConnectionOutput:
    """Writes the frames of one connection, and decides when the links of the connection may produce more frames."""

    def __init__(
        self,
        core: Connection,
        stream: ByteStream,
        account: ConnectionAccount,
        limit_exceeded: Callable[[LimitExceededError], None],
        connection_memory: int,
    ) -> None:
        """`limit_exceeded` counts and logs limits of the protocol core that the peer exceeded."""
        self._core = core
        self._stream = stream
        self._account = account
        self._limit_exceeded = limit_exceeded
        self._loop = asyncio.get_running_loop()
        self._max_deciding = min(_MAX_DECIDING_BYTES, connection_memory // _DECIDING_SHARE)
        self._deciding_bytes = 0
        self._unflushed_bytes = 0
        self._accepted: defaultdict[Session, list[int]] = defaultdict(list)
        self._receivers: dict[PausableLink, None] = {}
        self._stalled: dict[StallableLink, None] = {}  # in the order in which they stalled
        self._is_flush_scheduled = False
        self._is_resume_scheduled = False
        self._waits_for_stream = False
        self._is_paused = False
        self._accounted_bytes = 0  # the bytes held by the core that were last reported to the account

    # --- frames --------------------------------------------------------------------------------------------------

    def accept(self, session: Session, delivery_id: int) -> None:
        """Accept and settle a received delivery with the next flush."""
        self._accepted[session].append(delivery_id)
        self.flush_soon()

    def dispose_received(self, session: Session, delivery_id: int, state: DeliveryState) -> None:
        """Settle a received delivery with the given state."""
        session.dispose(RECEIVER, delivery_id, settled=True, state=state)
        self.flush_soon()

    def dispose_sent(
        self, session: Session, first: int, last: int, state: DeliveryState | None, *, settled: bool = True
    ) -> None:
        """Send the disposition of a range of deliveries that this side sent."""
        session.dispose(SENDER, first, last, settled=settled, state=state)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Schedule `flush` for the end of this turn of the event loop."""
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write all frames that wait. Closes the stream if the core has closed the connection."""
        self._is_flush_scheduled = False
        if self._unflushed_bytes >= self._max_deciding:
            self._resume_soon()
        self._unflushed_bytes = 0
        for session, ids in self._accepted.items():
            for first, last in consecutive_runs(ids):
                session.dispose(RECEIVER, first, last, settled=True, state=_ACCEPTED)
        self._accepted.clear()
        if parts := self._core.data_to_send():
            self._stream.write(parts)
        if self._core.exceeded:
            for exceeded in self._core.exceeded:
                self._limit_exceeded(exceeded)
            self._core.exceeded.clear()
        if not self._core.is_closed:
            self._update_account()
            if self._stream.is_full and not self._is_paused and self._stream.unsent_bytes > self._max_deciding:
                self._pause_receivers()
        elif self._core.has_failed:
            self._stream.close_after_error()
        else:
            self._stream.close()

    def _update_account(self) -> None:
        held, before = self._core.held_bytes, self._accounted_bytes
        if held != before and (held < _ACCOUNT_STEP or abs(held - before) >= _ACCOUNT_STEP):
            self._accounted_bytes = held
            self._account.hold(HELD_BY_CORE, held)

    # --- links ---------------------------------------------------------------------------------------------------

    def add_receiver(self, link: PausableLink) -> None:
        """Add a link to the links that are paused when the peer leaves too many bytes unread."""
        self._receivers[link] = None

    def remove_receiver(self, link: PausableLink) -> None:
        """Forget a link that is gone."""
        self._receivers.pop(link, None)
        self._stalled.pop(link, None)

    def forget_session(self, session: Session) -> None:
        """Drop the dispositions of a session that has ended, if they were not written yet."""
        self._accepted.pop(session, None)

    def clear(self) -> None:
        """Drop all links and all dispositions that were not written: the connection is gone."""
        self._accepted.clear()
        self._receivers.clear()
        self._stalled.clear()

    @property
    def is_full(self) -> bool:
        """Whether the links must send no more messages until the peer has read some of the bytes that wait."""
        return self._stream.is_full or self._core.pending_bytes > _MAX_PENDING_BYTES

    @property
    def has_room(self) -> bool:
        """Whether the engine may decide about deliveries on one more link."""
        return not self.is_full and self._deciding_bytes + self._unflushed_bytes < self._max_deciding

    def deciding(self, runtime: NamespaceRuntime, entity: Entity, portion: int) -> None:
        """Count bytes that the engine may use for deliveries, until the engine has decided about the entity."""
        self._deciding_bytes += portion
        runtime.after(entity, lambda: self._decided(portion))

    def _decided(self, portion: int) -> None:
        self._deciding_bytes -= portion
        if self._stalled:
            # The flush is scheduled first: the deliveries that were just decided may fill the stream.
            self.flush_soon()
            self._resume_soon()

    def delivering(self, size: int) -> None:
        """Add the bytes of messages that were handed to the core to the unflushed bytes."""
        self._unflushed_bytes += size

    def stall(self, link: StallableLink) -> None:
        """Put a link in the queue of stalled links. `resume` of the link is called when there is room."""
        self._stalled[link] = None
        self._resume_when_stream_has_room()

    @property
    def has_stalled(self) -> bool:
        """Whether any link is stalled."""
        return bool(self._stalled)

    def resume_stalled(self) -> None:
        """Resume stalled links as long as there is room."""
        self._is_resume_scheduled = False
        if self.has_room:
            self._is_paused = False
        for link in list(self._stalled):
            if not self.has_room:
                self._resume_when_stream_has_room()
                return
            if link in self._stalled:
                del self._stalled[link]
                link.resume()

    def _resume_when_stream_has_room(self) -> None:
        if self._stream.is_full and not self._waits_for_stream:
            self._waits_for_stream = True
            self._stream.when_room(self._stream_has_room)

    def _stream_has_room(self) -> None:
        self._waits_for_stream = False
        self.resume_stalled()

    def _resume_soon(self) -> None:
        if self._stalled and not self._is_resume_scheduled:
            self._is_resume_scheduled = True
            self._loop.call_soon(self.resume_stalled)

    def _pause_receivers(self) -> None:
        self._is_paused = True
        self._resume_when_stream_has_room()
        for link in list(self._receivers):
            link.pause()


class ConnectionInput:
    """Stops reading from the peer while too many of its messages wait to be stored."""

    def __init__(self, stream: ByteStream, account: ConnectionAccount) -> None:
        self._stream = stream
        self._account = account
        self._unstored_bytes = 0

    def storing(self, size: int) -> None:
        """Count a message of `size` bytes that waits to be stored. Stop reading if too many bytes wait."""
        self._unstored_bytes += size
        if self._unstored_bytes > _MAX_UNSTORED_BYTES:
            self._stream.pause_reading("incoming")
            self._account.hold("messages that wait to be stored", self._unstored_bytes)

    def stored(self, size: int) -> None:
        """Stop counting a message of `size` bytes that was stored or refused. Read again if few enough bytes wait."""
        was_too_much = self._unstored_bytes > _MAX_UNSTORED_BYTES
        self._unstored_bytes -= size
        if was_too_much and self._unstored_bytes <= _MAX_UNSTORED_BYTES:
            self._stream.resume_reading("incoming")
            self._account.hold("messages that wait to be stored", 0)
