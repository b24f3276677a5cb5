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
    success_number,
    success_place,
)
from twinbus.ledger.entries import OK, Metered, Movement, Operation, Stage, State
from twinbus.ledger.running import RunningOperation
from twinbus.ledger.units import UNIT, units

Item = RunningOperation | Operation | State | Movement | Metered

_Place = tuple[Stage, str, str, str | None]
_MOST_PLACES = 4096


class Lines:
    """`prefix` begins the ids of one writer's operations."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._places: dict[_Place, str] = {}
        # The usual line, but for its numbers and its message id: it is put together of as few parts as can be.
        self._number = success_number(prefix)
        self._last: tuple[_Place, str] = ((Stage.PING, "", "", None), "")

    def of(self, item: Item, offset: float) -> str:
        """Its line, "" where everything about it was told. `offset` turns the operations' clock into wall time."""
        if type(item) is not RunningOperation:
            return encode(item)  # type: ignore[arg-type] # mypy does not narrow by type()
        # First this, then a look at the result: an end that comes between the two queues it once more.
        item.taken = True
        result = item.result
        if item.told:
            return ""
        ids, size = item.ids, item.size
        if result != OK or item.intended or item.failed or len(ids) != 1 or type(size) is not int or size > UNIT:
            return self._operation(item, result, offset)
        # Nearly all there are.
        item.told = True
        (stage, namespace, entity, destination), there = self._last
        if (
            item.entity is not entity
            or item.stage is not stage
            or item.destination is not destination
            or item.namespace is not namespace
        ):
            there = self._success(item)
        begun = item.begun
        at, seconds = int((offset + begun) * 1000), item.ended - begun
        return success_line(at, self._number, item.number, there, quoted(id_text(ids[0])), size, seconds)

    def _success(self, operation: RunningOperation) -> str:
        key = (operation.stage, operation.namespace, operation.entity, operation.destination)
        there = success_place(self._place(key))
        self._last = key, there
        return there

    def _operation(self, operation: RunningOperation, result: str | None, offset: float) -> str:
        number, begun = f"{self._prefix}-{operation.number}", operation.begun
        there = self._place((operation.stage, operation.namespace, operation.entity, operation.destination))
        ids, size = operation.ids, operation.size
        total = size if isinstance(size, int) else sum(size)
        said = listed(map(id_text, ids)), total, units(len(ids), size)
        if result is None:
            operation.intended = True
            return intent_line(int((offset + begun) * 1000), number, there, *said)
        operation.told = True
        ended = operation.ended
        end = ending(ended - begun, result, operation.cause, tuple(map(id_text, operation.failed)))
        if operation.intended:
            return outcome_line(int((offset + ended) * 1000), number, end)
        return operation_line(int((offset + begun) * 1000), number, there, *said, end)

    def _place(self, key: _Place) -> str:
        there = self._places.get(key)
        if there is None:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            there = self._places[key] = place(*key)
        return there
