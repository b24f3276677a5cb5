"""An operation under way, from `begin` to `end`. It is made for every send: it holds, and decides nothing.

Its fields are read by the writer's thread, without a lock; the order in which `end` sets them is what makes that safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from twinbus.ledger.entries import OK

if TYPE_CHECKING:
    from twinbus.ledger.writer import Writer

Ending = tuple[str, str | None, Sequence[object]]
"""Result, cause, and the ids that it is about where not all are."""
WELL: Final[Ending] = (OK, None, ())

# How much of it the writer has told.
NOTHING, SEEN, INTENT, ALL = range(4)


class RunningOperation:
    """What `Ledger.begin` returns, which sets its fields. Call `end` once; never ended, its outcome is unknown."""

    __slots__ = ("begun", "ended", "ending", "ids", "number", "place", "size", "state", "writer")

    writer: Writer
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
        self.end_as(WELL if result is OK and not failed else (result, cause, failed))

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
