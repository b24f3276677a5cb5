"""The checks of `twinbus doctor --conformance`: what Twinbus assumes about a namespace, observed in scratch entities.

Each assumption is a row of `ASSUMPTIONS`: a name, what a namespace shows if the assumption is right, and a probe that
returns what the namespace shows. Both are short texts, and they are compared as texts. A local namespace shows the
expected text in every row: tests compare it. On another namespace, a difference is a result, not an error.

`Scratch` makes the entities, counts what the probes cost, and removes the entities at the end. If the process is killed
first, the service removes most of them after five idle minutes; an entity that forwards may stay.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import uuid4

from azure.core.exceptions import AzureError, HttpResponseError, ResourceNotFoundError
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import MessageSizeExceededError
from azure.servicebus.management import SqlRuleFilter

from twinbus.amqp import DELIVERY_ANNOTATIONS, Properties, build_message, split_sections
from twinbus.cli import connections
from twinbus.connect import (
    JWT_TYPE,
    NEXT_AVAILABLE,
    RECEIVE_AND_DELETE,
    ReceivedMessage,
    ServiceBusConnection,
    ServiceBusError,
    Token,
)
from twinbus.ledger import billable_units
from twinbus.message import Message
from twinbus.pairing import PING_CONTENT_TYPE, AioAdministration, service_text

PREFIX: Final = "twinbus-conformance-"
_IDLE: Final = timedelta(minutes=5)  # the shortest that the service allows
_LOCK: Final = timedelta(seconds=5)
_PATIENCE: Final = 20.0
_AT_A_TIME: Final = 4
_ACCEPTED: Final = "accepted"
_TRANSFER_DEAD_LETTERS: Final = "/$Transfer/$DeadLetterQueue"


class Observation(NamedTuple):
    """One assumption, and what the namespace showed."""

    check: str
    expected: str
    observed: str

    @property
    def agrees(self) -> bool:
        return self.expected == self.observed


@dataclass(slots=True)
class Conformance:
    """The result: all observations, what they cost, and the entities that could not be removed."""

    namespace: str
    tier: str | None = None
    """The tier that the namespace reports, such as Standard or Premium. None until it was asked."""
    observations: list[Observation] = field(default_factory=list)
    operations: int = 0
    units: int = 0
    left: list[str] = field(default_factory=list)

    @property
    def differences(self) -> list[Observation]:
        return [one for one in self.observations if not one.agrees]


class Scratch:
    """Entities of one run, the clients to use them, and the count of operations (M2)."""

    def __init__(
        self, connection_string: str, bus: ServiceBusConnection, administration: AioAdministration, seconds: float
    ) -> None:
        self.connection_string = connection_string
        self.bus = bus
        self.administration = administration
        self.seconds = seconds
        self.prefix = f"{PREFIX}{uuid4().hex[:8]}-"
        self.operations = self.units = 0
        self._entities: dict[str, bool] = {}
        """The names of the entities that were made or perhaps made, and whether each is a topic."""
        self._creations: set[asyncio.Future[Any]] = set()

    def count(self, operations: int = 1, size: int = 0) -> None:
        """Count operations of messages with `size` bytes each."""
        self.operations += operations
        self.units += billable_units(operations, operations * size)

    async def queue(self, name: str, **properties: Any) -> str:
        path = self.prefix + name
        self._entities[path] = False
        properties.setdefault("auto_delete_on_idle", _IDLE)
        await self._created(self.administration.request(self.administration.client.create_queue, path, **properties))
        return path

    async def topic(self, name: str, **subscription: Any) -> str:
        """Make a topic with the subscription `s`."""
        path = self.prefix + name
        self._entities[path] = True

        async def create(**request: Any) -> None:
            # The SDK's `create_topic` takes no options of the request, so a client gets them.
            made = connections.aio_administration(self.connection_string, self.seconds, side="primary", **request)
            async with made:
                await made.client.create_topic(path, auto_delete_on_idle=_IDLE)

        await self._created(self.administration.request(create))
        client = self.administration.client
        await self.administration.request(client.create_subscription, path, "s", **subscription)
        return path

    async def _created(self, creation: Awaitable[Any]) -> None:
        """Wait for the creation of an entity. If the waiting is cancelled, the creation goes on: `remove` waits for it.

        Without an answer, the entity could appear after its removal.
        """
        going_on = asyncio.ensure_future(creation)
        self._creations.add(going_on)
        await asyncio.shield(going_on)

    async def send(self, path: str, *messages: Message | bytes) -> None:
        self.count(len(messages))
        sender = await self.bus.sender(path)
        try:
            await sender.send(messages)
        finally:
            await sender.close()

    @asynccontextmanager
    async def receiving(self, path: str, count: int = 1, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
        """Yield a receiver and up to `count` messages that it received."""
        self.count(max(1, count))
        receiver = await self.bus.receiver(path, prefetch=0, **options)
        try:
            yield receiver, await receiver.receive(count, _PATIENCE) if count else []
        finally:
            await receiver.close()

    async def peeked(self, path: str, sub_queue: str = "", count: int = 10) -> list[ReceivedMessage]:
        self.count()
        management = self.bus.management(path, address=path + sub_queue)
        try:
            return await management.peek(0, count)
        finally:
            await management.close()

    async def first_in(self, path: str, sub_queue: str) -> ReceivedMessage | None:
        """Wait until a sub-queue has a message, and return it; None if it has none in time."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            if found := await self.peeked(path, sub_queue):
                return found[0]
            await asyncio.sleep(0.5)
        return None

    async def remove(self) -> list[str]:
        """Remove all entities. Returns the paths of those that could not be removed."""
        await asyncio.gather(*self._creations, return_exceptions=True)
        client, left = self.administration.client, list[str]()
        places = asyncio.Semaphore(_AT_A_TIME)

        async def removed(path: str, is_topic: bool) -> None:
            async with places:
                try:
                    await self.administration.request(client.delete_topic if is_topic else client.delete_queue, path)
                except ResourceNotFoundError:
                    pass
                except Exception:
                    left.append(path)

        await asyncio.gather(*(removed(path, is_topic) for path, is_topic in self._entities.items()))
        return sorted(left)


