"""Two namespaces with a backlog, for tests of the verbs `syphon` and `deadletter`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from twinbus.amqp import Properties, build_message
from twinbus.backlog import PATH_PROPERTY, backlog_queue_path
from twinbus.connect import ReceivedMessage, ServiceBusConnection, connect
from twinbus.pairing import Administration, provisioning_steps
from twinbus.testing import LocalNamespaces

T = TypeVar("T")
_numbers = itertools.count()
ENOUGH = 40
CONFIG = {
    "namespaces": [
        {"name": "primary", "queues": [{"name": f"orders-{number}"} for number in range(ENOUGH)]},
        {
            "name": "secondary",
            "authorization_rules": [
                {"name": "all", "claims": ["Manage"], "primary_key": "key-of-all"},
                {"name": "app", "claims": ["Send", "Listen"], "primary_key": "key-of-app"},
            ],
        },
    ]
}


class Backlog:
    """The backlog queues and the destination of one test."""

    def __init__(self, namespaces: LocalNamespaces, count: int = 2) -> None:
        number = next(_numbers)
        self.name = f"contoso-{number}"
        self.destination = f"orders-{number % ENOUGH}"
        self.queues = [backlog_queue_path(self.name, index) for index in range(count)]
        self._primary, self._secondary = (namespaces[name].connection_string for name in ("primary", "secondary"))
        with Administration.from_connection_string(self._secondary) as administration:
            administration.run(provisioning_steps(self.queues))

    @property
    def environment(self) -> dict[str, str]:
        return {
            "TWINBUS_PRIMARY_CONNECTION_STRING": self._primary,
            "TWINBUS_SECONDARY_CONNECTION_STRING": self._secondary,
            "TWINBUS_PRIMARY_NAME": self.name,
        }

    @property
    def weaker(self) -> dict[str, str]:
        """The same environment with a key that has no right to list the secondary's queues."""
        weak = self._secondary.replace("=all;", "=app;").replace("key-of-all", "key-of-app")
        return {**self.environment, "TWINBUS_SECONDARY_CONNECTION_STRING": weak}

    def divert(
        self,
        *ids: str,
        path: str | None = "",
        queue: int = 0,
        properties: Mapping[str, object] | None = None,
        **sections: Any,
    ) -> None:
        """Divert messages. `path` is their destination: "" for this test's destination, None for no destination."""
        where = {} if path is None else {PATH_PROPERTY: path or self.destination}
        raws = [
            build_message(
                **{"data": b"body", **sections},
                properties=Properties(message_id=one),
                application_properties={**where, "colour": "red", **(properties or {})},
            )
            for one in ids
        ]
        self._on(self._secondary, lambda bus: _send(bus, self.queues[queue], raws))

    def dead_letter(self, *ids: str, reason: str = "NoDestination", description: str = "why", queue: int = 0) -> None:
        """Dead-letter messages of the queue."""
        self._on(self._secondary, lambda bus: _dead_letter(bus, self.queues[queue], ids, reason, description))

    def arrived(self, path: str | None = None) -> list[ReceivedMessage]:
        return self._on(self._primary, lambda bus: bus.management(path or self.destination).peek(0, 500))

    def left(self) -> list[ReceivedMessage]:
        return [one for queue in self.queues for one in self.peek(queue)]

    def dead(self) -> list[ReceivedMessage]:
        return [one for queue in self.queues for one in self.peek(queue, f"{queue}/$DeadLetterQueue")]

    def peek(self, queue: str, address: str | None = None) -> list[ReceivedMessage]:
        return self._on(self._secondary, lambda bus: bus.management(queue, address=address).peek(0, 500))

    def _on(self, text: str, call: Callable[[ServiceBusConnection], Awaitable[T]]) -> T:
        async def work() -> T:
            async with connect(text, timeout=10) as bus:
                return await call(bus)

        return asyncio.run(work())


async def _send(bus: ServiceBusConnection, queue: str, raws: Sequence[bytes]) -> None:
    async with await bus.sender(queue) as sender:
        await sender.send(raws)


async def _dead_letter(bus: ServiceBusConnection, queue: str, ids: Sequence[str], reason: str, why: str) -> None:
    async with await bus.receiver(queue, prefetch=0) as receiver:
        waiting, others = set(ids), []
        while waiting:
            for one in await receiver.receive(100, 10):
                if one.message_id in waiting:
                    waiting.discard(str(one.message_id))
                    await receiver.dead_letter([one], reason, why)
                else:
                    others.append(one)
        await receiver.release(others)


def ids_of(messages: Sequence[ReceivedMessage]) -> list[str]:
    return sorted(str(one.message_id) for one in messages)
