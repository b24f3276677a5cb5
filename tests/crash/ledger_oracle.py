"""Compares the balance of a ledger with a count of messages that was taken from the queues.

The count is the truth: it knows neither entries nor balances. Ids are unique among all destinations of a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from twinbus.ledger import OK, UNKNOWN, Balance, Entry, Intent, MessageKey, Operation, Outcome, Stage


def contradictions(
    found: Balance,
    *,
    arrived: Mapping[str, int],
    left: Collection[str],
    safe: Collection[str],
    is_over: bool,
    refused: Collection[str] = (),
    deduplicated: Collection[str] = (),
) -> list[str]:
    """Returns every statement of the balance that the count contradicts (L1, L2).

    `arrived`: copies on the primary. `left`: what is in the backlog queues. `safe`: what a program reported as safe.
    `is_over`: everything was brought home by a syphon that closed its ledger, so nothing may be unknown.
    `refused`: messages whose return the primary refused at least once (`refused_returns`). Such a message was in
    the backlog then, even if a syphon that was killed earlier had delivered it without a record (L1: "until the message
    is booked again").
    `deduplicated`: messages for an entity that drops a second copy. The ledger counts a copy that the entity accepted,
    because no answer tells that it was dropped.
    """
    wrong = [f"{name}: reported safe, and the ledger has no acceptance" for name in set(safe) - _ids(found.accepted)]
    delivered, waiting, unknown = _ids(found.delivered), _ids(found.in_backlog), _ids(found.unknown)
    copies, perhaps = _counts(found.duplicated), _counts(found.possibly_duplicated)
    lost = _ids(found.lost)
    for name in _ids(found.accepted):
        count, is_left = arrived.get(name, 0), name in left
        if not count and not is_left:
            wrong.append(f"{name}: is in no queue")
        if name in lost:
            wrong.append(f"{name}: lost by the ledger; {count} copies arrived, in the backlog: {is_left}")
        if name in delivered and not count:
            wrong.append(f"{name}: delivered by the ledger, and not on the primary")
        if name not in delivered and not is_left:
            wrong.append(f"{name}: completed in the backlog, and not delivered by the ledger")
        if name in waiting and (not is_left or (count and name not in refused)):
            wrong.append(f"{name}: in the backlog by the ledger; {count} copies arrived, in the backlog: {is_left}")
        if name in unknown and is_over:
            wrong.append(f"{name}: unknown by the ledger, though a syphon delivered it since")
        if count - 1 > copies[name] + perhaps[name]:
            wrong.append(f"{name}: {count} copies, and {copies[name]} + {perhaps[name]} further ones by the ledger")
        if copies[name] > max(0, count - 1) and name not in deduplicated:
            wrong.append(f"{name}: {count} copies, and {copies[name]} certain duplicates by the ledger")
    return wrong


def refused_returns(entries: Iterable[Entry]) -> set[str]:
    """Returns the ids of messages whose return was certainly not carried out, at least once."""
    begun: dict[str, Intent | Operation] = {}
    ended: dict[str, Outcome | Operation] = {}
    for entry in entries:
        if isinstance(entry, Intent | Operation) and entry.stage is Stage.RETURN_PRIMARY:
            begun[entry.id] = entry
        if isinstance(entry, Outcome | Operation):
            ended[entry.id] = entry
    return {
        name
        for id_, intent in begun.items()
        if id_ in ended and ended[id_].result not in (OK, UNKNOWN)
        for name in ended[id_].failed or intent.ids
    }


def _ids(counted: Counter[MessageKey]) -> set[str]:
    return {message.id for message in counted}


def _counts(counted: Counter[MessageKey]) -> Counter[str]:
    return Counter({message.id: count for message, count in counted.items()})
