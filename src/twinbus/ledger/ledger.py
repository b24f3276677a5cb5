"""The recorder: what a program tells its ledger, at a price it can pay for every send.

Whether an operation may begin while the ledger cannot be written is decided here; how lines come to the disk is not.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from twinbus.errors import OperatorError
from twinbus.ledger.entries import (
    OK,
    UNIT_BYTES,
    Fact,
    Metered,
    Move,
    Movement,
    Operation,
    Role,
    Stage,
    State,
    billable_units,
)
from twinbus.ledger.group_writer import GroupWriter
from twinbus.ledger.json_lines import id_text, operation_prefix
from twinbus.ledger.options import LedgerOptions
from twinbus.ledger.running_operation import NOTHING, RunningOperation
from twinbus.ledger.segment_opening import Opening
from twinbus.ledger.segments import SegmentWriter

_log = logging.getLogger("twinbus.ledger")

FLUSH_SECONDS: Final = 30.0
"""What a disk may take to answer."""


class LedgerUnavailableError(OperatorError):
    """The ledger cannot be written, and `on_error` is "stop"."""

    def __init__(self, directory: Path, cause: str) -> None:
        super().__init__(
            f"the ledger in {directory} cannot be written: {cause}",
            "Make room, or put the directory back; writing is tried again every second.",
        )
        self.directory = directory
        self.cause = cause


class Ledger:
    """A writer of the ledger in a directory that many may share. Safe to use from threads, tasks and after a fork."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        role: Role | str = Role.CLIENT,
        options: LedgerOptions | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.role = Role(role)
        self.options = options or LedgerOptions()
        self._stops = self.options.on_error == "stop"
        self._now = now
        self._closed = False
        self._open()
        _ledgers.add(self)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if self._stops:
                raise LedgerUnavailableError(self.directory, str(error)) from error
            _log.error("ledger: %s cannot be made: %s. Operations go on without it", self.directory, error)

    # --- operations --------------------------------------------------------------------------------------------------

    def begin(
        self,
        stage: Stage,
        namespace: str,
        entity: str,
        ids: Sequence[object] = (),
        size: int | Sequence[int] = 0,
        destination: str | None = None,
    ) -> RunningOperation:
        """An operation is about to be tried; `end` it. LedgerUnavailableError where that must not be; TypeError for
        ids that are no sequence.

        `ids`: a text alone is one id. `size`: of each message, or of all together. `destination`: the
        `namespace/entity` on the primary that the messages are for, where the operation is on another entity.
        """
        if isinstance(size, int):
            size = int(size)  # and not True
        if not isinstance(ids, str):
            ids = tuple(ids)
        elif not isinstance(size, int) or size > UNIT_BYTES:
            ids = (ids,)
        return self.begin_as(operation_prefix(stage, namespace, entity, destination), ids, size)

    def begin_as(self, place: str, ids: str | Sequence[object], size: int | Sequence[int]) -> RunningOperation:
        """`begin`, for who has all of it put together, as a `RunningOperation` holds it."""
        self.check()
        operation = RunningOperation()
        operation.writer = writer = self._writer
        operation.number = next(self._numbers)
        operation.place = place
        operation.ids = ids
        operation.size = size
        operation.ending = None
        operation.state = NOTHING
        operation.begun = writer.now()
        writer.put(operation)
        return operation

    def done(
        self,
        stage: Stage,
        namespace: str,
        entity: str,
        ids: Sequence[object] = (),
        size: int | Sequence[int] = 0,
        destination: str | None = None,
        *,
        seconds: float,
        result: str = OK,
        cause: str | None = None,
        failed: Sequence[object] = (),
    ) -> str:
        """An operation that is over, and is told only now: a receive, or one that must be tried whatever the ledger
        can take. `result`, `cause`, `failed` as in `RunningOperation.end`. Its operation id.
        """
        operation = Operation(
            at=int((time.time() - seconds) * 1000),
            id=self._id(),
            stage=stage,
            namespace=namespace,
            entity=entity,
            ids=tuple(map(id_text, ids)),
            bytes=size if isinstance(size, int) else sum(size),
            units=billable_units(len(ids), size),
            destination=destination,
            seconds=seconds,
            result=result,
            cause=cause,
            failed=tuple(map(id_text, failed)),
        )
        self._writer.put(operation)
        return operation.id

    def check(self) -> None:
        """LedgerUnavailableError where `on_error` is "stop" and it cannot be written."""
        if self._stops and (self._closed or self._writer.failure is not None):
            raise LedgerUnavailableError(self.directory, self._writer.failure or "it was closed")

    # --- other facts -------------------------------------------------------------------------------------------------

    def state(self, event: str, facts: Mapping[str, Fact], *, pair: str = "", at: int | None = None) -> None:
        """Something changed (S11). `at`: milliseconds since the epoch; now, where not given."""
        self._writer.put(State(at=self._at(at), id=self._id(), event=event, pair=pair, facts=dict(facts)))

    def moved(
        self,
        move: Move,
        ids: Sequence[object],
        source: str,
        destination: str,
        reason: str | None = None,
        op: str | None = None,
    ) -> None:
        """Messages went elsewhere, or stay. `source`, `destination`: `namespace/entity`; `op`: the operation's id."""
        texts = tuple(map(id_text, ids))
        self._writer.put(
            Movement(
                at=self._at(),
                id=self._id(),
                move=Move(move),
                ids=texts,
                source=source,
                destination=destination,
                reason=reason,
                op=op,
            )
        )

    def metered(
        self, namespace: str, entity: str, operation: str, count: int, size: int, units: int, since: int, until: int
    ) -> None:
        """A namespace served so many operations in an interval (N5)."""
        self._writer.put(
            Metered(
                at=self._at(),
                id=self._id(),
                namespace=namespace,
                entity=entity,
                operation=operation,
                count=count,
                bytes=size,
                units=units,
                since=since,
                until=until,
            )
        )

    # --- durability --------------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = FLUSH_SECONDS) -> bool:
        """Wait until all that was recorded before is on the disk. False if it is not, and operations may go on.

        Where `on_error` is "stop": LedgerUnavailableError instead.
        """
        try:
            reason = self._writer.flush().result(timeout)
        except TimeoutError:
            reason = self._hangs(timeout)
        return self._flushed(reason)

    async def flushed(self, timeout: float | None = FLUSH_SECONDS) -> bool:
        """`flush`, for asyncio."""
        try:
            async with asyncio.timeout(timeout):
                reason = await asyncio.wrap_future(self._writer.flush())
        except TimeoutError:
            reason = self._hangs(timeout)
        return self._flushed(reason)

    def _hangs(self, seconds: float | None) -> str:
        reason = f"the disk has not answered for {seconds or 0.0:g} s"
        _log.error("ledger: %s: %s", self.directory, reason)
        return reason

    def _flushed(self, reason: str | None) -> bool:
        if reason is not None and self._stops:
            raise LedgerUnavailableError(self.directory, reason)
        return reason is None

    @property
    def failure(self) -> str | None:
        """Why it cannot be written at the moment."""
        return self._writer.failure

    @property
    def missing(self) -> int:
        """Entries that were never written; gaps in the ledger tell of them."""
        return self._writer.missing

    @property
    def writer(self) -> str:
        """The name that its segments begin with."""
        return self._name

    def close(self, timeout: float | None = 10.0) -> None:
        """Write what is left, and seal the segment. Where `on_error` is "stop": LedgerUnavailableError if it cannot."""
        if self._closed:
            return
        self._closed = True
        if not self._writer.close(timeout) and self._stops:
            raise LedgerUnavailableError(self.directory, self._writer.failure or "its disk is too slow")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Dropped without closing: the thread writes what is left and ends.
        if not getattr(self, "_closed", True):
            self._writer.finish()

    # --- making of ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:63] or "unknown"
        prefix = secrets.token_hex(8)
        self._prefix = prefix
        self._name = f"{self.role}-{host}-{os.getpid()}-{prefix}"
        self._numbers = itertools.count()
        options = self.options
        segments = SegmentWriter(
            self.directory,
            self._name,
            Opening(self.directory, self._name, self.role, host, options),
            most_bytes=options.segment_bytes,
            most_seconds=options.segment_age.total_seconds(),
        )
        self._writer = GroupWriter(
            self.directory,
            self._name,
            segments,
            group_seconds=options.group_interval.total_seconds(),
            buffer_bytes=options.buffer_bytes,
            now=self._now,
        )

    def _forked(self) -> None:
        """In the child: a writer of its own. What was queued, and what is under way, is the parent's."""
        self._writer.abandon()
        if not self._closed:
            self._open()

    def _id(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"

    def _at(self, at: int | None = None) -> int:
        return int(time.time() * 1000) if at is None else at


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _after_fork() -> None:
    for ledger in tuple(_ledgers):
        ledger._forked()


os.register_at_fork(after_in_child=_after_fork)
