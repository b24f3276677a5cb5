"""The comparison of a ledger's tables with looks at the backlog, on Spark (L3).

`twinbus.ledger.audit_rules` decides about each message, in the tasks. This module makes the arguments of that decision.
Most messages need none: the copies and dead letters that were seen are those that the ledger has. The earlier reading
and the details are computed only for the others. So the whole history is shuffled once for each comparison, and the
driver gets sums, and rows of the messages in which the ledger and the looks differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it
from pyspark.sql.types import ArrayType

from twinbus.ledger import (
    AUDIT_WORDS,
    BACKLOG_STAGES,
    OK,
    STORING_STAGES,
    UNKNOWN,
    AuditFindings,
    AuditMove,
    MessageKey,
    MessageReading,
    Move,
    Movement,
    SeenCopies,
    Stage,
    compare_message,
)
from twinbus.pipeline import reconcile
from twinbus.pipeline.jobs import JOBS, followed_sums, is_followed, read_history
from twinbus.pipeline.settling import SettledState
from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.tables import Tables, struct
from twinbus.pipeline.writer_states import WriterStates

_KEY: Final = ("destination", "id")
# What a finding is: a word with a number of copies, or a move to record.
_FINDING: Final = "word string, copies long, move string, source string, reason string, broker_at long, goes_to string"
# The condition `audit_rules.differs` on the columns of `_seen` and `_known`.
_DIFFERS: Final = "there > most or least > there or (there > 0 and least > 0 and least(there, dead) > dead_letters)"
# Columns of a reading, in the order of the fields of MessageReading.
_FIELDS: Final = MessageReading._fields
# The numbers and flags of a reading that has no entry about a message.
_NOTHING: Final[dict[str, bool | float | int | str]] = {
    name: value for name, value in MessageReading()._asdict().items() if isinstance(value, int)
}


class TablesReading:
    """One reading of a ledger: a version of its tables, and the writers that were dead before this version was made."""

    def __init__(self, tables: Tables, version: TablesVersion, writers: WriterStates) -> None:
        self.tables = tables
        self.version = version
        self.writers = writers

    @cached_property
    def history(self) -> tuple[DataFrame, DataFrame]:
        """The operations and the other entries, as `read_history` returns them."""
        return read_history(self.tables, self.version, F.lit(True), self.writers)

    def sums(self) -> DataFrame:
        """Returns the sums of each message, as the job `reconcile` merges them."""
        job = JOBS["reconcile"]
        # An audit may ask for any message: also for one that is settled, and has no row of its own.
        if is_followed(job, self.version) and not SettledState.of(self.tables, self.version).is_any:
            return followed_sums(self.tables, self.version, job, self.writers)
        operations, entries = self.history
        return job.resolve(job.merge(job.tally(operations, entries)), entries)

    def queues(self, namespace: str) -> set[str]:
        """Returns the queues of a namespace to which copies were sent, in lower case."""
        operations, _ = self.history
        ours = F.col("stage").isin([*map(str, STORING_STAGES)]) & (F.lower("namespace") == namespace.lower())
        rows = operations.where(ours & (F.size("ids") > 0)).select(F.lower("entity")).distinct().collect()
        return {row[0] for row in rows}


class BacklogComparison:
    """The result of `compare`. It can be used inside the block of `compare` only."""

    def __init__(self, after: TablesReading, there: int, findings: DataFrame) -> None:
        self.after = after
        self._there = there
        self._findings = findings

    def counts(self) -> dict[str, int]:
        """Returns the number of copies for each of the AUDIT_WORDS."""
        rows = self._findings.where("word is not null").groupBy("word").agg(F.sum("copies")).collect()
        return dict.fromkeys(AUDIT_WORDS, 0) | {"there": self._there} | {row[0]: row[1] for row in rows}

    def messages(self, *words: str) -> dict[str, list[tuple[MessageKey, int]]]:
        """Returns the messages of these words, in order, with their copies."""
        found: dict[str, list[tuple[MessageKey, int]]] = {word: [] for word in words}
        rows = self._findings.where(F.col("word").isin([*words])).select("word", *_KEY, "copies").collect()
        for row in rows:
            found[row.word].append((MessageKey(row.destination, row.id), row.copies))
        return {word: sorted(messages) for word, messages in found.items()}

    def moves(self) -> Iterator[AuditMove]:
        """Yields the moves of which `is_recorded` decides whether they are recorded."""
        rows = self._findings.where("move is not null").orderBy("move", "reason", "source", *_KEY)
        for row in rows.toLocalIterator():
            message = MessageKey(row.goes_to, row.id)
            yield AuditMove(Move(row.move), message, row.copies, row.source, row.reason, row.broker_at)


@contextmanager
def compare(
    before: TablesReading,
    looks: Sequence[DataFrame],
    after: TablesReading,
    namespace: str,
    *,
    is_partial: bool = False,
) -> Iterator[BacklogComparison]:
    """Compares two readings of the ledger with the looks between them, as `compare_with_backlog` does.

    A look has the columns `destination`, `id`, `copies` and `dead_letters`, the copies that are dead letters; rows
    without an id are left out. The rows must stay the same if they are computed again. `is_partial`: there may be
    messages that the looks did not show.
    """
    both = _filled(_known(after.sums()).join(_seen(looks), [*_KEY], "full_outer"))
    both = both.na.fill(0, [*SeenCopies._fields]).where("there > 0 or most > 0")
    both.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        differs = F.expr(_DIFFERS)
        there = F.coalesce(F.sum(F.least("there", "most")), F.lit(0)).cast("long")
        found = both.agg(there, F.count(F.when(differs, 1))).first()
        assert found is not None, "an aggregate without keys has a row"
        if found[1]:
            findings = _findings(before, both.where(differs), after, namespace)
        else:
            findings = after.tables.spark.createDataFrame([], f"destination string, id string, {_FINDING}")
        if is_partial:
            is_unseen = F.col("word").isin("absent", "redirected")
            words = F.when(is_unseen, "not_looked_at").otherwise(F.col("word"))
            findings = findings.withColumn("word", words)
        findings.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            yield BacklogComparison(after, found[0], findings)
        finally:
            findings.unpersist()
    finally:
        both.unpersist()


def _seen(looks: Sequence[DataFrame]) -> DataFrame:
    """Returns for each message the columns of `SeenCopies`."""
    rows = looks[0].select(*_KEY, "copies", "dead_letters", F.lit(0).alias("look"))
    for number, look in enumerate(looks[1:], 1):
        rows = rows.unionAll(look.select(*_KEY, "copies", "dead_letters", F.lit(number).alias("look")))

    def sums(name: str) -> list[Column]:
        return [F.sum(F.when(F.col("look") == n, F.col(name)).otherwise(0)) for n in range(len(looks))]

    copies = F.array(*sums("copies"))
    most, least, dead = F.array_max(copies), F.array_min(copies), F.array_min(F.array(*sums("dead_letters")))
    grouped = rows.where("id is not null").groupBy(*_KEY)
    return grouped.agg(most.alias("most"), least.alias("least"), dead.alias("dead"))


def _known(sums: DataFrame) -> DataFrame:
    """Returns what the balance has about each message, as the fields of MessageReading with the same names."""
    return reconcile.with_verdict(sums).select(
        *_KEY,
        "accepted",
        "there",
        F.col("dead_lettered").alias("dead_letters"),
        (F.col("lost") + F.col("unknown")).alias("doubtful"),
        F.col("hoped").alias("copies"),
        (F.col("unconfirmed") > 0).alias("is_unconfirmed"),
        ((F.col("duplicated") > 0) | (F.col("possibly_duplicated") > 0)).alias("is_duplicated"),
        "doubted_at",
    )


# --- messages in which the ledger and the looks differ ---------------------------------------------------------------


def _findings(before: TablesReading, differing: DataFrame, after: TablesReading, namespace: str) -> DataFrame:
    # By id alone: what happened to the same id at other destinations matters too, if messages were redirected.
    ids = differing.select("id").distinct()
    operations, entries = before.history
    sums = reconcile.resolve(reconcile.merge(reconcile.tally(operations, entries, ids)), entries)
    # An entry may have no effect on the balance, such as a send that was refused.
    earlier = _filled(_known(sums).join(_details(operations, entries, ids), [*_KEY], "full_outer"))
    later = _filled(differing.join(_details(*after.history, ids), [*_KEY], "left"))
    rows = later.select(*_KEY, F.struct(*SeenCopies._fields).alias("seen"), F.struct(*_FIELDS).alias("after")).join(
        earlier.select(*_KEY, F.struct(*_FIELDS).alias("before")), [*_KEY], "left"
    )

    def judged(destination: str, name: str, before: Any, after: Any, seen: Any) -> list[tuple[Any, ...]]:
        result, message = AuditFindings(), MessageKey(destination, name)
        first = MessageReading() if before is None else _message_reading(before)
        compare_message(result, message, first, _message_reading(after), SeenCopies(*seen), namespace)
        words = [(word, getattr(result, word)[message], None, None, None, None, None) for word in AUDIT_WORDS]
        moves = [
            (None, one.copies, str(one.move), one.source, one.reason, one.broker_at, one.message.destination)
            for one in result.moves
        ]
        return [row for row in words if row[1]] + moves

    judge = F.udf(judged, ArrayType(struct(_FINDING)), useArrow=False)
    found = rows.select(*_KEY, F.explode(judge(*_KEY, "before", "after", "seen")).alias("finding"))
    return found.select(*_KEY, "finding.*")


def _message_reading(row: Any) -> MessageReading:
    values = row.asDict()
    return MessageReading(**values | {"places": frozenset(values["places"])})


def _filled(rows: DataFrame) -> DataFrame:
    """Returns the rows of a join without nulls in the fields of MessageReading that are never None."""
    rows = rows.na.fill({name: value for name, value in _NOTHING.items() if name in rows.columns})
    if "places" not in rows.columns:
        return rows
    return rows.withColumn("places", F.coalesce("places", F.array().cast("array<string>")))


def _details(operations: DataFrame, entries: DataFrame, ids: DataFrame) -> DataFrame:
    """Returns the entries about the messages with these ids, as `read_for_audit` counts them."""
    nowhere, nothing = F.lit(None).cast("string"), F.lit(0)
    stores, stage = [*map(str, STORING_STAGES)], F.col("stage")
    is_perhaps_done = F.coalesce("result", F.lit(UNKNOWN)).isin(OK, UNKNOWN)
    done = _rows(
        operations.where(stage.isin([*map(str, BACKLOG_STAGES)])),
        F.col("destination"),
        F.col("ended").isNull() & F.col("cause").isNull(),
        F.when(stage.isin(stores), F.lower(F.concat_ws("/", "namespace", "entity"))),
        F.when((stage == str(Stage.RESUBMIT_BACKLOG)) & is_perhaps_done, 1).otherwise(0),
    )
    moves = entries.where(F.col("kind") == Movement.kind)
    taken = F.when(F.col("move").isin([str(Move.RESUBMITTED), str(Move.REDIRECTED)]), -1).otherwise(0)
    came = _rows(moves, F.lower("destination"), F.lit(False), nowhere, taken)
    away = moves.where(F.col("move") == str(Move.REDIRECTED))
    left = _rows(away, F.lower("source"), F.lit(False), nowhere, nothing)
    rows = done.unionAll(came).unionAll(left).join(ids, "id", "left_semi")
    sums = rows.groupBy(*_KEY).agg(
        F.count("*").alias("entries"),
        F.max("is_in_flight").alias("is_in_flight"),
        F.collect_set("place").alias("places"),
        (F.sum("resubmitted") > 0).alias("is_resubmitted"),
    )
    same_id = Over.partitionBy("id")
    resubmitted = F.collect_set(F.when(F.col("is_resubmitted"), F.col("destination"))).over(same_id)
    # A program that lives resubmits a copy, for this destination or another one.
    is_resubmitted_now = F.max(F.col("is_resubmitted") & F.col("is_in_flight")).over(same_id)
    sums = sums.withColumns(
        {"resubmitted": resubmitted, "is_in_flight": F.col("is_in_flight") | is_resubmitted_now},
    )
    elsewhere = F.expr("array_min(array_remove(resubmitted, destination))")
    return sums.withColumn("redirected_to", elsewhere).drop("is_resubmitted", "resubmitted")


def _rows(rows: DataFrame, destination: Column, is_in_flight: Column, place: Column, resubmitted: Column) -> DataFrame:
    return rows.select(
        destination.alias("destination"),
        is_in_flight.alias("is_in_flight"),
        place.alias("place"),
        resubmitted.alias("resubmitted"),
        F.explode("ids").alias("id"),
    )
