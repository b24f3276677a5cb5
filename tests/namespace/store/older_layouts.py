"""Store files in the layout of each older version, filled with a sample of everything.

Made without the code under test, so that it cannot change with it. The newest layout is here already: a change of it
adds one, and never edits this one. Data folders of a real server: `tests/formats`.
"""

# ruff: noqa: S608  # statements are put together from constants

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apsw

_LAYOUT_1 = """
CREATE TABLE message (
  queue INTEGER NOT NULL,
  lane INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  origin_seq INTEGER NOT NULL,
  enqueued INTEGER NOT NULL,
  expires INTEGER,
  due INTEGER,
  session TEXT,
  delivery_count INTEGER NOT NULL,
  size INTEGER NOT NULL,
  overlay BLOB,
  body INTEGER,
  raw BLOB
) STRICT;
CREATE UNIQUE INDEX message_key ON message (queue, lane, seq);
CREATE INDEX message_session ON message (queue, lane, session, seq) WHERE session IS NOT NULL;
CREATE INDEX message_expiry ON message (queue, expires, seq) WHERE expires IS NOT NULL AND lane = 0;
CREATE INDEX message_due ON message (queue, due, seq) WHERE due IS NOT NULL;
CREATE INDEX message_body ON message (body) WHERE body IS NOT NULL;
CREATE TABLE body (id INTEGER PRIMARY KEY, raw BLOB NOT NULL) STRICT;
CREATE TRIGGER body_unused AFTER DELETE ON message WHEN old.body IS NOT NULL
BEGIN
  DELETE FROM body WHERE id = old.body AND NOT EXISTS (SELECT 1 FROM message WHERE body = old.body);
END;
CREATE TABLE entity (
  queue INTEGER PRIMARY KEY,
  kind TEXT NOT NULL,
  path TEXT NOT NULL,
  text TEXT NOT NULL,
  created INTEGER NOT NULL,
  updated INTEGER NOT NULL
) STRICT;
CREATE TABLE counter (
  queue INTEGER PRIMARY KEY,
  next_seq INTEGER NOT NULL,
  active INTEGER NOT NULL,
  deferred INTEGER NOT NULL,
  scheduled INTEGER NOT NULL,
  dead INTEGER NOT NULL,
  dead_deferred INTEGER NOT NULL,
  size INTEGER NOT NULL,
  accessed INTEGER NOT NULL
) STRICT;
CREATE TABLE session_state (
  queue INTEGER NOT NULL,
  session TEXT NOT NULL,
  state BLOB NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (queue, session)
) STRICT, WITHOUT ROWID;
CREATE TABLE seen (
  queue INTEGER NOT NULL,
  message_id TEXT NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (queue, message_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX seen_at ON seen (queue, at);
CREATE TABLE dropped (queue INTEGER PRIMARY KEY) STRICT;
CREATE TABLE highest (only INTEGER PRIMARY KEY CHECK (only = 1), queue INTEGER NOT NULL) STRICT;
INSERT INTO highest VALUES (1, 0);
"""
_LAYOUT_2 = """
ALTER TABLE counter ADD COLUMN transfer_dead INTEGER NOT NULL DEFAULT 0;
ALTER TABLE counter ADD COLUMN transfer_dead_deferred INTEGER NOT NULL DEFAULT 0;
"""
_LAYOUT_3 = """
ALTER TABLE body ADD COLUMN topic INTEGER NOT NULL DEFAULT 0;
CREATE TABLE shared (topic INTEGER PRIMARY KEY, bytes INTEGER NOT NULL) STRICT;
CREATE TABLE freed (topic INTEGER PRIMARY KEY, bytes INTEGER NOT NULL) STRICT;
CREATE TRIGGER body_freed AFTER DELETE ON body
BEGIN
  INSERT INTO freed SELECT topic, length(old.raw) FROM shared WHERE topic = old.topic
  ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes;
END;
"""
_LAYOUT_4 = """
ALTER TABLE message ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE body ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE session_state ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE seen ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE entity ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE counter ADD COLUMN rows INTEGER NOT NULL DEFAULT 0;
ALTER TABLE counter ADD COLUMN keys INTEGER NOT NULL DEFAULT 0;
ALTER TABLE counter ADD COLUMN commits INTEGER NOT NULL DEFAULT 0;
ALTER TABLE counter ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
CREATE TABLE totals (
  only INTEGER PRIMARY KEY CHECK (only = 1),
  identity INTEGER NOT NULL,
  commits INTEGER NOT NULL,
  entities INTEGER NOT NULL,
  entity_crcs INTEGER NOT NULL,
  highest INTEGER NOT NULL,
  crc INTEGER NOT NULL
) STRICT;
DROP TABLE highest;
"""
LAYOUTS = {
    1: _LAYOUT_1,
    2: _LAYOUT_1 + _LAYOUT_2,
    3: _LAYOUT_1 + _LAYOUT_2 + _LAYOUT_3,
    4: _LAYOUT_1 + _LAYOUT_2 + _LAYOUT_3 + _LAYOUT_4,
}

