"""The load of one life of the server: all kinds of operations at once, each recorded in the oracle, until the kill.

`oracle` decides what must be true, `killed_server` when the server is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from random import Random

from tests.crash.entities import (
    BURYING,
    COMPLETING,
    DELETED,
    DELETING,
    PLAIN,
    SCHEDULED,
    SESSION_IDS,
    SESSIONS,
    TOPIC,
    UNIQUE,
)
from tests.crash.oracle import EntityOracle, ExpectedMessage, ObservedMessage, Oracle, Sent, Where
from twinbus.connect import (
    NEXT_AVAILABLE,
    RECEIVE_AND_DELETE,
    MessageNotFoundError,
    OperationTimeoutError,
    ReceivedMessage,
    Receiver,
    Sender,
    ServiceBusCommunicationError,
    ServiceBusConnection,
    ServiceBusConnectionError,
    ServiceBusError,
    SessionLockLostError,
    connect,
)
from twinbus.message import Message

# Deep enough that there is always a message to receive, and small enough to inspect quickly.
DEEPEST = 120
TIMEOUT = 30.0
LATEST_DUE_MS = 1200


def now_ms() -> int:
    return round(datetime.now(UTC).timestamp() * 1000)


def sighting(message: ReceivedMessage, where: Where) -> ObservedMessage:
    enqueued = message.enqueued_time
    return ObservedMessage(
        str(message.message_id),
        message.sequence_number or 0,
        where,
        message.body,
        message.delivery_count,
        round(enqueued.timestamp() * 1000) if enqueued is not None else 0,
    )


@contextmanager
def settlement(account: EntityOracle, messages: Sequence[ReceivedMessage], where: Where) -> Iterator[None]:
    """Record a request before it is sent, and its outcome afterwards."""
    ids = [str(message.message_id) for message in messages]
    account.asked(ids, where)
    failed = set(ids)
    try:
        yield
        failed.clear()
    except ServiceBusError as error:
        failed = {str(message.message_id) for message in error.failed} or failed
        raise
    finally:
        account.confirmed([id for id in ids if id not in failed], where)
        account.unanswered([id for id in ids if id in failed], where)


@contextmanager
def sending(oracle: Oracle, sent: Sent) -> Iterator[list[int]]:
    """Record a send. The caller appends the sequence numbers of a schedule request to the list."""
    numbers: list[int] = []
    try:
        yield numbers
    except BaseException:
        oracle.send_unanswered(sent)
        raise
    oracle.send_confirmed(sent, numbers)


class Load:
    """All tasks of one life. `begun` is set after some acknowledgements. `broken` has errors that no kill explains."""

    def __init__(
        self, oracle: Oracle, connection_string: str, life: int, seed: str, unsure: dict[str, Message]
    ) -> None:
        """`unsure` has the unacknowledged messages of the duplicate-detecting queue, of all lives."""
        self.begun = asyncio.Event()
        self.is_dying = False
        self.broken: list[str] = []
        self._oracle = oracle
        self._connection_string = connection_string
        self._seed = seed
        self._unsure = unsure
        self._names = (f"{life}-{number}" for number in count())
        self._holds = count(life * 1_000_000 + 1)
        self._acknowledged = 0

    async def run(self) -> None:
        """Run until every task has lost the server."""
        tasks: list[Callable[[ServiceBusConnection, Random], Awaitable[None]]] = [
            self._send_plain,
            self._send_plain,
            self._receive_plain,
            self._receive_plain,
            self._send_deleted,
            self._receive_deleted,
            self._receive_put_aside,
            self._schedule,
            self._receive_scheduled,
            self._send_to_even_sessions,
            self._send_to_odd_sessions,
            self._receive_sessions,
            self._receive_sessions,
            self._send_unique,
            self._receive_unique,
            self._publish,
            self._receive_completing,
            self._receive_deleting,
            self._receive_burying,
        ]
        async with asyncio.TaskGroup() as group:
            for number, task in enumerate(tasks):
                group.create_task(self._until_broken(task, Random(f"{self._seed}-{number}")))

    async def _until_broken(self, task: Callable[[ServiceBusConnection, Random], Awaitable[None]], rng: Random) -> None:
        # Each task has its own connection, as with the SDK.
        async with connect(self._connection_string, timeout=TIMEOUT) as bus:
            try:
                await task(bus, rng)
            except (ServiceBusConnectionError, ServiceBusCommunicationError, SessionLockLostError) as error:
                if not self.is_dying:
                    self.broken.append(f"{getattr(task, '__name__', task)}: {error!r}")

    # --- parts -------------------------------------------------------------------------------------------------

    def _new(self, entity: str, rng: Random, session: str | None = None) -> Message:
        id = f"{entity}-{next(self._names)}"
        size = rng.choice((0, 100, 1000, 5000, 20_000))  # the largest takes several pages of the store
        return Message(f"{id} {'.' * size}".encode(), message_id=id, session_id=session)

    async def _may_send(self, bus: ServiceBusConnection, entity: str, rng: Random) -> bool:
        """Pause between two steps. Returns whether to send: the entity is not deep yet, or the connection is lost."""
        await asyncio.sleep(rng.random() * 0.004)
        return self._oracle.depth(entity) <= DEEPEST or not bus.is_connected

    def _sent(self, entity: str, messages: Sequence[Message], due: int | None = None) -> Sent:
        return self._oracle.send_asked(entity, [(str(m.message_id), m.body, m.session_id) for m in messages], due)

    def _count(self) -> None:
        self._acknowledged += 1
        if self._acknowledged == 10:
            self.begun.set()

    async def _settle(
        self, receiver: Receiver, account: EntityOracle, messages: Sequence[ReceivedMessage], fate: str
    ) -> None:
        if not messages:
            return
        match fate:
            case "complete":
                with settlement(account, messages, Where.NOWHERE):
                    await receiver.complete(messages)
            case "abandon":
                with settlement(account, messages, Where.ACTIVE):
                    await receiver.abandon(messages)
            case "defer":
                with settlement(account, messages, Where.DEFERRED):
                    await receiver.defer(messages)
            case "dead-letter":
                with settlement(account, messages, Where.DEAD):
                    await receiver.dead_letter(messages, "reason", "description")
            case _:
                raise AssertionError(fate)
        self._count()

    async def _receive(
        self, receiver: Receiver, account: EntityOracle, rng: Random, hold: int = 0, wait: float = 1.0
    ) -> list[ReceivedMessage]:
        messages = await receiver.receive(rng.randint(1, 12), wait)
        for message in messages:
            account.sighted(sighting(message, Where.ACTIVE), hold)
        return messages

    async def _send_batches(self, bus: ServiceBusConnection, entity: str, rng: Random, largest: int) -> None:
        sender = await bus.sender(entity)
        while True:
            if not await self._may_send(bus, entity, rng):
                continue
            messages = [self._new(entity, rng) for _ in range(rng.choice((1, 1, rng.randint(2, largest))))]
            with sending(self._oracle, self._sent(entity, messages)):
                await sender.send(messages)
            self._count()

    async def _receive_forever(self, bus: ServiceBusConnection, name: str, rng: Random, fates: Sequence[str]) -> None:
        account = self._oracle.accounts[name]
        receiver = await bus.receiver(name, prefetch=rng.choice((0, 5, 50)))
        while True:
            messages = await self._receive(receiver, account, rng)
            cut = rng.randint(0, len(messages))
            await self._settle(receiver, account, messages[:cut], rng.choice(fates))
            await self._settle(receiver, account, messages[cut:], rng.choice(fates))

    async def _delete_forever(self, bus: ServiceBusConnection, name: str, rng: Random) -> None:
        account = self._oracle.accounts[name]
        receiver = await bus.receiver(name, mode=RECEIVE_AND_DELETE)
        while True:
            await asyncio.sleep(rng.random() * 0.01)
            asked = rng.randint(1, 10)
            account.outstanding += asked
            messages = await receiver.receive(asked, 1.0)
            for message in messages:
                account.deleted(sighting(message, Where.ACTIVE))
            # `receive` has taken back the unused credit, unless the server is gone.
            if bus.is_connected:
                account.outstanding -= asked - len(messages)
            self._count()

    # --- queues ------------------------------------------------------------------------------------------------

    async def _send_plain(self, bus: ServiceBusConnection, rng: Random) -> None:
        await self._send_batches(bus, PLAIN, rng, 20)

    async def _receive_plain(self, bus: ServiceBusConnection, rng: Random) -> None:
        fates = ("complete", "complete", "complete", "abandon", "defer", "dead-letter")
        await self._receive_forever(bus, PLAIN, rng, fates)

    async def _receive_put_aside(self, bus: ServiceBusConnection, rng: Random) -> None:
        """Receive deferred messages by sequence number, and dead-lettered messages."""
        plain = self._oracle.accounts[PLAIN]
        receiver = await bus.receiver(PLAIN, prefetch=0)
        dead = {name: await bus.receiver(name, prefetch=0, dead_letter=True) for name in (PLAIN, SESSIONS, BURYING)}
        while True:
            await self._receive_deferred(receiver, plain, rng)
            for name, one in dead.items():
                account = self._oracle.accounts[name]
                messages = await one.receive(rng.randint(1, 8), 0.005)
                for message in messages:
                    account.sighted(sighting(message, Where.DEAD))
                await self._settle(one, account, messages, "complete")

    async def _receive_deferred(self, receiver: Receiver, account: EntityOracle, rng: Random) -> None:
        """Receive deferred messages. This task is their only receiver, so all that are known must be there."""
        deferred = [
            entry.numbers[False]
            for entry in account.open.values()
            if entry.known == {Where.DEFERRED} and not entry.settling and entry.session == receiver.session_id
        ]
        if deferred:
            messages = await receiver.receive_deferred(rng.sample(deferred, rng.randint(1, min(4, len(deferred)))))
            for message in messages:
                account.sighted(sighting(message, Where.DEFERRED))
            await self._settle(receiver, account, messages, "complete")

    async def _send_deleted(self, bus: ServiceBusConnection, rng: Random) -> None:
        await self._send_batches(bus, DELETED, rng, 10)

    async def _receive_deleted(self, bus: ServiceBusConnection, rng: Random) -> None:
        await self._delete_forever(bus, DELETED, rng)

    async def _schedule(self, bus: ServiceBusConnection, rng: Random) -> None:
        account = self._oracle.accounts[SCHEDULED]
        sender = await bus.sender(SCHEDULED)
        while True:
            if not await self._may_send(bus, SCHEDULED, rng):
                continue
            due = now_ms() + rng.randint(20, LATEST_DUE_MS)
            messages = [self._new(SCHEDULED, rng) for _ in range(rng.randint(1, 4))]
            with sending(self._oracle, self._sent(SCHEDULED, messages, due)) as numbers:
                numbers.extend(await sender.schedule(messages, datetime.fromtimestamp(due / 1000, UTC)))
            self._count()
            waiting = [entry for entry in account.open.values() if entry.known == {Where.SCHEDULED}]
            if waiting and rng.random() < 0.4:
                await self._cancel(sender, account, rng.choice(waiting))

    async def _cancel(self, sender: Sender, account: EntityOracle, entry: ExpectedMessage) -> None:
        account.asked([entry.id], Where.NOWHERE)
        try:
            await sender.cancel_scheduled([entry.numbers[True]])
        except MessageNotFoundError:
            account.cancel_refused(entry.id, now_ms())
        except BaseException:
            account.unanswered([entry.id], Where.NOWHERE)
            raise
        else:
            account.confirmed([entry.id], Where.NOWHERE)
            self._oracle.figures["cancelled"] += 1
            self._count()

    async def _receive_scheduled(self, bus: ServiceBusConnection, rng: Random) -> None:
        await self._receive_forever(bus, SCHEDULED, rng, ("complete",))

    async def _send_unique(self, bus: ServiceBusConnection, rng: Random) -> None:
        """Send new message ids, ids that may have arrived in an earlier life, and ids that surely arrived."""
        sender = await bus.sender(UNIQUE)
        acknowledged: list[Message] = []
        while True:
            if not await self._may_send(bus, UNIQUE, rng):
                continue
            messages = [self._new(UNIQUE, rng) for _ in range(rng.choice((1, 1, 4)))]
            for known in (list(self._unsure.values()), acknowledged[-20:]):
                if known and rng.random() < 0.5:
                    messages.append(rng.choice(known))
                    self._oracle.figures["ids sent again"] += 1
            self._unsure |= {str(message.message_id): message for message in messages}
            with sending(self._oracle, self._sent(UNIQUE, messages)):
                await sender.send(messages)
            for message in messages:
                self._unsure.pop(str(message.message_id), None)
            acknowledged += messages
            self._count()

    async def _receive_unique(self, bus: ServiceBusConnection, rng: Random) -> None:
        await self._receive_forever(bus, UNIQUE, rng, ("complete",))

    # --- a topic -----------------------------------------------------------------------------------------------

    async def _publish(self, bus: ServiceBusConnection, rng: Random) -> None:
        await self._send_batches(bus, TOPIC, rng, 8)

    async def _receive_completing(self, bus: ServiceBusConnection, rng: Random) -> None:
        await self._receive_forever(bus, COMPLETING, rng, ("complete",))

    async def _receive_deleting(self, bus: ServiceBusConnection, rng: Random) -> None:
        await self._delete_forever(bus, DELETING, rng)

    async def _receive_burying(self, bus: ServiceBusConnection, rng: Random) -> None:
        await self._receive_forever(bus, BURYING, rng, ("complete", "dead-letter"))

    # --- sessions ----------------------------------------------------------------------------------------------

    async def _send_to_even_sessions(self, bus: ServiceBusConnection, rng: Random) -> None:
        await self._send_to_sessions(bus, rng, SESSION_IDS[::2])

    async def _send_to_odd_sessions(self, bus: ServiceBusConnection, rng: Random) -> None:
        await self._send_to_sessions(bus, rng, SESSION_IDS[1::2])

    async def _send_to_sessions(self, bus: ServiceBusConnection, rng: Random, sessions: Sequence[str]) -> None:
        """Send to one session. It is its only sender, so messages must arrive in the order of the sends."""
        sender = await bus.sender(SESSIONS)
        while True:
            if not await self._may_send(bus, SESSIONS, rng):
                continue
            size = rng.choice((1, 1, 6))
            messages = [self._new(SESSIONS, rng, rng.choice(sessions)) for _ in range(size)]
            with sending(self._oracle, self._sent(SESSIONS, messages)):
                await sender.send(messages)
            self._count()

    async def _receive_sessions(self, bus: ServiceBusConnection, rng: Random) -> None:
        while True:
            try:
                receiver = await bus.receiver(SESSIONS, session=NEXT_AVAILABLE, session_timeout=0.5, prefetch=10)
            except OperationTimeoutError:
                continue  # nothing in any free session
            await self._hold(receiver, rng)
            await receiver.close()

    async def _hold(self, receiver: Receiver, rng: Random) -> None:
        account, hold = self._oracle.accounts[SESSIONS], next(self._holds)
        session = receiver.session_id or ""
        account.state_certain(session, await receiver.get_session_state())
        fates = ("complete", "complete", "complete", "abandon", "defer", "dead-letter")
        for _ in range(rng.randint(1, 4)):
            messages = await self._receive(receiver, account, rng, hold, wait=0.02)
            await self._settle(receiver, account, messages, rng.choice(fates))
            if rng.random() < 0.5:
                state = next(self._names).encode()
                account.state_asked(session, state)
                await receiver.set_session_state(state)
                account.state_certain(session, state)
                self._oracle.figures["states set"] += 1
                self._count()
            await self._receive_deferred(receiver, account, rng)
