"""What is to be said about a secondary's backlog queues (P6): depth, differing properties, extras, orphans.

What differs is decided here from what was found; `clean` removes empty extras one by one, and nothing else ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, StrEnum
from typing import Any, Final, NamedTuple
from uuid import uuid4

from azure.core.exceptions import ResourceNotFoundError
from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient

from twinbus.backlog import (
    TRANSFER_SEGMENT,
    backlog_queue_index,
    backlog_queue_paths,
    classify,
    evidence_of,
    extra_backlog_queues,
)
from twinbus.pairing.administration import Administration, AioAdministration
from twinbus.pairing.message_copies import ping_message
from twinbus.pairing.provisioning import LONGEST, PROPERTIES

# What P5 leaves at its default and a backlog queue cannot do without: a diverted message has no session id.
DEFAULTS: Final[Mapping[str, object]] = {
    "requires_session": False,
    "requires_duplicate_detection": False,
    "forward_to": None,
    "forward_dead_lettered_messages_to": None,
    "status": "Active",
}
_SPANS: Final = {LONGEST: timedelta(days=10675199), "PT1M": timedelta(minutes=1)}
_COUNTS: Final = (
    "active_message_count",
    "dead_letter_message_count",
    "scheduled_message_count",
    "transfer_message_count",
    "transfer_dead_letter_message_count",
)


class PropertyDifference(NamedTuple):
    property: str
    wanted: str
    found: str


@dataclass(frozen=True, slots=True)
class Depth:
    """Messages in a queue. `other` are scheduled or in transfer."""

    active: int = 0
    dead_lettered: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.active + self.dead_lettered + self.other


@dataclass(frozen=True, slots=True)
class FoundQueue:
    """A backlog queue of this primary, or (an orphan, as far as this pair knows) of another one."""

    path: str
    depth: Depth
    differences: tuple[PropertyDifference, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspection:
    """`queues` are those senders of this primary use; `extras` have an index of the count or more (P6)."""

    primary: str
    secondary: str
    queues: tuple[FoundQueue, ...]
    missing: tuple[str, ...]
    extras: tuple[FoundQueue, ...]
    orphans: tuple[FoundQueue, ...]

    @property
    def problems(self) -> list[str]:
        """What an operator should mend."""
        told = [f"{path} is missing: `twinbus provision` creates it" for path in self.missing]
        for queue in self.queues:
            told += (f"{queue.path}: {d.property} is {d.found}, not {d.wanted}" for d in queue.differences)
        told += (
            f"{extra.path} holds {extra.depth.total} messages, and senders no longer use it: a syphon empties it"
            for extra in self.extras
            if extra.depth.total
        )
        return told


# --- looking ---------------------------------------------------------------------------------------------------------


def inspect_backlog(administration: Administration, name: str, count: int) -> Inspection:
    """Looks at every queue of the secondary; alters nothing. Raises the client's errors."""
    client = administration.client
    settings = {str(queue.name): queue for queue in administration.ask(client.list_queues)}
    figures = {str(queue.name): queue for queue in administration.ask(client.list_queues_runtime_properties)}

    def found(path: str) -> FoundQueue:
        return FoundQueue(path, _depth(figures.get(path)), differences(settings[path]))

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
    """Backlog queues of other primaries: of a pair that shares this secondary, or of one that is no more."""
    found = []
    for path in paths:
        owner, _, index = path.rpartition(f"/{TRANSFER_SEGMENT}/")
        if owner and index.isascii() and index.isdigit() and owner.lower() != name.lower():
            found.append(path)
    return sorted(found, key=str.lower)


def differences(queue: Any) -> tuple[PropertyDifference, ...]:
    """What of a queue's properties is not as a backlog queue's should be."""
    wanted = {**PROPERTIES, **DEFAULTS}
    pairs = ((name, value, _plain(getattr(queue, name))) for name, value in wanted.items())
    return tuple(
        PropertyDifference(name, str(value), str(found)) for name, value, found in pairs if _differs(value, found)
    )


def _differs(wanted: object, found: object) -> bool:
    if isinstance(wanted, str) and wanted in _SPANS:
        span = _SPANS[wanted]
        # The longest span has more digits than a timedelta: the SDK rounds it.
        return not isinstance(found, timedelta) or (found < span if wanted == LONGEST else found != span)
    return (found or None) != (wanted or None)


def _plain(found: object) -> object:
    return found.value if isinstance(found, Enum) else found


def _depth(figures: Any) -> Depth:
    if figures is None:
        return Depth()
    active, dead, *other = (getattr(figures, name) or 0 for name in _COUNTS)
    return Depth(active, dead, sum(other))


# --- cleaning --------------------------------------------------------------------------------------------------------


class Cleaned(StrEnum):
    REMOVED = "removed"
    KEPT = "kept: it holds messages"
    GONE = "gone already"


def clean_extra(administration: Administration, name: str, count: int, path: str) -> Cleaned:
    """Remove one extra if it is empty. Nothing can come in between the last look and the removal.

    It takes no more sends before it is looked at; where it is not empty it becomes again what it was.
    """
    if extra_backlog_queues(name, count, [path]) != [path]:
        raise ValueError(f"{path} is no extra backlog queue of {name}")
    client = administration.client
    try:
        queue = administration.ask(client.get_queue, path)
        if _look(administration, path).total:
            return Cleaned.KEPT
        before, queue.status = queue.status, "SendDisabled"
        administration.ask(client.update_queue, queue)
        if _look(administration, path).total:
            queue.status = before
            administration.ask(client.update_queue, queue)
            return Cleaned.KEPT
        administration.ask(client.delete_queue, path)
    except ResourceNotFoundError:
        return Cleaned.GONE
    return Cleaned.REMOVED


def _look(administration: Administration, path: str) -> Depth:
    return _depth(administration.ask(administration.client.get_queue_runtime_properties, path))


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
