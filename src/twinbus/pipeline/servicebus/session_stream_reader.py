"""The stream read of an entity that requires sessions, and what it guarantees.

A stream of sessions delivers each message at least once, the messages of a session in their order, and completes
exactly the messages of the batches that Spark has committed. `stream_reader` explains when Spark calls which method.
For sessions it works as follows:

- The reader accepts sessions, at most `maxSessions` at a time, and renews their locks (`held_sessions`). While it holds
  a session, no other receiver gets a message of the session.
- `latestOffset` completes the batch that ends at `start`, under the locks of its sessions. Then it peeks at the
  sessions that it holds, and puts the sequence numbers of their active messages into the offset. A batch has the first
  messages of each of its sessions without a gap. A session with messages that are read and not completed yet is not
  planned again before these are completed.
- One task reads a session, by peeking at the numbers in the offset. So a task needs no lock, and a repeated task reads
  the same messages.
- A lock can be lost while a batch runs. The batch is then committed as usual: all its messages were read. To complete
  them, the reader accepts the session again. If another receiver holds it, they stay in the offset as uncompleted. They
  are completed as soon as the session is free, or the other receiver has settled them.
- A lock can be lost before the tasks of a batch begin, and after a restart no session is held. So `partitions` accepts
  the sessions of the batch again. If another receiver holds one of them, that receiver reads the same messages.
  `partitions` waits until they are settled or the session is free, so that the messages of a session are not read in
  two places at once. If this takes too long, it raises SessionHeldError.
- A session without messages is released. If the reader holds as many sessions as it may, it releases those of the last
  batch before it accepts the next ones, so that each session gets its turn.
- `availableNow` reads the sessions that have messages when the query starts, and no message that arrives later. It
  finds them by peeking, and leaves sessions that another receiver holds to that receiver.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from twinbus.errors import OperatorError
from twinbus.pipeline.servicebus.broker import LONGEST_LOCK, PAGE, Broker
from twinbus.pipeline.servicebus.held_sessions import HeldSessions
from twinbus.pipeline.servicebus.message_marks import session_of
from twinbus.pipeline.servicebus.offsets import SequenceNumbers, check_entity, latest
from twinbus.pipeline.servicebus.options import SourceOptions
from twinbus.pipeline.servicebus.session_offsets import BySession, SessionOffset, merged
from twinbus.pipeline.servicebus.stream_reader import CompletionError, LimitedStreamReader
from twinbus.pipeline.servicebus.task_reader import TaskReader, split_sessions

_log = logging.getLogger(__name__)

# An offset is written to the checkpoint with each batch. 10,000 runs of numbers take 20 to 35 KB.
_MOST_RUNS: Final = 10_000
_MOST_UNCOMPLETED: Final = 100_000
# Seconds that the namespace waits for a session with messages: if the stream holds no session, and if it holds some.
_WAIT_IDLE, _WAIT_BUSY = 2.0, 0.25
# How often the reader tries to accept a session again that another receiver holds, in seconds.
_TRY_AGAIN: Final = 30.0
# How long `partitions` waits for the sessions of a batch. The lock of a receiver that was cut off lasts LONGEST_LOCK.
_MOST_WAIT: Final = LONGEST_LOCK + 30.0


class SessionHeldError(OperatorError):
    """A batch cannot be read, because another receiver holds one of its sessions."""


class SessionStreamReader(LimitedStreamReader):
    """Reads sessions under their locks. The module's docstring explains how."""

    def __init__(self, options: SourceOptions, reader: TaskReader) -> None:
        super().__init__(options, reader)
        self._held: HeldSessions | None = None
        """None until the first call that needs sessions: tasks get a copy of this object, which has no connection."""
        self._taken_over: SessionOffset | None = None
        """The batch that was last added to `_uncompleted`."""
        self._uncompleted: BySession = {}
        """Messages of committed batches that are not completed yet."""
        self._newest: dict[str, int | None] = {}
        """For each session in `_uncompleted`, the latest enqueued time of these messages. A message that was enqueued
        later is a different one: the queue was created again."""
        self._tried = float("-inf")
        """When a completion was last tried."""
        self._refused: dict[str, float] = {}
        """Sessions with uncompleted messages that another receiver holds, each with the time of the last try."""
        self._looked = float("-inf")
        """When the last look found nothing to read."""
        self._none_free = float("-inf")
        """When there was last no session to accept."""
        self._served: dict[str, int] = {}
        """The sessions that are held, each with the number of the batch that last had messages of it."""
        self._batches = 0
        self._completed = 0
        self._found: set[str] = set()
        """With availableNow: the sessions that were found by peeking."""
        self._unread: set[str] = set()
        """With availableNow: the sessions that were accepted and not read to their end. Some may have been lost."""
        self._find_from: int | None = 0
        """With availableNow: the number from which to search for sessions; None if the search has ended."""

    @property
    def _sessions(self) -> HeldSessions:
        if self._held is None:
            self._held = HeldSessions(self._options)
        return self._held

    def stop(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    # --- planning ----------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's names, here and below
        return SessionOffset(entity=self._entity).to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        self.commit(start)
        # Each look is charged as an operation, and Spark calls `latestOffset` without pauses.
        if self._target is None and time.monotonic() - self._looked < self._options.poll_interval:
            return start
        self._check_uncompleted()
        read, newest = self._planned(self._most(limit))
        if not read:
            self._looked = time.monotonic()
            return start
        known = ((session, self._newest[session]) for session in self._uncompleted)
        times = {session: enqueued for session, enqueued in known if enqueued is not None}
        planned = SessionOffset(
            read=read,
            uncompleted=self._uncompleted,
            newest=latest(newest, *times.values()),
            newest_uncompleted=times,
            entity=self._entity,
        )
        return planned.to_json()

    def _offset(self, values: Mapping[str, Any]) -> SessionOffset:
        """Returns an offset of the checkpoint. Raises OffsetError if a stream of another entity has written it."""
        offset = SessionOffset.of_json(values)
        check_entity(offset.entity, self._entity)
        return offset

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Returns what StreamingQueryProgress shows as `latestOffset`.

        `held` is the number of sessions that the stream holds, `completed` the messages that this process has
        completed, and `uncompleted` those that are committed and not completed yet.
        """
        return {
            "held": 0 if self._held is None else len(self._held.ids),
            "completed": self._completed,
            "uncompleted": _count(self._uncompleted),
        }

    def _planned(self, most: int | None) -> tuple[BySession, int | None]:
        """Returns the messages of the next batch, and the latest enqueued time of these messages."""
        with Broker(self._options, is_patient=True) as broker:
            if self._target is not None:
                while True:
                    self._accept_found(broker)
                    read, newest = self._peeked(broker, most)
                    is_at_end = self._find_from is None and not self._lost_unread()
                    if read or is_at_end or self._free == 0:
                        return read, newest
            self._give_others_a_turn()
            read, newest = self._after_accepting(broker, most, _WAIT_BUSY) if self._usable() else ({}, None)
            return (read, newest) if read else self._after_accepting(broker, most, _WAIT_IDLE)

    def _after_accepting(self, broker: Broker, most: int | None, wait: float) -> tuple[BySession, int | None]:
        self._accept_next(wait)
        return self._peeked(broker, most)

    def _usable(self) -> list[str]:
        """Returns the sessions that can be planned; first those that were not read for the longest time."""
        ids = (session for session in self._sessions.ids if session not in self._uncompleted)
        return sorted(ids, key=lambda session: self._served.get(session, -1))

    def _peeked(self, broker: Broker, most: int | None) -> tuple[BySession, int | None]:
        """Returns the first active messages of each session, at most `most`. Releases sessions without any."""
        if any(session in self._sessions for session in self._refused):
            self._complete()  # the other receiver has released it
        sessions = self._usable()
        size = PAGE if most is None else max(1, min(PAGE, most // max(1, len(sessions))))
        found: dict[str, list[int]] = {session: [] for session in sessions}
        open_ = {session: self._messages(broker, session, size) for session in sessions}
        room, runs, newest = most, 0, None
        while open_ and room != 0 and (most is None or runs < _MOST_RUNS):
            for session, messages in list(open_.items()):
                asked = size if room is None else min(size, room)
                page = list(islice(messages, asked))
                if len(page) < asked:
                    del open_[session]
                numbers = found[session]
                for number, enqueued in page:
                    runs += not numbers or numbers[-1] != number - 1
                    numbers.append(number)
                    newest = latest(newest, enqueued)
                room = None if room is None else room - len(page)
        # A lock may have been lost before or after the peek: another receiver may then have the messages.
        held = self._sessions
        self._release(one for one in sessions if not found[one] and one not in open_ and one in held)
        read = {one: SequenceNumbers.of(numbers) for one, numbers in found.items() if numbers and one in held}
        self._batches += 1
        self._served = {one: batch for one, batch in self._served.items() if one in held}
        self._served.update(dict.fromkeys(read, self._batches))
        return read, newest

    def _messages(self, broker: Broker, session: str, size: int) -> Iterator[tuple[int, int | None]]:
        """Yields number and enqueued time of the active messages of a session, in their order."""
        held, is_first = self._sessions.get(session), True
        if held is None:
            return
        for marks, _ in broker.from_number(held.inactive_through + 1, size, session=session):
            number = marks.number
            if number is None:
                _log.warning("%s: a message without a readable sequence number is left out", self._options.address)
                continue
            if self._target is not None and number > self._target:
                return
            if marks.is_active:
                is_first = False
                yield number, marks.enqueued
            elif is_first:
                held.inactive_through = number

    # --- accepting sessions ------------------------------------------------------------------------------------

    @property
    def _free(self) -> int:
        """How many more sessions may be accepted."""
        return max(0, self._options.max_sessions - len(self._sessions.ids))

    def _give_others_a_turn(self) -> None:
        """Releases the sessions of the last batch if no other session could be accepted."""
        if self._taken_over is not None and not self._free:
            held = self._sessions
            self._release(one for one in self._taken_over.read if one in held and one not in self._uncompleted)
            self._none_free = float("-inf")

    def _accept_next(self, wait: float) -> None:
        """Accepts sessions that have messages, at most `maxSessions` in all."""
        held = self._sessions
        is_busy = wait == _WAIT_BUSY
        if is_busy and time.monotonic() - self._none_free < self._options.poll_interval:
            return
        together = 1
        while free := self._free:
            asked = min(together, free)
            if held.accept_next(asked, wait) < asked:
                self._none_free = time.monotonic()
                return
            together, wait = 2 * together, _WAIT_BUSY

    def _accept_found(self, broker: Broker) -> None:
        """With availableNow: accepts sessions that have messages, at most `maxSessions` in all."""
        while free := self._free:
            names = self._lost_unread()[:free] or self._find(broker, free)
            if not names:
                return
            accepted = self._sessions.accept(names)
            self._unread.update(accepted)
            if others := sorted(set(names) - set(accepted)):
                self._unread.difference_update(others)
                _log.warning("%s: another receiver holds %s: left to it", self._options.address, _named(others))

    def _lost_unread(self) -> list[str]:
        """With availableNow: returns the sessions that were lost before they were read to their end."""
        return [one for one in self._unread if one not in self._sessions and one not in self._uncompleted]

    def _find(self, broker: Broker, count: int) -> list[str]:
        """Returns up to `count` sessions that were not found before and have active messages up to `_target`."""
        names: list[str] = []
        if self._find_from is None:
            return names
        assert self._target is not None
        for marks, message in broker.from_number(self._find_from):
            number = marks.number
            if number is None:
                continue
            if number > self._target:
                break
            session = session_of(message)
            if session is not None and session not in self._found and marks.is_active:
                self._found.add(session)
                names.append(session)
                if len(names) == count:
                    self._find_from = number + 1
                    return names
        self._find_from = None
        return names

    def _release(self, sessions: Iterator[str]) -> None:
        names = list(sessions)
        self._sessions.release(names)
        self._unread.difference_update(names)

    # --- reading -----------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        batch = self._offset(end)
        self._hold(batch)
        return split_sessions(batch.read, self._options.partitions)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        self._check_worker()
        return self._reader.read(partition)

    def _hold(self, batch: SessionOffset) -> None:
        """Accepts the sessions of a batch that are not held. Waits for those that another receiver holds.

        Returns also if all messages of such a session are settled: then the other receiver has read them. If two
        streams each hold a session that the other one waits for, none could go on. So a session that was accepted here
        is released while this method waits for others.
        """
        held, ends = self._sessions, time.monotonic() + _MOST_WAIT
        wanted = [session for session in batch.read if session not in held]
        while wanted:
            accepted = held.accept(wanted)
            if len(accepted) == len(wanted):
                return
            with Broker(self._options, is_patient=True) as broker:
                others = {
                    session: left
                    for session in wanted
                    if session not in accepted
                    and (left := broker.still_there(batch.read[session], batch.newest, session=session))
                }
            if not others:
                return
            held.release(accepted)
            if time.monotonic() >= ends:
                session, numbers = next(iter(others.items()))
                raise SessionHeldError(
                    f"another receiver holds {_named(others)} of {self._options.address}, and the batch to be read has "
                    f"{len(numbers)} messages of session {session!r}, from sequence number {numbers.first} on",
                    "Start the stream again when that receiver has settled the messages or released the session.",
                )
            _log.warning("%s: waiting for %s: another receiver holds it", self._options.address, _named(others))
            time.sleep(_pause())
            wanted = [session for session in batch.read if session not in held]

    # --- completing --------------------------------------------------------------------------------------------

    def commit(self, end: dict[str, Any]) -> None:
        batch = self._offset(end)
        is_new = batch != self._taken_over
        if is_new:
            is_first = self._taken_over is None
            before, known = (batch.uncompleted, {}) if is_first else (self._uncompleted, self._newest)
            self._uncompleted = merged(before, batch.read)
            self._newest = {
                session: batch.newest_of(session) if session in batch.read or is_first else known[session]
                for session in self._uncompleted
            }
            self._taken_over, self._tried = batch, float("-inf")
        if self._uncompleted and time.monotonic() - self._tried >= _TRY_AGAIN:
            self._complete()

    def _complete(self) -> None:
        """Completes the messages in `_uncompleted`. Those that cannot be completed stay there for the next call."""
        before = _count(self._uncompleted)
        for _ in range(2):  # again if a lock was lost meanwhile
            self._accept_again()
            self._complete_held()
            if all(session in self._sessions or session in self._refused for session in self._uncompleted):
                break
        self._completed += before - _count(self._uncompleted)
        self._tried = time.monotonic()

    def _complete_held(self) -> None:
        done = self._sessions.complete(self._uncompleted, self._newest)
        self._uncompleted = {**self._uncompleted, **{one: result.left for one, result in done.items()}}
        # Messages that were not received may be gone: expired, or settled by another receiver.
        self._drop_settled([session for session in done if self._uncompleted[session]])
        if stopped := {one: result.stopped for one, result in done.items() if result.stopped is not None}:
            _log.warning("%s: messages are not completed yet, by session: %r", self._options.address, stopped)

    def _accept_again(self) -> None:
        """Accepts sessions that were lost, or were held by an earlier process, in order to complete their messages."""
        now = time.monotonic()
        lost = [
            session
            for session in self._uncompleted
            if session not in self._sessions and now - self._refused.get(session, float("-inf")) >= _TRY_AGAIN
        ]
        self._drop_settled(lost)
        lost = [session for session in lost if session in self._uncompleted]
        refused = set(lost) - set(self._sessions.accept(lost))
        self._refused |= dict.fromkeys(refused, now)
        waiting = (one for one in self._refused if one in self._uncompleted and one not in self._sessions)
        self._refused = {session: self._refused[session] for session in waiting}

    def _drop_settled(self, sessions: Sequence[str]) -> None:
        """Removes from `_uncompleted` the messages of these sessions that do not exist any more."""
        left = dict(self._uncompleted)
        if sessions:
            with Broker(self._options, is_patient=True) as broker:
                for session in sessions:
                    left[session] = broker.still_there(left[session], self._newest[session], session=session)
        self._uncompleted = {session: numbers for session, numbers in left.items() if numbers}

    def _check_uncompleted(self) -> None:
        """Raises CompletionError if too many messages could not be completed."""
        if _count(self._uncompleted) > _MOST_UNCOMPLETED:
            raise CompletionError(
                f"the stream of {self._options.address} has read and committed {_count(self._uncompleted)} messages "
                f"that it cannot complete: other receivers hold {_named(self._uncompleted)}",
                "End those receivers, or let them settle the messages. Then start the stream again.",
            )


def _pause() -> float:
    """Returns seconds until the next try. They are random, so that two streams do not try at the same time."""
    return random.uniform(0.5, 1.5)


def _count(sessions: BySession) -> int:
    return sum(map(len, sessions.values()))


def _named(sessions: BySession | Sequence[str]) -> str:
    names = [repr(session) for session in islice(sessions, 5)]
    more = f" and {len(sessions) - 5} more" if len(sessions) > 5 else ""
    return f"session {names[0]}" if len(sessions) == 1 else f"sessions {', '.join(names)}{more}"
