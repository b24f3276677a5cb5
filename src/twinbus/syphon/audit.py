"""The audit (L3): reads a ledger and peeks at the backlog, compares both, and records what it saw. Moves no message.

`twinbus.ledger.audit_rules` decides. This module reads, peeks, waits between two looks, and writes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twinbus.backlog import TRANSFER_SEGMENT, FailureKind, backlog_queue_paths, failure_kind, was_refused
from twinbus.connect import Management, ReceivedMessage, ServiceBusConnection, ServiceBusError
from twinbus.ledger import (
    AUDITED,
    OK,
    SILENCE,
    AuditFindings,
    BacklogLook,
    Balance,
    Judgement,
    Ledger,
    LedgerReading,
    LineProblem,
    MessageKey,
    Role,
    Stage,
    compare_with_backlog,
    dead_writers,
    grouped_moves,
    id_text,
    id_value,
    judge_ledger,
    list_segments,
    read_for_audit,
    read_ledger,
    result_of_failure,
)
from twinbus.syphon.discovery import ListedDiscovery, is_credential_refused
from twinbus.syphon.translation import destination_of
from twinbus.syphon.transport import PEEK_PAGE_SIZE

if TYPE_CHECKING:
    from twinbus.pairing import AioAdministration

BACKLOG_LOCK: Final = timedelta(minutes=1)
"""Lock duration of the backlog queues that Twinbus makes (P5)."""
_DEAD_LETTERS: Final = "/$DeadLetterQueue"
_DEFAULT_QUEUES: Final = 10
_FIRST_OF_A_PARTITION: Final = 2**48


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What an audit found."""

    findings: AuditFindings
    balance: Balance
    """The balance of the ledger with what the audit recorded."""
    missing: tuple[str, ...]
    """Reasons why entries are missing from the ledger. With a reason, absent messages are not called lost."""
    queues: tuple[str, ...]
    look: BacklogLook
    """The last look."""
    looks: int
    peeks: int
    seconds: float

    @property
    def sums(self) -> dict[str, int]:
        return self.balance.sums()

    @property
    def judgement(self) -> Judgement:
        """The verdict on the ledger (L6)."""
        return judge_ledger(self.sums, self.missing)


@dataclass(frozen=True, slots=True)
class AuditedQueues:
    """The backlog queues that an audit looks at, and their longest lock duration."""

    queues: tuple[str, ...]
    lock_duration: timedelta = BACKLOG_LOCK


async def find_audited_queues(administration: AioAdministration, names: Iterable[str]) -> AuditedQueues:
    """Return the backlog queues of the primaries with these names.

    Without the Manage right, returns the paths of the queues that a pair has by default: an audit takes a queue that
    does not exist for an empty one.
    """
    found: dict[str, float | None] = {}
    for name in sorted(names):
        listed = ListedDiscovery(name, administration)
        try:
            found |= {queue: listed.lock_seconds(queue) for queue in await listed.queues()}
        except Exception as error:
            if not is_credential_refused(error):
                raise
            found |= dict.fromkeys(backlog_queue_paths(name, _DEFAULT_QUEUES))
    seconds = [BACKLOG_LOCK.total_seconds() if one is None else one for one in found.values()]
    return AuditedQueues(tuple(found), timedelta(seconds=max(seconds, default=BACKLOG_LOCK.total_seconds())))


FindQueues = Callable[[Collection[str]], Awaitable[AuditedQueues]]
"""Returns the backlog queues of the primaries with these names."""


