"""The layout of a store file, and how a file is created, checked and opened. Why this layout: docs/decisions/0005.

A new file is built under another name and renamed when it is complete and synced. So a file that exists and is not
complete is damaged. The time of the checks does not depend on the number of messages: they do not read all pages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import apsw

from twinbus.namespace.engine.storage_protocol import OpenedStore, PutCounters, PutEntity, StoredEntity
from twinbus.namespace.store.errors import StoreError, StoreVersionError, damaged_error
from twinbus.namespace.store.files import sync_folder

_MAGIC = b"SQLite format 3\x00"
_BUSY_MS = 5_000
WRITER_CACHE_KIB = 8 * 1024
READER_CACHE_KIB = 4 * 1024

# --- layout -----------------------------------------------------------------------------------------------------------

APPLICATION_ID = 0x54774275
"""«TwBu» in the header of the file: distinguishes a store from any other SQLite file."""

VERSION = 3

PAGE_SIZE = 8192

# A rowid table stores rows in the order in which they arrive, so a commit to many queues writes only some pages.
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
-- Dropped queues that still have rows.
CREATE TABLE dropped (queue INTEGER PRIMARY KEY) STRICT;
-- One row: the highest id that any queue ever had. Ids of queues are never used again.
CREATE TABLE highest (only INTEGER PRIMARY KEY CHECK (only = 1), queue INTEGER NOT NULL) STRICT;
INSERT INTO highest VALUES (1, 0);
"""

_TRANSFER_DEAD = """
ALTER TABLE counter ADD COLUMN transfer_dead INTEGER NOT NULL DEFAULT 0;
ALTER TABLE counter ADD COLUMN transfer_dead_deferred INTEGER NOT NULL DEFAULT 0;
"""

# Each body names the topic that is charged for it. `shared` holds the bytes that each topic is charged. `freed` holds
# the bytes of bodies that the current transaction deleted, and is empty after each transaction. A row that shares a
# body is charged 64 bytes; before version 3 it was charged the whole message.
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
"""SQL that takes a file from version n to n + 1. An empty file is version 0."""

TABLES = ("message", "body", "entity", "counter", "session_state", "seen", "dropped", "highest", "shared", "freed")


def migrate(connection: apsw.Connection, version: int, steps: Mapping[int, str] = MIGRATIONS) -> None:
    """Bring the file from `version` to the newest. Each step and its version number are one transaction."""
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


# --- opening ----------------------------------------------------------------------------------------------------------


