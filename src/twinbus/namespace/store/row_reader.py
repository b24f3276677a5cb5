"""Answers the reads of the engine from an SQLite connection, each in one step of SQLite.

Why one step. SQLite runs without the interpreter lock: every step releases the lock, and must wait to get the lock back
while the event loop is busy. A SELECT that returns its rows one by one takes a step for each row. Such a SELECT needs
less CPU, but the server delivers stored messages more slowly (docs/decisions/0005).

How. A read selects exactly one result row, which contains all rows of the answer in two columns:

    heads   a JSON array with one array for each row: the fields of `Row` in their order, then what the checks need
            (`_heads`). The place of `raw` holds its length. `overlay` is in hexadecimal, as JSON has no bytes.
    raws    the `raw` of all rows, one after the other, as one blob

A read with a limit in bytes first picks rowids and sizes through an index, and joins only the picked rows with their
bodies.

Every row is checked before it is returned (X2): its checksum, the checksum of its body, and that it is the row that the
index promised. A row that fails raises DamagedRowError. A read without `raw` cannot compare the checksum; it only
compares row and index, and no message is delivered from such a read.
"""

# ruff: noqa: S608  # statements are put together from the parts in this file, never from arguments

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, assert_never

import apsw

from twinbus.namespace.engine.storage_protocol import (
    BrowseRows,
    DueAnswer,
    DueRows,
    ExpiredRows,
    KnownIds,
    NextRows,
    PutBody,
    Row,
    RowsBySeq,
    StoredSessions,
    StoredSessionState,
    StoreRead,
    WaitingSessions,
)
from twinbus.namespace.store.checksums import body_crc, row_crc, values_crc
from twinbus.namespace.store.errors import UNREADABLE

_RAW = "coalesce(b.raw, m.raw, x'')"


class DamagedRowError(Exception):
    """A stored row does not have its checksum, or is not the row that the index names.

    `seq` is its sequence number, or None if it is not known.
    """

    def __init__(self, seq: int | None) -> None:
        super().__init__(seq)
        self.seq = seq


def _heads(length: str, checks: str) -> str:
    """Return the SQL expression for the column `heads`. `length` is the SQL expression for the length of `raw`.

    `checks` are the four values after the fields: the sequence number in the index if the row differs from the index
    (otherwise 0), the checksum of the row, and topic and checksum of its body. Without raw, the last three are NULL.
    """
    columns = {"raw": length, "overlay": "iif(m.overlay IS NULL, NULL, hex(m.overlay))"}
    fields = ", ".join(columns.get(name, f"m.{name}") for name in Row._fields)
    return f"json_group_array(json_array({fields}, {checks}))"


def _misplaced(*equal: str) -> str:
    """Return the SQL expression that is 0 if all these hold, and otherwise the sequence number in the index.

    `p` is what was picked through the index. If the row is gone, its columns are NULL, and no comparison holds.
    """
    return f"iif(m.queue = :queue AND m.seq = p.seq AND {' AND '.join(equal)}, 0, p.seq)"


def _with_raw(misplaced: str) -> str:
    heads = _heads(f"length({_RAW})", f"{misplaced}, m.crc, b.topic, b.crc")
    return f"{heads}, CAST(group_concat({_RAW}, '') AS BLOB)"


def _without_raw(misplaced: str) -> str:
    return f"{_heads('0', f'{misplaced}, NULL, NULL, NULL')}, NULL"


_JOIN_BODY = "LEFT JOIN body AS b ON b.id = m.body"


def _bounded(picked: str, order: str, *equal: str) -> str:
    """Return a SELECT of the picked rows with raw, up to :limit rows and :bytes bytes, but at least one row.

    `picked` is a SELECT in the order `order`. LEFT JOIN makes SQLite run `picked` as the outer loop. So the rows of
    the answer have the order of `picked`, and `picked` ends as soon as one of the limits is reached. `equal` are
    conditions that hold for every row that is not damaged.
    """
    return f"""SELECT {_with_raw(_misplaced(*equal))} FROM (
      SELECT *, sum(size) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) AS total FROM ({picked}) LIMIT :limit
    ) AS p LEFT JOIN message AS m ON m.rowid = p.id {_JOIN_BODY}
    WHERE p.total <= :bytes OR p.total = p.size"""


