"""Reads everything intact out of a damaged store, as writes for a new one, and lists what is lost (X2).

A damaged page makes SQLite end a SELECT with an error. So each table is read from both ends, and messages that this
does not reach are read one by one, by the rowids in the index of messages. Only rows with their checksum are kept.

A page from an earlier time may have such rows of messages that were settled since. So a row that is not in the index is
left out, unless the index of its queue is damaged too.

    entities     A subscription is lost with its topic. What is stored under a lost entity is lost too.
    counters     They are counted again from the kept rows. Sequence numbers go on behind the highest one known.
    lost         The inventory of a queue says how many messages it had, and the index which sequence numbers. A message
                 that is in neither the table nor the index is counted, but its sequence number is not known.
"""

# ruff: noqa: S608  # statements are put together from constants

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import apsw

from twinbus.namespace.engine.storage_protocol import (
    DropEntity,
    PutBody,
    PutCounters,
    PutEntity,
    PutRow,
    PutSeenId,
    PutSessionState,
    QueueLane,
    Row,
    StoreWrite,
)
from twinbus.namespace.store import open_store
from twinbus.namespace.store.checksums import Inventory, body_crc, counters_crc, row_key, values_crc
from twinbus.namespace.store.errors import DAMAGE_ERRORS, TOO_LARGE, UNREADABLE, is_cut_short
from twinbus.namespace.store.examine import OTHER_ROWS, ROW_COLUMNS, intact_row
from twinbus.namespace.store.open_store import StoredCounters

_ROWS_PER_COMMIT: Final = 1_000
_BYTES_PER_COMMIT: Final = 8 * 1024 * 1024
_READ_ERRORS: Final = (*DAMAGE_ERRORS, *TOO_LARGE, UnicodeDecodeError, apsw.IOError)


