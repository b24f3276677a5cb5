"""Inspect a secondary and a primary for `twinbus doctor`: backlog queues (P6), and whether pings are hidden (G3).

`inspect_backlog` compares the backlog queues with the properties that they should have; `findings` decides what this
means. `clock_offset` compares this machine's clock with the secondary's. `clean_extra` removes an extra
queue if it is empty. `check_pings` sends one ping, and removes the scratch queue that it made. No other function
removes a queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from email.utils import parsedate_to_datetime
from enum import Enum, StrEnum
from typing import Any, Final, NamedTuple
from uuid import uuid4

from azure.core.exceptions import ResourceNotFoundError
from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient

from twinbus.backlog import (
    TRANSFER_SEGMENT,
    FailureKind,
    backlog_queue_index,
    backlog_queue_paths,
    classify,
    evidence_of,
    extra_backlog_queues,
)
from twinbus.pairing.administration import Administration, AioAdministration, service_text
from twinbus.pairing.findings import EntityProperties
from twinbus.pairing.message_copies import ping_message
from twinbus.pairing.provisioning import LONGEST, PROPERTIES, LosingProperty, losing_properties

# Properties that P5 leaves at the service's default. A backlog queue needs these values: for instance, a diverted
# message has no session id.
DEFAULTS: Final[Mapping[str, object]] = {
    "requires_session": False,
    "requires_duplicate_detection": False,
    "forward_to": None,
    "forward_dead_lettered_messages_to": None,
    "status": "Active",
}
_SPANS: Final = {LONGEST: timedelta(days=10675199), "PT1M": timedelta(minutes=1)}
_DEPTH_FIELDS: Final = (
    "active_message_count",
    "dead_letter_message_count",
    "scheduled_message_count",
    "transfer_message_count",
    "transfer_dead_letter_message_count",
)


class PropertyDifference(NamedTuple):
    """A property of a backlog queue that is not as it should be."""

    property: str
    wanted: str
    found: str


@dataclass(frozen=True, slots=True)
class Depth:
    """The number of messages in a queue. `other` is the number of scheduled messages and of those in transfer."""

    active: int = 0
    dead_lettered: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.active + self.dead_lettered + self.other


@dataclass(frozen=True, slots=True)
class FoundQueue:
    """A backlog queue on the secondary, of this primary or of another primary (an *orphan* here).

    `size` and `capacity` are the used and the allowed bytes; 0 if not known.
    """

    path: str
    depth: Depth
    differences: tuple[PropertyDifference, ...] = ()
    losing: tuple[LosingProperty, ...] = ()
    size: int = 0
    capacity: int = 0


@dataclass(frozen=True, slots=True)
class Inspection:
    """The backlog queues on the secondary. Senders of this primary use `queues`.

    `extras` are queues of this primary whose index is not below the configured count (P6). `orphans` are queues of
    other primaries.
    """

    primary: str
    secondary: str
    queues: tuple[FoundQueue, ...]
    missing: tuple[str, ...]
    extras: tuple[FoundQueue, ...]
    orphans: tuple[FoundQueue, ...]


# --- inspecting ------------------------------------------------------------------------------------------------------


def inspect_backlog(administration: Administration, name: str, count: int) -> Inspection:
    """Return which backlog queues the secondary has. Changes nothing. Raises the errors of the management API."""
    client = administration.client
    settings = {str(queue.name): queue for queue in administration.request(client.list_queues)}
    figures = {str(queue.name): queue for queue in administration.request(client.list_queues_runtime_properties)}

    def found(path: str) -> FoundQueue:
        queue, figure = settings[path], figures.get(path)
        return FoundQueue(
            path,
            _depth(figure),
            differences(queue),
            losing_properties(queue),
            getattr(figure, "size_in_bytes", None) or 0,
            (queue.max_size_in_megabytes or 0) * 2**20,
        )

    by_index = {backlog_queue_index(name, path): path for path in settings}
    wanted = backlog_queue_paths(name, count)
    return Inspection(
        primary=name,
        secondary=administration.namespace,
        queues=tuple(found(by_index[index]) for index in range(count) if index in by_index),
        missing=tuple(path for index, path in enumerate(wanted) if index not in by_index),
        extras=tuple(found(path) for path in extra_backlog_queues(name, count, settings)),
        orphans=tuple(found(path) for path in orphans(name, settings)),
    )


def orphans(name: str, paths: Iterable[str]) -> list[str]:
    """Return the backlog queues of other primaries. Another primary shares this secondary, or exists no more."""
    found = []
    for path in paths:
        owner, _, index = path.rpartition(f"/{TRANSFER_SEGMENT}/")
        if owner and index.isascii() and index.isdigit() and owner.lower() != name.lower():
            found.append(path)
    return sorted(found, key=str.lower)


def differences(queue: Any) -> tuple[PropertyDifference, ...]:
    """Return the properties of a queue that differ from those that a backlog queue should have."""
    wanted = {**PROPERTIES, **DEFAULTS}
    pairs = ((name, value, _plain(getattr(queue, name))) for name, value in wanted.items())
    return tuple(
        PropertyDifference(name, str(value), str(found)) for name, value, found in pairs if _differs(value, found)
    )


def _differs(wanted: object, found: object) -> bool:
    if isinstance(wanted, str) and wanted in _SPANS:
        span = _SPANS[wanted]
        # The longest span has more digits than a timedelta, so the SDK rounds it.
        return not isinstance(found, timedelta) or (found < span if wanted == LONGEST else found != span)
    return (found or None) != (wanted or None)


def _plain(found: object) -> object:
    return found.value if isinstance(found, Enum) else found


def _depth(figures: Any) -> Depth:
    if figures is None:
        return Depth()
    active, dead, *other = (getattr(figures, name) or 0 for name in _DEPTH_FIELDS)
    return Depth(active, dead, sum(other))


def clock_offset(administration: Administration) -> float | None:
    """Return by how many seconds this machine's clock is ahead of the namespace's. None if the namespace tells no time.

    The time is in a header of every answer, in whole seconds. Raises the errors of the management API.
    """
    dates: list[str] = []

    def note_date(response: Any, found: Any, _: object) -> Any:
        dates.append(response.http_response.headers.get("Date", ""))
        return found

    before = time.time()
    administration.request(administration.client.get_namespace_properties, cls=note_date)
    here = (before + time.time()) / 2
    return _ahead(dates[-1] if dates else None, here)


def clock_of_refusal(error: Exception) -> float | None:
    """Return the clock offset by the answer with which the management API refused a request; None if it has no time.

    A wrong clock may be the reason of the refusal: the token is signed with an expiry.
    """
    response = getattr(error, "response", None)
    return None if response is None else _ahead(response.headers.get("Date"), time.time())


def _ahead(date: str | None, here: float) -> float | None:
    try:
        # The header is cut to whole seconds: on average half a second is missing.
        return here - parsedate_to_datetime(date or "").timestamp() - 0.5
    except ValueError:
        return None


async def entity_properties(administration: AioAdministration, path: str) -> EntityProperties:
    """Return status and size of a queue or topic.

    Raises ResourceNotFoundError if there is neither, and the other errors of the management API.
    """
    client = administration.client
    found: Any
    figures: Any
    try:
        found = await administration.request(client.get_queue, path)
        figures = await administration.request(client.get_queue_runtime_properties, path)
    except (ResourceNotFoundError, AttributeError):
        # The SDK raises AttributeError if the entity is a topic.
        found = await administration.request(client.get_topic, path)
        figures = await administration.request(client.get_topic_runtime_properties, path)
    capacity = (found.max_size_in_megabytes or 0) * 2**20
    return EntityProperties(str(_plain(found.status)), figures.size_in_bytes or 0, capacity)


# --- cleaning --------------------------------------------------------------------------------------------------------


class Cleaned(StrEnum):
    """What became of an extra backlog queue."""

    REMOVED = "removed"
    KEPT = "kept: it holds messages"
    GONE = "gone already"


def clean_extra(administration: Administration, name: str, count: int, path: str) -> Cleaned:
    """Remove one extra backlog queue if it is empty. Raises ValueError if `path` is not an extra backlog queue.

    The queue is closed to sends before its depth is read, so no message can arrive between reading and removing. A
    queue that is not empty gets its former status back.
    """
    if extra_backlog_queues(name, count, [path]) != [path]:
        raise ValueError(f"{path} is no extra backlog queue of {name}")
    client = administration.client
    try:
        queue = administration.request(client.get_queue, path)
        if _current_depth(administration, path).total:
            return Cleaned.KEPT
        before, queue.status = queue.status, "SendDisabled"
        administration.request(client.update_queue, queue)
        if _current_depth(administration, path).total:
            queue.status = before
            administration.request(client.update_queue, queue)
            return Cleaned.KEPT
        administration.request(client.delete_queue, path)
    except ResourceNotFoundError:
        return Cleaned.GONE
    return Cleaned.REMOVED


def _current_depth(administration: Administration, path: str) -> Depth:
    return _depth(administration.request(administration.client.get_queue_runtime_properties, path))


SCRATCH: Final = "twinbus-doctor-"
_MARKER: Final = "twinbus-doctor"


class Visibility(StrEnum):
    """Whether receivers of the primary see pings (G3)."""

    HIDDEN = "hidden"
    VISIBLE = "visible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PingCheck:
    """The result of `check_pings`."""

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
    """Find out whether receivers of the primary see pings, with a real ping (G3). Never raises: UNKNOWN has the reason.

    The ping goes to the queue `entity`, or to a scratch queue that is removed at the end.
    """
    try:
        async with asyncio.timeout(seconds):
            if entity is not None:
                return await _in_queue(client, entity, scratch=False)
            async with _scratch(administration) as path:
                return await _in_queue(client, path, scratch=True)
    except Exception as error:
        kind = "timeout" if isinstance(error, TimeoutError) else classify(evidence_of(error))
        if kind is FailureKind.ENTITY_NOT_FOUND and entity is not None:
            return PingCheck(Visibility.UNKNOWN, f"queue {entity!r} is not on {client.fully_qualified_namespace}")
        text = service_text(error)
        return PingCheck(Visibility.UNKNOWN, f"the check failed ({kind}{f': {text}' if text else ''})")


@asynccontextmanager
async def _scratch(administration: AioAdministration) -> AsyncIterator[str]:
    path = f"{SCRATCH}{uuid4().hex[:12]}"
    # If this process dies before it removes the queue, the service does.
    await administration.request(administration.client.create_queue, path, auto_delete_on_idle=timedelta(minutes=5))
    try:
        yield path
    finally:
        await administration.request(administration.client.delete_queue, path)


async def _in_queue(client: ServiceBusClient, path: str, *, scratch: bool) -> PingCheck:
    token = uuid4().hex
    # In the scratch queue the ping lives longer than a second (G1): otherwise a slow peek would prove nothing.
    ping = ping_message()
    ping.message_id = token
    if scratch:
        ping.time_to_live = timedelta(minutes=1)
    async with client.get_queue_sender(path) as sender, client.get_queue_receiver(path) as receiver:
        await sender.send_messages(ping)
        if scratch:
            # If the peek returns this later message, it would return the ping too.
            await sender.send_messages(ServiceBusMessage(_MARKER, message_id=_MARKER))
        seen = [str(message.message_id) for message in await receiver.peek_messages(max_message_count=100)]
    if token in seen:
        return PingCheck(Visibility.VISIBLE, f"a ping sent to {path} was seen there")
    if not scratch:
        return PingCheck(
            Visibility.UNKNOWN, f"a ping sent to {path} was not seen, but a receiver may have been quicker"
        )
    if _MARKER not in seen:
        return PingCheck(Visibility.UNKNOWN, f"what was sent to {path} was not seen there in time")
    return PingCheck(Visibility.HIDDEN, f"a ping sent to {path} was accepted and not seen; a message after it was")
