"""What is queued, as lines: an operation that has ended is one; one that has not is an intent, and later an outcome.

One thread; what repeats from line to line is put together once.
"""

from __future__ import annotations

from twinbus.ledger.encoding import (
    encode,
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
from twinbus.ledger.encoding import ending as how_it_ended
from twinbus.ledger.entries import Metered, Movement, Operation, Stage, State
from twinbus.ledger.running import ALL, INTENT, SEEN, WELL, RunningOperation
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
        self._last: tuple[Stage, str, str, str | None, str] = (Stage.PING, "", "", None, "")

    def of(self, item: Item, offset: float) -> str:
        """Its line, "" where everything about it was told. `offset` turns the operations' clock into wall time."""
        if type(item) is not RunningOperation:
            return encode(item)  # type: ignore[arg-type] # mypy does not narrow by type()
        if item.state:
            return self._again(item, offset)
        # First this, then a look at its end: one that comes between the two queues it once more.
        item.state = SEEN
        stage, namespace, entity, ids, size, destination = item.said
        if item.ending is not WELL or type(ids) is not str or type(size) is not int or size > UNIT:
            return self._again(item, offset)
        # Nearly all there are.
        item.state = ALL
        last = self._last
        if entity is last[2] and stage is last[0] and destination is last[3] and namespace is last[1]:
            there = last[4]
        else:
            there = success_place(self._place((stage, namespace, entity, destination)))
            self._last = (stage, namespace, entity, destination, there)
        if ":" in ids:
            ids = id_text(ids)
        begun = item.begun
        return success_line(
            int((offset + begun) * 1000.0), self._number, item.number, there, quoted(ids), size, item.ended - begun
        )

    def _again(self, operation: RunningOperation, offset: float) -> str:
        """One that is not over, or did not end in the usual way, or of which the intent is written."""
        ending, state = operation.ending, operation.state
        if state == ALL or (state == INTENT and ending is None):
            return ""
        number, begun = f"{self._prefix}-{operation.number}", operation.begun
        stage, namespace, entity, given, size, destination = operation.said
        ids = (given,) if type(given) is str else given
        there = self._place((stage, namespace, entity, destination))
        total = size if isinstance(size, int) else sum(size)
        said = listed(map(id_text, ids)), total, units(len(ids), size)
        if ending is None:
            operation.state = INTENT
            return intent_line(int((offset + begun) * 1000), number, there, *said)
        operation.state = ALL
        result, cause, failed = ending
        ended = operation.ended
        end = how_it_ended(ended - begun, result, cause, tuple(map(id_text, failed)))
        if state == INTENT:
            return outcome_line(int((offset + ended) * 1000), number, end)
        return operation_line(int((offset + begun) * 1000), number, there, *said, end)

    def _place(self, key: _Place) -> str:
        there = self._places.get(key)
        if there is None:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            there = self._places[key] = place(*key)
        return there
