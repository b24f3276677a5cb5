"""The plan of a run, made from its seed: the outage, another fault, and where syphons are killed or frozen.

The first twenty seeds cover every outage, every other fault and every step at which a syphon can be stopped.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Final

from tests.chaos.sending import TASKS, THREADS
from tests.chaos.syphoning import COMPLETING, FATAL, SEND_UNDER_WAY, StopPoint
from twinbus.syphon import MoveStep


class Outage(Enum):
    """How the primary fails."""

    KILL = "killed and restarted"
    BLACK_HOLE = "black-holed"
    FREEZE = "frozen"


class Trouble(Enum):
    NONE = "none"
    SECONDARY_KILLED = "the secondary is killed while the primary is away"
    SECONDARY_KILLED_AFTER = "the secondary is killed while the backlog is brought home"
    QUEUE_BROKEN = "a backlog queue answers with errors"
    SENDS_UNANSWERED = "acknowledgements of sends to the primary are lost"
    COMPLETIONS_UNANSWERED = "acknowledgements of completions in the backlog are lost"
    PRIMARY_BUSY = "the primary is busy while the backlog is brought home"
    PRIMARY_AGAIN = "the primary is killed again while the backlog is brought home"


# Steps at which it matters that the lock ends while the syphon is frozen.
_FREEZES: Final = (
    MoveStep.RECEIVED.value,
    MoveStep.INTENDED.value,
    SEND_UNDER_WAY,
    MoveStep.CONFIRMED.value,
    COMPLETING,
)
_TIMES: Final = (1, 1, 2)


@dataclass(frozen=True, slots=True)
class OutagePlan:
    seed: int
    outage: Outage
    seconds: float
    """Duration of the outage."""
    trouble: Trouble
    senders: tuple[str, ...]
    """The kinds of senders, each in its own process."""
    fates: tuple[tuple[StopPoint, ...], ...]
    """For each syphon, where each of its lives ends."""
    struck: bool
    """Whether the first syphon is killed once more, at a random instant."""

    @property
    def text(self) -> str:
        fates = "; ".join(
            ", ".join(f"{one.signal.name} at {one.place} × {one.times}" for one in lives) or "left alone"
            for lives in self.fates
        )
        outage = f"primary {self.outage.value} for {self.seconds:.1f} s"
        return f"seed {self.seed}: {' and '.join(self.senders)}; {outage}; {self.trouble.value}; {fates}"


def outage_plan(seed: int) -> OutagePlan:
    rng = Random(f"chaos {seed}")
    first = [StopPoint(FATAL[seed % len(FATAL)], rng.choice(_TIMES))]
    first += [StopPoint(rng.choice(FATAL), rng.choice(_TIMES)) for _ in range(rng.choice((0, 0, 1)))]
    fates = [tuple(first)]
    if seed % 4 == 3:
        # When the locks have ended, the other syphon receives the messages that the frozen syphon holds.
        fates.append((StopPoint(rng.choice(_FREEZES), rng.choice(_TIMES), signal.SIGSTOP),))
    elif rng.random() < 0.5:
        fates.append(tuple(StopPoint(rng.choice(FATAL), rng.choice(_TIMES)) for _ in range(rng.randrange(2))))
    outage = list(Outage)[seed % len(Outage)]
    return OutagePlan(
        seed=seed,
        outage=outage,
        # Senders notice silence only after the timeout of a try, so the outage must be longer than this timeout.
        seconds=rng.uniform(0.6, 1.2) if outage is Outage.KILL else rng.uniform(1.8, 2.4),
        trouble=list(Trouble)[seed % len(Trouble)],
        senders=(THREADS, TASKS) if seed % 5 == 4 else (THREADS if rng.random() < 0.5 else TASKS,),
        fates=tuple(fates),
        struck=rng.random() < 0.3,
    )