def _lane_from(lane: str, start: str, by_session: bool) -> str:
    session = "AND session = :session" if by_session else ""
    return f"""SELECT rowid AS id, lane, seq, size FROM message
      WHERE queue = :queue AND lane = {lane} {session} AND seq {start}"""


_SAME_LANE = {False: ("m.lane = p.lane",), True: ("m.lane = p.lane", "m.session = :session")}
_NEXT = {
    by: _bounded(_lane_from(":lane", "> :after", by) + " ORDER BY seq", "seq", *_SAME_LANE[by]) for by in (False, True)
}
_DUE = _bounded(
    """SELECT rowid AS id, due, seq, size FROM message INDEXED BY message_due
      WHERE queue = :queue AND due IS NOT NULL AND due <= :at ORDER BY due, seq""",
    "due, seq",
    "m.due = p.due",
)
_NEXT_DUE = """
SELECT due FROM message INDEXED BY message_due
WHERE queue = :queue AND due IS NOT NULL AND (due, seq) > (:at, :seq) ORDER BY due, seq LIMIT 1
"""
_EXPIRED = f"""SELECT {_without_raw(_misplaced("m.lane = 0", "m.expires = p.expires"))} FROM (
  SELECT rowid AS id, expires, seq FROM message INDEXED BY message_expiry
  WHERE queue = :queue AND expires IS NOT NULL AND lane = 0 AND expires <= :at ORDER BY expires, seq LIMIT :limit
) AS p LEFT JOIN message AS m ON m.rowid = p.id"""
_NEXT_EXPIRY = """
SELECT expires FROM message INDEXED BY message_expiry
WHERE queue = :queue AND expires IS NOT NULL AND lane = 0 AND (expires, seq) > (:at, :seq)
ORDER BY expires, seq LIMIT 1
"""
# The key of these rows comes from the index, so the checksum also compares row and index.
_BY_SEQ = {
    with_raw: f"""SELECT {(_with_raw if with_raw else _without_raw)("0")}
    FROM json_each(:seqs) AS s CROSS JOIN json_each(:lanes) AS l CROSS JOIN message AS m
    ON m.queue = :queue AND m.lane = l.value AND m.seq = s.value {_JOIN_BODY if with_raw else ""}"""
    for with_raw in (False, True)
}
# Each step of the recursion seeks the next session in the index; the rows of a session are not read.
_WAITING = """
WITH RECURSIVE waiting (session) AS (
  SELECT min(session) FROM message WHERE queue = :queue AND lane = 0 AND session IS NOT NULL AND session > :after
  UNION ALL
  SELECT (SELECT min(m.session) FROM message AS m
          WHERE m.queue = :queue AND m.lane = 0 AND m.session IS NOT NULL AND m.session > w.session)
  FROM waiting AS w WHERE w.session IS NOT NULL LIMIT :limit
)
SELECT json_group_array(session) FROM waiting WHERE session IS NOT NULL
"""


def _sessions_of(lane: int) -> str:
    return f"""
lane{lane} (session) AS (
  SELECT min(session) FROM message WHERE queue = :queue AND lane = {lane} AND session IS NOT NULL
  UNION ALL
  SELECT (SELECT min(m.session) FROM message AS m
          WHERE m.queue = :queue AND m.lane = {lane} AND m.session IS NOT NULL AND m.session > l.session)
  FROM lane{lane} AS l WHERE l.session IS NOT NULL LIMIT :reach
)"""


