"""The effects of faults on single operations of an AMQP connection (N4).

`Faults` decides which operation a fault hits. This module maps each kind of fault to an effect. A link describes its
operation as a `FaultableOperation`: functions that continue, refuse or end the operation.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.faults import Fault, FaultKind, FaultPoint, Faults
from twinbus.namespace.front import refusals

# Operations of one connection that may wait until a black hole ends. Further operations are lost.
_MAX_HELD = 1000


def crash() -> None:
    """End the process without any clean-up, as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultableOperation:
    """An operation that a fault hit. The fault decides which one of these functions is called."""

    proceed: Callable[[], None]
    refuse: Callable[[Refusal], None]
    detach: Callable[[Refusal], None]
    proceed_without_answer: Callable[[Callable[[], None]], None]
    """Carries out the operation. Calls the function in its argument instead of sending the answer."""


class FaultEffects:
    """Applies faults to the operations of one AMQP connection, and holds the operations that a black hole hit."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._held: list[tuple[Fault, Callable[[], None]]] = []

    def trigger(self, point: FaultPoint, entity: str, link: str) -> Fault | None:
        """Return the fault that hits an operation, and count the hit. Returns None if no fault hits the operation."""
        return self._faults.trigger(point, entity, link) if self._faults.active else None

    def black_hole(self, point: FaultPoint, entity: str, link: str) -> Fault | None:
        """Return the active black hole for such operations, or None. Does not count a hit."""
        return self._faults.black_hole(point, entity, link) if self._faults.active else None

    def apply(self, fault: Fault, operation: FaultableOperation) -> None:
        """Call the function of the operation that belongs to the kind of the fault."""
        match fault.kind:
            case FaultKind.SERVER_BUSY:
                operation.refuse(refusals.busy())
            case FaultKind.INTERNAL_ERROR:
                operation.refuse(refusals.INTERNAL)
            case FaultKind.DETACH | FaultKind.REFUSE:
                operation.detach(refusals.DETACHED)
            case FaultKind.DELAY:
                asyncio.get_running_loop().call_later(fault.delay, operation.proceed)
            case FaultKind.DROP_ACK:
                operation.proceed_without_answer(_send_no_answer)
            case FaultKind.CRASH if fault.after:
                operation.proceed_without_answer(crash)
            case FaultKind.CRASH:
                crash()
            case FaultKind.BLACK_HOLE:
                self.hold(fault, operation.proceed)
            case _:
                assert_never(fault.kind)

    def hold(self, fault: Fault, proceed: Callable[[], None]) -> None:
        """Call `proceed` when the black hole `fault` has ended. Drops the operation if too many are held already."""
        if len(self._held) < _MAX_HELD:
            self._held.append((fault, proceed))

    def faults_changed(self) -> None:
        """Continue operations that an ended `black-hole` fault held back. Hits of a fault with a count are dropped."""
        held, self._held = self._held, []
        for fault, proceed in held:
            if not self._faults.is_over(fault):
                self._held.append((fault, proceed))
            elif fault.count is None:
                proceed()

    def clear(self) -> None:
        """Drop all held operations: the connection is gone."""
        self._held.clear()


def _send_no_answer() -> None:
    """Does nothing. Called instead of sending the answer that a fault of kind drop-ack suppresses."""
