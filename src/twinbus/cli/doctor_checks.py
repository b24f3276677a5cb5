"""The checks of `twinbus doctor`: gather facts about both namespaces and a ledger. Changes nothing there.

`twinbus.pairing.findings` decides what the facts mean. A check never raises for what it looks for: a namespace that
cannot be reached, a key that is refused or a folder that cannot be read is a fact.

Over AMQP the checks open sender links without sending, and peek. Peeking locks nothing. So a key's Send and Listen
rights are seen as applications and syphons would see them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

from azure.core.exceptions import AzureError, ResourceNotFoundError

from twinbus.backlog import PATH_PROPERTY, FailureKind, backlog_queue_paths, evidence_of, failure_kind
from twinbus.cli import connections
from twinbus.connect import MessageState, ReceivedMessage, ServiceBusConnection
from twinbus.errors import TwinbusError
from twinbus.ledger import (
    SYPHON_STARTED,
    EntryError,
    Role,
    State,
    dead_writers,
    decode_entry,
    failing_writers,
    list_segments,
)
from twinbus.pairing import (
    Administration,
    CheckFailure,
    Depth,
    EntityProperties,
    FoundQueue,
    Inspection,
    LedgerFolderFacts,
    PrimaryFacts,
    QueueLook,
    SecondaryFacts,
    StateFacts,
    Visibility,
    check_pings,
    clock_of_refusal,
    clock_offset,
    entity_properties,
    inspect_backlog,
    management_failure,
    service_text,
)

# A syphon records its start in one of the first lines of its first segment.
_FIRST_LINES: Final = 100
_ABSENT: Final = "twinbus-doctor-absent-"
# A page of messages that a syphon put aside, and how many pages are read before the search for others ends.
_PAGE: Final = 32
_PAGES: Final = 8
# Kinds of failure that concern one entity. After others, the whole namespace cannot be used.
_OF_ONE_ENTITY: Final = frozenset(
    {
        FailureKind.ENTITY_NOT_FOUND,
        FailureKind.UNAUTHORIZED,
        FailureKind.ENTITY_DISABLED,
        FailureKind.QUOTA_EXCEEDED,
        FailureKind.SERVER_BUSY,
    }
)


@dataclass(frozen=True, slots=True)
class DoctorChecks:
    """What to check: both namespaces, and the name and number of the backlog queues."""

    primary: str
    secondary: str
    name: str
    count: int
    seconds: float
    wait: float

    # --- the primary -------------------------------------------------------------------------------------------------

    async def primary_facts(self, entities: Sequence[str]) -> PrimaryFacts:
        """Open a sender link on each entity; without entities, on one that does not exist: this tests the key alone."""
        host = connections.address("primary", self.primary).authority
        found: dict[str, CheckFailure | None] = {}
        async with connections.access(self.primary, side="primary").connect(timeout=self.seconds) as bus:
            for entity in entities or (_ABSENT + uuid4().hex[:12],):
                refused = await _try_sender(bus, entity)
                if refused is not None and refused.kind not in _OF_ONE_ENTITY:
                    return PrimaryFacts(host, refused)
                found[entity] = refused
        if not entities:
            (answer,) = found.values()
            if answer is None or answer.kind is FailureKind.ENTITY_NOT_FOUND:
                return PrimaryFacts(host)
            if answer.kind is FailureKind.UNAUTHORIZED:
                # The service checks the right before it looks for the entity.
                return PrimaryFacts(host, None, {"any entity": answer}, may_send=False)
            return PrimaryFacts(host, answer)
        refused_rights = [one for one in found.values() if one is not None and one.kind is FailureKind.UNAUTHORIZED]
        return PrimaryFacts(host, None, found, may_send=not refused_rights)

    async def examined_entities(self, facts: PrimaryFacts) -> PrimaryFacts:
        """Add status and size of the entities, which a link does not show: a full entity opens links. Needs Manage."""
        found: dict[str, EntityProperties] = {}
        async with connections.aio_administration(self.primary, self.seconds, side="primary") as administration:
            for entity in facts.entities:
                try:
                    found[entity] = await entity_properties(administration, entity)
                except ResourceNotFoundError:
                    continue
                except (AzureError, OSError) as error:
                    # The other entities would be refused, or as silent.
                    refused = CheckFailure(management_failure(error).kind, service_text(error))
                    return replace(facts, properties=found, properties_failure=refused)
        return replace(facts, properties=found)

    async def pings(self, facts: PrimaryFacts, entity: str | None) -> PrimaryFacts:
        """Test whether the primary hides pings (G3). A scratch queue that took the ping also shows the Send right."""
        async with (
            connections.aio_client(self.primary, side="primary") as client,
            connections.aio_administration(self.primary, self.seconds, side="primary") as administration,
        ):
            found = await check_pings(client, administration, entity=entity, seconds=2 * self.seconds)
        sent = found.visibility is not Visibility.UNKNOWN
        return replace(facts, pings=found, may_send=True if sent and facts.may_send is None else facts.may_send)

    # --- the secondary -----------------------------------------------------------------------------------------------

    def inspected(self, administration: Administration) -> SecondaryFacts:
        """List the backlog queues with their properties, and compare the clocks. Blocks."""
        host = connections.address("secondary", self.secondary).authority
        try:
            inspection = inspect_backlog(administration, self.name, self.count)
            return SecondaryFacts(host, inspection=inspection, clock=clock_offset(administration))
        except (AzureError, OSError) as error:
            failure = management_failure(error)
            refused = CheckFailure(failure.kind, service_text(error))
            return SecondaryFacts(host, management=refused, clock=clock_of_refusal(error))

    async def looked_at(self, facts: SecondaryFacts) -> SecondaryFacts:
        """Add what AMQP shows: whether the key may send and listen, and which messages wait."""
        async with connections.access(self.secondary, side="secondary").connect(timeout=self.seconds) as bus:
            if facts.inspection is None:
                facts = await self._found_over_amqp(bus, facts)
            else:
                facts = await self._send_tested(bus, facts, facts.inspection)
            if facts.failure is not None or facts.inspection is None:
                return facts
            return await self._messages_seen(bus, facts, facts.inspection)

    async def _send_tested(
        self, bus: ServiceBusConnection, facts: SecondaryFacts, inspection: Inspection
    ) -> SecondaryFacts:
        usable = [queue.path for queue in inspection.queues if all(one.property != "status" for one in queue.losing)]
        path = (usable or [*backlog_queue_paths(self.name, 1)])[0]
        refused = await _try_sender(bus, path)
        if refused is not None and refused.kind not in _OF_ONE_ENTITY:
            return replace(facts, failure=refused)
        if refused is not None and refused.kind is FailureKind.ENTITY_NOT_FOUND:
            return facts
        return replace(facts, send=refused)

    async def _found_over_amqp(self, bus: ServiceBusConnection, facts: SecondaryFacts) -> SecondaryFacts:
        """Find the backlog queues without the management API: open a sender link on every path."""
        queues, missing = list[FoundQueue](), list[str]()
        for path in backlog_queue_paths(self.name, self.count):
            refused = await _try_sender(bus, path)
            if refused is not None and refused.kind is FailureKind.ENTITY_NOT_FOUND:
                missing.append(path)
                continue
            if refused is not None and refused.kind not in _OF_ONE_ENTITY:
                return replace(facts, failure=refused)
            facts = replace(facts, send=facts.send or refused)
            queues.append(FoundQueue(path, Depth()))
        inspection = Inspection(self.name, facts.host, tuple(queues), tuple(missing), (), ())
        return replace(facts, inspection=inspection, counted=False)

    async def _messages_seen(
        self, bus: ServiceBusConnection, facts: SecondaryFacts, inspection: Inspection
    ) -> SecondaryFacts:
        """Look twice at the oldest message of every queue of the pair that may hold messages."""
        own = [queue for queue in (*inspection.queues, *inspection.extras) if queue.depth.total or not facts.counted]
        now = time.time() - (facts.clock or 0.0)
        first, counted = list[FirstLook](), dict[str, FoundQueue]()
        for queue in own or inspection.queues[:1]:
            try:
                found = await first_look(bus, queue.path, now)
                dead = 0 if facts.counted else len(await _dead_letters(bus, queue.path))
            except TwinbusError as error:
                failure = _failure_of(error)
                facts = replace(facts, listen=facts.listen or failure)
                if failure.kind in _OF_ONE_ENTITY:
                    continue
                # The others would be as silent, and each costs a timeout.
                break
            first.append(found)
            if not facts.counted:
                depth = replace(queue.depth, active=int(found.number is not None), dead_lettered=dead)
                counted[queue.path] = replace(queue, depth=depth)
        queues = tuple(counted.get(queue.path, queue) for queue in inspection.queues)
        facts = replace(facts, inspection=replace(inspection, queues=queues), look_seconds=self.wait)
        if any(look.number is not None for look in first):
            await asyncio.sleep(self.wait)
        return replace(facts, looks=tuple([await second_look(bus, look) for look in first]))


# --- one link, one peek ----------------------------------------------------------------------------------------------


async def _try_sender(bus: ServiceBusConnection, entity: str) -> CheckFailure | None:
    """Open and close a sender link. Returns the reason if this fails."""
    try:
        sender = await bus.sender(entity)
        await sender.close()
    except TwinbusError as error:
        return _failure_of(error)
    return None


def _failure_of(error: TwinbusError) -> CheckFailure:
    kind = failure_kind(error)
    if "ServiceBusAuthenticationError" in evidence_of(error).names and kind is FailureKind.UNAUTHORIZED:
        # `$cbs` refused the token with the same condition as a link that needs another right.
        kind = FailureKind.AUTHENTICATION
    detail = getattr(error, "description", "") or str(error)
    return CheckFailure(kind, detail)


class FirstLook(NamedTuple):
    """The first look at a queue. `number` is the sequence number of the oldest message that no syphon put aside."""

    look: QueueLook
    number: int | None


async def first_look(bus: ServiceBusConnection, queue: str, now: float) -> FirstLook:
    """Peek until a message is found that no syphon put aside. `now` is the broker's time."""
    aside = Counter[str]()
    management = bus.management(queue)
    start, size = 0, 1
    for _ in range(_PAGES):
        page = await management.peek(start, size)
        for message in page:
            if message.state is MessageState.ACTIVE:
                enqueued = message.enqueued_time
                age = 0.0 if enqueued is None else max(0.0, now - enqueued.timestamp())
                look = QueueLook(queue, _destination(message), age, aside=tuple(aside.items()))
                return FirstLook(look, message.sequence_number)
            if message.state is MessageState.DEFERRED:
                aside[_destination(message)] += 1
        if not page:
            break
        start, size = (page[-1].sequence_number or 0) + 1, _PAGE
    return FirstLook(QueueLook(queue, aside=tuple(aside.items())), None)


