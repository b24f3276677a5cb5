"""Examines a store before it is used, and returns what is damaged (X2).

    always             commits that are missing in the log or against the commit counter; the layout; the checksums of
                       entities and counters, and that no entity is missing; the inventory of each queue against the
                       index of its messages. This reads the index, not the messages.
                       The log is not older than the file. The pages of all tables but messages, bodies and remembered
                       ids (SQLite's integrity check).
    up to `MOST_BYTES` every page and the checksum of every row. In a larger store, a message is checked when it is
                       read.

A store of an older version has no checksums. Only its log and its structure are examined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import apsw

from twinbus.namespace.engine.storage_protocol import PutBody, PutCounters, PutEntity, Row
from twinbus.namespace.store import open_store
from twinbus.namespace.store.checksums import KEY_SQL, Inventory, body_crc, counters_crc, row_crc, values_crc
from twinbus.namespace.store.commit_counter import CountedCommits, counter_path
from twinbus.namespace.store.errors import DAMAGE_ERRORS, TOO_LARGE, UNREADABLE, damage_text, is_cut_short
from twinbus.namespace.store.log_scan import Log
from twinbus.namespace.store.open_store import StoredCounters

MOST_BYTES: Final = 64 * 1024 * 1024
"""The size of file and log up to which every row is checked when a store is opened."""

OLDER_LOG: Final = "the log is older than the file, and later commits are missing"

_NUMBERS_SHOWN: Final = 20


def examine(
    connection: apsw.Connection, path: Path, log: Log, counted: CountedCommits | None, most_bytes: int = MOST_BYTES
) -> list[str]:
    """Return a text for each damage that was found. `counted` is what the commit counter says.

    Writes nothing. Raises StoreError for a file that is no store or of a newer version, and apsw.Error if the file
    cannot be read for another reason.
    """
    found: list[str] = []
    try:
        version = open_store.checked_version(connection, path)
    except DAMAGE_ERRORS as error:
        return [damage_text(error)]
    is_current = version == open_store.VERSION
    is_small = path.stat().st_size + len(log.frames) * open_store.PAGE_SIZE <= most_bytes
    examined: list[Callable[[], Iterator[str]]] = [partial(_examine_structure, connection, path, log, version)]
    if is_current:
        examined += [partial(_examine_commits, connection, path, counted), partial(_examine_age, connection, path)]
        examined += [partial(part, connection) for part in (_examine_entities, _examine_inventories)]
    if is_small:
        examined.append(partial(_examine_pages, connection))
    elif is_current:
        examined += [partial(_examine_pages, connection, table) for table in _SMALL_TABLES]
    if is_small and is_current:
        examined += [partial(part, connection) for part in (_examine_messages, _examine_other_rows)]
    for part in examined:
        try:
            found += part()
        except (*DAMAGE_ERRORS, *TOO_LARGE, apsw.IOError) as error:
            if isinstance(error, apsw.IOError) and not is_cut_short(error):
                raise
            found.append(damage_text(error))
        except UNREADABLE as error:
            found.append(f"a value cannot be read ({error})")
    return list(dict.fromkeys(found))


def _examine_structure(connection: apsw.Connection, path: Path, log: Log, version: int) -> Iterator[str]:
    in_log = connection.execute("SELECT count(*) FROM sqlite_schema").get and _valid_frames(connection)
    if log.header_is_damaged and (commits := sum(frame.ends_commit for frame in log.frames)):
        yield f"the header of the log is damaged, and up to {commits} commits in the log are missing"
    elif lost := log.lost_commits(in_log):
        yield f"the log is damaged, and at least {lost} commits behind the damage are missing"
    page_count, page_size = int(connection.pragma("page_count")), int(connection.pragma("page_size"))
    in_file = path.stat().st_size // page_size
    if missing := set(range(in_file + 1, page_count + 1)) - log.pages(in_log):
        yield f"it is cut short: {len(missing)} of {page_count} pages are missing"
    if version < open_store.VERSION:
        return
    yield from open_store.header_damage(connection, version)
    if (connection.pragma("auto_vacuum"), connection.pragma("encoding")) != (0, "UTF-8"):
        yield "the header of the file has settings that a store never has"
    expected, layout = open_store.expected_layout(), open_store.layout(connection)
    tables = {name for kind, name, *_ in layout if kind == "table"}
    if lacking := [table for table in open_store.TABLES if table not in tables]:
        yield f"it lacks the table {lacking[0]}"
    elif layout != expected:
        yield "the definitions of tables and indexes are not those of a store"
    roots = connection.execute(
        "SELECT count(rootpage) - count(DISTINCT rootpage) FROM sqlite_schema WHERE rootpage > 0"
    )
    if roots.get:
        yield "two tables or indexes begin at the same page"


def _valid_frames(connection: apsw.Connection) -> int:
    """Return the number of frames in the log that SQLite can read."""
    frames, _ = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
    return max(0, frames)


def last_commit(connection: apsw.Connection) -> int:
    """Return the number of the last commit in the store."""
    highest = connection.execute(
        "SELECT max(commits) FROM (SELECT commits FROM counter UNION ALL SELECT commits FROM totals)"
    )
    return int(highest.get or 0)


def _examine_commits(connection: apsw.Connection, path: Path, counted: CountedCommits | None) -> Iterator[str]:
    totals = connection.execute(f"SELECT {', '.join(open_store.Totals._fields)}, crc FROM totals").get  # noqa: S608
    if totals is None or values_crc(totals[:-1]) != totals[-1]:
        yield "the totals of the store are damaged"
        return
    commits = last_commit(connection)
    if counted is None:
        # A store gets its counter before its first commit, on disk. So only a person or a program can have removed it.
        if commits and not counter_path(path).exists():
            yield (
                f"the commit counter {counter_path(path).name} is missing. The store has {commits} commits; whether"
                " later ones are missing is not known"
            )
    elif counted.identity != totals[0]:
        # A kill may leave a new store beside the counter of an earlier one that never had a commit.
        if commits or counted.commits:
            yield f"the commit counter is that of another store, which had {counted.commits} commits"
    elif (behind := counted.commits - commits) > 0:
        yield f"the last {behind} commits are missing"


def _examine_age(connection: apsw.Connection, path: Path) -> Iterator[str]:
    """Compare the counters with those in the file alone, without its log: a log is never older than its file.

    A log of an earlier time hides later pages of the file. Its counters are older, and so is all that they count.
    """
    url = f"file:{quote(str(path.absolute()))}?immutable=1"
    file = apsw.Connection(url, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    try:
        in_file = dict(_commits_of_queues(file))
    except (*DAMAGE_ERRORS, *UNREADABLE, apsw.IOError):
        return  # a checkpoint was interrupted: pages of the file belong to different commits
    finally:
        file.close()
    now = dict(_commits_of_queues(connection))
    if any(commits > now.get(queue, commits) for queue, commits in in_file.items()):
        yield OLDER_LOG


def _commits_of_queues(connection: apsw.Connection) -> Iterator[tuple[int, int]]:
    """Yield the storage id of each queue whose counters are intact, with the number of the commit that wrote them."""
    return ((stored.counters.queue, stored.commits) for stored, is_intact in _counters(connection) if is_intact)


def _counters(connection: apsw.Connection) -> Iterator[tuple[StoredCounters, bool]]:
    """Yield all counters, and whether they have their checksum."""
    columns = (*PutCounters._fields, *Inventory._fields, "commits", "crc")
    width = len(PutCounters._fields)
    for row in connection.execute(f"SELECT {', '.join(columns)} FROM counter"):  # noqa: S608
        stored = StoredCounters(PutCounters(*row[:width]), Inventory(*row[width:-2]), row[-2])
        yield stored, counters_crc(*stored) == row[-1]


def _examine_entities(connection: apsw.Connection) -> Iterator[str]:
    number = crcs = 0
    queues = set()
    for *values, crc in connection.execute(f"SELECT {', '.join(PutEntity._fields)}, crc FROM entity"):  # noqa: S608
        if values_crc(values) != crc:
            yield f"the description of the entity {values[2]!r} is damaged"
        number += 1
        crcs += crc
        queues.add(values[0])
    totals = open_store.read_totals(connection)
    if number < totals.entities:
        yield f"{totals.entities - number} of {totals.entities} entities are missing"
    elif (number, crcs) != (totals.entities, totals.entity_crcs):
        yield "the entities are not those that were stored"
    dropped = set(open_store.read_dropped(connection))
    if dropped & queues or max(queues | dropped, default=0) > totals.highest:
        yield "the list of deleted entities is damaged"


_INVENTORIES = f"SELECT queue, count(*), sum({KEY_SQL}) FROM message INDEXED BY message_key GROUP BY queue"  # noqa: S608


def _examine_inventories(connection: apsw.Connection) -> Iterator[str]:
    paths = entity_paths(connection)
    expected: dict[int, Inventory] = {}
    for (counters, inventory, _), is_intact in _counters(connection):
        if is_intact:
            expected[counters.queue] = inventory
        else:
            yield f"the counters of {_named(paths, counters.queue)} are damaged"
    if lacking := [path for queue, path in paths.items() if queue not in expected]:
        yield f"the counters of {', '.join(lacking[:_NUMBERS_SHOWN])} are missing or damaged"
    dropped = open_store.read_dropped(connection)
    stored = {queue: Inventory(rows, keys) for queue, rows, keys in connection.execute(_INVENTORIES)}
    for queue in sorted(expected.keys() | stored.keys()):
        wanted, there = expected.get(queue, Inventory()), stored.get(queue, Inventory())
        if wanted == there or queue in dropped:
            continue
        if there.rows < wanted.rows:
            yield f"{wanted.rows - there.rows} of {wanted.rows} messages of {_named(paths, queue)} are missing"
        else:
            yield f"the messages of {_named(paths, queue)} are not those that were stored"


_SMALL_TABLES: Final = ("entity", "counter", "session_state", "dropped", "shared", "totals")


def _examine_pages(connection: apsw.Connection, table: str | None = None) -> Iterator[str]:
    """Let SQLite check the pages of one table; if it is None, all pages, up to `_NUMBERS_SHOWN` findings."""
    for (text,) in connection.execute(f"PRAGMA integrity_check({table or _NUMBERS_SHOWN})"):
        if text != "ok":
            yield f"the structure of the file: {' '.join(str(text).split())}"


def _examine_messages(connection: apsw.Connection) -> Iterator[str]:
    paths = entity_paths(connection)
    damaged: defaultdict[int, list[int]] = defaultdict(list)
    for queue, seq in damaged_rows(connection):
        damaged[queue].append(seq)
    for queue, seqs in damaged.items():
        yield f"{_named(paths, queue)}: {messages_text(seqs)} damaged"


def _examine_other_rows(connection: apsw.Connection) -> Iterator[str]:
    paths = entity_paths(connection)
    for *values, crc in connection.execute("SELECT id, raw, topic, crc FROM body"):
        if not _is_intact_body((*values, crc)):
            yield f"the body {values[0]} of messages of topics is damaged"
    for name, columns in OTHER_ROWS.items():
        for *values, crc in connection.execute(f"SELECT {', '.join(columns)}, crc FROM {name}"):  # noqa: S608
            if values_crc(values) != crc:
                yield f"{_named(paths, values[0])}: the {_OTHER_NAMES[name]} {values[1]!r} is damaged"
    mischarged = """SELECT topic FROM shared WHERE bytes <> (
      SELECT coalesce(sum(length(raw)), 0) FROM body WHERE body.topic = shared.topic)"""
    for (topic,) in connection.execute(mischarged):
        yield f"{_named(paths, topic)}: its size is damaged"


OTHER_ROWS: Final = {
    "session_state": ("queue", "session", "state", "at"),
    "seen": ("queue", "message_id", "at"),
}
"""The columns of the tables whose rows belong to an entity but are no messages."""
_OTHER_NAMES: Final = {"session_state": "state of the session", "seen": "remembered id"}


def _undecoded(column: str) -> str:
    """Return the SQL expression of a column that gives text as a blob.

    Damage may give any column the type text. Text that is not UTF-8 would end the whole SELECT.
    """
    return f"iif(typeof({column}) = 'text', CAST({column} AS BLOB), {column})"


ROW_COLUMNS: Final = ", ".join(
    _undecoded("coalesce(m.raw, x'')" if name == "raw" else f"m.{name}") for name in (*Row._fields, "crc")
)
"""The columns of a row and its checksum, as `intact_row` takes them."""
_BODY_COLUMNS: Final = ", ".join(_undecoded(f"b.{name}") for name in ("id", "raw", "topic", "crc"))


def intact_row(values: Sequence[Any]) -> Row | None:
    """Return the row of the columns `ROW_COLUMNS`, or None if it is damaged."""
    *columns, crc = values
    try:
        row = Row._make(columns)
        if row.session is not None:
            row = row._replace(session=row.session.decode())  # type: ignore[attr-defined]  # it was read as a blob
        return row if row_crc(row) == crc else None
    except UNREADABLE:
        return None


def damaged_rows(connection: apsw.Connection, queue: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield storage id and sequence number of each damaged message, of all queues or of one."""
    where = "" if queue is None else "WHERE m.queue = ?"
    sql = f"""SELECT {ROW_COLUMNS}, {_BODY_COLUMNS}
      FROM message AS m LEFT JOIN body AS b ON b.id = m.body {where}"""  # noqa: S608
    for values in connection.execute(sql, () if queue is None else (queue,)):
        row = intact_row(values[:-4])
        if row is None or (row.body is not None and not _is_intact_body(values[-4:])):
            yield values[0], values[2]


def _is_intact_body(values: Sequence[Any]) -> bool:
    try:
        return bool(body_crc(PutBody(*values[:-1])) == values[-1])
    except UNREADABLE:
        return False


def entity_paths(connection: apsw.Connection) -> dict[int, str]:
    """Return the paths of the entities, by storage id. They may be damaged: use them only in texts."""
    found = connection.execute("SELECT queue, CAST(path AS BLOB) FROM entity")
    return {queue: (path or b"").decode(errors="replace") for queue, path in found}


def _named(paths: dict[int, str], queue: int) -> str:
    return paths.get(queue) or f"the entity with storage id {queue}"


def messages_text(seqs: Collection[int]) -> str:
    """Return "message 7 is", or how many messages with which sequence numbers "are"."""
    if not seqs:
        return "messages are"
    if len(seqs) == 1:
        return f"message {next(iter(seqs))} is"
    shown = ", ".join(map(str, sorted(seqs)[:_NUMBERS_SHOWN]))
    more = f" and {len(seqs) - _NUMBERS_SHOWN} more" if len(seqs) > _NUMBERS_SHOWN else ""
    return f"{len(seqs)} messages (sequence numbers {shown}{more}) are"