_COLUMNS = "queue, lane, seq, origin_seq, enqueued, expires, due, session, delivery_count, size, overlay, body, raw"
_PUT_COUNTER = """
INSERT INTO counter (queue, next_seq, active, deferred, scheduled, dead, dead_deferred, size, accessed)
VALUES (?, 3, ?, ?, ?, ?, ?, ?, 1000)
"""

QUEUE, TOPIC, FIRST, SECOND, OTHER_TOPIC, GONE = range(1, 7)
SHARED = {1: b"a" * 300, 2: b"b" * 200, 3: b"c" * 100}
"""Bodies: 1 is named by both subscriptions, 2 by the second and a dropped one, 3 only by the dropped one."""
OWN = b"of the queue"
IDENTITY, COMMITS = 4711, 9


def older_store(path: Path, version: int) -> None:
    """Write a queue, a topic with two subscriptions, another topic, and a dropped subscription that still has rows."""
    connection = apsw.Connection(str(path))
    connection.pragma("page_size", 8192)
    connection.pragma("journal_mode", "wal")
    with connection:
        connection.execute(LAYOUTS[version])
        connection.pragma("user_version", version)
        connection.pragma("application_id", 0x54774275)
        _fill(connection)
        if version >= 3:
            _charge_once(connection)
        if version >= 4:
            _add_checksums(connection)
    connection.close()
    if version >= 4:
        _write_commit_counter(path.with_name(path.name + ".commits"))