async def _outcome(call: Awaitable[Any]) -> str:
    """Return "accepted", or the condition or the HTTP status with which the service refuses the call."""
    try:
        await call
    except HttpResponseError as error:
        return str(error.status_code)
    except ServiceBusError as error:
        return error.condition or type(error).__name__
    return _ACCEPTED


# --- pings and what a message looks like -----------------------------------------------------------------------------


async def _ping(scratch: Scratch) -> str:
    path = await scratch.queue("ping")
    ping = Message(content_type=PING_CONTENT_TYPE, message_id="ping", time_to_live=timedelta(minutes=1))
    await scratch.send(path, ping, Message(b"after", message_id="after"))
    seen = [one.message_id for one in await scratch.peeked(path)]
    return "visible" if "ping" in seen else "hidden" if "after" in seen else "neither was seen"


async def _message_without_id(scratch: Scratch) -> str:
    path = await scratch.queue("id")
    await scratch.send(path, build_message(data=b"x"))
    [found] = await scratch.peeked(path)
    return "gets an id" if found.message_id else "has none"


async def _sent_on(scratch: Scratch) -> str:
    """Send what the Python SDK writes when it sends on a message that it received."""
    path = await scratch.queue("sent-on")
    raw = build_message(
        message_annotations={"x-opt-partition-key": b"key", "x-opt-locked-until": 1, "x-opt-sequence-number": 9},
        delivery_annotations={"x-opt-lock-token": uuid4()},
        properties=Properties(message_id=b"id"),
        data=b"x",
    )
    await scratch.send(path, raw)
    [found] = await scratch.peeked(path)
    key = found.annotations.get("x-opt-partition-key")
    kept = [name for name in ("x-opt-locked-until",) if name in found.annotations]
    return f"accepted; key {key!r}, {'old lock kept' if kept else 'no old lock'}"


