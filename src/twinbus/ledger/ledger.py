"""`Ledger`: the interface with which a program records entries. It is fast enough for a call in every send.

`group_writer` writes the entries to segments, and syncs them. This module decides whether an operation may begin while
the ledger cannot be written (`on_error`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from twinbus.errors import OperatorError
from twinbus.ledger.dead_writers import own_host
from twinbus.ledger.entries import OK, Fact, Metered, Move, Movement, Operation, Role, Stage, State, billable_units
from twinbus.ledger.group_writer import GroupWriter
from twinbus.ledger.json_lines import broker_times, id_text, operation_prefix
from twinbus.ledger.options import LedgerOptions
from twinbus.ledger.permissions import make_ledger_folder
from twinbus.ledger.running_operation import RunningOperation
from twinbus.ledger.segment_opening import SegmentOpening
from twinbus.ledger.segments import SegmentWriter
from twinbus.storage_location import refuse_url

_log = logging.getLogger("twinbus.ledger")

FLUSH_SECONDS: Final = 30.0
"""Seconds that a flush waits for the disk by default."""


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
    """A writer of the ledger in a directory. Many writers may share the directory.

    Safe to use from threads, from asyncio tasks and after a fork.

    Example: `SendAvailabilityOptions(ledger=Ledger("/var/lib/twinbus/ledger"))`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        role: Role | str = Role.CLIENT,
        options: LedgerOptions | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = refuse_url(directory).absolute()
        self.role = Role(role)
        self.options = options or LedgerOptions()
        self.stops_on_error = self.options.on_error == "stop"
        self._now = now
        self._closed = False
        self._open()
        _ledgers.add(self)
        try:
            make_ledger_folder(self.directory)
        except OSError as error:
            if self.stops_on_error:
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
        *,
        broker_at: int | None = None,
        waited: Sequence[int] = (),
    ) -> RunningOperation:
        """Records that an operation begins. Call `end` of the returned object when the operation has ended.

        `ids` are message ids; a single text is one id. `size` is a list of the sizes of the messages, or their sum.
        `destination` is the entity on the primary that the messages are meant for, as `namespace/entity`, if the
        operation is on another entity. `broker_at` and `waited` are the times of the broker's clock, as in `Intent`.
        Raises LedgerUnavailableError if the operation must not begin, and TypeError if `ids` is not a sequence.

        Example: `running = ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", ["id"], 120)`, then `running.end()`.
        """
        if isinstance(size, int):
            size = int(size)  # True would be written as a JSON boolean
        if not isinstance(ids, str):
            ids = tuple(ids)  # a copy, because the caller may change its list before the line is written
        prefix = operation_prefix(stage, namespace, entity, destination)
        if broker_at is not None:
            prefix += broker_times(broker_at, waited)
        return self.begin_as(prefix, ids, size)

    def begin_as(self, prefix: str, ids: str | Sequence[object], size: int | Sequence[int]) -> RunningOperation:
        """Does what `begin` does, for callers on a hot path.

        `prefix` is the result of `operation_prefix` for the stage, namespace, entity and destination. `ids` and `size`
        are not copied: the caller must not change these objects after the call.

        Example: `ledger.begin_as(prefix, ["id"], 120)`.
        """
        if self.stops_on_error:
            self.check()
        return RunningOperation(self._writer, prefix, ids, size)

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
        broker_at: int | None = None,
    ) -> str:
        """Records an operation that has ended, and returns its operation id. Never raises LedgerUnavailableError.

        For receives, and for operations that are also tried while the ledger cannot be written. `result`, `cause` and
        `failed` are described at `RunningOperation.end`, and `broker_at` at `Intent`.

        Example: `ledger.done(Stage.RECEIVE_PRIMARY, "contoso", "orders", ["id"], 120, seconds=0.02)`.
        """
        operation = Operation(
            at=int((time.time() - seconds) * 1000),
            id=self._new_id(),
            stage=stage,
            namespace=namespace,
            entity=entity,
            ids=tuple(map(id_text, ids)),
            bytes=size if isinstance(size, int) else sum(size),
            units=billable_units(len(ids), size),
            destination=destination,
            broker_at=broker_at,
            seconds=seconds,
            result=result,
            cause=cause,
            failed=tuple(map(id_text, failed)),
            count=None if ids or isinstance(size, int) else len(size) or None,
        )
        self._writer.put(operation)
        return operation.id

    def check(self) -> None:
        """Raises LedgerUnavailableError if `on_error` is "stop" and the ledger cannot be written.

        Example: `ledger.check()` before work that must be recorded.
        """
        if self.stops_on_error and (self._writer.is_closing or self._writer.failure is not None):
            raise LedgerUnavailableError(self.directory, self._writer.failure or "it was closed")

    # --- other facts -------------------------------------------------------------------------------------------------

    def state(self, event: str, facts: Mapping[str, Fact], *, pair: str = "", at: int | None = None) -> None:
        """Records a change of state. `at` is in milliseconds since the epoch; the default is now.

        Example: `ledger.state("restored", {"entity": "orders"}, pair="contoso")`.
        """
        at = _milliseconds() if at is None else at
        self._writer.put(State(at=at, id=self._new_id(), event=event, pair=pair, facts=dict(facts)))

    def moved(
        self,
        move: Move,
        ids: Sequence[object],
        source: str,
        destination: str,
        reason: str | None = None,
        op: str | None = None,
        broker_at: int | None = None,
    ) -> None:
        """Records a move of messages from `source` to `destination`, both `namespace/entity`.

        `op` is the id of the operation that moved the messages. `broker_at` is described at `Movement`.

        Example: `ledger.moved(Move.DELIVERED, ["id"], "fabrikam/backlog", "contoso/orders")`.
        """
        self._writer.put(
            Movement(
                at=_milliseconds(),
                id=self._new_id(),
                move=Move(move),
                ids=tuple(map(id_text, ids)),
                source=source,
                destination=destination,
                reason=reason,
                op=op,
                broker_at=broker_at,
            )
        )

    def metered(
        self, namespace: str, entity: str, operation: str, count: int, size: int, units: int, since: int, until: int
    ) -> None:
        """Records how many operations of one kind a namespace served in an interval.

        Example: `ledger.metered("contoso", "orders", "send", 10, 1200, 10, since, until)`.
        """
        self._writer.put(
            Metered(
                at=_milliseconds(),
                id=self._new_id(),
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

    def write(self) -> bool:
        """Writes all entries that were recorded before this call to the segment, without waiting for a sync.

        After this, the entries survive the end of the process at any instant; after `flush`, also a power loss. Returns
        False if this fails; the entries then wait in memory. If `on_error` is "stop", raises LedgerUnavailableError
        instead of returning False.

        Example: `ledger.write()`.
        """
        return self._flush_result(self._writer.write())

    def flush(self, timeout: float | None = FLUSH_SECONDS) -> bool:
        """Waits until all entries that were recorded before this call are on the disk. Returns False if this fails.

        If `on_error` is "stop", raises LedgerUnavailableError instead of returning False. Fails at once in a signal
        handler that interrupted a write of the same thread.

        Example: `ledger.flush(timeout=5)`.
        """
        try:
            reason = self._writer.flush().result(timeout)
        except TimeoutError:
            reason = self._disk_hangs(timeout)
        return self._flush_result(reason)

    async def flushed(self, timeout: float | None = FLUSH_SECONDS) -> bool:
        """Does what `flush` does, for asyncio.

        Example: `await ledger.flushed(timeout=5)`.
        """
        try:
            async with asyncio.timeout(timeout):
                reason = await asyncio.wrap_future(self._writer.flush())
        except TimeoutError:
            reason = self._disk_hangs(timeout)
        return self._flush_result(reason)

    def _disk_hangs(self, seconds: float | None) -> str:
        reason = f"the disk has not answered for {seconds or 0.0:g} s"
        _log.error("ledger: %s: %s", self.directory, reason)
        return reason

    def _flush_result(self, reason: str | None) -> bool:
        if reason is not None and self.stops_on_error:
            raise LedgerUnavailableError(self.directory, reason)
        return reason is None

    @property
    def failure(self) -> str | None:
        """Why the ledger cannot be written now; None if it can be written.

        Example: `if ledger.failure: alert(ledger.failure)`.
        """
        return self._writer.failure

    @property
    def missing(self) -> int:
        """How many entries were never written. Gap entries in the ledger report this number.

        Example: `ledger.missing == 0`.
        """
        return self._writer.missing

    @property
    def writer(self) -> str:
        """The name of this writer. The file names of its segments begin with this name.

        Example: `print(ledger.writer)`.
        """
        return self._name

    def close(self, timeout: float | None = 10.0) -> None:
        """Writes all queued entries and seals the segment.

        If `on_error` is "stop", raises LedgerUnavailableError if not all entries were written within `timeout` seconds.
        In a signal handler that interrupted a write of the same thread, this method does not wait: the ledger closes
        after the handler has returned. Then a second call waits for this.

        Example: `ledger.close()`, or `with Ledger(folder) as ledger: ...`.
        """
        if self._closed:
            return
        if self._writer.is_interrupted():
            self._writer.finish()
            return
        self._closed = True
        if not self._writer.close(timeout) and self.stops_on_error:
            raise LedgerUnavailableError(self.directory, self._writer.failure or "its disk is too slow")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The ledger was not closed: its thread writes the queued entries and ends.
        if not getattr(self, "_closed", True):
            self._writer.finish()

    # --- the writer --------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        host = own_host()
        self._name = f"{self.role}-{host}-{os.getpid()}-{secrets.token_hex(8)}"
        options = self.options
        segments = SegmentWriter(
            self.directory,
            self._name,
            SegmentOpening(self.directory, self._name, self.role, host, options),
            most_bytes=options.segment_bytes,
            most_seconds=options.segment_age.total_seconds(),
            most_unsynced=options.buffer_bytes,
        )
        self._writer = GroupWriter(
            self.directory,
            self._name,
            segments,
            writes_through=options.durability == "process",
            group_seconds=options.group_interval.total_seconds(),
            buffer_bytes=options.buffer_bytes,
            now=self._now,
        )

    def _reopen_after_fork(self) -> None:
        """Makes a new writer in the child process of a fork.

        The parent process writes the queued entries and the operations in flight.
        """
        self._writer.abandon()
        if not self._closed:
            self._open()

    def _new_id(self) -> str:
        return f"{self._writer.writer_id}-{next(self._writer.numbers)}"


def _milliseconds() -> int:
    return int(time.time() * 1000)


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _after_fork() -> None:
    for ledger in tuple(_ledgers):
        ledger._reopen_after_fork()


os.register_at_fork(after_in_child=_after_fork)
