"""The audit (L3): reads a ledger and peeks at the backlog, compares both, and records what it saw. Moves no message.

`twinbus.ledger.audit_rules` decides. This module reads, peeks, waits between two looks, and writes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twinbus.backlog import TRANSFER_SEGMENT, FailureKind, backlog_queue_paths, failure_kind, was_refused
from twinbus.connect import Management, ReceivedMessage, ServiceBusConnection, ServiceBusError
from twinbus.ledger import (
    AUDIT_WORDS,
    AUDITED,
    LISTED_SUMS,
    OK,
    SILENCE,
    AuditFindings,
    AuditMove,
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
    unfinished_writers,
    why_undecided,
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
LISTED_WORDS: Final = ("absent", "come_again", "unconfirmed", "redirected", "not_looked_at")
"""The words of an audit whose messages are listed."""


ListedMessages = Sequence[tuple[MessageKey, int]]
"""Messages in order, each with its number of copies."""


@dataclass(frozen=True, slots=True)
class AuditSummary:
    """What an audit found, as it is shown. The audit in this process and the audit on Spark both have one."""

    sums: Mapping[str, int]
    """The words of the balance, after what the audit recorded."""
    listed: Mapping[str, ListedMessages]
    """The words of the balance that are listed by message."""
    missing: tuple[str, ...]
    """As in `AuditResult`."""
    counts: Mapping[str, int]
    """For each of the AUDIT_WORDS, the number of copies."""
    messages: Mapping[str, ListedMessages]
    """The words of the audit that are listed by message."""
    queues: tuple[str, ...]
    seen: int
    """Messages in the queues, in the last look."""
    dead_letters: int
    looks: int
    peeks: int
    seconds: float

    @property
    def judgement(self) -> Judgement:
        """The verdict on the ledger (L6)."""
        return judge_ledger(self.sums, self.missing)


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What an audit in this process found."""

    findings: AuditFindings
    balance: Balance
    """The balance of the ledger with what the audit recorded."""
    missing: tuple[str, ...]
    """Reasons why the ledger is not proven: entries are missing. With a reason, absent messages are not called lost."""
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

    @property
    def summary(self) -> AuditSummary:
        return AuditSummary(
            self.sums,
            {name: sorted(getattr(self.balance, name).items()) for name in LISTED_SUMS},
            self.missing,
            {name: getattr(self.findings, name).total() for name in AUDIT_WORDS},
            {name: sorted(getattr(self.findings, name).items()) for name in LISTED_WORDS},
            self.queues,
            self.look.messages,
            self.look.dead_letters,
            self.looks,
            self.peeks,
            self.seconds,
        )


@dataclass(frozen=True, slots=True)
class AuditedQueues:
    """The backlog queues that an audit looks at, and their longest lock duration."""

    queues: tuple[str, ...]
    lock_duration: timedelta = BACKLOG_LOCK

    def and_named(self, named: Iterable[str]) -> tuple[str, ...]:
        """Returns these queues, and the queues that a ledger names in lower case."""
        return tuple(
            sorted(({queue: queue for queue in named} | {queue.lower(): queue for queue in self.queues}).values())
        )


