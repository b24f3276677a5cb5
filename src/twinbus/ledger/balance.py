"""What must add up: accepted = delivered + in backlog + dead-lettered, and which messages are lost, doubled or unknown.

Pure, and in any order of entries: each message is a handful of sums. An operation whose outcome is unknown may have
happened or not; what is said here holds whichever way each of them went.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from twinbus.ledger.entries import (
    OK,
    UNKNOWN,
    Closed,
    Dropped,
    Entry,
    Gap,
    Intent,
    Move,
    Movement,
    Operation,
    Outcome,
    SegmentHeader,
    Stage,
)


class MessageKey(NamedTuple):
    """`destination`: `namespace/entity` on the primary, in lower case, since paths are case-insensitive."""

    destination: str
    id: str


class _Effect(NamedTuple):
    """What one operation of a stage does to each of its messages."""

    accepted: int = 0
    delivered: int = 0
    stored: int = 0
    removed: int = 0


STAGE_EFFECTS: Final[Mapping[Stage, _Effect]] = {
    Stage.SEND_PRIMARY: _Effect(accepted=1, delivered=1),
    Stage.SCHEDULE_PRIMARY: _Effect(accepted=1, delivered=1),
    Stage.SEND_BACKLOG: _Effect(accepted=1, stored=1),
    Stage.RESUBMIT_BACKLOG: _Effect(stored=1),
    Stage.RETURN_PRIMARY: _Effect(delivered=1),
    Stage.COMPLETE_BACKLOG: _Effect(removed=1),
}


@dataclass(slots=True)
class _Sums:
    """Of one message: how often each thing happened, and how often it may have."""

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

    def add(self, effect: _Effect, result: str) -> None:
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
    """How many copies of which messages. An id that a caller used n times for one entity counts n times.

    `accepted` is always delivered + in_backlog + dead_lettered + unknown + lost.
    """

    accepted: Counter[MessageKey] = field(default_factory=Counter)
    """The caller was told that they are safe."""
    delivered: Counter[MessageKey] = field(default_factory=Counter)
    in_backlog: Counter[MessageKey] = field(default_factory=Counter)
    dead_lettered: Counter[MessageKey] = field(default_factory=Counter)
    unknown: Counter[MessageKey] = field(default_factory=Counter)
    """Safe if operations of unknown outcome went well, otherwise lost."""
    lost: Counter[MessageKey] = field(default_factory=Counter)
    """Gone, however those went."""
    duplicated: Counter[MessageKey] = field(default_factory=Counter)
    """Delivered so many times more than accepted, however those went."""
    possibly_duplicated: Counter[MessageKey] = field(default_factory=Counter)
    unconfirmed: Counter[MessageKey] = field(default_factory=Counter)
    """Never reported safe to a caller, though they are or may be there: a send that timed out, a sender that died."""
    incomplete: list[str] = field(default_factory=list)
    """Why the ledger does not hold everything."""


def balance(entries: Iterable[Entry]) -> Balance:
    """Of whole histories: messages whose entries are partly elsewhere look lost or in the backlog."""
    sums: dict[MessageKey, _Sums] = {}
    seen: set[tuple[str, str]] = set()
    begun: dict[str, Intent] = {}
    ended: dict[str, Outcome] = {}
    written: dict[str, set[int]] = {}
    closed: set[str] = set()
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
            case SegmentHeader():
                written.setdefault(entry.writer, set()).add(entry.segment)
            case Closed():
                closed.add(entry.writer)
            case Gap():
                result.incomplete.append(f"{entry.count} entries are missing: {entry.reason}")
            case Dropped():
                result.incomplete.append(f"{entry.count} segments were removed for the disk budget")
            case _:
                pass
    for intent in begun.values():
        _add(sums, intent, None)
    if ended:
        result.incomplete.append(f"{len(ended)} outcomes have no intent: {', '.join(sorted(ended)[:5])}")
    result.incomplete += _missing(written, closed)
    _resolve(sums)
    for message, sum_ in sums.items():
        _judge(result, message, sum_)
    return result


def _add(sums: dict[MessageKey, _Sums], intent: Intent | Operation, outcome: Outcome | Operation | None) -> None:
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
        sums.setdefault(MessageKey(destination, name), _Sums()).add(effect, result if concerned else OK)


def _move(sums: dict[MessageKey, _Sums], entry: Movement) -> None:
    for name in entry.ids:
        sum_ = sums.setdefault(MessageKey(entry.destination.lower(), name), _Sums())
        match entry.move:
            case Move.DEAD_LETTERED:
                sum_.dead_lettered += 1
            case Move.RESUBMITTED:
                sum_.dead_lettered -= 1
            case Move.REDIRECTED:
                # From here on it is a message for another entity: what was accepted and stored goes with it.
                before = sums.setdefault(MessageKey(entry.source.lower(), name), _Sums())
                before.accepted, before.stored = before.accepted - 1, before.stored - 1
                before.dead_lettered -= 1
                sum_.accepted, sum_.stored = sum_.accepted + 1, sum_.stored + 1
                sum_.redirected += 1
            case Move.POSSIBLE_DUPLICATE:
                sum_.doubted += 1
            case Move.KEPT:
                pass


def _resolve(sums: Mapping[MessageKey, _Sums]) -> None:
    """What was redirected more often than it was accepted, as far as this ledger knows, brought no acceptance along.

    Where its id went to several destinations, the first by name lack it.
    """
    debts: Counter[str] = Counter()
    for message, before in sums.items():
        if before.accepted < 0:
            debts[message.id] -= before.accepted
    for message in sorted(one for one, after in sums.items() if one.id in debts and after.redirected):
        after = sums[message]
        lacking = max(0, min(after.accepted, after.redirected, debts[message.id]))
        after.accepted -= lacking
        debts[message.id] -= lacking


def _judge(result: Balance, message: MessageKey, sums: _Sums) -> None:
    accepted = max(0, sums.accepted)  # below 0 where it was redirected more often
    # The worst and the best of the ways in which the operations of unknown outcome may have gone.
    held = max(0, sums.stored - sums.removed - sums.maybe_removed)
    hoped = max(0, sums.stored + sums.maybe_stored - sums.removed)
    lost = max(0, accepted - sums.delivered - sums.maybe_delivered - hoped)
    unknown = max(0, accepted - sums.delivered - held) - lost
    delivered = min(accepted, sums.delivered)
    there = accepted - delivered - unknown - lost
    dead = min(there, max(0, sums.dead_lettered))
    expected = max(accepted, 1)
    duplicated = max(0, sums.delivered - expected)
    possibly = max(0, sums.delivered + sums.maybe_delivered - expected) - duplicated
    counts = (
        (result.accepted, accepted),
        (result.delivered, delivered),
        (result.in_backlog, there - dead),
        (result.dead_lettered, dead),
        (result.unknown, unknown),
        (result.lost, lost),
        (result.duplicated, duplicated),
        (result.possibly_duplicated, max(possibly, min(1, sums.doubted) if not duplicated else 0)),
        (result.unconfirmed, int(not accepted and (sums.delivered + sums.maybe_delivered + hoped) > 0)),
    )
    for counter, count in counts:
        if count:
            counter[message] = count


def _missing(written: Mapping[str, set[int]], closed: set[str]) -> Iterable[str]:
    for writer, numbers in sorted(written.items()):
        if holes := sorted(set(range(max(numbers))) - numbers):
            yield f"segments {', '.join(map(str, holes))} of {writer} are not there"
        if writer not in closed:
            yield f"{writer} is still at work, or ended without closing: what it has not flushed is missing"
