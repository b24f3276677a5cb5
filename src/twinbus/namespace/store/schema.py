"""The layout of a store file, its version, and the way from older ones. Why it is so: docs/decisions/0005.

Only SQL that makes or changes the layout; what reads and writes rows stands in reading and writing.
"""

from __future__ import annotations

from collections.abc import Mapping

import apsw

APPLICATION_ID = 0x54774275
"""«TwBu» in the file's header: tells a store from any other SQLite file."""

VERSION = 3

PAGE_SIZE = 8192

# Rowid order is order of arrival over all queues, so a commit over many queues still fills few pages.
_MESSAGE = """
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
"""

_BODY = """
CREATE TABLE body (id INTEGER PRIMARY KEY, raw BLOB NOT NULL) STRICT;
CREATE TRIGGER body_unused AFTER DELETE ON message WHEN old.body IS NOT NULL
BEGIN
  DELETE FROM body WHERE id = old.body AND NOT EXISTS (SELECT 1 FROM message WHERE body = old.body);
END;
"""

_REST = """
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
-- Queues that are gone but whose rows are not yet.
CREATE TABLE dropped (queue INTEGER PRIMARY KEY) STRICT;
-- One row. Ids of queues are never given twice, so it outlives the entities.
CREATE TABLE highest (only INTEGER PRIMARY KEY CHECK (only = 1), queue INTEGER NOT NULL) STRICT;
INSERT INTO highest VALUES (1, 0);
"""

_TRANSFER_DEAD = """
ALTER TABLE counter ADD COLUMN transfer_dead INTEGER NOT NULL DEFAULT 0;
ALTER TABLE counter ADD COLUMN transfer_dead_deferred INTEGER NOT NULL DEFAULT 0;
"""

# Bodies know the topic that is charged for them. `shared` is what each topic is charged; `freed` is what went of it
# within a transaction, and empty at its end. A copy is charged 64 bytes where it was charged its whole message before.
_CHARGED_ONCE = """
ALTER TABLE body ADD COLUMN topic INTEGER NOT NULL DEFAULT 0;
UPDATE body SET topic = owner.topic FROM (
  SELECT m.body AS id, max(t.queue) AS topic FROM message AS m
  JOIN entity AS s ON s.queue = m.queue AND s.kind = 'subscription'
  JOIN entity AS t ON t.path = s.text ->> 'topic' AND t.kind = 'topic'
  WHERE m.body IS NOT NULL GROUP BY m.body
) AS owner WHERE owner.id = body.id;
CREATE TABLE shared (topic INTEGER PRIMARY KEY, bytes INTEGER NOT NULL) STRICT;
INSERT INTO shared SELECT topic, sum(length(raw)) FROM body WHERE topic > 0 GROUP BY topic;
CREATE TABLE freed (topic INTEGER PRIMARY KEY, bytes INTEGER NOT NULL) STRICT;
CREATE TRIGGER body_freed AFTER DELETE ON body
BEGIN
  INSERT INTO freed SELECT topic, length(old.raw) FROM shared WHERE topic = old.topic
  ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes;
END;
UPDATE counter SET size = size - (
  SELECT coalesce(sum(m.size - 64), 0) FROM message AS m WHERE m.queue = counter.queue AND m.body IS NOT NULL);
"""

MIGRATIONS: Mapping[int, str] = {0: _MESSAGE + _BODY + _REST, 1: _TRANSFER_DEAD, 2: _CHARGED_ONCE}
"""From version n to n + 1. An empty file is version 0. Each runs in one transaction with the change of version."""

TABLES = ("message", "body", "entity", "counter", "session_state", "seen", "dropped", "highest", "shared", "freed")


def migrate(connection: apsw.Connection, version: int, steps: Mapping[int, str] = MIGRATIONS) -> None:
    """Bring the file from `version` to the newest, one transaction for each step."""
    while version in steps:
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute(steps[version])
            version += 1
            connection.execute(f"PRAGMA user_version = {version}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
