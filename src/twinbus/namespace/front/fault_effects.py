"""What a fault does to one operation of a connection (N4): one table for all points.

Which operation is struck is decided in faults.py; how an operation goes on, is refused or ends its link is the link's.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.faults import Fault, FaultKind, Faults
from twinbus.namespace.front import refusals

# Operations of one connection that wait for a black hole to end; what comes beyond them stays in it.
_MOST_HELD = 1000


def crash() -> None:
    """The process ends at once, as by kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultableOperation:
    """An operation by what can become of it. `unanswered` carries it out and makes a call instead of its answer."""

    go_on: Callable[[], None]
    refuse: Callable[[Refusal], None]
    detach: Callable[[Refusal], None]
    unanswered: Callable[[Callable[[], None]], None]


class BlackHoles:
    """What black holes over parts of a namespace hold of one connection: it goes on when they are over."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._held: list[tuple[Fault, Callable[[], None]]] = []

    def hold(self, fault: Fault, go_on: Callable[[], None]) -> None:
        if len(self._held) < _MOST_HELD:
            self._held.append((fault, go_on))

    def let_go(self) -> None:
        """Faults have changed. What a fault of counted hits swallowed stays swallowed."""
        held, self._held = self._held, []
        for fault, go_on in held:
            if not self._faults.is_over(fault):
                self._held.append((fault, go_on))
            elif fault.count is None:
                go_on()

    def forget(self) -> None:
        self._held.clear()


def carry_out(fault: Fault, operation: FaultableOperation, black_holes: BlackHoles) -> None:
    match fault.kind:
        case FaultKind.SERVER_BUSY:
            operation.refuse(refusals.busy())
        case FaultKind.INTERNAL_ERROR:
            operation.refuse(refusals.INTERNAL)
        case FaultKind.DETACH | FaultKind.REFUSE:
            operation.detach(refusals.DETACHED)
        case FaultKind.DELAY:
            asyncio.get_running_loop().call_later(fault.delay, operation.go_on)
        case FaultKind.DROP_ACK:
            operation.unanswered(_say_nothing)
        case FaultKind.CRASH if fault.after:
            operation.unanswered(crash)
        case FaultKind.CRASH:
            crash()
        case FaultKind.BLACK_HOLE:
            black_holes.hold(fault, operation.go_on)
        case _:
            assert_never(fault.kind)


def _say_nothing() -> None:
    """The answer is dropped on purpose."""
