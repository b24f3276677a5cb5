"""The balance of a ledger: accepted = delivered + in backlog + dead-lettered + unknown + lost, message by message.

For each message the entries are only added up to sums and latest times, so the order in which the entries are read does
not matter. Times of different writers are compared by the broker's clock, where the entries have it (L5). An operation
whose outcome is unknown may or may not have happened. Such operations are counted in separate sums (`maybe_…`), and the
verdict on a message is true in both cases.

An intent without an outcome is in flight while its writer lives. If its writer is dead (L1), nobody will ever record
the outcome: the message may have been delivered, and its copy in the backlog may have been completed. So a dead
writer's intent to deliver counts as perhaps delivered and perhaps removed, and the message is `unknown`, until a later
entry shows that the copy was in the backlog after that: another delivery, a dead letter, a message that was kept or
found.

This module is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from twinbus.ledger.entries import (
    OK,
    UNKNOWN,
    Closed,
    Dropped,
    Ended,
    Entry,
    Gap,
    Intent,
    Move,
    Movement,
    Operation,
    Outcome,
    Role,
    SegmentHeader,
    Stage,
)


class MessageKey(NamedTuple):
    """Identifies a message: the entity that the message is meant for, and the message id."""

    destination: str
    """`namespace/entity` on the primary, in lower case: paths are case-insensitive."""
    id: str


class _StageEffect(NamedTuple):
    """What a successful operation of a stage adds to the sums of each of its messages."""

    accepted: int = 0
    delivered: int = 0
    stored: int = 0
    removed: int = 0
    sees: bool = False
    """Whether the operation, with any result, shows that a copy was in the backlog when the operation began."""


STAGE_EFFECTS: Final[Mapping[Stage, _StageEffect]] = {
    Stage.SEND_PRIMARY: _StageEffect(accepted=1, delivered=1),
    Stage.SCHEDULE_PRIMARY: _StageEffect(accepted=1, delivered=1),
    Stage.SEND_BACKLOG: _StageEffect(accepted=1, stored=1),
    Stage.RESUBMIT_BACKLOG: _StageEffect(stored=1),
    Stage.RETURN_PRIMARY: _StageEffect(delivered=1, sees=True),
    Stage.COMPLETE_BACKLOG: _StageEffect(removed=1),
}
SIGHTINGS: Final = frozenset({Move.DEAD_LETTERED, Move.KEPT, Move.FOUND, Move.REAPPEARED})
"""Moves that show that a copy was in the backlog, or in its dead-letter queue, at the time of the move."""
BALANCE_SUMS: Final = (
    "accepted",
    "delivered",
    "in_backlog",
    "dead_lettered",
    "unknown",
    "lost",
    "duplicated",
    "possibly_duplicated",
    "unconfirmed",
)
"""Names of the sums of a balance, in the order in which they are shown."""
LISTED_SUMS: Final = ("lost", "unknown", "duplicated", "possibly_duplicated", "unconfirmed")
"""Names of the sums whose messages are listed by id."""
_NEVER: Final = -(2**63)
# The durability with which a writer that was killed has written everything that a caller was told.
_PROCESS: Final = "process"


@dataclass(slots=True)
class _MessageSums:
    """How often one message was accepted, delivered, stored and so on. `maybe_…`: operations of unknown outcome."""

    accepted: int = 0
    delivered: int = 0
    maybe_delivered: int = 0
    stored: int = 0
    maybe_stored: int = 0
    removed: int = 0
    maybe_removed: int = 0
    dead_lettered: int = 0
    doubted: int = 0
    redirected: int = 0
    found: int = 0
    doubted_at: int = _NEVER
    """When a copy was last perhaps removed from the backlog: when such a completion ended, or a delivery began."""
    seen_at: int = _NEVER
    """When a copy was last seen in the backlog."""

    def add(self, effect: _StageEffect, result: str) -> None:
        if result == OK:
            self.accepted += effect.accepted
            self.delivered += effect.delivered
            self.stored += effect.stored
            self.removed += effect.removed
        elif result == UNKNOWN:
            self.maybe_delivered += effect.delivered
            self.maybe_stored += effect.stored
            self.maybe_removed += effect.removed


@dataclass(slots=True)
class Balance:
    """The balance: for each word, the messages with their number of copies. An id that was used n times counts n times.

    `accepted` is always delivered + in_backlog + dead_lettered + unknown + lost.
    """

    accepted: Counter[MessageKey] = field(default_factory=Counter)
    """Messages whose sends returned without an error."""
    delivered: Counter[MessageKey] = field(default_factory=Counter)
    in_backlog: Counter[MessageKey] = field(default_factory=Counter)
    dead_lettered: Counter[MessageKey] = field(default_factory=Counter)
    unknown: Counter[MessageKey] = field(default_factory=Counter)
    """Messages that are safe if the operations of unknown outcome succeeded, and lost if they failed."""
    lost: Counter[MessageKey] = field(default_factory=Counter)
    """Messages that are certainly lost, also if all operations of unknown outcome succeeded."""
    duplicated: Counter[MessageKey] = field(default_factory=Counter)
    """Messages that were certainly delivered more often than accepted, also if operations of unknown outcome failed."""
    possibly_duplicated: Counter[MessageKey] = field(default_factory=Counter)
    unconfirmed: Counter[MessageKey] = field(default_factory=Counter)
    """Messages that are certainly or possibly delivered or in the backlog, although the ledger has no send of them that
    returned without an error."""
    copies: Counter[MessageKey] = field(default_factory=Counter)
    """Copies in the backlog, if operations of unknown outcome stored copies and removed none. Dead letters included."""
    dead_letters: Counter[MessageKey] = field(default_factory=Counter)
    """Dead-lettered less resubmitted. Below 0 if messages were resubmitted whose dead letters no entry has."""
    doubted_at: dict[MessageKey, int] = field(default_factory=dict)
    """Of the messages with an operation that perhaps removed a copy: when the last such operation began or ended."""
    incomplete: list[str] = field(default_factory=list)
    """Reasons why entries about messages are missing from the ledger."""
    unmetered: list[str] = field(default_factory=list)
    """Reasons why entries of namespaces are missing. Namespaces write no entry about a message, only meter readings."""
    at_work: list[str] = field(default_factory=list)
    """Names of the writers that may still write."""

    def sums(self) -> dict[str, int]:
        """Returns the number of messages for each name of `BALANCE_SUMS`."""
        return {name: getattr(self, name).total() for name in BALANCE_SUMS}


def balance(
    entries: Iterable[Entry], dead: Collection[str] | None = None, alive: Collection[str] | None = None
) -> Balance:
    """Returns the balance of a whole ledger. With only a part of the entries, `lost` and `in_backlog` may be wrong.

    `dead` has the names of the writers that will not write again (`dead_writers`). Determine these before the entries
    are read: otherwise a writer could record an outcome and end in between. Writers whose entries say that they closed
    or ended are dead in any case. All other writers are alive if `dead` is given and `alive` is not. If neither is
    given, or if `alive` does not have a writer, nothing is known of that writer: its intents are in flight, and its
    last entries may be missing.
    """
    sums: dict[MessageKey, _MessageSums] = {}
    seen: set[tuple[str, str]] = set()
    begun: dict[str, Intent] = {}
    ended: dict[str, Outcome] = {}
    writers = _Writers(dead, alive)
    result = Balance()
    for entry in entries:
        key = (entry.kind, entry.id)
        if key in seen:
            continue
        seen.add(key)
        match entry:
            case Operation():
                _add(sums, entry, entry)
            case Intent():
                if (outcome := ended.pop(entry.id, None)) is not None:
                    _add(sums, entry, outcome)
                else:
                    begun[entry.id] = entry
            case Outcome():
                if (intent := begun.pop(entry.id, None)) is not None:
                    _add(sums, intent, entry)
                else:
                    ended[entry.id] = entry
            case Movement():
                _move(sums, entry)
            case SegmentHeader() | Closed() | Ended():
                writers.add(entry)
            case Gap():
                writers.note(entry, f"{entry.count} entries are missing: {entry.reason}")
            case Dropped():
                writers.note(entry, f"{entry.count} segments were removed for the disk budget")
            case _:
                pass
    dead_ids = writers.dead_ids()
    for intent in begun.values():
        _add(sums, intent, None, is_orphaned=writer_id(intent.id) in dead_ids)
    result.incomplete, result.unmetered = writers.missing()
    if ended:
        result.incomplete.append(f"{len(ended)} outcomes have no intent: {', '.join(sorted(ended)[:5])}")
    result.at_work = writers.at_work()
    _resolve(sums)
    for message, sum_ in sums.items():
        _judge(result, message, sum_)
    return result


def _add(
    sums: dict[MessageKey, _MessageSums],
    intent: Intent | Operation,
    outcome: Outcome | Operation | None,
    *,
    is_orphaned: bool = False,
) -> None:
    """Adds an operation. `is_orphaned`: it has no outcome, and its writer is dead."""
    effect = STAGE_EFFECTS.get(intent.stage)
    if effect is None:
        return
    result = UNKNOWN if outcome is None else outcome.result
    failed = Counter(outcome.failed if outcome is not None else ())
    some = bool(failed)
    destination = (intent.destination or f"{intent.namespace}/{intent.entity}").lower()
    for name in intent.ids:
        concerned = not some or failed[name] > 0
        failed[name] -= concerned
        sum_ = sums.setdefault(MessageKey(destination, name), _MessageSums())
        sum_.add(effect, result if concerned else OK)
        if effect.sees:
            at = _brokers_time(intent)
            sum_.seen_at = max(sum_.seen_at, at)
            if is_orphaned:
                sum_.maybe_removed += 1
                sum_.doubted_at = max(sum_.doubted_at, at)
        elif effect.removed and concerned and result == UNKNOWN:
            sum_.doubted_at = max(sum_.doubted_at, _ended_at(intent, outcome))


def _brokers_time(entry: Intent | Operation | Movement) -> int:
    """Returns the time of an entry by the broker's clock; by its writer's clock, if the entry has no other."""
    return entry.at if entry.broker_at is None else entry.broker_at


def _ended_at(intent: Intent | Operation, outcome: Outcome | Operation | None) -> int:
    """Returns when an operation ended; when it began, if it has no outcome."""
    if isinstance(outcome, Outcome) and intent.broker_at is None:
        return outcome.at
    return _brokers_time(intent) + (0 if outcome is None else int(outcome.seconds * 1000 + 0.5))


def _move(sums: dict[MessageKey, _MessageSums], entry: Movement) -> None:
    for name in entry.ids:
        sum_ = sums.setdefault(MessageKey(entry.destination.lower(), name), _MessageSums())
        if entry.move in SIGHTINGS:
            sum_.seen_at = max(sum_.seen_at, _brokers_time(entry))
        match entry.move:
            case Move.DEAD_LETTERED:
                sum_.dead_lettered += 1
            case Move.RESUBMITTED:
                sum_.dead_lettered -= 1
            case Move.REDIRECTED:
                # The message now belongs to another entity: its acceptance and its stored copy count for that entity.
                before = sums.setdefault(MessageKey(entry.source.lower(), name), _MessageSums())
                before.accepted, before.stored = before.accepted - 1, before.stored - 1
                before.dead_lettered -= 1
                sum_.accepted, sum_.stored = sum_.accepted + 1, sum_.stored + 1
                sum_.redirected += 1
            case Move.POSSIBLE_DUPLICATE:
                sum_.doubted += 1
            case Move.FOUND:
                sum_.found += 1
            case Move.LOST:
                sum_.removed += 1
            case Move.REAPPEARED:
                sum_.removed -= 1
            case Move.KEPT:
                pass


def _resolve(sums: Mapping[MessageKey, _MessageSums]) -> None:
    """Takes back acceptances that a redirect moved although this ledger has no acceptance of the message.

    If an id was redirected to several destinations, they are taken back from the first destinations by name.
    """
    debts: Counter[str] = Counter()
    for message, before in sums.items():
        if before.accepted < 0:
            debts[message.id] -= before.accepted
    for message in sorted(key for key, after in sums.items() if key.id in debts and after.redirected):
        after = sums[message]
        lacking = max(0, min(after.accepted, after.redirected, debts[message.id]))
        after.accepted -= lacking
        debts[message.id] -= lacking


def _judge(result: Balance, message: MessageKey, sums: _MessageSums) -> None:
    accepted = max(0, sums.accepted)  # below 0 if the message was redirected more often than accepted
    # Copies in the backlog: `held` in the worst case, `hoped` in the best case of the operations of unknown outcome.
    hoped = max(0, sums.stored + sums.maybe_stored - sums.removed)
    if sums.seen_at > sums.doubted_at:
        # A copy was seen after the last operation that perhaps removed it. Copies that an audit found are certain, too.
        held = max(0, sums.stored - sums.removed, min(hoped, sums.found))
    else:
        held = max(0, sums.stored - sums.removed - sums.maybe_removed)
    lost = max(0, accepted - sums.delivered - sums.maybe_delivered - hoped)
    unknown = max(0, accepted - sums.delivered - held) - lost
    delivered = min(accepted, sums.delivered)
    there = accepted - delivered - unknown - lost
    dead = min(there, max(0, sums.dead_lettered))
    expected = max(accepted, 1)
    duplicated = max(0, sums.delivered - expected)
    possibly = max(0, sums.delivered + sums.maybe_delivered - expected) - duplicated
    # Delivered, and the completion of the copy in the backlog is not recorded: that copy may be delivered, too.
    comes_again = sums.delivered > 0 and held - max(0, sums.dead_lettered) > accepted - delivered
    doubt = 0 if duplicated else int(sums.doubted > 0 or comes_again)
    counts = (
        (result.accepted, accepted),
        (result.delivered, delivered),
        (result.in_backlog, there - dead),
        (result.dead_lettered, dead),
        (result.unknown, unknown),
        (result.lost, lost),
        (result.duplicated, duplicated),
        (result.possibly_duplicated, max(possibly, doubt)),
        (result.copies, hoped),
        (result.dead_letters, sums.dead_lettered),
        (result.unconfirmed, int(not accepted and (sums.delivered + sums.maybe_delivered + hoped + sums.found) > 0)),
    )
    for counter, count in counts:
        if count:
            counter[message] = count
    if sums.doubted_at != _NEVER:
        result.doubted_at[message] = sums.doubted_at


# --- writers ---------------------------------------------------------------------------------------------------------


def writer_id(text: str) -> str:
    """Returns the 16 digits of a writer, from the id of one of its entries."""
    return text.partition("-")[0]


def id_of_writer(name: str) -> str:
    """Returns the 16 digits of a writer, from its name."""
    return name.rpartition("-")[2]


class _Writers:
    """What the entries say about the writers: their segments, and which of them closed or ended."""

    def __init__(self, dead: Collection[str] | None, alive: Collection[str] | None) -> None:
        self._dead = dead or ()
        self._alive = () if dead is None and alive is None else alive
        """Names of the writers that are alive; None if these are all that are not dead."""
        self._segments: dict[str, set[int]] = {}
        self._lazy: set[str] = set()
        self._closed: set[str] = set()
        self._ended: dict[str, int] = {}
        self._namespaces: set[str] = set()
        self._noted: list[tuple[str, str]] = []

    def add(self, entry: SegmentHeader | Closed | Ended) -> None:
        match entry:
            case SegmentHeader():
                self._segments.setdefault(entry.writer, set()).add(entry.segment)
                if entry.role is Role.NAMESPACE:
                    self._namespaces.add(id_of_writer(entry.writer))
                if entry.durability != _PROCESS:
                    self._lazy.add(entry.writer)
            case Closed():
                self._closed.add(entry.writer)
            case Ended():
                self._ended[entry.writer] = max(entry.segment, self._ended.get(entry.writer, 0))

    def dead_ids(self) -> frozenset[str]:
        names = {*self._closed, *filter(self._is_dead, self._ended), *self._dead}
        return frozenset(map(id_of_writer, names))

    def at_work(self) -> list[str]:
        return sorted(writer for writer in self._segments if not self._is_dead(writer))

    def note(self, entry: Gap | Dropped, reason: str) -> None:
        """Adds a reason why entries are missing, which a writer itself has recorded."""
        self._noted.append((writer_id(entry.id), reason))

    def missing(self) -> tuple[list[str], list[str]]:
        """Returns the reasons why entries are missing: of programs that move messages, and of namespaces."""
        reasons = [*self._noted]
        for writer, numbers in sorted(self._segments.items()):
            digits = id_of_writer(writer)
            if holes := sorted(set(range(max(numbers))) - numbers):
                reasons.append((digits, f"segments {', '.join(map(str, holes))} of {writer} are not there"))
            if writer in self._closed or writer not in self._lazy:
                continue
            if self._is_dead(writer):
                reasons.append((digits, f"{writer} ended without closing: its last entries may be missing"))
            elif self._alive is not None and writer not in self._alive:
                reasons.append((digits, f"{writer} may have ended without closing: its last entries may be missing"))
        about_messages = [reason for digits, reason in reasons if digits not in self._namespaces]
        return about_messages, [reason for digits, reason in reasons if digits in self._namespaces]

    def _is_dead(self, writer: str) -> bool:
        if writer in self._closed or writer in self._dead:
            return True
        # A writer that was only silent, and that another writer took for dead, has a later segment.
        return writer in self._ended and self._ended[writer] >= max(self._segments.get(writer, {0}))