def primaries_of(queues: Iterable[str], primary: str = "") -> set[str]:
    """Returns the names of the primaries of these backlog queues, and the name `primary`, in lower case."""
    named = {queue.rpartition(f"/{TRANSFER_SEGMENT}/")[0] for queue in queues}
    return {name for name in (*named, primary.lower()) if name}


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
    the first. `silence` has the meaning of the argument of `dead_writers`; the default is SILENCE, but then a writer of
    which only copied segments are here never counts as dead.
    """

    def __init__(
        self,
        connection: ServiceBusConnection,
        ledger: Ledger,
        find_queues: FindQueues,
        *,
        secondary: str,
        primary: str = "",
        silence: timedelta | None = None,
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
        named = before.queues(self._secondary)
        audited = await self._find_queues(primaries_of(named, self._primary))
        queues = audited.and_named(named)
        look = first = await self._look(queues)
        after, missing, unshipped = await self._read()
        findings = compare_with_backlog(before, first, after, None, namespace=self._secondary)
        looks, peeks = 1, first.peeks
        if findings.needs_second_look:
            seconds = audited.lock_duration.total_seconds()
            if second_look is not None:
                second_look(seconds)
            await self._pause(seconds)
            queues = audited.and_named(after.queues(self._secondary))
            look = await self._look(queues)
            after, missing, unshipped = await self._read()
            findings = compare_with_backlog(
                before, first, after, look, namespace=self._secondary, missing=[*missing, *unshipped]
            )
            looks, peeks = 2, peeks + look.peeks
        record_audit(
            self._ledger,
            findings.moves,
            {word: getattr(findings, word).total() for word in AUDIT_WORDS},
            secondary=self._secondary,
            primary=self._primary,
            queues=len(queues),
            looks=looks,
            seen=look.messages,
            dead_letters=look.dead_letters,
        )
        if findings.moves:
            after, missing, unshipped = await self._read()
        # If every message was seen, it does not matter that a writer may have more entries elsewhere.
        missing += unshipped if findings.absent or findings.redirected else ()
        missing += why_undecided(findings.redirected.total())
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
        for is_dead_letters in (False, True):
            address = queue + _DEAD_LETTERS if is_dead_letters else queue
            management = self._connection.management(queue, address=address)
            start = 0
            try:
                while page := await self._peek(management, queue, start, look):
                    for message in page:
                        destination = f"{primary}/{destination_of(message.raw) or ''}".lower()
                        key = MessageKey(destination, id_text(message.message_id))
                        look.seen[key] += 1
                        look.dead[key] += is_dead_letters
                    if is_dead_letters:
                        look.dead_letters += len(page)
                    else:
                        look.messages += len(page)
                    last = page[-1].sequence_number or 0
                    # In a partitioned queue the upper bits are the partition. Whether a peek goes on from partition to
                    # partition is not documented.
                    look.is_partial |= last >= _FIRST_OF_A_PARTITION
                    start = last + 1
            finally:
                await management.close()

    async def _peek(self, management: Management, queue: str, start: int, look: BacklogLook) -> list[ReceivedMessage]:
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
        look.peeks += 1
        return page

    def _record_peek(self, queue: str, size: int, began: float, result: str = OK, cause: str | None = None) -> None:
        seconds = time.monotonic() - began
        self._ledger.done(
            Stage.PEEK_BACKLOG, self._secondary, queue, (), size, seconds=seconds, result=result, cause=cause
        )


def record_audit(
    ledger: Ledger,
    moves: Iterable[AuditMove],
    counts: Mapping[str, int],
    *,
    secondary: str,
    primary: str,
    queues: int,
    looks: int,
    seen: int,
    dead_letters: int,
) -> None:
    """Records what an audit saw: the moves, and one `audited` entry with the counts."""
    for one, ids in grouped_moves(moves):
        values = [id_value(text) for text in ids]
        ledger.moved(one.move, values, one.source, one.message.destination, one.reason, broker_at=one.broker_at)
    facts = {"queues": queues, "looks": looks, "seen": seen, "dead_letters": dead_letters, **counts}
    ledger.state(AUDITED, {"secondary": secondary, **facts}, pair=primary)


def read_with_problems(directory: Path, silence: timedelta | None = None) -> tuple[LedgerReading, list[str], list[str]]:
    """Return a reading of a ledger, the reasons why entries are missing, and the writers with entries elsewhere.

    `silence` is described at `Audit`.
    """
    # Both are read before the entries: a writer may begin a segment, or close, meanwhile.
    dead = dead_writers(directory, silence=SILENCE if silence is None else silence)
    here = WritersHere.find(directory, silence)
    problems: list[LineProblem] = []
    reading = read_for_audit(read_ledger(directory, problems.append), dead)
    unshipped = here.why_unshipped(reading.balance.at_work, dead)
    return reading, [*reading.balance.incomplete, *map(str, problems)], unshipped


@dataclass(frozen=True, slots=True)
class WritersHere:
    """What the files in a ledger's directory show about entries that are elsewhere.

    A writer that has an open segment here has no entries elsewhere: it writes an entry before a message is completed
    (L1). A writer whose last segment is not here has entries elsewhere. A writer that neither ended nor has an open
    segment here may have some.
    """

    open: frozenset[str]
    unfinished: frozenset[str]

    @classmethod
    def find(cls, directory: Path, silence: timedelta | None) -> WritersHere:
        """Looks at the directory. With a `silence`, unfinished writers count as ended after it, as the user wants."""
        is_open = {segment.writer for segment in list_segments(directory) if segment.is_open}
        return cls(frozenset(is_open), frozenset() if silence is not None else unfinished_writers(directory))

    def why_unshipped(self, at_work: Iterable[str], dead: Collection[str]) -> list[str]:
        """Returns a reason for each writer that may have entries elsewhere. `at_work`: those that may still write."""
        return [
            f"{writer} has no open segment here: its last entries may not be shipped yet"
            for writer in sorted({*at_work, *self.unfinished} - (self.open - set(dead)))
            if not writer.startswith(f"{Role.NAMESPACE}-")  # a namespace writes meter readings only
        ]
