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
    success_line,
)
from twinbus.ledger.entries import OK, Metered, Movement, Stage, State
from twinbus.ledger.running import RunningOperation
from twinbus.ledger.units import UNIT, units

Item = RunningOperation | State | Movement | Metered

_Place = tuple[Stage, str, str, str | None]
_MOST_PLACES = 4096


class Lines:
    """`prefix` begins the ids of one writer's operations."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._places: dict[_Place, str] = {}

    def of(self, item: Item, offset: float) -> str:
        """Its line, "" where everything about it was told. `offset` turns the operations' clock into wall time."""
        if type(item) is not RunningOperation:
            return encode(item)  # type: ignore[arg-type] # mypy does not narrow by type()
        # First this, then a look at the result: an end that comes between the two queues it once more.
        item.taken = True
        result = item.result
        if item.told:
            return ""
        if result is None or result != OK or item.intended or item.failed:
            return self._operation(item, result, offset)
        item.told = True
        begun, ids, size = item.begun, item.ids, item.size
        key = (item.stage, item.namespace, item.entity, item.destination)
        there = self._places.get(key) or self._place(key)
        if len(ids) == 1 and type(size) is int and size <= UNIT:
            # Nearly all there are.
            said, cost = quoted(id_text(ids[0])), 1
        else:
            said, size, cost = _several(item)
        at, seconds = int((offset + begun) * 1000), item.ended - begun
        return success_line(at, f"{self._prefix}-{item.number}", there, said, size, cost, seconds)

    def _operation(self, operation: RunningOperation, result: str | None, offset: float) -> str:
        number, begun = f"{self._prefix}-{operation.number}", operation.begun
        key = (operation.stage, operation.namespace, operation.entity, operation.destination)
        there = self._places.get(key) or self._place(key)
        if result is None:
            operation.intended = True
            return intent_line(int((offset + begun) * 1000), number, there, *_several(operation))
        operation.told = True
        ended = operation.ended
        end = ending(ended - begun, result, operation.cause, tuple(map(id_text, operation.failed)))
        if operation.intended:
            return outcome_line(int((offset + ended) * 1000), number, end)
        return operation_line(int((offset + begun) * 1000), number, there, *_several(operation), end)

    def _place(self, key: _Place) -> str:
        if len(self._places) >= _MOST_PLACES:
            self._places.clear()
        there = self._places[key] = place(*key)
        return there


def _several(operation: RunningOperation) -> tuple[str, int, int]:
    """Ids, bytes and units of any operation."""
    ids, size = operation.ids, operation.size
    total = size if isinstance(size, int) else sum(size)
    return listed(map(id_text, ids)), total, units(len(ids), size)
