"""Receive everything at the destinations, and everything left in the backlog, and enter it into the accounts."""

from __future__ import annotations

import asyncio
from typing import Final

from tests.chaos.entities import PLACES, QUEUES, SESSION_IDS, SESSIONS, body_of, session_of
from tests.chaos.message_accounts import MessageAccounts
from twinbus.connect import RECEIVE_AND_DELETE, ReceivedMessage, ServiceBusConnection, connect

_WAIT_SECONDS: Final = 0.1
_AT_A_TIME: Final = 1000


async def receive_all(books: MessageAccounts, primary: str, secondary: str) -> None:
    async with connect(primary) as bus, connect(secondary) as away, asyncio.TaskGroup() as group:
        for places in PLACES.values():
            for place in places:
                for session in SESSION_IDS if place == SESSIONS else (None,):
                    group.create_task(_receive(books, bus, place, session))
        for queue in QUEUES:
            for address in (queue, f"{queue}/$DeadLetterQueue"):
                group.create_task(_look(books, away, queue, address))


async def _receive(books: MessageAccounts, bus: ServiceBusConnection, place: str, session: str | None) -> None:
    receiver = await bus.receiver(place, mode=RECEIVE_AND_DELETE, session=session)
    while messages := await receiver.receive(_AT_A_TIME, _WAIT_SECONDS):
        for message in messages:
            books.received(place, str(message.message_id), _fault(message, place))


def _fault(message: ReceivedMessage, place: str) -> str | None:
    name = str(message.message_id)
    if message.body != body_of(name):
        return f"body {message.body[:40]!r}"
    if message.application_properties:
        return f"properties {message.application_properties}"
    if place == SESSIONS and message.session_id != session_of(name):
        return f"session {message.session_id}"
    return None


async def _look(books: MessageAccounts, bus: ServiceBusConnection, queue: str, address: str) -> None:
    left = await bus.management(queue, address=address).peek(0, _AT_A_TIME)
    books.wrong += [f"{message.message_id!s}: is left in {address}" for message in left]
