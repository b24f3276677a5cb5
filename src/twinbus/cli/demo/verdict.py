"""Whether the demo is proof: what the application was told is safe, what receivers have, and what the ledger says.

Decides from these alone. Nothing is asked for here, and nothing is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from twinbus.cli.demo.application import Records

# In a demo that went well, none is anywhere but on the primary.
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
    """`missing` and `duplicated`: ids, by the place they were, or should have been, received at."""

    accepted: int
    diverted: int
    received: int
    missing: Mapping[str, tuple[str, ...]]
    duplicated: Mapping[str, tuple[str, ...]]
    sums: Mapping[str, int]

    @property
    def problems(self) -> list[str]:
        told = [] if self.diverted else ["no message was diverted: nobody noticed the outage, or the backlog was away"]
        told += [f"{place} never received {_named(ids)}" for place, ids in self.missing.items()]
        told += (f"{place} received more than once {_named(ids)}" for place, ids in self.duplicated.items())
        told += (f"the ledger tells of {self.sums[name]} {said}" for name, said in _NONE.items() if self.sums[name])
        if self.sums["accepted"] != self.accepted:
            told.append(
                f"the ledger tells of {self.sums['accepted']} accepted, the application was told of {self.accepted}"
            )
        return told


def judge(kept: Records, sums: Mapping[str, int]) -> DemoVerdict:
    """`sums`: of the balance, by word."""
    missing = {place: tuple(sorted(ids - kept.received[place].keys())) for place, ids in kept.accepted.items()}
    # The same number is the same message, delivered again because its completion was not heard of.
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
    )


def _named(ids: tuple[str, ...]) -> str:
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return f"{', '.join(ids[:_NAMED])}{more}"
