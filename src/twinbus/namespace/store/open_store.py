"""The layout of a store file, and how a file is created, checked and opened. Why this layout: docs/decisions/0005.

A new file is built under another name and renamed when it is complete and synced. So a file that exists and is not
complete is damaged. `examine` finds damage in a file of the current version.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import apsw

from twinbus.namespace.engine.storage_protocol import OpenedStore, PutBody, PutCounters, PutEntity, Row, StoredEntity
from twinbus.namespace.store.checksums import KEY_SQL, Inventory, body_crc, counters_crc, row_crc, values_crc
from twinbus.namespace.store.errors import (
    DAMAGE_ERRORS,
    UNREADABLE,
    StoreDamagedError,
    StoreError,
    StoreVersionError,
    recover_command,
)
from twinbus.namespace.store.files import sync_folder

_MAGIC = b"SQLite format 3\x00"
_BUSY_MS = 5_000
WRITER_CACHE_KIB = 8 * 1024
READER_CACHE_KIB = 4 * 1024

# --- layout -----------------------------------------------------------------------------------------------------------

APPLICATION_ID = 0x54774275
"""«TwBu» in the header of the file: distinguishes a store from any other SQLite file."""

VERSION = 4
"""Every version has tables of its own: a header with another version, beside the tables of this one, is damaged."""

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

# Every row has a checksum. `rows` and `keys` of `counter` are the inventory of the queue. `commits` is the number of
# the commit that wrote the row; the highest one is the number of the last commit. `totals` has one row: the number of
# entities, the sum of their checksums, and the highest id that any queue ever had (before: table `highest`).
_CHECKED = f"""
ALTER TABLE message ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
UPDATE message SET crc = row_crc({", ".join(Row._fields)});
ALTER TABLE body ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
UPDATE body SET crc = body_crc(id, raw, topic);
ALTER TABLE session_state ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
UPDATE session_state SET crc = values_crc(queue, session, state, at);
ALTER TABLE seen ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
UPDATE seen SET crc = values_crc(queue, message_id, at);
ALTER TABLE entity ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
UPDATE entity SET crc = values_crc(queue, kind, path, text, created, updated);
INSERT INTO counter (queue, next_seq, active, deferred, scheduled, dead, dead_deferred, size, accessed)
SELECT queue, max(seq) + 1, 0, 0, 0, 0, 0, 0, 0 FROM message
WHERE queue NOT IN (SELECT queue FROM counter) AND queue NOT IN (SELECT queue FROM dropped) GROUP BY queue;
ALTER TABLE counter ADD COLUMN rows INTEGER NOT NULL DEFAULT 0;
ALTER TABLE counter ADD COLUMN keys INTEGER NOT NULL DEFAULT 0;
ALTER TABLE counter ADD COLUMN commits INTEGER NOT NULL DEFAULT 0;
ALTER TABLE counter ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
UPDATE counter SET rows = t.rows, keys = t.keys FROM (
  SELECT queue, count(*) AS rows, sum({KEY_SQL}) AS keys FROM message GROUP BY queue
) AS t WHERE t.queue = counter.queue;
UPDATE counter SET crc = counters_crc({", ".join(PutCounters._fields)}, rows, keys, commits);
CREATE TABLE totals (
  only INTEGER PRIMARY KEY CHECK (only = 1),
  identity INTEGER NOT NULL,
  commits INTEGER NOT NULL,
  entities INTEGER NOT NULL,
  entity_crcs INTEGER NOT NULL,
  highest INTEGER NOT NULL,
  crc INTEGER NOT NULL
) STRICT;
INSERT INTO totals
SELECT 1, random(), 0, count(*), coalesce(sum(crc), 0), (SELECT queue FROM highest), 0 FROM entity;
UPDATE totals SET crc = values_crc(identity, commits, entities, entity_crcs, highest);
DROP TABLE highest;
"""  # noqa: S608  # only names of columns

MIGRATIONS: Mapping[int, str] = {0: _MESSAGE + _BODY + _REST, 1: _TRANSFER_DEAD, 2: _CHARGED_ONCE, 3: _CHECKED}
"""SQL that takes a file from version n to n + 1. An empty file is version 0."""

TABLES = ("message", "body", "entity", "counter", "session_state", "seen", "dropped", "totals", "shared", "freed")


class Totals(NamedTuple):
    """The row of the table `totals`."""

    identity: int
    """A random number that a store gets when it is created."""
    commits: int
    entities: int
    entity_crcs: int
    highest: int
    """The highest id that any queue ever had. Ids of queues are never used again."""


def _add_checksum_functions(connection: apsw.Connection) -> None:
    """Make the checksums known to SQL, for the migration of rows without them."""

    def of_counters(*values: Any) -> int:
        width = len(PutCounters._fields)
        return counters_crc(PutCounters(*values[:width]), Inventory(*values[width:-1]), values[-1])

    connection.create_scalar_function("row_crc", lambda *row: row_crc(Row._make(row)), deterministic=True)
    connection.create_scalar_function("body_crc", lambda *body: body_crc(PutBody(*body)), deterministic=True)
    connection.create_scalar_function("values_crc", lambda *values: values_crc(values), deterministic=True)
    connection.create_scalar_function("counters_crc", of_counters, deterministic=True)


def migrate(connection: apsw.Connection, version: int, steps: Mapping[int, str] = MIGRATIONS) -> None:
    """Bring the file from `version` to the newest. Each step and its version number are one transaction."""
    _add_checksum_functions(connection)
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


def layout(connection: apsw.Connection) -> set[tuple[str, str, str]]:
    """Return kind, name and definition of every table, index and trigger."""
    found = connection.execute("SELECT type, name, CAST(sql AS BLOB) FROM sqlite_schema")
    return {(kind, name, " ".join((sql or b"").decode(errors="replace").split())) for kind, name, sql in found}


@cache
def _versions_by_layout() -> Mapping[frozenset[tuple[str, str, str]], int]:
    """Return the version of a store by its layout, for all versions."""
    connection = apsw.Connection("")
    versions = {}
    try:
        for version, step in MIGRATIONS.items():
            migrate(connection, version, {version: step})
            versions[frozenset(layout(connection))] = version + 1
        return versions
    finally:
        connection.close()


def expected_layout() -> frozenset[tuple[str, str, str]]:
    """Return the layout of a store of the current version."""
    return next(layout for layout, version in _versions_by_layout().items() if version == VERSION)


# --- opening ----------------------------------------------------------------------------------------------------------


def create(path: Path, vfs: str | None) -> None:
    """Create an empty store. The file appears under `path` only when it is complete and on disk."""
    building = path.with_name(path.name + ".new")
    _remove(building)
    try:
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
    except BaseException:
        _remove(building)
        raise
    sync_folder(path.parent)


def find_unusable(path: Path) -> str | None:
    """Return why SQLite cannot open the file, or would silently start an empty database. Returns None if neither holds.

    Call this before the first connection is opened: this function opens and closes the file, and closing a file drops
    all locks that the process has on the file.
    """
    if not path.exists():
        log = path.with_name(path.name + "-wal")
        return "the file is missing, but its log is there" if log.exists() and log.stat().st_size > 0 else None
    with path.open("rb") as file:
        head = file.read(len(_MAGIC))
    if not head:
        return "the file is empty"
    return None if head == _MAGIC else "this is not an SQLite file"


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


def checked_version(connection: apsw.Connection, path: Path) -> int:
    """Return the version of the file. Raises StoreError if this is no Twinbus store that this version can use.

    If the tables are those of a version, they decide. If the header then has another kind or version, the store is
    damaged. A damaged store of the current version is not refused here: `examine` reports the damage, and
    `--accept-damage` repairs it. A damaged store of an older version is refused, because a migration from the wrong
    version would alter the file. If no version has these tables, the header decides.
    """
    application_id, version = read_header(connection)
    of_tables = _version_of_tables(connection)
    if of_tables is not None and of_tables < VERSION and (found := header_damage(connection, of_tables)):
        raise StoreDamagedError(
            f"The store is damaged ({'; '.join(found)})",
            path,
            f"Keep a copy of all files {path.name}* first. Then put a backup of all of them in their place. Or correct"
            f' the header: sqlite3 {path.name} "PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version ='
            f' {of_tables}"',
        )
    if of_tables == VERSION or (application_id, version) == (APPLICATION_ID, VERSION):
        return VERSION
    if application_id != APPLICATION_ID:
        raise StoreError(
            "This SQLite file is not a Twinbus store", path, "Use another data folder, or move the file away."
        )
    if version > VERSION:
        raise StoreVersionError(
            f"The store has version {version}; this Twinbus knows up to {VERSION}",
            path,
            "Use a newer Twinbus.",
        )
    return version


def read_header(connection: apsw.Connection) -> tuple[int, int]:
    """Return application id and version of the file, as its header says."""
    return connection.pragma("application_id"), connection.pragma("user_version")


def header_damage(connection: apsw.Connection, version: int) -> list[str]:
    """Return a text for each wrong value in the header of a store. `version` is the version that its tables show."""
    application_id, said = read_header(connection)
    found = []
    if application_id != APPLICATION_ID:
        found.append("the header of the file does not say that it is a store, but its tables are those of one")
    if said != version:
        found.append(f"the header of the file says version {said}, but its tables are those of version {version}")
    return found


def _version_of_tables(connection: apsw.Connection) -> int | None:
    """Return the version of a store with these tables; None if no version has them.

    Also None if the tables are those of the current version, but the checksum of the totals is wrong.
    """
    try:
        version = _versions_by_layout().get(frozenset(layout(connection)))
        return version if version != VERSION or are_totals_intact(connection) else None
    except (*DAMAGE_ERRORS, *UNREADABLE, apsw.IOError):
        return None  # `examine` reports what cannot be read


def are_totals_intact(connection: apsw.Connection) -> bool:
    """Whether the row of the table `totals` is there and has its checksum. Raises apsw.Error."""
    totals = connection.execute(f"SELECT {', '.join(Totals._fields)}, crc FROM totals").get  # noqa: S608
    return totals is not None and bool(values_crc(totals[:-1]) == totals[-1])


def prepare(connection: apsw.Connection, path: Path) -> None:
    """Bring a file that was examined to the current version, and copy its log into it. Raises StoreError."""
    version = checked_version(connection, path)
    if connection.pragma("journal_mode", "wal") != "wal":
        raise StoreError("The store cannot keep a write-ahead log here", path, "Put the data folder on a local disk.")
    connection.wal_autocheckpoint(0)
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    if version < VERSION:
        try:
            if version not in MIGRATIONS:
                raise ValueError("there is no such version")
            migrate(connection, version)
        except (*DAMAGE_ERRORS, *UNREADABLE) as error:
            raise StoreDamagedError(
                f"The store is damaged: it cannot be upgraded from version {version} ({error})",
                path,
                f"Keep a copy of all files {path.name}* first. Then put a backup of all of them in their place. Or save"
                f" by hand what can be read: {recover_command(path)}",
            ) from error
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)


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
    body = _one(connection, "SELECT max(id) FROM body")
    return OpenedStore(entities, next_queue=read_totals(connection).highest + 1, next_body=(body or 0) + 1)


def read_totals(connection: apsw.Connection) -> Totals:
    """Return the row of the table `totals`."""
    return Totals(*_one(connection, f"SELECT {', '.join(Totals._fields)} FROM totals"))  # noqa: S608  # no arguments


class StoredCounters(NamedTuple):
    """A row of the table `counter`: the counters that the engine wrote, and the inventory of the rows in the file."""

    counters: PutCounters
    inventory: Inventory
    commits: int


def read_counters(connection: apsw.Connection) -> dict[int, StoredCounters]:
    """Return the counters and inventories of all queues."""
    columns = ", ".join((*PutCounters._fields, *Inventory._fields, "commits"))
    width = len(PutCounters._fields)
    return {
        row[0]: StoredCounters(PutCounters(*row[:width]), Inventory(*row[width:-1]), row[-1])
        for row in connection.execute(f"SELECT {columns} FROM counter")  # noqa: S608  # no arguments
    }


def read_entity_crcs(connection: apsw.Connection) -> dict[int, int]:
    """Return the checksums of all entities."""
    return dict(connection.execute("SELECT queue, crc FROM entity"))


def read_dropped(connection: apsw.Connection) -> list[int]:
    """Return the dropped queues that still have rows."""
    return [queue for (queue,) in connection.execute("SELECT queue FROM dropped ORDER BY queue")]


def _one(connection: apsw.Connection, sql: str) -> Any:
    return connection.execute(sql).get


def _remove(building: Path) -> None:
    """Delete the files of a creation that was interrupted."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        building.with_name(building.name + suffix).unlink(missing_ok=True)