def create(path: Path, vfs: str | None) -> None:
    """Create an empty store. The file appears under `path` only when it is complete and on disk."""
    building = path.with_name(path.name + ".new")
    _remove(building)
    os.close(os.open(building, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = connect(building, vfs, WRITER_CACHE_KIB)
    try:
        connection.pragma("page_size", PAGE_SIZE)
        connection.pragma("journal_mode", "wal")
        migrate(connection, 0)
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    finally:
        connection.close()
    building.rename(path)
    sync_folder(path.parent)


def inspect(path: Path) -> bool:
    """Return whether there is a store. Raises StoreDamagedError where SQLite would silently start an empty database.

    Call this before the first connection is opened: this function opens and closes the file, and closing a file drops
    all locks that the process has on the file.
    """
    log = path.with_name(path.name + "-wal")
    logged = log.exists() and log.stat().st_size > 0
    if not path.exists():
        if logged:
            raise damaged_error(path, "the file is missing, but its log is there")
        return False
    with path.open("rb") as file:
        head = file.read(len(_MAGIC))
    if not head:
        raise damaged_error(path, "the file is empty")
    if head != _MAGIC:
        raise damaged_error(path, "this is not an SQLite file")
    return True


def connect(path: Path, vfs: str | None, cache_kib: int) -> apsw.Connection:
    """Return a connection to the file. A COMMIT on this connection returns after the data is synced to disk."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE, vfs=vfs, statementcachesize=128)
    try:
        connection.set_busy_timeout(_BUSY_MS)
        connection.pragma("synchronous", "full")
        connection.pragma("fullfsync", "on")  # on macOS, fsync alone does not flush the cache of the drive
        connection.pragma("checkpoint_fullfsync", "on")
        connection.pragma("cache_size", -cache_kib)
        connection.pragma("temp_store", "memory")
        connection.pragma("trusted_schema", "off")
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(connection: apsw.Connection, path: Path) -> None:
    """Check that the file is a complete Twinbus store, and bring it to the current version. Raises StoreError."""
    if connection.pragma("application_id") != APPLICATION_ID:
        raise StoreError(
            "This SQLite file is not a Twinbus store", path, "Use another data folder, or move the file away."
        )
    version = connection.pragma("user_version")
    if version > VERSION:
        raise StoreVersionError(
            f"The store has version {version}; this Twinbus knows up to {VERSION}",
            path,
            "Use a newer Twinbus.",
        )
    if connection.pragma("journal_mode", "wal") != "wal":
        raise StoreError("The store cannot keep a write-ahead log here", path, "Put the data folder on a local disk.")
    migrate(connection, version)
    connection.wal_autocheckpoint(0)
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    _check_length(connection, path)
    _check_tables(connection, path)


def _check_length(connection: apsw.Connection, path: Path) -> None:
    expected = int(connection.pragma("page_count")) * int(connection.pragma("page_size"))
    if (found := path.stat().st_size) < expected:
        raise damaged_error(path, f"it is cut short: {found} of {expected} bytes")


def _check_tables(connection: apsw.Connection, path: Path) -> None:
    found = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if missing := [table for table in TABLES if table not in found]:
        raise damaged_error(path, f"it lacks the table {missing[0]}")
    for table in ("message", "body"):  # the two tables that may be large: read the first and the last row
        connection.execute(f"SELECT * FROM {table} ORDER BY rowid LIMIT 1").get  # noqa: B018, S608  # may raise
        connection.execute(f"SELECT * FROM {table} ORDER BY rowid DESC LIMIT 1").get  # noqa: B018, S608  # may raise


_ENTITIES = """
SELECT e.queue, e.kind, e.path, e.text, e.created, e.updated,
  c.queue, c.next_seq, c.active, c.deferred, c.scheduled, c.dead, c.dead_deferred, c.size, c.accessed,
  c.transfer_dead, c.transfer_dead_deferred,
  (SELECT expires FROM message INDEXED BY message_expiry
   WHERE queue = e.queue AND expires IS NOT NULL AND lane = 0 ORDER BY expires LIMIT 1),
  (SELECT due FROM message INDEXED BY message_due WHERE queue = e.queue AND due IS NOT NULL ORDER BY due LIMIT 1),
  coalesce(s.bytes, 0)
FROM entity AS e LEFT JOIN counter AS c ON c.queue = e.queue LEFT JOIN shared AS s ON s.topic = e.queue ORDER BY e.queue
"""


def read_opened(connection: apsw.Connection) -> OpenedStore:
    """Return the entities with their counters. The counters are read from their table; no rows are counted."""
    entities = []
    for row in connection.execute(_ENTITIES):
        counters = PutCounters(*row[6:17]) if row[6] is not None else PutCounters(row[0], 1, 0, 0, 0, 0, 0, 0, row[4])
        entities.append(StoredEntity(PutEntity(*row[:6]), counters, *row[17:]))
    highest = _one(connection, "SELECT queue FROM highest")
    body = _one(connection, "SELECT max(id) FROM body")
    return OpenedStore(entities, next_queue=highest + 1, next_body=(body or 0) + 1)


def read_dropped(connection: apsw.Connection) -> list[int]:
    """Return the dropped queues that still have rows."""
    return [queue for (queue,) in connection.execute("SELECT queue FROM dropped ORDER BY queue")]


def _one(connection: apsw.Connection, sql: str) -> Any:
    return connection.execute(sql).get


def _remove(building: Path) -> None:
    """Delete the files of a creation that was interrupted."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        building.with_name(building.name + suffix).unlink(missing_ok=True)