async def second_look(bus: ServiceBusConnection, first: FirstLook) -> QueueLook:
    """Return the look with the answer whether its oldest message is still in its place."""
    if first.number is None:
        return first.look
    try:
        page = await bus.management(first.look.queue).peek(first.number, 1)
    except TwinbusError:
        return first.look
    there = any(one.sequence_number == first.number and one.state is MessageState.ACTIVE for one in page)
    return first.look._replace(moved=not there)


async def _dead_letters(bus: ServiceBusConnection, queue: str) -> list[ReceivedMessage]:
    return await bus.management(queue, address=f"{queue}/$DeadLetterQueue").peek(0, _PAGE)


def _destination(message: ReceivedMessage) -> str:
    return str(message.application_properties.get(PATH_PROPERTY, "no destination"))


# --- the ledger ------------------------------------------------------------------------------------------------------


def ledger_facts(directory: Path) -> LedgerFolderFacts:
    """Look at the folder of a ledger: whether it can be read and written, who writes, and the free space."""
    path = str(directory)
    try:
        if not directory.is_dir():
            return LedgerFolderFacts(path, "It is no directory." if directory.exists() else "It does not exist.")
        segments = list(list_segments(directory))
        for segment in segments:
            with segment.path.open("rb"):
                pass
        dead = dead_writers(directory)
        writers = {segment.writer for segment in segments}
        free = shutil.disk_usage(directory).free
    except FileNotFoundError:
        # A writer sealed a segment meanwhile.
        return ledger_facts(directory)
    except OSError as error:
        return LedgerFolderFacts(path, f"{error.filename or path}: {error.strerror}.")
    if not os.access(directory, os.W_OK | os.X_OK):
        return LedgerFolderFacts(path, "This user may not write there.")
    alive = sorted(writer for writer in writers - dead if writer.partition("-")[0] == Role.SYPHON)
    first = {one.writer: one.path for one in sorted(segments, key=lambda one: one.number, reverse=True)}
    unshared = tuple(writer for writer in alive if _runs_without_state(first[writer]))
    return LedgerFolderFacts(
        path, None, bool(segments), tuple(failing_writers(directory)), tuple(alive), free, unshared
    )


def _runs_without_state(segment: Path) -> bool:
    """Return whether a syphon recorded in its first segment that it reads no shared state. False if it is not known."""
    try:
        with segment.open("rb") as file:
            for line in itertools.islice(file, _FIRST_LINES):
                entry = decode_entry(line)
                if isinstance(entry, State) and entry.event == SYPHON_STARTED:
                    return entry.facts.get("state") is False
    except (OSError, EntryError):
        # The segment was sealed meanwhile, or its line is being written.
        return False
    return False


async def state_facts(state: str, name: str, secondary: str, seconds: float) -> StateFacts:
    """Look at the shared state (S16)."""
    async with connections.shared_state(state, name, secondary, seconds) as shared:
        location = str(shared.location)
        try:
            found = await shared.read()
        except FileNotFoundError:
            # No process has written there yet.
            return StateFacts(location, is_missing=shared.location.is_missing())
        except Exception as error:
            return StateFacts(location, " ".join(str(error).split()) or type(error).__name__)
    return StateFacts(
        location,
        found.unreadable[0] if found.unreadable else None,
        found.state.held_names(),
        tuple(found.state.failovers.values()),
        time.time(),
    )
