"""What a syphon tells its ledger and its progress of each operation (M1): stages, ids, sizes, results.

Without a ledger only the counts are kept. It moves nothing, and decides nothing but what an outcome is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from twinbus.ledger.entries import OK, UNKNOWN, Move, Stage, result_of_failure
from twinbus.ledger.recorder import Ledger
from twinbus.ledger.running import RunningOperation
from twinbus.syphon.progress import Counts
from twinbus.syphon.transport import Held, Outgoing, SendFailedError

NOT_TRIED: Final = "not_tried"
"""The result of an intent that the ledger could not take: nothing was asked of anybody."""


class Books:
    """`primary` and `secondary` are the namespaces' names, as backlog queue paths write them (P4)."""

    def __init__(self, ledger: Ledger | None, primary: str, secondary: str, counts: Counts) -> None:
        self.counts = counts
        self._ledger = ledger
        self._primary = primary
        self._secondary = secondary

    def done(
        self,
        stage: Stage,
        queue: str,
        size: int | Sequence[int],
        seconds: float,
        result: str = OK,
        cause: str | None = None,
    ) -> None:
        """On a backlog queue: an operation for each of these sizes; one, where there are none or one for them all."""
        self.counts.operations[stage] += 1 if isinstance(size, int) else len(size) or 1
        if self._ledger is not None:
            self._ledger.done(stage, self._secondary, queue, (), size, seconds=seconds, result=result, cause=cause)

    def sending(self, path: str, messages: Sequence[Outgoing]) -> RunningOperation | None:
        """The intent; `durable` before the send. LedgerUnavailableError where nothing may be sent without it."""
        self.counts.operations[Stage.RETURN_PRIMARY] += len(messages)
        if self._ledger is None:
            return None
        ids = [message.message_id for message in messages]
        sizes = [message.size for message in messages]
        return self._ledger.begin(Stage.RETURN_PRIMARY, self._primary, path, ids, sizes)

    def not_tried(self, operation: RunningOperation | None) -> None:
        if operation is not None:
            operation.end(NOT_TRIED)

    async def durable(self) -> None:
        if self._ledger is not None:
            await self._ledger.flushed()

    def sent(self, operation: RunningOperation | None, path: str, messages: Sequence[Outgoing], now: float) -> None:
        if operation is not None:
            operation.end(OK)
        self.counts.returned(path, len(messages), sum(message.size for message in messages), now)

    def failed(
        self,
        operation: RunningOperation | None,
        error: SendFailedError,
        arrived: Sequence[Outgoing],
        now: float,
    ) -> None:
        if operation is not None:
            ids = [message.message_id for message in error.failed] if arrived else ()
            result, cause = result_of_failure(error.kind, refused=error.refused)
            operation.end(result, cause=cause, failed=ids)
        if arrived:
            self.counts.returned(error.path, len(arrived), sum(message.size for message in arrived), now)

    def completed(
        self, queue: str, path: str, messages: Sequence[Outgoing], lost: Sequence[Held], why: str, seconds: float
    ) -> None:
        """Of those that are `lost`, for that reason, nobody knows whether they were; their delivery may be repeated.

        Told afterwards: what was delivered is completed even while the ledger cannot be written.
        """
        self.counts.operations[Stage.COMPLETE_BACKLOG] += len(messages)
        if self._ledger is not None:
            self._ledger.done(
                Stage.COMPLETE_BACKLOG,
                self._secondary,
                queue,
                [message.message_id for message in messages],
                (0,) * len(messages),
                f"{self._primary}/{path}",
                seconds=seconds,
                result=UNKNOWN if lost else OK,
                cause=why if lost else None,
                failed=[one.message_id for one in lost] if len(lost) < len(messages) else (),
            )
        if lost:
            self.moved(Move.POSSIBLE_DUPLICATE, queue, path, lost, why)

    def moved(self, move: Move, queue: str, path: str | None, held: Sequence[Held], reason: str | None = None) -> None:
        """Beyond one operation: dead-lettered, kept, or perhaps delivered twice."""
        match move:
            case Move.DEAD_LETTERED:
                self.counts.dead_lettered(path or "", len(held))
            case Move.KEPT:
                self.counts.kept(path or "", len(held))
            case Move.POSSIBLE_DUPLICATE:
                self.counts.possible_duplicates(path or "", len(held))
            case _:
                pass
        if self._ledger is not None:
            source, destination = f"{self._secondary}/{queue}", f"{self._primary}/{path or ''}"
            self._ledger.moved(move, [one.message_id for one in held], source, destination, reason)
