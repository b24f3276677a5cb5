"""An operation under way, from `begin` to `end`. It is made for every send: it holds, and decides nothing.

Its fields are read by the writer's thread, without a lock; the order in which `end` sets them is what makes that safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from twinbus.ledger.entries import OK, Metered, Movement, Operation, State, billable_units
from twinbus.ledger.json_lines import encode_entry, id_text, intent_line, listed, operation_line, outcome_line, quoted
from twinbus.ledger.json_lines import ending as how_it_ended

if TYPE_CHECKING:
    from twinbus.ledger.group_writer import GroupWriter


Ending = tuple[str, str | None, Sequence[object]]
"""Result, cause, and the ids that it is about where not all are."""
OK_ENDING: Final[Ending] = (OK, None, ())

# How much of it the writer has told.
NOTHING, SEEN, INTENT, ALL = range(4)


class RunningOperation:
    """What `Ledger.begin` returns, which sets its fields. Call `end` once; never ended, its outcome is unknown."""

    __slots__ = ("begun", "ended", "ending", "ids", "number", "place", "size", "state", "writer")

    writer: GroupWriter
    number: int
    place: str
    """As `encoding.place` has it."""
    ids: str | Sequence[object]
    """A text alone is the one id of a message of one billable unit."""
    size: int | Sequence[int]
    begun: float
    ended: float
    ending: Ending | None
    state: int

    @property
    def id(self) -> str:
        """The operation id."""
        return f"{self.writer.prefix}-{self.number}"

    def end(self, result: str = OK, *, cause: str | None = None, failed: Sequence[object] = ()) -> None:
        """How it ended: "ok"; "unknown" where it may have happened, with the word for why as `cause`; or that word.

        `failed`: the ids that the result is about, where the others are well.
        """
        self.end_as(OK_ENDING if result is OK and not failed else (result, cause, failed))

    def end_as(self, ending: Ending) -> None:
        """`end`, for who has all of it put together."""
        if self.ending is None:
            writer = self.writer
            now = writer.now  # as in `recording`, for speed
            self.ended = now()
            # From here on the writer may see it. Where it has looked before, it is told that there is something to add.
            self.ending = ending
            if self.state:
                writer.put(self)


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
                and item.ending is OK_ENDING
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
        return encode_entry(item)
    if not item.state:
        # First this, then a look at its end: one that comes between the two queues it once more.
        item.state = SEEN
    ending, state = item.ending, item.state
    if state == ALL or (state == INTENT and ending is None):
        return ""
    number, begun = f"{prefix}-{item.number}", item.begun
    ids = (item.ids,) if isinstance(item.ids, str) else item.ids
    total = item.size if isinstance(item.size, int) else sum(item.size)
    said = item.place, listed(map(id_text, ids)), total, billable_units(len(ids), item.size)
    if ending is None:
        item.state = INTENT
        return intent_line(int((offset + begun) * 1000), number, *said)
    item.state = ALL
    result, cause, failed = ending
    end = how_it_ended(item.ended - begun, result, cause, tuple(map(id_text, failed)))
    if state == INTENT:
        return outcome_line(int((offset + item.ended) * 1000), number, end)
    return operation_line(int((offset + begun) * 1000), number, *said, end)
