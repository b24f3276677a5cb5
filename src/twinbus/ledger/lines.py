"""What is queued, as lines: an operation that has ended is one; one that has not is an intent, and later an outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twinbus.ledger.encoding import encode, id_text, intent_line, listed, operation_line, outcome_line, quoted
from twinbus.ledger.encoding import ending as how_it_ended
from twinbus.ledger.entries import Metered, Movement, Operation, State
from twinbus.ledger.running import ALL, INTENT, SEEN, WELL, RunningOperation
from twinbus.ledger.units import units

Item = RunningOperation | Operation | State | Movement | Metered


def lines(items: Iterable[Item], prefix: str, offset: float, failed: Callable[[Exception], None]) -> list[str]:
    """Theirs, without those of which everything was told. `failed`: one cannot be put down in words.

    `prefix` begins the ids of the operations, `offset` turns their clock into wall time.
    """
    found: list[str] = []
    add = found.append
    for item in items:
        try:
            if (
                type(item) is RunningOperation
                and item.ending is WELL
                and type(id_ := item.ids) is str
                and not item.state
            ):
                # Nearly all there are, so this is `operation_line`, without its call. It is not marked as seen: it has
                # ended, and is not queued again.
                begun = item.begun
                add(
                    f'{{"v":1,"kind":"operation","at":{int((offset + begun) * 1000.0)},"id":"{prefix}-{item.number}",'
                    f'{item.place},"ids":[{quoted(id_text(id_) if ":" in id_ else id_)}],"bytes":{item.size},"units":1,'
                    f'"seconds":{item.ended - begun:.6f},"result":"ok"}}\n'
                )
            elif line := _line(item, prefix, offset):
                add(line)
        except Exception as error:
            failed(error)
    return found


def _line(item: Item, prefix: str, offset: float) -> str:
    """Nothing where everything was told."""
    if not isinstance(item, RunningOperation):
        return encode(item)
    if not item.state:
        # First this, then a look at its end: one that comes between the two queues it once more.
        item.state = SEEN
    ending, state = item.ending, item.state
    if state == ALL or (state == INTENT and ending is None):
        return ""
    number, begun = f"{prefix}-{item.number}", item.begun
    ids = (item.ids,) if isinstance(item.ids, str) else item.ids
    total = item.size if isinstance(item.size, int) else sum(item.size)
    said = item.place, listed(map(id_text, ids)), total, units(len(ids), item.size)
    if ending is None:
        item.state = INTENT
        return intent_line(int((offset + begun) * 1000), number, *said)
    item.state = ALL
    result, cause, failed = ending
    end = how_it_ended(item.ended - begun, result, cause, tuple(map(id_text, failed)))
    if state == INTENT:
        return outcome_line(int((offset + item.ended) * 1000), number, end)
    return operation_line(int((offset + begun) * 1000), number, *said, end)