class Salvage:
    """What can be read of a damaged store. Iterate over `writes()` to the end; then `lost` is complete."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self.lost: list[str] = []
        """One text for each entity, or other part, of which something is lost."""
        self._entities: dict[int, PutEntity] = {}
        self._stored: dict[int, StoredCounters] = {}
        self._dropped: set[int] = set()
        self._bodies: dict[int, bool] = {}
        """Whether a body is intact, for all bodies that were looked at."""
        self._counted: defaultdict[int, Counter[int]] = defaultdict(Counter)
        """Kept rows of each queue, by lane."""
        self._sizes: Counter[int] = Counter()
        self._highest_seq: Counter[int] = Counter()
        self._kept: set[tuple[int, int]] = set()
        self._lost_seqs: defaultdict[int, set[int]] = defaultdict(set)
        self._indexed: dict[int, set[tuple[int, int]]] = {}
        """Lane and sequence number of the rows of each queue whose index is intact."""
        self._cut_short: set[str] = set()
        """The SELECTs of which damage hides rows."""

    def writes(self) -> Iterator[Sequence[StoreWrite]]:
        """Yield the commits that make up the new store."""
        self._read_counters()
        highest = self._read_entities()
        yield list(self._entities.values())
        batch: list[StoreWrite] = []
        size = 0
        for write in self._all_rows():
            batch.append(write)
            size += len(write.raw) if isinstance(write, PutBody) else len(write.row.raw)
            if len(batch) >= _ROWS_PER_COMMIT or size >= _BYTES_PER_COMMIT:
                yield batch
                batch, size = [], 0
        yield batch
        yield from self._other_rows()
        yield [self._counters(queue) for queue in self._entities]
        if highest > max(self._entities, default=0):
            # The ids of deleted entities are not used again.
            yield [PutEntity(highest, "queue", "deleted", "{}", 0, 0), DropEntity(highest)]
        self._list_lost_messages()

    # --- entities and counters ----------------------------------------------------------------------------------------

    def _read_counters(self) -> None:
        columns = (*PutCounters._fields, *Inventory._fields, "commits", "crc")
        width = len(PutCounters._fields)
        for row in self._from_both_ends(f"SELECT {', '.join(columns)} FROM counter ORDER BY queue"):
            try:
                stored = StoredCounters(PutCounters(*row[:width]), Inventory(*row[width:-2]), row[-2])
                if counters_crc(*stored) == row[-1]:
                    self._stored[row[0]] = stored
            except UNREADABLE:
                continue
        self._dropped = {queue for (queue,) in self._from_both_ends("SELECT queue FROM dropped ORDER BY queue")}

    def _read_entities(self) -> int:
        """Read the entities. Returns the highest storage id that is known."""
        found: dict[int, PutEntity] = {}
        seen = 0
        sql = f"SELECT {', '.join(PutEntity._fields)}, crc FROM entity ORDER BY queue"
        for *values, crc in self._from_both_ends(sql):
            seen = max(seen, values[0])
            if _has_crc(values, crc):
                found[values[0]] = PutEntity(*values)
            else:
                self._lose_entity(values[0], f"the entity {values[2]!r}: its description is damaged")
        topics = {entity.path.lower() for entity in found.values() if entity.kind == "topic"}
        for queue, entity in found.items():
            if entity.kind == "subscription" and str(json.loads(entity.text)["topic"]).lower() not in topics:
                self._lose_entity(queue, f"the entity {entity.path!r}: its topic is lost")
            else:
                self._entities[queue] = entity
        self._dropped -= self._entities.keys()
        totals = next(
            self._from_both_ends(f"SELECT {', '.join(open_store.Totals._fields)}, crc FROM totals ORDER BY 1"), None
        )
        if totals is not None and _has_crc(totals[:-1], totals[-1]):
            if (missing := totals[2] - len(self._entities)) > 0:
                self.lost.append(f"{missing} of {totals[2]} entities in all")
            return max(seen, int(totals[4]))
        return max([seen, *self._stored, *self._dropped])

    def _lose_entity(self, queue: int, text: str) -> None:
        stored = self._stored.get(queue)
        line = f"{text}; with {'its' if stored is None else stored.inventory.rows} messages"
        if line not in self.lost:  # damage may make both ends of a table lead to the same row
            self.lost.append(line)

    def _counters(self, queue: int) -> PutCounters:
        lanes = [self._counted[queue][lane] for lane in QueueLane]
        stored = self._stored.get(queue)
        next_seq = max(self._highest_seq[queue] + 1, 1 if stored is None else stored.counters.next_seq)
        accessed = self._entities[queue].updated if stored is None else stored.counters.accessed
        return PutCounters._make((queue, next_seq, *lanes[:5], self._sizes[queue], accessed, *lanes[5:]))

    # --- messages -----------------------------------------------------------------------------------------------------

    def _all_rows(self) -> Iterator[PutRow | PutBody]:
        every = f"SELECT m.rowid, {ROW_COLUMNS} FROM message AS m ORDER BY m.rowid"
        one = f"SELECT {ROW_COLUMNS} FROM message AS m WHERE m.rowid = ?"
        index = "SELECT rowid, queue, lane, seq FROM message INDEXED BY message_key ORDER BY queue, lane, seq"
        self._read_index(index)
        reached: set[int] = set()
        for rowid, *values in self._from_both_ends(every):
            reached.add(rowid)
            yield from self._row(values)
        for rowid, queue, _, seq in self._from_both_ends(index):
            if rowid not in reached and (found := self._one(one, rowid)) is not None:
                yield from self._row(found)
            if (queue, seq) not in self._kept:
                self._lose(queue, seq)

    def _read_index(self, sql: str) -> None:
        """Read the index of messages. That of a queue is intact if it has the rows of the inventory."""
        found: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        for _, queue, lane, seq in self._from_both_ends(sql):
            found[queue].add((lane, seq))
        for queue, stored in self._stored.items():
            try:
                inventory = Inventory(len(found[queue]), sum(row_key(*key) for key in found[queue]))
            except UNREADABLE:
                continue
            if inventory == stored.inventory:
                self._indexed[queue] = found[queue]

    def _row(self, values: Sequence[Any]) -> Iterator[PutRow | PutBody]:
        """Yield a row if it is intact and belongs to an entity, after its body if no earlier row has the same."""
        row = intact_row(values)
        if row is None:
            self._lose(values[0], values[2])
        elif row.queue not in self._entities or (row.queue, row.seq) in self._kept or self._is_outdated(row):
            return
        elif row.body is not None and row.body not in self._bodies and (body := self._read_body(row.body)) is not None:
            yield body
            yield self._keep(row)
        elif row.body is None or self._bodies[row.body]:
            yield self._keep(row)
        else:
            self._lose(row.queue, row.seq)

    def _is_outdated(self, row: Row) -> bool:
        indexed = self._indexed.get(row.queue)
        return indexed is not None and (row.lane, row.seq) not in indexed

    def _keep(self, row: Row) -> PutRow:
        self._kept.add((row.queue, row.seq))
        self._counted[row.queue][row.lane] += 1
        self._sizes[row.queue] += row.charge
        self._highest_seq[row.queue] = max(self._highest_seq[row.queue], row.seq)
        return PutRow(row)

    def _lose(self, queue: Any, seq: Any) -> None:
        """Note a lost message. Both numbers come from a damaged row or index, and may be wrong."""
        if queue in self._entities and isinstance(seq, int):
            self._lost_seqs[queue].add(seq)

    def _read_body(self, body: int) -> PutBody | None:
        """Read a body. Notes in `_bodies` whether it is intact."""
        found = self._one("SELECT id, raw, topic, crc FROM body WHERE id = ?", body)
        try:
            made = None if found is None or body_crc(PutBody(*found[:-1])) != found[-1] else PutBody(*found[:-1])
        except UNREADABLE:
            made = None
        self._bodies[body] = made is not None
        return made

    def _list_lost_messages(self) -> None:
        for queue, entity in self._entities.items():
            kept = sum(self._counted[queue].values())
            seqs = sorted(seq for seq in self._lost_seqs[queue] if (queue, seq) not in self._kept)
            stored = self._stored.get(queue)
            lost = len(seqs) if stored is None else max(len(seqs), stored.inventory.rows - kept)
            if lost:
                numbers = f"sequence numbers {', '.join(map(str, seqs))}" if seqs else "sequence numbers not known"
                rest = f" and {lost - len(seqs)} not known" if seqs and lost > len(seqs) else ""
                self.lost.append(f"{entity.path}: {lost} of {kept + lost} messages; {numbers}{rest}")

    # --- other rows ---------------------------------------------------------------------------------------------------

    def _other_rows(self) -> Iterator[Sequence[StoreWrite]]:
        kinds = {"session_state": (PutSessionState, "states of sessions"), "seen": (PutSeenId, "remembered ids")}
        for table, columns in OTHER_ROWS.items():
            make, name = kinds[table]
            batch: list[StoreWrite] = []
            lost: Counter[int] = Counter()
            sql = f"SELECT {', '.join(columns)}, crc FROM {table} ORDER BY 1, 2"
            for *values, crc in self._from_both_ends(sql):
                if not _has_crc(values, crc):
                    lost[values[0]] += 1
                elif values[0] in self._entities:
                    batch.append(make(*values))
            yield batch
            for queue, number in lost.items():
                if (entity := self._entities.get(queue)) is not None:
                    self.lost.append(f"{entity.path}: {number} {name}")
            if sql in self._cut_short:
                self.lost.append(f"{name} in pages that cannot be read; their number is not known")

    # --- reading ------------------------------------------------------------------------------------------------------

    def _from_both_ends(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a SELECT that ends in ORDER BY, up to damage; then those from the end, up to damage."""
        try:
            yield from self._connection.execute(sql)
        except _READ_ERRORS as error:
            _raise_if_not_damage(error)
            yield from self._from_the_end(sql)

    def _from_the_end(self, sql: str) -> Iterator[tuple[Any, ...]]:
        start, _, order = sql.rpartition("ORDER BY ")
        backwards = ", ".join(f"{column} DESC" for column in order.split(", "))
        try:
            yield from self._connection.execute(f"{start}ORDER BY {backwards}")
        except _READ_ERRORS as error:
            _raise_if_not_damage(error)
            self._cut_short.add(sql)

    def _one(self, sql: str, key: int) -> tuple[Any, ...] | None:
        try:
            found: tuple[Any, ...] | None = self._connection.execute(sql, (key,)).get
        except _READ_ERRORS as error:
            _raise_if_not_damage(error)
            return None
        return found


def _raise_if_not_damage(error: Exception) -> None:
    if isinstance(error, apsw.IOError) and not is_cut_short(error):
        raise error


def _has_crc(values: Sequence[Any], crc: Any) -> bool:
    try:
        return bool(values_crc(values) == crc)
    except UNREADABLE:
        return False