def _fill(connection: apsw.Connection) -> None:
    _entity(connection, QUEUE, "queue", "orders", path="orders")
    _entity(connection, TOPIC, "topic", "News", path="News")
    _entity(connection, FIRST, "subscription", "News/Subscriptions/a", topic="News", name="a")
    _entity(connection, SECOND, "subscription", "News/Subscriptions/b", topic="News", name="b")
    _entity(connection, OTHER_TOPIC, "topic", "other", path="other")
    if connection.pragma("user_version") < 4:
        connection.execute("UPDATE highest SET queue = ?", (GONE,))
    connection.execute("INSERT INTO dropped VALUES (?)", (GONE,))
    connection.executemany("INSERT INTO body (id, raw) VALUES (?, ?)", SHARED.items())
    connection.execute(
        "INSERT INTO session_state (queue, session, state, at) VALUES (?, 'session', x'01', 5)", (QUEUE,)
    )
    connection.execute("INSERT INTO seen (queue, message_id, at) VALUES (?, 'an id', 5)", (QUEUE,))
    # queue, lane, seq, its raw or the id of its body
    rows: list[tuple[int, int, int, bytes | int]] = [
        (QUEUE, 0, 1, OWN),
        (QUEUE, 3, 2, OWN),
        (TOPIC, 2, 1, b"due"),
        (FIRST, 0, 1, 1),
        (FIRST, 0, 2, b"of one alone"),
        (SECOND, 0, 1, 1),
        (SECOND, 3, 2, 2),
        (GONE, 0, 1, 2),
        (GONE, 0, 2, 3),
    ]
    for queue, lane, seq, content in rows:
        body, raw = (content, None) if isinstance(content, int) else (None, content)
        due = 9_000 if lane == 2 else None
        size = len(raw if raw is not None else SHARED[body])  # type: ignore[index]  # one of the two is there
        row = (queue, lane, seq, seq, 1_000, None, due, None, 0, size, None, body, raw)
        connection.execute(f"INSERT INTO message ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    for queue in (QUEUE, TOPIC, FIRST, SECOND, OTHER_TOPIC):
        held = [len(SHARED[each[3]]) if isinstance(each[3], int) else len(each[3]) for each in rows if each[0] == queue]
        lanes = [sum(each[:2] == (queue, lane) for each in rows) for lane in range(5)]
        connection.execute(_PUT_COUNTER, (queue, *lanes, sum(held)))


def _charge_once(connection: apsw.Connection) -> None:
    """Since version 3 a topic is charged for a shared body, and a subscription 64 bytes for its copy."""
    connection.execute("UPDATE body SET topic = ? WHERE id IN (1, 2)", (TOPIC,))
    connection.execute("INSERT INTO shared VALUES (?, ?)", (TOPIC, len(SHARED[1]) + len(SHARED[2])))
    connection.execute("UPDATE counter SET size = 64 + ? WHERE queue = ?", (len(b"of one alone"), FIRST))
    connection.execute("UPDATE counter SET size = 2 * 64 WHERE queue = ?", (SECOND,))


def _add_checksums(connection: apsw.Connection) -> None:
    """Since version 4 every row has a CRC-32, and a queue the number of its rows and the sum of their keys."""
    execute: Any = connection.execute
    never = -(1 << 63)
    for rowid, *row in execute(f"SELECT rowid, {_COLUMNS} FROM message").fetchall():
        queue, lane, seq, origin, enqueued, _, due, _, count, size, _, body, raw = row
        numbers = (queue, lane, seq, origin, enqueued, never, never if due is None else due, count, size)
        packed = struct.pack("<10q", *numbers, -1 if body is None else body)
        execute("UPDATE message SET crc = ? WHERE rowid = ?", (zlib.crc32(packed, zlib.crc32(raw or b"")), rowid))
        execute("UPDATE counter SET rows = rows + 1, keys = keys + ? WHERE queue = ?", (seq * 8 + lane, queue))
    for body, raw, topic in execute("SELECT id, raw, topic FROM body").fetchall():
        crc = zlib.crc32(raw, zlib.crc32(struct.pack("<2q", body, topic)))
        execute("UPDATE body SET crc = ? WHERE id = ?", (crc, body))
    for row in execute("SELECT * FROM counter").fetchall():
        execute("UPDATE counter SET crc = ? WHERE queue = ?", (zlib.crc32(struct.pack("<14q", *row[:-1])), row[0]))
    for table, second in (("session_state", "session"), ("seen", "message_id"), ("entity", "kind")):
        for *values, _ in execute(f"SELECT * FROM {table}").fetchall():
            sql = f"UPDATE {table} SET crc = ? WHERE queue = ? AND {second} = ?"
            execute(sql, (_crc_of(values), *values[:2]))
    totals = (IDENTITY, COMMITS, *execute("SELECT count(*), sum(crc) FROM entity").get, GONE)
    execute("INSERT INTO totals VALUES (1, ?, ?, ?, ?, ?, ?)", (*totals, _crc_of(totals)))


def _write_commit_counter(path: Path) -> None:
    """Since version 4 a file beside the store has the number of its last commit, twice."""
    slot = struct.pack("<8s2q", b"TwBuCmt1", IDENTITY, COMMITS)
    slot += struct.pack("<I4x", zlib.crc32(slot))
    path.write_bytes(slot.ljust(512, b"\0") + slot)


def _crc_of(values: Iterable[Any]) -> int:
    texts = [value if isinstance(value, bytes) else str(value).encode() for value in values]
    return zlib.crc32(b"".join(b"%d:%s" % (len(text), text) for text in texts))


def _entity(connection: apsw.Connection, queue: int, kind: str, path: str, /, **fields: Any) -> None:
    text = json.dumps(fields | {"status": "Active"})
    sql = "INSERT INTO entity (queue, kind, path, text, created, updated) VALUES (?, ?, ?, ?, 10, 20)"
    connection.execute(sql, (queue, kind, path, text))
