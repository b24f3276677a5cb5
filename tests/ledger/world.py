"""A simulated world of senders, a backlog and a syphon, whose operations fail in every way, and its ledger.

The world knows where every copy really is. `careless`: the syphon sometimes completes a message without delivering it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from twinbus.ledger.entries import Entry, Intent, Move, Movement, Operation, Outcome, Stage

DESTINATION = "contoso/orders"
QUEUE = "contoso/x-servicebus-transfer/0"


class KilledError(Exception):
    """The running process was killed. Another process replaces it."""


@dataclass
class World:
    seed: int
    careless: bool = False
    primary: Counter[str] = field(default_factory=Counter)
    backlog: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    accepted: Counter[str] = field(default_factory=Counter)
    thrown_away: Counter[str] = field(default_factory=Counter)
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = Random(self.seed)
        self._numbers = itertools.count()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            step = self._chance.choice([self._send, self._send, self._move, self._move, self._move, self._resubmit])
            try:
                step()
            except KilledError:
                continue
        # Lines come in any order, and some twice.
        self.entries += [entry for entry in self.entries if self._chance.random() < 0.1]
        self._chance.shuffle(self.entries)

    # --- what happens ------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        name = f"m{self._chance.randrange(12)}" if self._chance.random() < 0.3 else f"n{next(self._numbers)}"
        safe = self._chance.random() < 0.5 and self._operation(Stage.SEND_PRIMARY, name, lambda: self._arrive(name))
        if safe or self._operation(Stage.SEND_BACKLOG, name, lambda: self.backlog.append(name)):
            self.accepted[name] += 1

    def _move(self) -> None:
        if not self.backlog:
            return
        name = self._chance.choice(self.backlog)
        if self.careless and self._chance.random() < 0.2:
            self._complete(self.backlog, name, self.thrown_away)
        elif self._chance.random() < 0.1:
            if self._operation(Stage.SETTLE_BACKLOG, name, lambda: self._dead_letter(name)):
                self._moved(Move.DEAD_LETTERED, name)
        elif self._operation(Stage.RETURN_PRIMARY, name, lambda: self._arrive(name)):
            if self._chance.random() < 0.1:
                raise KilledError
            self._complete(self.backlog, name)

    def _resubmit(self) -> None:
        if not self.dead or self._chance.random() < 0.5:
            return
        name = self._chance.choice(self.dead)
        if self._operation(Stage.RESUBMIT_BACKLOG, name, lambda: self.backlog.append(name)):
            self._complete(self.dead, name)
            self._moved(Move.RESUBMITTED, name)

    def _dead_letter(self, name: str) -> None:
        self.backlog.remove(name)
        self.dead.append(name)

    def _arrive(self, name: str) -> None:
        self.primary[name] += 1

    def _complete(self, place: list[str], name: str, gone: Counter[str] | None = None) -> None:
        def remove() -> None:
            place.remove(name)
            if gone is not None:
                gone[name] += 1

        self._operation(Stage.COMPLETE_BACKLOG, name, remove)

    # --- how it is told ----------------------------------------------------------------------------------------------

    def _operation(self, stage: Stage, name: str, do: object) -> bool:
        """Try an operation. Returns whether the caller got a success. The process may be killed during this."""
        assert callable(do)
        fate = self._chance.choices(["ok", "refused", "unknown", "silent", "killed"], [20, 3, 2, 2, 1])[0]
        if fate in ("ok", "unknown"):
            do()
        there = {"entity": "orders"} if stage in (Stage.SEND_PRIMARY, Stage.RETURN_PRIMARY) else {"entity": QUEUE}
        number = f"op-{next(self._numbers)}"
        begun = {
            "at": 0, "id": number, "stage": stage, "namespace": "contoso", "ids": (name,), "bytes": 1, "units": 1,
            "destination": None if there["entity"] == "orders" else DESTINATION.upper(), **there,
        }  # fmt: skip
        if fate == "killed":
            if self._chance.random() < 0.5:
                do()
            self.entries.append(Intent(**begun))  # type: ignore[arg-type] # a dict of all kinds
            raise KilledError
        result = "unknown" if fate == "silent" else "server_busy" if fate == "refused" else fate
        if self._chance.random() < 0.5:
            self.entries.append(Operation(**begun, seconds=0.1, result=result))  # type: ignore[arg-type] # as above
        else:
            self.entries.append(Intent(**begun))  # type: ignore[arg-type] # as above
            self.entries.append(Outcome(at=1, id=number, seconds=0.1, result=result))
        return fate == "ok"

    def _moved(self, move: Move, name: str) -> None:
        number = f"move-{next(self._numbers)}"
        self.entries.append(
            Movement(at=0, id=number, move=move, ids=(name,), source=QUEUE, destination=DESTINATION, reason="wrong")
        )