async def _scheduled_by_a_number(scratch: Scratch) -> str:
    """Send a scheduled time as the SDKs write it when they send on a scheduled message: as a number."""
    path = await scratch.queue("scheduled")
    later = int(time.time() + 3600) * 1000
    await scratch.send(path, build_message(message_annotations={"x-opt-scheduled-enqueue-time": later}, data=b"x"))
    [found] = await scratch.peeked(path)
    return found.state.name.lower()


async def _order_of_sections(scratch: Scratch) -> str:
    """Send delivery annotations after the body, as the Python SDK does, and a footer before it, as JavaScript does.

    Look at the bodies and at the footer. Delivery annotations are for the next hop, and need not come back.
    """
    path, body = await scratch.queue("sections"), build_message(data=b"x")
    annotations = build_message(delivery_annotations={"x-opt-hop": "hop"}, data=b"x").removesuffix(body)
    footer = build_message(data=b"x", footer={"x-opt-sum": "sum"}).removeprefix(body)
    await scratch.send(path, body + annotations)
    await scratch.send(path, footer + body)
    found = await scratch.peeked(path)
    bodies, footers = [bytes(one.body) for one in found], [dict(one.footer) for one in found]
    kept = bodies == [b"x", b"x"] and footers == [{}, {"x-opt-sum": "sum"}]
    return "accepted; bodies and footer kept" if kept else f"accepted; bodies {bodies}, footers {footers}"


async def _deleted_on_receive(scratch: Scratch) -> str:
    path = await scratch.queue("delete")
    await scratch.send(path, Message(b"x"))
    async with scratch.receiving(path, mode=RECEIVE_AND_DELETE) as (_, [found]):
        spans = split_sections(found.raw).spans
        present = f"with {dict(found.delivery_annotations)}" if found.delivery_annotations else "empty"
        return present if DELIVERY_ANNOTATIONS in spans else "absent"