_STORED = f"""
WITH RECURSIVE {_sessions_of(0)}, {_sessions_of(1)}, {_sessions_of(2)}
SELECT json_group_array(session) FROM (
  SELECT session FROM lane0 WHERE session IS NOT NULL
  UNION SELECT session FROM lane1 WHERE session IS NOT NULL
  UNION SELECT session FROM lane2 WHERE session IS NOT NULL
  UNION SELECT session FROM (SELECT session FROM session_state WHERE queue = :queue ORDER BY session LIMIT :reach)
  ORDER BY session LIMIT :limit OFFSET :skip)
"""
_STATE_SINCE = """
SELECT json_group_array(session) FROM (
  SELECT session FROM session_state WHERE queue = :queue AND at > :since ORDER BY session LIMIT :limit OFFSET :skip)
"""
_STATE = "SELECT queue, session, state, at, crc FROM session_state WHERE queue = :queue AND session = :session"
_KNOWN = """
SELECT json_group_array(json_array(s.message_id, s.at, s.crc)) FROM json_each(:ids) AS i CROSS JOIN seen AS s
ON s.queue = :queue AND s.message_id = i.value AND s.at >= :since
"""
_BEFORE_ALL = -(1 << 63)


class RowReader:
    """Runs the SELECTs of reads on the reading connection."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._execute = connection.execute

    def answer(self, read: StoreRead) -> Any:
        """Return the answer to `read`. The docstring of each class of reads says the type of the answer.

        Raises DamagedRowError.
        """
        match read:
            case NextRows():
                return self._next(read)
            case RowsBySeq():
                return self._by_seq(read)
            case BrowseRows():
                return self._browse(read)
            case DueRows():
                return self._due(read)
            case ExpiredRows():
                return self._expired(read)
            case WaitingSessions():
                return self._texts(_WAITING, {"queue": read.queue, "after": read.after, "limit": read.limit})
            case StoredSessions():
                return self._stored_sessions(read)
            case StoredSessionState():
                return self._session_state(read)
            case KnownIds():
                return self._known_ids(read)
            case _:
                assert_never(read)

    def _value(self, sql: str, arguments: Mapping[str, Any]) -> Any:
        """Return what the statement selects: a value, a tuple of values, or None if it selects no row.

        Raises DamagedRowError for text that is not UTF-8.
        """
        # `get` runs the statement to its end. A statement that is not at its end keeps its snapshot, and SQLite then
        # cannot start the log again from its beginning.
        try:
            return self._execute(sql, arguments).get
        except UnicodeDecodeError:
            raise DamagedRowError(None) from None

    def _rows(self, sql: str, arguments: Mapping[str, Any]) -> list[Row]:
        heads, raws = self._value(sql, arguments)
        return _unpacked(heads, raws)

    def _texts(self, sql: str, arguments: Mapping[str, Any]) -> list[str]:
        texts: list[str] = json.loads(self._value(sql, arguments))
        return texts

    def _session_state(self, read: StoredSessionState) -> bytes | None:
        found = self._value(_STATE, {"queue": read.queue, "session": read.session})
        if found is None:
            return None
        *values, crc = found
        if values_crc(values) != crc:
            raise DamagedRowError(None)
        state: bytes = values[2]
        return state

    def _known_ids(self, read: KnownIds) -> set[str]:
        arguments = {"queue": read.queue, "ids": json.dumps(read.ids), "since": read.since}
        found = json.loads(self._value(_KNOWN, arguments))
        if any(values_crc((read.queue, message_id, at)) != crc for message_id, at, crc in found):
            raise DamagedRowError(None)
        return {message_id for message_id, *_ in found}

    def _next(self, read: NextRows) -> list[Row]:
        arguments = {
            "queue": read.queue,
            "lane": read.lane,
            "after": read.after,
            "limit": read.limit,
            "bytes": read.max_bytes,
            "session": read.session,
        }
        return self._rows(_NEXT[read.session is not None], arguments)

    def _browse(self, read: BrowseRows) -> list[Row]:
        # SQLite merges the lanes by sequence number while it reads them, so no lane is read further than needed.
        lanes = (_lane_from(str(int(lane)), ">= :start", read.session is not None) for lane in read.lanes)
        sql = _bounded(" UNION ALL ".join(lanes) + " ORDER BY seq", "seq", *_SAME_LANE[read.session is not None])
        arguments = {
            "queue": read.queue,
            "start": read.start,
            "limit": read.limit,
            "bytes": read.max_bytes,
            "session": read.session,
        }
        return self._rows(sql, arguments)

    def _by_seq(self, read: RowsBySeq) -> list[Row]:
        arguments = {"queue": read.queue, "seqs": json.dumps(read.seqs), "lanes": json.dumps(read.lanes)}
        try:
            rows = self._rows(_BY_SEQ[read.with_raw], arguments)
        except apsw.TooBigError:  # the rows together are larger than SQLite's largest blob
            return [row for seq in read.seqs for row in self._by_seq(replace(read, seqs=(seq,)))]
        found = {row.seq: row for row in rows}
        return [found[seq] for seq in read.seqs if seq in found]

    def _due(self, read: DueRows) -> DueAnswer:
        arguments = {"queue": read.queue, "at": read.at, "limit": read.limit, "bytes": read.max_bytes}
        rows = self._rows(_DUE, arguments)
        at, seq = (rows[-1].due, rows[-1].seq) if rows else (_BEFORE_ALL, 0)
        return DueAnswer(rows, self._value(_NEXT_DUE, {"queue": read.queue, "at": at, "seq": seq}))

    def _expired(self, read: ExpiredRows) -> DueAnswer:
        rows = self._rows(_EXPIRED, {"queue": read.queue, "at": read.at, "limit": read.limit})
        at, seq = (rows[-1].expires, rows[-1].seq) if rows else (_BEFORE_ALL, 0)
        return DueAnswer(rows, self._value(_NEXT_EXPIRY, {"queue": read.queue, "at": at, "seq": seq}))

    def _stored_sessions(self, read: StoredSessions) -> list[str]:
        arguments = {
            "queue": read.queue,
            "skip": read.skip,
            "limit": read.limit,
            "reach": read.skip + read.limit + 1,
            "since": read.state_since,
        }
        return self._texts(_STORED if read.state_since is None else _STATE_SINCE, arguments)


_OVERLAY = Row._fields.index("overlay")
_LENGTH = Row._fields.index("raw")
_SEQ = Row._fields.index("seq")


def _unpacked(heads: str, raws: bytes | None) -> list[Row]:
    """Return the checked rows of an answer. `raws` is None for rows without raw."""
    rows: list[list[Any]] = json.loads(heads)
    found = []
    start = 0
    for values in rows:
        crc_of_body, topic, crc, misplaced = values.pop(), values.pop(), values.pop(), values.pop()
        if misplaced:
            raise DamagedRowError(misplaced)
        try:
            if raws is not None:
                end = start + values[_LENGTH]
                values[_LENGTH] = raws[start:end]
                start = end
            else:
                values[_LENGTH] = b""
            if values[_OVERLAY] is not None:
                values[_OVERLAY] = bytes.fromhex(values[_OVERLAY])
            row = Row._make(values)
            if raws is not None and not _is_intact(row, crc, topic, crc_of_body):
                raise DamagedRowError(row.seq)
        except UNREADABLE:
            raise DamagedRowError(values[_SEQ]) from None
        found.append(row)
    return found


def _is_intact(row: Row, crc: Any, topic: Any, crc_of_body: Any) -> bool:
    """Whether a row, and the body that it shares, have their checksums. May raise one of `UNREADABLE`."""
    if row_crc(row) != crc:
        return False
    return row.body is None or body_crc(PutBody(row.body, row.raw, topic)) == crc_of_body
