"""Checks the demo's result: compares accepted messages, received messages and the ledger's balance. Pure.

The ledger's verdict (L6) is one part of the check: a demo with a missing message in a receiver fails, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from twinbus.cli.demo.application import Records
from twinbus.ledger import Judgement, Verdict, judge_ledger

# After a successful demo, each of these sums is 0, because every message was delivered to the primary.
_NONE: Final = {
    "lost": "lost",
    "unknown": "of unknown fate",
    "in_backlog": "still in the backlog",
    "dead_lettered": "dead-lettered",
    "duplicated": "delivered more often than sent",
}
_NAMED: Final = 10


@dataclass(frozen=True, slots=True)
class DemoVerdict:
    """The result of the checks. `missing` and `duplicated` have the ids of messages, by queue or subscription."""

    accepted: int
    diverted: int
    received: int
    missing: Mapping[str, tuple[str, ...]]
    duplicated: Mapping[str, tuple[str, ...]]
    sums: Mapping[str, int]
    ledger: Judgement
    """The verdict on the ledger, as the commands of the ledger print it."""

    @property
    def problems(self) -> list[str]:
        """What went wrong, as texts.

        This includes problems that are not part of the ledger's verdict: receivers lack a message or have it twice.
        """
        found = [] if self.diverted else ["no message was diverted: the outage had no effect, or the backlog was down"]
        found += [f"{place} never received {_named(ids)}" for place, ids in self.missing.items()]
        found += (f"{place} received more than once {_named(ids)}" for place, ids in self.duplicated.items())
        found += (f"the ledger has {self.sums[name]} {text}" for name, text in _NONE.items() if self.sums[name])
        if self.sums["accepted"] != self.accepted:
            found.append(f"the ledger has {self.sums['accepted']} accepted, the application {self.accepted}")
        if self.ledger.verdict is Verdict.NOT_PROVEN and not self.sums["unknown"]:
            found.append("entries are missing from the ledger")
        return found


def judge(kept: Records, sums: Mapping[str, int], incomplete: Iterable[str] = ()) -> DemoVerdict:
    """Return the verdict.

    `sums` are the sums of the ledger's balance, by name. `incomplete` are the reasons why entries are missing from it.
    """
    missing = {place: tuple(sorted(ids - kept.received[place].keys())) for place, ids in kept.accepted.items()}
    # Two deliveries with the same sequence number are the same message: it was delivered again because its completion
    # was lost.
    doubled = {
        place: tuple(sorted(id_ for id_, numbers in found.items() if len(numbers) > 1))
        for place, found in kept.received.items()
    }
    return DemoVerdict(
        accepted=kept.count_accepted(),
        diverted=kept.diverted,
        received=kept.count_received(),
        missing={place: ids for place, ids in missing.items() if ids},
        duplicated={place: ids for place, ids in doubled.items() if ids},
        sums=sums,
        ledger=judge_ledger(sums, incomplete),
    )


def _named(ids: tuple[str, ...]) -> str:
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return f"{', '.join(ids[:_NAMED])}{more}"
