"""What is queued, as lines: an operation that has ended is one; one that has not is an intent, and later an outcome.

One thread; what repeats from line to line is put together once.
"""

from __future__ import annotations

from twinbus.ledger.encoding import (
    encode,
    ending,
    id_text,
    intent_line,
    listed,
    operation_line,
    outcome_line,
    place,
    quoted,
)
from twinbus.ledger.entries import Metered, Movement, Stage, State
from twinbus.ledger.running import RunningOperation
from twinbus.ledger.units import UNIT, units

Item = RunningOperation | State | Movement | Metered

_MOST_PLACES = 4096


class Lines:
    """`prefix` begins the ids of one writer's operations."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._places: dict[tuple[Stage, str, str, str | None], str] = {}

    def of(self, item: Item, offset: float) -> str:
        """Its line, "" where everything about it was told. `offset` turns the operations' clock into wall time."""
        return self._operation(item, offset) if type(item) is RunningOperation else encode(item)  # type: ignore[arg-type] # mypy does not narrow by type()

    def _operation(self, operation: RunningOperation, offset: float) -> str:
        # First this, then a look at the result: an end that comes between the two queues it once more.
        operation.taken = True
        result = operation.result
        if operation.told:
            return ""
        number, begun = f"{self._prefix}-{operation.number}", operation.begun
        if result is None:
            operation.intended = True
            return intent_line(int((offset + begun) * 1000), number, *self._said(operation))
        operation.told = True
        ended = operation.ended
        failed = tuple(map(id_text, operation.failed)) if operation.failed else ()
        end = ending(ended - begun, result, operation.cause, failed)
        if operation.intended:
            return outcome_line(int((offset + ended) * 1000), number, end)
        return operation_line(int((offset + begun) * 1000), number, *self._said(operation), end)

    def _said(self, operation: RunningOperation) -> tuple[str, str, int, int]:
        key = (operation.stage, operation.namespace, operation.entity, operation.destination)
        there = self._places.get(key)
        if there is None:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            there = self._places[key] = place(*key)
        ids, size = operation.ids, operation.size
        if len(ids) == 1 and type(size) is int and size <= UNIT:
            # Nearly all there are.
            return there, quoted(id_text(ids[0])), size, 1
        total = size if isinstance(size, int) else sum(size)
        return there, listed(map(id_text, ids)), total, units(len(ids), size)
