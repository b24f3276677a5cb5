"""Answers needs from a connection: one step of SQLite for each answer, however many rows it has.

A step per row would give the interpreter lock away for each; so rows come packed in one JSON text and one blob.
Reads only.
"""

# ruff: noqa: S608  # statements are put together from the parts in this file, never from arguments

from __future__ import annotations

import json
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
    Row,
    RowsBySeq,
    StoredSessions,
    StoredSessionState,
    StoreRead,
    WaitingSessions,
)

_HEAD = """json_array(
  m.queue, m.lane, m.seq, m.origin_seq, m.enqueued, m.expires, m.due, m.session, m.delivery_count, m.size,
  iif(m.overlay IS NULL, NULL, hex(m.overlay)), m.body"""
_HEADS = f"SELECT json_group_array({_HEAD}))"
_RAW = "coalesce(b.raw, m.raw, x'')"
_WHOLE = f"SELECT json_group_array({_HEAD}, length({_RAW}))), CAST(group_concat({_RAW}, '') AS BLOB)"
_WITH_BODY = "LEFT JOIN body AS b ON b.id = m.body"


def _bounded(picked: str, order: str) -> str:
    """Rows of a pick, whole, until :limit rows or :bytes are reached, but at least one.

    The pick runs without bodies first: it is sorted by its index and ends as soon as it has enough. It is the outer
    loop of the join, so the rows are packed in its order.
    """
    return f"""{_WHOLE} FROM (
      SELECT id, size, sum(size) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) AS total FROM ({picked}) LIMIT :limit
    ) AS p CROSS JOIN message AS m ON m.rowid = p.id {_WITH_BODY}
    WHERE p.total <= :bytes OR p.total = p.size"""


def _lane_from(lane: str, start: str, by_session: bool) -> str:
    session = "AND session = :session" if by_session else ""
    return f"""SELECT rowid AS id, seq, size FROM message
      WHERE queue = :queue AND lane = {lane} {session} AND seq {start}"""


_NEXT = {by: _bounded(_lane_from(":lane", "> :after", by) + " ORDER BY seq", "seq") for by in (False, True)}
_DUE = _bounded(
    """SELECT rowid AS id, due, seq, size FROM message INDEXED BY message_due
      WHERE queue = :queue AND due IS NOT NULL AND due <= :at ORDER BY due, seq""",
    "due, seq",
)
_NEXT_DUE = """
SELECT due FROM message INDEXED BY message_due
WHERE queue = :queue AND due IS NOT NULL AND (due, seq) > (:at, :seq) ORDER BY due, seq LIMIT 1
"""
_EXPIRED = f"""{_HEADS} FROM (
  SELECT rowid AS id FROM message INDEXED BY message_expiry
  WHERE queue = :queue AND expires IS NOT NULL AND lane = 0 AND expires <= :at ORDER BY expires, seq LIMIT :limit
) AS p CROSS JOIN message AS m ON m.rowid = p.id"""
_NEXT_EXPIRY = """
SELECT expires FROM message INDEXED BY message_expiry
WHERE queue = :queue AND expires IS NOT NULL AND lane = 0 AND (expires, seq) > (:at, :seq)
ORDER BY expires, seq LIMIT 1
"""
_BY_SEQ = {
    whole: f"""{_WHOLE if whole else _HEADS}
    FROM json_each(:seqs) AS s CROSS JOIN json_each(:lanes) AS l CROSS JOIN message AS m
    ON m.queue = :queue AND m.lane = l.value AND m.seq = s.value {_WITH_BODY if whole else ""}"""
    for whole in (False, True)
}
# Steps from one session to the next through the index, not over the rows of each.
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
_STATE = "SELECT state FROM session_state WHERE queue = ? AND session = ?"
_KNOWN = """
SELECT json_group_array(s.message_id) FROM json_each(:ids) AS i CROSS JOIN seen AS s
ON s.queue = :queue AND s.message_id = i.value AND s.at >= :since
"""


