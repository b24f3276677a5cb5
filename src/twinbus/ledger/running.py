"""An operation under way, from `begin` to `end`. It is made for every send: it holds, and decides nothing.

Its fields are read by the writer's thread, without a lock; the order in which `end` sets them is what makes that safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twinbus.ledger.entries import OK, Stage

if TYPE_CHECKING:
    from twinbus.ledger.writer import Writer


class RunningOperation:
    """What `Ledger.begin` returns, which sets its fields. Call `end` once; never ended, its outcome is unknown."""

    __slots__ = (
        "begun", "cause", "destination", "ended", "entity", "failed", "ids", "intended", "namespace", "number",
        "result", "size", "stage", "taken", "told", "writer",
    )  # fmt: skip

    writer: Writer
    number: int
    stage: Stage
    namespace: str
    entity: str
    ids: Sequence[object]
    size: int | Sequence[int]
    destination: str | None
    begun: float
    result: str | None
    cause: str | None
    failed: Sequence[object]
    ended: float
    taken: bool
    intended: bool
    told: bool

    @property
    def id(self) -> str:
        """The operation id."""
        return f"{self.writer.prefix}-{self.number}"

    def end(self, result: str = OK, *, cause: str | None = None, failed: Sequence[object] = ()) -> None:
        """How it ended: "ok"; "unknown" where it may have happened, with the word for why as `cause`; or that word.

        `failed`: the ids that the result is about, where the others are well.
        """
        if self.result is not None:
            return
        self.cause = cause
        self.failed = failed
        self.ended = self.writer.now()
        # From here on the writer may see it. Where it has looked before, it is told that there is something to add.
        self.result = result
        if self.taken:
            self.writer.put(self)