class Audit:
    """Compares a ledger with the backlog queues of one secondary. The caller closes the connection and the ledger.

    `secondary` and `primary` are the names of the namespaces in the ledger. `find_queues` is called once, with the name
    `primary` and the names of all primaries whose messages the ledger has on this secondary. Queues that the ledger
    names are looked at too, also if they do not exist any more. The second look begins at least one lock duration after
    the first. `silence` has the meaning of the argument of `dead_writers`.
    """

    def __init__(
        self,
        connection: ServiceBusConnection,
        ledger: Ledger,
        find_queues: FindQueues,
        *,
        secondary: str,
        primary: str = "",
        silence: timedelta = SILENCE,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._connection = connection
        self._ledger = ledger
        self._find_queues = find_queues
        self._secondary = secondary
        self._primary = primary
        self._silence = silence
        self._pause = pause

    async def run(self, second_look: Callable[[float], None] | None = None) -> AuditResult:
        """Run the audit. Calls `second_look` with the seconds to wait, if a second look is needed.

        Raises ServiceBusError if a queue cannot be peeked, and OSError if the ledger cannot be read. A queue that does
        not exist is empty.
        """
        began = time.monotonic()
        before, _, _ = await self._read()
        audited = await self._find_queues(self._primaries(before))
        queues = self._all_queues(audited, before)
        look = first = await self._look(queues)
        after, missing, unshipped = await self._read()
        findings = compare_with_backlog(before, first, after, None, namespace=self._secondary)
        looks, peeks = 1, first.peeks
        if findings.needs_second_look:
            seconds = audited.lock_duration.total_seconds()
            if second_look is not None:
                second_look(seconds)
            await self._pause(seconds)
            queues = self._all_queues(audited, after)
            look = await self._look(queues)
            after, missing, unshipped = await self._read()
            findings = compare_with_backlog(
                before, first, after, look, namespace=self._secondary, missing=[*missing, *unshipped]
            )
            looks, peeks = 2, peeks + look.peeks
        self._record(findings, queues, look, looks)
        if findings.moves:
            after, missing, unshipped = await self._read()
        # Without an absent message, it does not matter that a writer may have more entries elsewhere.
        missing += unshipped if findings.absent else ()
        return AuditResult(
            findings, after.balance, tuple(missing), queues, look, looks, peeks, time.monotonic() - began
        )

    # --- reading -----------------------------------------------------------------------------------------------------

    async def _read(self) -> tuple[LedgerReading, list[str], list[str]]:
        is_written = await self._ledger.flushed()
        reading, missing, unshipped = await asyncio.to_thread(read_with_problems, self._ledger.directory, self._silence)
        if not is_written:
            # Entries of this process are missing: after a drain, these are the deliveries of the syphon.
            missing.append(f"{self._ledger.directory} cannot be written: {self._ledger.failure or 'the disk is slow'}")
        return reading, missing, unshipped

    def _primaries(self, reading: LedgerReading) -> set[str]:
        queues = reading.queues(self._secondary)
        named = {queue.rpartition(f"/{TRANSFER_SEGMENT}/")[0] for queue in queues}
        return {name for name in (*named, self._primary.lower()) if name}

    def _all_queues(self, audited: AuditedQueues, reading: LedgerReading) -> tuple[str, ...]:
        named = {queue: queue for queue in reading.queues(self._secondary)}
        return tuple(sorted((named | {queue.lower(): queue for queue in audited.queues}).values()))

    # --- looking -----------------------------------------------------------------------------------------------------

    async def _look(self, queues: Sequence[str]) -> BacklogLook:
        look = BacklogLook()
        try:
            async with asyncio.TaskGroup() as tasks:
                for queue in queues:
                    tasks.create_task(self._look_at(queue, look))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return look

    async def _look_at(self, queue: str, look: BacklogLook) -> None:
        """Count the messages of a queue, and after that those of its dead-letter queue.

        The order matters: if the broker dead-letters a message during the look, at least one of the two shows it.
        """
        primary = queue.rpartition(f"/{TRANSFER_SEGMENT}/")[0]
        for address in (queue, queue + _DEAD_LETTERS):
            management = self._connection.management(queue, address=address)
            start = 0
            try:
                while page := await self._peek(management, queue, start):
                    look.peeks += 1
                    for message in page:
                        destination = f"{primary}/{destination_of(message.raw) or ''}".lower()
                        look.seen[MessageKey(destination, id_text(message.message_id))] += 1
                    if address == queue:
                        look.messages += len(page)
                    else:
                        look.dead_letters += len(page)
                    last = page[-1].sequence_number or 0
                    # In a partitioned queue the upper bits are the partition. Whether a peek goes on from partition to
                    # partition is not documented.
                    look.is_partial |= last >= _FIRST_OF_A_PARTITION
                    start = last + 1
            finally:
                await management.close()

    async def _peek(self, management: Management, queue: str, start: int) -> list[ReceivedMessage]:
        """Return the next page of messages, and record the peek (M1). A queue that does not exist has no page."""
        began = time.monotonic()
        try:
            page = await management.peek(start, PEEK_PAGE_SIZE)
        except ServiceBusError as error:
            kind = failure_kind(error)
            if kind is FailureKind.ENTITY_NOT_FOUND:  # the link was refused, so nothing was requested
                return []
            self._record_peek(queue, 0, began, *result_of_failure(kind, refused=was_refused(error)))
            raise
        self._record_peek(queue, sum(len(message.raw) for message in page), began)
        return page

    def _record_peek(self, queue: str, size: int, began: float, result: str = OK, cause: str | None = None) -> None:
        seconds = time.monotonic() - began
        self._ledger.done(
            Stage.PEEK_BACKLOG, self._secondary, queue, (), size, seconds=seconds, result=result, cause=cause
        )

    # --- writing -----------------------------------------------------------------------------------------------------

    def _record(self, findings: AuditFindings, queues: Sequence[str], look: BacklogLook, looks: int) -> None:
        for one, ids in grouped_moves(findings.moves):
            values = [id_value(text) for text in ids]
            self._ledger.moved(one.move, values, one.source, one.message.destination, one.reason)
        words = ("there", "absent", "come_again", "unconfirmed", "found", "moving", "not_looked_at")
        counts = {word: getattr(findings, word).total() for word in words}
        seen = {"seen": look.messages, "dead_letters": look.dead_letters}
        self._ledger.state(
            AUDITED,
            {"secondary": self._secondary, "queues": len(queues), "looks": looks, **seen, **counts},
            pair=self._primary,
        )


def read_with_problems(directory: Path, silence: timedelta = SILENCE) -> tuple[LedgerReading, list[str], list[str]]:
    """Return a reading of a ledger, the reasons why entries are missing, and the writers with entries elsewhere.

    A writer that has an open segment here has no entries elsewhere: it writes an entry before a message is completed
    (L1). A writer that neither ended nor has an open segment here may have entries that are not shipped yet. It counts
    as ended after `silence`.
    """
    # Both are read before the entries: a writer may begin a segment, or close, meanwhile.
    dead = dead_writers(directory, silence=silence)
    alive = {segment.writer for segment in list_segments(directory) if segment.is_open} - dead
    problems: list[LineProblem] = []
    reading = read_for_audit(read_ledger(directory, problems.append), dead)
    unshipped = [
        f"{writer} has no open segment here: its last entries may not be shipped yet"
        for writer in reading.balance.at_work
        if writer not in alive and not writer.startswith(f"{Role.NAMESPACE}-")  # a namespace writes meter readings only
    ]
    return reading, [*reading.balance.incomplete, *map(str, problems)], unshipped