class RowReader:
    """The statements of needs on the reading connection."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._execute = connection.execute

    def answer(self, need: StoreRead) -> Any:
        match need:
            case NextRows():
                return self._next(need)
            case RowsBySeq():
                return self._by_seq(need)
            case BrowseRows():
                return self._browse(need)
            case DueRows():
                return self._due(need)
            case ExpiredRows():
                return self._expired(need)
            case WaitingSessions():
                arguments = {"queue": need.queue, "after": need.after, "limit": need.limit}
                return json.loads(self._one(_WAITING, arguments))
            case StoredSessions():
                return self._stored_sessions(need)
            case StoredSessionState():
                return self._execute(_STATE, (need.queue, need.session)).get
            case KnownIds():
                arguments = {"queue": need.queue, "ids": json.dumps(need.ids), "since": need.since}
                return set(json.loads(self._one(_KNOWN, arguments)))
            case _:
                assert_never(need)

    def _one(self, sql: str, arguments: dict[str, Any]) -> Any:
        # .get steps to the end of the statement: no snapshot stays open behind it.
        return self._execute(sql, arguments).get

    def _next(self, need: NextRows) -> list[Row]:
        arguments = {
            "queue": need.queue,
            "lane": need.lane,
            "after": need.after,
            "limit": need.limit,
            "bytes": need.max_bytes,
            "session": need.session,
        }
        return _unpacked(*self._one(_NEXT[need.session is not None], arguments))

    def _browse(self, need: BrowseRows) -> list[Row]:
        # The lanes are merged by sequence number as they are read; none is read further than needed.
        lanes = (_lane_from(str(int(lane)), ">= :start", need.session is not None) for lane in need.lanes)
        sql = _bounded(" UNION ALL ".join(lanes) + " ORDER BY seq", "seq")
        arguments = {
            "queue": need.queue,
            "start": need.start,
            "limit": need.limit,
            "bytes": need.max_bytes,
            "session": need.session,
        }
        return _unpacked(*self._one(sql, arguments))

    def _by_seq(self, need: RowsBySeq) -> list[Row]:
        arguments = {"queue": need.queue, "seqs": json.dumps(need.seqs), "lanes": json.dumps(need.lanes)}
        try:
            answer = self._one(_BY_SEQ[need.with_raw], arguments)
        except apsw.TooBigError:  # together they are more than SQLite puts into one blob
            return [found for seq in need.seqs for found in self._by_seq(replace(need, seqs=(seq,)))]
        rows = {row.seq: row for row in (_unpacked(*answer) if need.with_raw else _unpacked_heads(answer))}
        return [rows[seq] for seq in need.seqs if seq in rows]

    def _due(self, need: DueRows) -> DueAnswer:
        arguments = {"queue": need.queue, "at": need.at, "limit": need.limit, "bytes": need.max_bytes}
        rows = _unpacked(*self._one(_DUE, arguments))
        last = (rows[-1].due, rows[-1].seq) if rows else (_BEFORE_ALL, 0)
        return DueAnswer(rows, self._one(_NEXT_DUE, {"queue": need.queue, "at": last[0], "seq": last[1]}))

    def _expired(self, need: ExpiredRows) -> DueAnswer:
        rows = _unpacked_heads(self._one(_EXPIRED, {"queue": need.queue, "at": need.at, "limit": need.limit}))
        last = (rows[-1].expires, rows[-1].seq) if rows else (_BEFORE_ALL, 0)
        return DueAnswer(rows, self._one(_NEXT_EXPIRY, {"queue": need.queue, "at": last[0], "seq": last[1]}))

    def _stored_sessions(self, need: StoredSessions) -> list[str]:
        arguments = {
            "queue": need.queue,
            "skip": need.skip,
            "limit": need.limit,
            "reach": need.skip + need.limit + 1,
            "since": need.state_since,
        }
        answer: list[str] = json.loads(self._one(_STORED if need.state_since is None else _STATE_SINCE, arguments))
        return answer


_BEFORE_ALL = -(1 << 63)
_OVERLAY = Row._fields.index("overlay")


def _unpacked(heads: str, blob: bytes | None) -> list[Row]:
    """Rows from their heads, each ending in the length of its raw, and all the raws in one piece."""
    rows: list[list[Any]] = json.loads(heads)
    start = 0
    for row in rows:
        end = start + row[-1]
        row[-1] = blob[start:end] if blob else b""
        start = end
    return _made(rows)


def _unpacked_heads(heads: str) -> list[Row]:
    rows: list[list[Any]] = json.loads(heads)
    for row in rows:
        row.append(b"")
    return _made(rows)


def _made(rows: list[list[Any]]) -> list[Row]:
    for row in rows:
        if row[_OVERLAY] is not None:
            row[_OVERLAY] = bytes.fromhex(row[_OVERLAY])
    return list(map(Row._make, rows))


def empty_answer(need: StoreRead) -> Any:
    """What a queue that is gone answers."""
    match need:
        case DueRows() | ExpiredRows():
            return DueAnswer([], None)
        case StoredSessionState():
            return None
        case KnownIds():
            return set()
        case _:
            return []
