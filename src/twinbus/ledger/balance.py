"""The balance of a ledger: accepted = delivered + in backlog + dead-lettered + unknown + lost, message by message.

For each message the entries are only added up to sums, so the order of the entries does not matter. An operation whose
outcome is unknown may or may not have happened. Such operations are counted in separate sums (`maybe_…`), and the
verdict on a message is true in both cases. This module is pure.
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


STAGE_EFFECTS: Final[Mapping[Stage, _StageEffect]] = {
    Stage.SEND_PRIMARY: _StageEffect(accepted=1, delivered=1),
    Stage.SCHEDULE_PRIMARY: _StageEffect(accepted=1, delivered=1),
    Stage.SEND_BACKLOG: _StageEffect(accepted=1, stored=1),
    Stage.RESUBMIT_BACKLOG: _StageEffect(stored=1),
    Stage.RETURN_PRIMARY: _StageEffect(delivered=1),
    Stage.COMPLETE_BACKLOG: _StageEffect(removed=1),
}


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
    incomplete: list[str] = field(default_factory=list)
    """Reasons why entries are missing from the ledger."""


def balance(entries: Iterable[Entry]) -> Balance:
    """Returns the balance of a whole ledger. With only a part of the entries, `lost` and `in_backlog` may be wrong."""
    sums: dict[MessageKey, _MessageSums] = {}
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
    result.incomplete += _missing_segments(written, closed)
    _resolve(sums)
    for message, sum_ in sums.items():
        _judge(result, message, sum_)
    return result


def _add(sums: dict[MessageKey, _MessageSums], intent: Intent | Operation, outcome: Outcome | Operation | None) -> None:
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
        sums.setdefault(MessageKey(destination, name), _MessageSums()).add(effect, result if concerned else OK)


def _move(sums: dict[MessageKey, _MessageSums], entry: Movement) -> None:
    for name in entry.ids:
        sum_ = sums.setdefault(MessageKey(entry.destination.lower(), name), _MessageSums())
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
    held = max(0, sums.stored - sums.removed - sums.maybe_removed)
    hoped = max(0, sums.stored + sums.maybe_stored - sums.removed)
    held = max(held, min(hoped, sums.found))  # an audit saw these copies, so these are certain
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
        (result.unconfirmed, int(not accepted and (sums.delivered + sums.maybe_delivered + hoped + sums.found) > 0)),
    )
    for counter, count in counts:
        if count:
            counter[message] = count


def _missing_segments(written: Mapping[str, set[int]], closed: set[str]) -> Iterable[str]:
    for writer, numbers in sorted(written.items()):
        if holes := sorted(set(range(max(numbers))) - numbers):
            yield f"segments {', '.join(map(str, holes))} of {writer} are not there"
        if writer not in closed:
            yield f"{writer} is still at work, or ended without closing: what it has not flushed is missing"
