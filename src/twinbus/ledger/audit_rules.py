"""The rules of the audit (L3): compares what a ledger says about the backlog with what was seen there.

Theory of operation. An audit reads the ledger, looks at all backlog queues and their dead-letter queues (peeks, which
lock nothing), and reads the ledger again. Programs go on sending and syphoning meanwhile, so neither a reading nor a
look shows one instant. The rules stay right because of three facts:

- A syphon writes the outcome of a delivery before it completes the message (L1). So if a syphon removed a message
  before a look, every later reading has an entry about this.
- A look visits each queue before the queue's dead-letter queue, and each of them by rising sequence numbers. A message
  that the broker moves during the look is seen at its new place. Only a resubmit moves a message back, and a resubmit
  writes its intent first.
- A message that was accepted is in the backlog, unless an entry says otherwise, or something removed it that writes no
  entry.

So a copy is *absent* if the readings before and after the look both have it in the backlog, no entry about it was added
between them, no operation on it is in flight, and the look does not show it. A copy that is still absent in a second
look, at least one lock duration later, is recorded as lost. What this means for the message follows from the balance:
it is lost, or unknown if an operation of unknown outcome may have delivered it.

A message is also listed if it is seen more often than the ledger explains: it was delivered and will come again, or
nobody reported it safe, or its place was unknown, or an earlier audit recorded it as lost.

A dead letter that is seen, and about which the ledger has no entry, is recorded as dead-lettered.

Copies are counted, because an application may use one id several times. This module is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

from twinbus.ledger.balance import Balance, MessageKey, balance, id_of_writer, writer_id
from twinbus.ledger.entries import OK, UNKNOWN, Entry, Intent, Move, Movement, Operation, Outcome, Stage

STORING_STAGES: Final = (Stage.SEND_BACKLOG, Stage.RESUBMIT_BACKLOG)
"""Stages whose operations store a copy in the backlog."""
BACKLOG_STAGES: Final = (*STORING_STAGES, Stage.RETURN_PRIMARY, Stage.COMPLETE_BACKLOG)
"""Stages of messages that are or were in the backlog."""
AUDIT_WORDS: Final = (
    "there",
    "absent",
    "come_again",
    "unconfirmed",
    "found",
    "redirected",
    "moving",
    "not_looked_at",
)
"""The words of `AuditFindings`."""
SECOND_LOOK_WORDS: Final = ("absent", "come_again", "redirected")
"""The words that a second look has to confirm before they are recorded."""
COME_AGAIN: Final = "seen in the backlog after it was delivered"
NOT_REPORTED: Final = "seen in the backlog; no send of it returned without an error"
PLACE_KNOWN: Final = "seen in the backlog; its place was unknown"
SEEN_AGAIN: Final = "seen in the backlog; the ledger had no copy there"
NOT_BY_A_SYPHON: Final = "dead-lettered, and not by a syphon"
REDIRECT_NOT_RECORDED: Final = "resubmitted for this destination, and not at the old one; the move was not recorded"
_CERTAIN_AT_ONCE: Final = (PLACE_KNOWN, SEEN_AGAIN, NOT_BY_A_SYPHON)
_PERHAPS_DONE: Final = (OK, UNKNOWN)
NOT_SEEN: Final = "not in the backlog in two looks, and no entry explains why"


# --- a reading of the ledger -----------------------------------------------------------------------------------------


class MessageReading(NamedTuple):
    """What one reading of the ledger has about one message. The numbers are copies, if nothing else is said."""

    accepted: int = 0
    there: int = 0
    """In the backlog, dead letters included."""
    dead_letters: int = 0
    """As `Balance.dead_letters`."""
    doubtful: int = 0
    """Lost or unknown."""
    copies: int = 0
    """As `Balance.copies`."""
    is_unconfirmed: bool = False
    is_duplicated: bool = False
    """Certainly or possibly."""
    entries: int = 0
    """Number of entries about the message."""
    is_in_flight: bool = False
    """Whether an operation on it, or on a copy resubmitted for another destination, has no outcome, and its writer is
    not dead."""
    redirected_to: str | None = None
    """Another destination for which a copy was resubmitted, or perhaps was, without a record of the move."""
    places: frozenset[str] = frozenset()
    """As in `LedgerReading.places`."""
    doubted_at: int | None = None
    """As in `Balance.doubted_at`."""


@dataclass(slots=True)
class LedgerReading:
    """What one reading of the ledger has about the messages of the backlog."""

    balance: Balance
    entries: Counter[MessageKey] = field(default_factory=Counter)
    """Number of entries about each message."""
    in_flight: set[MessageKey] = field(default_factory=set)
    """Messages with an operation that has no outcome, of a writer that is not dead."""
    places: dict[MessageKey, frozenset[str]] = field(default_factory=dict)
    """The backlog queues to which copies were sent, as `namespace/entity`, in lower case."""

    resubmitted: dict[str, Counter[str]] = field(default_factory=dict)
    """By message id and destination: copies that were (perhaps) resubmitted, less those whose move is recorded."""

    def there(self, message: MessageKey) -> int:
        """Returns the number of copies that the ledger has in the backlog, dead letters included."""
        return self.balance.in_backlog[message] + self.balance.dead_lettered[message]

    def of(self, message: MessageKey) -> MessageReading:
        """Returns what this reading has about one message."""
        found = self.balance
        return MessageReading(
            accepted=found.accepted[message],
            there=self.there(message),
            dead_letters=found.dead_letters[message],
            doubtful=found.lost[message] + found.unknown[message],
            copies=found.copies[message],
            is_unconfirmed=found.unconfirmed[message] > 0,
            is_duplicated=found.duplicated[message] > 0 or found.possibly_duplicated[message] > 0,
            entries=self.entries[message],
            is_in_flight=message in self.in_flight or _is_resubmitted_now(self, message),
            redirected_to=_redirected_to(self, message),
            places=self.places.get(message, frozenset()),
            doubted_at=found.doubted_at.get(message),
        )

    def believed(self) -> Iterator[MessageKey]:
        """Yields each message that the ledger has in the backlog."""
        yield from self.balance.in_backlog
        yield from (message for message in self.balance.dead_lettered if message not in self.balance.in_backlog)

    def queues(self, namespace: str) -> set[str]:
        """Returns the queues of a namespace to which copies were sent, in lower case."""
        start = f"{namespace.lower()}/"
        found = frozenset().union(*set(self.places.values()))
        return {place.removeprefix(start) for place in found if place.startswith(start)}


def read_for_audit(entries: Iterable[Entry], dead: Collection[str] = ()) -> LedgerReading:
    """Returns the reading of all entries of a ledger. `dead` are the names of the writers that have ended."""
    reading = LedgerReading(Balance())
    digits = frozenset(map(id_of_writer, dead))
    begun: dict[str, Intent] = {}
    ended: dict[str, str] = {}
    resubmits: dict[str, Intent | Operation] = {}
    moved: set[str] = set()

    def observed() -> Iterator[Entry]:
        for entry in entries:
            match entry:
                case Intent() | Operation() if entry.stage in BACKLOG_STAGES:
                    _note_operation(reading, entry)
                    if isinstance(entry, Intent) and writer_id(entry.id) not in digits:
                        begun[entry.id] = entry
                    is_refused = isinstance(entry, Operation) and entry.result not in _PERHAPS_DONE
                    if entry.stage is Stage.RESUBMIT_BACKLOG and not is_refused:
                        resubmits[entry.id] = entry
                case Outcome():
                    ended[entry.id] = entry.result
                case Movement() if entry.id not in moved:  # a line may be repeated
                    moved.add(entry.id)
                    _note_movement(reading, entry)
                case _:
                    pass
            yield entry

    reading.balance = balance(observed(), dead)
    for id_ in begun.keys() - ended.keys():
        reading.in_flight.update(_keys(begun[id_]))
    for id_, resubmit in resubmits.items():
        if ended.get(id_, UNKNOWN) in _PERHAPS_DONE:
            for key in _keys(resubmit):
                reading.resubmitted.setdefault(key.id, Counter())[key.destination] += 1
    return reading


def _note_operation(reading: LedgerReading, entry: Intent | Operation) -> None:
    keys = _keys(entry)
    reading.entries.update(keys)
    if entry.stage in STORING_STAGES:
        place = f"{entry.namespace}/{entry.entity}".lower()
        for key in keys:
            reading.places[key] = _with(reading.places.get(key, frozenset()), place)


def _note_movement(reading: LedgerReading, entry: Movement) -> None:
    destinations = (entry.destination, entry.source) if entry.move is Move.REDIRECTED else (entry.destination,)
    for destination in destinations:
        reading.entries.update(MessageKey(destination.lower(), name) for name in entry.ids)
    if entry.move in (Move.RESUBMITTED, Move.REDIRECTED):
        for name in entry.ids:
            reading.resubmitted.setdefault(name, Counter())[entry.destination.lower()] -= 1


def _keys(entry: Intent | Operation) -> list[MessageKey]:
    destination = (entry.destination or f"{entry.namespace}/{entry.entity}").lower()
    return [MessageKey(destination, name) for name in entry.ids]


@lru_cache(4096)
def _with(places: frozenset[str], place: str) -> frozenset[str]:
    """Returns the set with one more place. The cache lets all messages of a queue share one set."""
    return places | {place}


# --- the comparison --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class BacklogLook:
    """What one look at the backlog showed: the copies of each message, and how many copies in all."""

    seen: Counter[MessageKey] = field(default_factory=Counter)
    """Copies in the queues and in their dead-letter queues."""
    dead: Counter[MessageKey] = field(default_factory=Counter)
    """Copies in the dead-letter queues."""
    messages: int = 0
    dead_letters: int = 0
    peeks: int = 0
    is_partial: bool = False
    """Whether there may be messages that the look did not show."""


class SeenCopies(NamedTuple):
    """The copies of one message in the looks of an audit."""

    most: int
    """In the look that shows most."""
    least: int
    """In every look."""
    dead: int
    """In the dead-letter queues, in every look."""


class AuditMove(NamedTuple):
    """A movement that the audit records: `copies` times the message."""

    move: Move
    message: MessageKey
    copies: int
    source: str
    """The backlog queue, as `namespace/entity`; the old destination of a redirected message."""
    reason: str
    broker_at: int | None = None
    """As in `Movement`; None if the time of the audit is good enough."""


@dataclass(slots=True)
class AuditFindings:
    """What a comparison found: for each word the messages with their number of copies, and the moves to record."""

    there: Counter[MessageKey] = field(default_factory=Counter)
    """Copies that the ledger has in the backlog, and that were seen."""
    absent: Counter[MessageKey] = field(default_factory=Counter)
    """Copies that the ledger has in the backlog, and that were not seen. No entry explains why."""
    come_again: Counter[MessageKey] = field(default_factory=Counter)
    """Copies beyond those that are to be delivered: the message was delivered, or stored more often than accepted. A
    syphon will deliver these copies too."""
    unconfirmed: Counter[MessageKey] = field(default_factory=Counter)
    """Copies that were seen although the ledger has no send of the message that returned without an error."""
    found: Counter[MessageKey] = field(default_factory=Counter)
    """Copies that were seen, and whose place was unknown, or which the ledger called lost."""
    redirected: Counter[MessageKey] = field(default_factory=Counter)
    """Copies that were not seen, of messages that were resubmitted for another destination without a record of the
    move. The audit records the move, and the next audit decides about the message at its new destination."""
    moving: Counter[MessageKey] = field(default_factory=Counter)
    """Copies that were not seen, but a program works on the message now. The next audit decides."""
    not_looked_at: Counter[MessageKey] = field(default_factory=Counter)
    """Copies that were not seen and may be at a place that the looks did not show, such as another namespace."""
    moves: list[AuditMove] = field(default_factory=list)

    @property
    def needs_second_look(self) -> bool:
        return any(getattr(self, word) for word in SECOND_LOOK_WORDS)


def compare_with_backlog(
    before: LedgerReading,
    first: BacklogLook,
    after: LedgerReading,
    second: BacklogLook | None,
    *,
    namespace: str,
    missing: Sequence[str] = (),
) -> AuditFindings:
    """Compares two readings of the ledger with the looks between them.

    `namespace` is the secondary's name in the ledger. `missing` has the reasons why entries are missing: with a reason,
    an absent copy is not recorded as lost. Without a second look, `absent`, `come_again` and `unconfirmed` are
    suspicions that a second look has to confirm, and `moves` has only copies that were found.
    """
    result = AuditFindings()
    looks = (first,) if second is None else (first, second)
    seen_by_any = set().union(*(look.seen.keys() for look in looks))
    for message in seen_by_any.union(before.believed(), after.believed()):
        copies = [look.seen[message] for look in looks]
        seen = SeenCopies(max(copies), min(copies), min(look.dead[message] for look in looks))
        there = after.there(message)
        if explained := min(there, seen.most):
            result.there[message] = explained
        if differs(there, after.balance.dead_letters[message], seen):
            compare_message(result, message, before.of(message), after.of(message), seen, namespace)
    is_partial = any(look.is_partial for look in looks)
    if is_partial:
        for unseen in (result.absent, result.redirected):
            result.not_looked_at += unseen
            unseen.clear()
    result.moves = [
        one for one in result.moves if is_recorded(one, looks=len(looks), is_partial=is_partial, missing=missing)
    ]
    return result


def differs(there: int, dead_letters: int, seen: SeenCopies) -> bool:
    """Returns whether the looks differ from the ledger: only then has `compare_message` a finding.

    `there` and `dead_letters` are those of the later reading.
    """
    return there > seen.most or seen.least > there or _unrecorded_dead_letters(there, dead_letters, seen) > 0


def _unrecorded_dead_letters(there: int, dead_letters: int, seen: SeenCopies) -> int:
    """Returns how many dead letters the ledger lacks: the broker or another receiver made them, and wrote no entry.

    A dead letter that was resubmitted before an audit saw it makes `dead_letters` one too low, for example -1. It is
    set right, so that the ledger counts the message as dead-lettered when a syphon dead-letters it later.
    """
    return min(there, seen.dead) - dead_letters if min(there, seen.least) > 0 else 0


def is_recorded(one: AuditMove, *, looks: int, is_partial: bool, missing: Sequence[str]) -> bool:
    """Returns whether an audit records this move after so many looks.

    `is_partial`: there may be messages that a look did not show. `missing`: reasons why entries are missing.
    """
    # The message may be there, or was delivered: the word is "not proven", not "lost" (L3).
    if one.move in (Move.LOST, Move.REDIRECTED) and (is_partial or missing):
        return False
    return looks > 1 or one.reason in _CERTAIN_AT_ONCE


def why_undecided(redirected: int) -> list[str]:
    """Returns the reason why the verdict after an audit that found so many redirected copies is "not proven"."""
    if not redirected:
        return []
    copies = "1 redirect was" if redirected == 1 else f"{redirected:,} redirects were"
    return [f"{copies} not recorded before this audit: audit again"]


def compare_message(
    result: AuditFindings,
    message: MessageKey,
    before: MessageReading,
    after: MessageReading,
    seen: SeenCopies,
    namespace: str,
) -> None:
    """Adds the findings about one message, apart from `there`."""
    changed = before.entries != after.entries or after.is_in_flight
    missing = min(after.there, before.there) - seen.most
    if missing > 0:
        _judge_missing(result, message, after, seen.most, missing, namespace, changed=changed)
    if changed:
        return
    source = _source(after, namespace)
    # A peek shows no time of the broker, and the clock of the audit may be wrong (L5). But the look came after each
    # operation of the reading before it that perhaps removed a copy: so a copy was there after the last of these.
    seen_at = None if before.doubted_at is None else before.doubted_at + 1
    if (dead_letters := _unrecorded_dead_letters(after.there, after.dead_letters, seen)) > 0:
        # At the earliest time: the dead letter proves nothing about other copies, whose place may be unknown.
        result.moves.append(AuditMove(Move.DEAD_LETTERED, message, dead_letters, source, NOT_BY_A_SYPHON, 0))
    surplus = seen.least - max(after.there, before.there)
    if surplus <= 0:
        return
    doubtful = min(after.doubtful, before.doubtful)
    if not after.accepted:
        result.unconfirmed[message] = surplus
        if not after.is_unconfirmed:
            result.moves.append(AuditMove(Move.FOUND, message, surplus, source, NOT_REPORTED, seen_at))
        return
    if doubtful:
        result.found[message] = copies = min(doubtful, surplus)
        # If the ledger has fewer copies left than were seen, it counted a removal that did not happen.
        if (beyond := min(copies, seen.least - after.copies)) > 0:
            result.moves.append(AuditMove(Move.REAPPEARED, message, beyond, source, SEEN_AGAIN, seen_at))
        result.moves.append(AuditMove(Move.FOUND, message, copies, source, PLACE_KNOWN, seen_at))
        surplus -= copies
    if surplus:
        result.come_again[message] = surplus
        if not after.is_duplicated:
            result.moves.append(AuditMove(Move.POSSIBLE_DUPLICATE, message, 1, source, COME_AGAIN))


def _judge_missing(
    result: AuditFindings,
    message: MessageKey,
    after: MessageReading,
    seen: int,
    missing: int,
    namespace: str,
    *,
    changed: bool,
) -> None:
    start = f"{namespace.lower()}/"
    if changed:
        result.moving[message] = missing
    elif not all(place.startswith(start) for place in after.places):
        result.not_looked_at[message] = missing
    elif after.redirected_to is not None:
        result.redirected[message] = missing
        new = MessageKey(after.redirected_to, message.id)
        result.moves.append(AuditMove(Move.REDIRECTED, new, missing, message.destination, REDIRECT_NOT_RECORDED))
    else:
        result.absent[message] = missing
        # All copies that the ledger has left, also copies of unknown outcome: none of them was seen.
        copies = max(missing, after.copies - seen)
        result.moves.append(AuditMove(Move.LOST, message, copies, _source(after, namespace), NOT_SEEN))


def _redirected_to(reading: LedgerReading, message: MessageKey) -> str | None:
    """Returns another destination for which a copy was resubmitted without a record of the move; None if there is none.

    The dead-letter tool records the move before it completes the dead letter, but older versions did so after it: if
    they were killed in between, the message seems to be absent at its old destination. A copy is also resubmitted
    without a record if the tool was killed before the record, and the dead letter was removed by something else.
    """
    resubmitted = reading.resubmitted.get(message.id, Counter())
    places = (place for place, copies in resubmitted.items() if copies > 0 and place != message.destination)
    return min(places, default=None)


def _is_resubmitted_now(reading: LedgerReading, message: MessageKey) -> bool:
    """Returns whether a program that lives resubmits a copy for some destination. It will record the move itself."""
    resubmitted = reading.resubmitted.get(message.id, Counter())
    return any(copies > 0 and MessageKey(to, message.id) in reading.in_flight for to, copies in resubmitted.items())


def _source(reading: MessageReading, namespace: str) -> str:
    start = f"{namespace.lower()}/"
    return min((place for place in reading.places if place.startswith(start)), default=start)


def grouped_moves(moves: Iterable[AuditMove], most_ids: int = 1000) -> Iterator[tuple[AuditMove, list[str]]]:
    """Yields the moves in groups that one entry can record: the first move of each group, and all message ids."""
    groups: dict[tuple[Move, str, str, str, int | None], tuple[AuditMove, list[str]]] = {}
    for one in moves:
        for _ in range(one.copies):
            key = (one.move, one.source, one.message.destination, one.reason, one.broker_at)
            group = groups.setdefault(key, (one, []))
            group[1].append(one.message.id)
            if len(group[1]) == most_ids:
                yield groups.pop(key)
    yield from groups.values()