async def _full_batch(scratch: Scratch) -> str:
    """Fill a batch up to the limit of the SDK. The SDK then writes more before it."""
    path = await scratch.queue("batch")
    async with connections.aio_client(scratch.connection_string) as client, client.get_queue_sender(path) as sender:
        batch = await sender.create_message_batch()
        batch.add_message(ServiceBusMessage("1", message_id="i" * 128, session_id="s" * 128, partition_key="s" * 128))
        for size in (20_000, 1_000, 10, 1):
            try:
                while True:
                    batch.add_message(ServiceBusMessage(b"x" * size))
            except MessageSizeExceededError:
                pass
        scratch.count(len(batch), batch.size_in_bytes // len(batch))
        try:
            await sender.send_messages(batch)
        except Exception as error:
            return type(error).__name__
    return _ACCEPTED


# --- conditions ------------------------------------------------------------------------------------------------------


async def _missing_entity(scratch: Scratch) -> str:
    return await _outcome(scratch.send(scratch.prefix + "missing", Message(b"x")))


async def _wrong_key(scratch: Scratch) -> str:
    """Use a wrong key; for a namespace that is given by its host, a token that nobody signed."""
    wrong = re.sub("(SharedAccessKey)=[^;]+", r"\1=d3Jvbmc=", scratch.connection_string)
    access = connections.access(wrong, side="primary")
    if wrong == scratch.connection_string:
        access = replace(access, source=_UnsignedToken())
    path = await scratch.queue("key")
    async with access.connect(timeout=scratch.seconds) as bus:
        return await _outcome(bus.sender(path))


class _UnsignedToken:
    async def token(self, audience: str) -> Token:
        return Token("bm8.c2lnbmF0dXJl.here", JWT_TYPE, int(time.time()) + 600)


async def _disabled(scratch: Scratch) -> str:
    path, client = await scratch.queue("disabled"), scratch.administration.client
    described = await scratch.administration.request(client.get_queue, path)
    described.status = "SendDisabled"
    await scratch.administration.request(client.update_queue, described)
    return await _outcome(scratch.send(path, Message(b"x")))


async def _no_session_id(scratch: Scratch) -> str:
    return await _outcome(scratch.send(await scratch.queue("needs-session", requires_session=True), Message(b"x")))


async def _locked_session(scratch: Scratch) -> str:
    path = await scratch.queue("session", requires_session=True)
    async with scratch.receiving(path, 0, session="s"):
        return await _outcome(scratch.bus.receiver(path, session="s"))


async def _no_free_session(scratch: Scratch) -> str:
    path = await scratch.queue("no-session", requires_session=True)
    scratch.count()
    return await _outcome(scratch.bus.receiver(path, session=NEXT_AVAILABLE, session_timeout=1.0))


async def _lost_lock(scratch: Scratch) -> str:
    path = await scratch.queue("lock", lock_duration=_LOCK)
    await scratch.send(path, Message(b"x"))
    async with scratch.receiving(path) as (receiver, messages):
        await asyncio.sleep(_LOCK.total_seconds() + 2)
        scratch.count()
        return await _outcome(receiver.complete(messages))


# --- limits ----------------------------------------------------------------------------------------------------------


async def _largest_message(scratch: Scratch) -> str:
    sender = await scratch.bus.sender(await scratch.queue("largest"))
    try:
        return str(sender.max_message_size)
    finally:
        await sender.close()


def _refused(**fields: Any) -> Callable[[Scratch], Awaitable[str]]:
    async def probe(scratch: Scratch) -> str:
        return await _outcome(scratch.send(await scratch.queue(f"refused-{uuid4().hex[:6]}"), Message(b"x", **fields)))

    return probe


def _created(name: str, **properties: Any) -> Callable[[Scratch], Awaitable[str]]:
    async def probe(scratch: Scratch) -> str:
        return await _outcome(scratch.queue(name, **properties))

    return probe


# --- forwarding ------------------------------------------------------------------------------------------------------


async def _forward_with_sessions(scratch: Scratch) -> str:
    target = await scratch.queue("session-target")
    return await _outcome(scratch.queue("session-source", requires_session=True, forward_to=target))


async def _forward_to_itself(scratch: Scratch) -> str:
    path = await scratch.queue("itself")
    return await _outcome(_forward(scratch, path))


async def _forward(scratch: Scratch, path: str) -> None:
    client = scratch.administration.client
    described = await scratch.administration.request(client.get_queue, path)
    described.forward_to = path
    await scratch.administration.request(client.update_queue, described)


async def _forwarded_to_itself(scratch: Scratch) -> str:
    path = await scratch.queue("round")
    await _forward(scratch, path)
    await scratch.send(path, Message(b"x"))
    found = await scratch.first_in(path, _TRANSFER_DEAD_LETTERS)
    return "no transfer dead letter" if found is None else str(found.dead_letter_reason)


async def _forward_to_own_topic(scratch: Scratch) -> str:
    path, client = await scratch.topic("own-topic"), scratch.administration.client
    described = await scratch.administration.request(client.get_subscription, path, "s")
    described.forward_to = path
    return await _outcome(scratch.administration.request(client.update_subscription, path, described))


# --- clock, duplicates, dead letters, rules --------------------------------------------------------------------------


async def _lock_clock(scratch: Scratch) -> str:
    """Compare locked-until minus lock duration with the enqueued time: both are times of the broker (L5)."""
    path = await scratch.queue("clock", lock_duration=timedelta(seconds=30))
    began = time.monotonic()
    await scratch.send(path, Message(b"x"))
    async with scratch.receiving(path) as (_, [found]):
        passed = time.monotonic() - began
        delivered = found.locked_until - timedelta(seconds=30)
        off = (delivered - found.enqueued_time).total_seconds()
    return "delivery time" if -1 <= off <= passed + 1 else f"{off:+.1f} s after enqueuing, {passed:.1f} s here"


async def _duplicates(scratch: Scratch) -> str:
    path = await scratch.queue("duplicates", requires_duplicate_detection=True)
    await scratch.send(path, Message(b"1", message_id="id"))
    await scratch.send(path, Message(b"2", message_id="id"))
    return f"{len(await scratch.peeked(path))} of 2 kept"


async def _ids_of_two_types(scratch: Scratch) -> str:
    path = await scratch.queue("types", requires_duplicate_detection=True)
    await scratch.send(path, Message(b"1", message_id="id"))
    await scratch.send(path, Message(b"2", message_id=b"id"))
    return f"{len(await scratch.peeked(path))} of 2 kept"


async def _reason_of(scratch: Scratch, path: str) -> str:
    found = await scratch.first_in(path, "/$DeadLetterQueue")
    return "no dead letter" if found is None else str(found.dead_letter_reason)


async def _expired(scratch: Scratch) -> str:
    path = await scratch.queue("expiry", dead_lettering_on_message_expiration=True)
    await scratch.send(path, Message(b"x", time_to_live=timedelta(seconds=1)))
    await asyncio.sleep(2)
    scratch.count()
    receiver = await scratch.bus.receiver(path, prefetch=0)  # the service looks for expired messages on receive
    await receiver.receive(1, 1.0)
    await receiver.close()
    return await _reason_of(scratch, path)


async def _delivered_too_often(scratch: Scratch) -> str:
    path = await scratch.queue("deliveries", max_delivery_count=1)
    await scratch.send(path, Message(b"x"))
    async with scratch.receiving(path) as (receiver, messages):
        scratch.count()
        await receiver.abandon(messages)
    return await _reason_of(scratch, path)


async def _unknown_system_property(scratch: Scratch) -> str:
    path, client = await scratch.topic("rule"), scratch.administration.client
    rule = SqlRuleFilter("sys.Nonsense = 1")
    return await _outcome(scratch.administration.request(client.create_rule, path, "s", "r", filter=rule))


async def _time_without_zone(scratch: Scratch) -> str:
    path, client = await scratch.topic("zone"), scratch.administration.client
    moment = datetime(2020, 7, 5, 11, 12, 13)  # noqa: DTZ001 - the zone is what is tested
    rule = SqlRuleFilter("at = @at", parameters={"@at": moment})
    await scratch.administration.request(client.create_rule, path, "s", "r", filter=rule)
    kept = (await scratch.administration.request(client.get_rule, path, "s", "r")).filter
    value = (kept.parameters or {}).get("@at") if isinstance(kept, SqlRuleFilter) else None
    return "without zone" if value == moment else f"{value}"


class Assumption(NamedTuple):
    name: str
    expected: str
    probe: Callable[[Scratch], Awaitable[str]]


ASSUMPTIONS: Final = (
    Assumption("ping", "hidden", _ping),
    Assumption("message_without_id", "gets an id", _message_without_id),
    Assumption("message_sent_on", "accepted; key 'key', no old lock", _sent_on),
    Assumption("scheduled_time_as_number", "scheduled", _scheduled_by_a_number),
    Assumption("order_of_sections", "accepted; bodies and footer kept", _order_of_sections),
    Assumption("delivery_annotations_without_lock", "empty", _deleted_on_receive),
    Assumption("full_batch", _ACCEPTED, _full_batch),
    Assumption("missing_entity", "amqp:not-found", _missing_entity),
    Assumption("wrong_key", "amqp:unauthorized-access", _wrong_key),
    Assumption("disabled_entity", "com.microsoft:entity-disabled", _disabled),
    Assumption("no_session_id", "amqp:not-allowed", _no_session_id),
    Assumption("locked_session", "com.microsoft:session-cannot-be-locked", _locked_session),
    Assumption("no_free_session", "com.microsoft:timeout", _no_free_session),
    Assumption("lost_lock", "com.microsoft:message-lock-lost", _lost_lock),
    Assumption("largest_message", "262144", _largest_message),
    Assumption(
        "large_property",
        "com.microsoft:argument-out-of-range",
        _refused(application_properties={"large": "x" * 33 * 1024}),
    ),
    Assumption("long_message_id", "com.microsoft:argument-error", _refused(message_id="x" * 129)),
    Assumption(
        "partition_key_and_session", "com.microsoft:argument-error", _refused(partition_key="a", session_id="b")
    ),
    Assumption("lock_of_six_minutes", "400", _created("long-lock", lock_duration=timedelta(minutes=6))),
    Assumption(
        "duplicate_window_of_eight_days",
        "400",
        _created(
            "long-window",
            requires_duplicate_detection=True,
            duplicate_detection_history_time_window=timedelta(days=8),
        ),
    ),
    Assumption("forward_to_missing_entity", "400", _created("no-target", forward_to=f"{PREFIX}missing")),
    Assumption("forward_with_sessions", _ACCEPTED, _forward_with_sessions),
    Assumption("forward_to_itself", _ACCEPTED, _forward_to_itself),
    Assumption("forward_to_own_topic", _ACCEPTED, _forward_to_own_topic),
    Assumption("forwarded_to_itself", "MaxTransferHopCountExceeded", _forwarded_to_itself),
    Assumption("lock_clock", "delivery time", _lock_clock),
    Assumption("duplicate", "1 of 2 kept", _duplicates),
    Assumption("duplicate_with_id_of_another_type", "2 of 2 kept", _ids_of_two_types),
    Assumption("expired_message", "TTLExpiredException", _expired),
    Assumption("delivered_too_often", "MaxDeliveryCountExceeded", _delivered_too_often),
    Assumption("rule_with_unknown_system_property", _ACCEPTED, _unknown_system_property),
    Assumption("rule_with_time_without_zone", "without zone", _time_without_zone),
)


async def observe(connection_string: str, seconds: float, result: Conformance) -> None:
    """Observe every assumption on a namespace. Removes the scratch entities, also after an error or a cancellation.

    Raises OperatorError if no scratch entity can be made. What a probe cannot observe is a difference, with the reason.
    """
    async with (
        connections.access(connection_string, side="primary").connect(timeout=seconds) as bus,
        connections.aio_administration(connection_string, seconds, side="primary") as administration,
    ):
        scratch = Scratch(connection_string, bus, administration, seconds)
        places = asyncio.Semaphore(_AT_A_TIME)

        async def observed(assumption: Assumption) -> Observation:
            async with places:
                return Observation(assumption.name, assumption.expected, await _probed(assumption, scratch))

        try:
            await _begin(scratch, result)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(observed(assumption)) for assumption in ASSUMPTIONS]
            result.observations = [task.result() for task in tasks]
        finally:
            removal = asyncio.ensure_future(scratch.remove())
            try:
                result.left = await asyncio.shield(removal)  # the first signal cancels the waiting only
            except asyncio.CancelledError:
                result.left = await removal
                raise
            finally:
                result.operations, result.units = scratch.operations, scratch.units


async def _begin(scratch: Scratch, result: Conformance) -> None:
    """Make the first entity, and read the tier of the namespace. Raises OperatorError."""
    administration = scratch.administration
    try:
        await scratch.queue("first")
        properties = await administration.request(administration.client.get_namespace_properties)
    except (AzureError, OSError) as error:
        raise connections.access_error(result.namespace, error) from error
    result.tier = properties.messaging_sku


async def _probed(assumption: Assumption, scratch: Scratch) -> str:
    try:
        async with asyncio.timeout(3 * scratch.seconds + 2 * _PATIENCE):
            return await assumption.probe(scratch)
    except TimeoutError:
        return "not observed: no answer in time"
    except Exception as error:  # whatever a namespace makes a probe do, the others go on
        return f"not observed: {type(error).__name__}: {service_text(error)}"
