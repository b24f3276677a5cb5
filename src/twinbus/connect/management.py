"""Operations of an entity's `$management` node: peek, deferred messages, locks, schedules, sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from twinbus.amqp import read_routing_fields
from twinbus.connect.errors import ServiceBusProtocolError, error_for_status
from twinbus.connect.link_session import RequestLink
from twinbus.connect.message_encoding import to_datetime, to_millis
from twinbus.connect.received_message import ReceivedMessage
from twinbus.connect.reconnection import Reconnector
from twinbus.connect.timeouts import deadline
from twinbus.values import Array, Int, Long, Timestamp, UInt

# The largest instant of .NET. As `last-updated-time` it requests all sessions, not only sessions with a newer state. As
# `enqueued-time-utc` it selects all messages.
_END_OF_TIME: Final = 253_402_300_799_999
_SESSIONS_PER_PAGE: Final = 100


class Management:
    """Requests to one `$management` node. Made by `ServiceBusConnection.management`."""

    def __init__(self, reconnector: Reconnector, entity: str, address: str, timeout: float) -> None:
        self.entity = entity
        self.timeout = timeout
        self._reconnector = reconnector
        self._address = address
        self._link: RequestLink | None = None
        self._attaching = asyncio.Lock()
        self.associated_link: str | None = None  # name of the receiver's link, which requests must contain

    # --- messages ----------------------------------------------------------------------------------------------

    async def peek(
        self, from_number: int = 0, count: int = 1, *, session: str | None = None, timeout: float | None = None
    ) -> list[ReceivedMessage]:
        """Return up to `count` messages, from a sequence number on, without locking the messages."""
        body = {"from-sequence-number": Long(from_number), "message-count": Int(count)}
        found = await self._request("peek-message", {**body, **_session_field(session)}, timeout)
        return [ReceivedMessage(entry["message"], None, is_settled=True) for entry in found.get("messages", ())]

    async def receive_deferred(
        self,
        numbers: Sequence[int],
        *,
        peek_lock: bool = True,
        session: str | None = None,
        timeout: float | None = None,
    ) -> list[ReceivedMessage]:
        """Return deferred messages. The service refuses the request if a message does not exist or is locked."""
        body = {
            "sequence-numbers": Array(Long, numbers),
            "receiver-settle-mode": UInt(1 if peek_lock else 0),
            **_session_field(session),
        }
        found = await self._request("receive-by-sequence-number", body, timeout)
        return [_deferred_message(entry, peek_lock) for entry in found.get("messages", ())]

    async def settle(
        self,
        tokens: Sequence[UUID],
        status: str,
        extra: Mapping[str, object],
        *,
        session: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Settle messages by lock token: messages whose link has ended, and messages received through this node."""
        body = {"disposition-status": status, "lock-tokens": Array(UUID, tokens), **extra, **_session_field(session)}
        await self._request("update-disposition", body, timeout)

    async def renew_locks(self, tokens: Sequence[UUID], *, timeout: float | None = None) -> list[int]:
        """Renew locks. Returns the new expiry time of each lock, in ms since the epoch."""
        found = await self._request("renew-lock", {"lock-tokens": Array(UUID, tokens)}, timeout)
        return [int(instant) for instant in found["expirations"]]

    async def delete_batch(self, count: int, before: datetime | None = None, *, timeout: float | None = None) -> int:
        """Delete up to `count` messages that were enqueued before an instant. Returns how many were deleted."""
        millis = _END_OF_TIME if before is None else to_millis(before)
        body = {"message-count": Int(count), "enqueued-time-utc": Timestamp(millis)}
        found = await self._request("batch-delete-messages", body, timeout)
        return int(found.get("message-count", 0))

    # --- schedules ---------------------------------------------------------------------------------------------

    async def schedule(self, messages: Sequence[bytes], *, timeout: float | None = None) -> list[int]:
        """Schedule encoded messages, each with its own scheduled enqueue time. Returns their sequence numbers."""
        if not messages:
            return []
        entries = [_schedule_entry(raw) for raw in messages]
        found = await self._request("schedule-message", {"messages": entries}, timeout)
        return [int(number) for number in found["sequence-numbers"]]

    async def cancel_scheduled(self, numbers: Sequence[int], *, timeout: float | None = None) -> None:
        if numbers:
            await self._request("cancel-scheduled-message", {"sequence-numbers": Array(Long, numbers)}, timeout)

    # --- sessions ----------------------------------------------------------------------------------------------

    async def get_session_state(self, session: str, *, timeout: float | None = None) -> bytes | None:
        found = await self._request("get-session-state", _session_field(session), timeout)
        state = found.get("session-state")
        return None if state is None else bytes(state)

    async def set_session_state(self, session: str, state: bytes | None, *, timeout: float | None = None) -> None:
        await self._request("set-session-state", {**_session_field(session), "session-state": state}, timeout)

    async def renew_session_lock(self, session: str, *, timeout: float | None = None) -> datetime:
        found = await self._request("renew-session-lock", _session_field(session), timeout)
        return to_datetime(found["expiration"])

    async def list_sessions(self, *, updated_since: datetime | None = None, timeout: float | None = None) -> list[str]:
        """Return the ids of sessions that have messages; with `updated_since`, of sessions with a newer state."""
        since = Timestamp(_END_OF_TIME if updated_since is None else to_millis(updated_since))
        sessions: list[str] = []
        while True:
            body = {"last-updated-time": since, "skip": Int(len(sessions)), "top": Int(_SESSIONS_PER_PAGE)}
            found = await self._request("get-message-sessions", body, timeout)
            page = found.get("sessions-ids", ())
            sessions += [str(session) for session in page]
            if len(page) < _SESSIONS_PER_PAGE:
                return sessions

    # --- the node ----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._link is not None:
            await self._reconnector.close_links(self._link)

    async def _request(self, operation: str, body: Mapping[str, object], timeout: float | None) -> dict[str, Any]:
        seconds = self.timeout if timeout is None else timeout
        properties: dict[str, object] = {
            "operation": f"com.microsoft:{operation}",
            "com.microsoft:server-timeout": UInt(max(1, int(seconds * 1000))),
        }
        if self.associated_link is not None:
            properties["associated-link-name"] = self.associated_link
        async with deadline(seconds, operation, self.entity):
            link = await self._attached()
            reply = await link.request(properties, body)
        if not reply.is_success:
            raise error_for_status(reply.status, reply.condition, reply.description, self.entity)
        if reply.body is not None and not isinstance(reply.body, dict):
            raise ServiceBusProtocolError(f"the reply to {operation} is not a map", entity=self.entity)
        return {str(key): value for key, value in (reply.body or {}).items()}

    async def _attached(self) -> RequestLink:
        if self._link is not None and self._link.is_open:
            return self._link
        async with self._attaching:
            if self._link is None or not self._link.is_open:
                transport = await self._reconnector.authorized(self.entity)
                name = self._reconnector.link_name(self._address)
                link = RequestLink(transport, self._address, self.entity, name)
                await link.attached()
                self._link = link
            return self._link


def _session_field(session: str | None) -> dict[str, object]:
    return {} if session is None else {"session-id": session}


def _schedule_entry(raw: bytes) -> dict[str, object]:
    fields = read_routing_fields(raw)
    entry: dict[str, object] = {"message": raw, "message-id": fields.message_id}
    if fields.group_id is not None:
        entry["session-id"] = fields.group_id
    if fields.partition_key is not None:
        entry["partition-key"] = fields.partition_key
    return entry


def _deferred_message(entry: Mapping[str, Any], peek_lock: bool) -> ReceivedMessage:
    token = entry.get("lock-token")
    raw_token = token.bytes_le if isinstance(token, UUID) else None
    return ReceivedMessage(entry["message"], raw_token, is_settled=not peek_lock)
