"""Whether a primary hides pings (G3), found out with one: in a scratch queue that goes at the end, or in a queue named.

Only `doctor` does this. What a pair makes of it is its option `ping`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final
from uuid import uuid4

from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient

from twinbus.pairing.administration import AioAdministration
from twinbus.pairing.failures import classify, evidence_of
from twinbus.pairing.pings import ping_message

SCRATCH: Final = "twinbus-doctor-"
_MARKER: Final = "twinbus-doctor"


class Visibility(StrEnum):
    HIDDEN = "hidden"
    VISIBLE = "visible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PingCheck:
    visibility: Visibility
    detail: str

    @property
    def advice(self) -> str:
        match self.visibility:
            case Visibility.HIDDEN:
                return 'ping="message" can be used: receivers never see a ping.'
            case Visibility.VISIBLE:
                return 'Keep ping="link" (the default on such a service): receivers would be given pings.'
            case Visibility.UNKNOWN:
                return 'Keep ping="link" until it is known.'


async def check_pings(
    client: ServiceBusClient, administration: AioAdministration, *, entity: str | None, seconds: float = 20.0
) -> PingCheck:
    """Never raises: what went wrong is the detail of UNKNOWN."""
    try:
        async with asyncio.timeout(seconds):
            if entity is not None:
                return await _in_queue(client, entity, of_ours=False)
            async with _scratch(administration) as path:
                return await _in_queue(client, path, of_ours=True)
    except Exception as error:
        kind = "timeout" if isinstance(error, TimeoutError) else classify(evidence_of(error))
        text = " ".join(str(error).split())[:200]
        return PingCheck(Visibility.UNKNOWN, f"it could not be tried ({kind}{f': {text}' if text else ''})")


@asynccontextmanager
async def _scratch(administration: AioAdministration) -> AsyncIterator[str]:
    path = f"{SCRATCH}{uuid4().hex[:12]}"
    # Should the removal below never come, the service removes it.
    await administration.ask(administration.client.create_queue, path, auto_delete_on_idle=timedelta(minutes=5))
    try:
        yield path
    finally:
        await administration.ask(administration.client.delete_queue, path)


async def _in_queue(client: ServiceBusClient, path: str, *, of_ours: bool) -> PingCheck:
    token = uuid4().hex
    # In a queue of ours it lives longer than G1's second: a slow look would otherwise see nothing and prove nothing.
    ping = ping_message()
    ping.message_id = token
    if of_ours:
        ping.time_to_live = timedelta(minutes=1)
    async with client.get_queue_sender(path) as sender, client.get_queue_receiver(path) as receiver:
        await sender.send_messages(ping)
        if of_ours:
            # What comes after it is seen: then the ping would be too.
            await sender.send_messages(ServiceBusMessage(_MARKER, message_id=_MARKER))
        seen = [str(message.message_id) for message in await receiver.peek_messages(max_message_count=100)]
    if token in seen:
        return PingCheck(Visibility.VISIBLE, f"a ping sent to {path} was seen there")
    if not of_ours:
        return PingCheck(
            Visibility.UNKNOWN, f"a ping sent to {path} was not seen, but a receiver may have been quicker"
        )
    if _MARKER not in seen:
        return PingCheck(Visibility.UNKNOWN, f"what was sent to {path} was not seen there in time")
    return PingCheck(Visibility.HIDDEN, f"a ping sent to {path} was accepted and not seen; a message after it was")
