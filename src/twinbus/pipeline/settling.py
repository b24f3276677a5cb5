"""Settled messages: what the followed job `reconcile` keeps of messages that are finished (D3).

Theory of operation. The followed job keeps two tables. `tallies-open` has rows by message id. `tallies-settled` has
sums by destination and hour, without ids. A message is *finished* if it was accepted in one hour, was delivered as
often as accepted, has no copy in the backlog, and nothing about it is in doubt. A finished message whose newest entry
is older than the *horizon* is *settled*: its acceptances are added to the sums of their hour, and its row is dropped.
So the number of rows depends on the traffic of the horizon, and on the messages that are not finished.

Another entry about a settled message may come at any time: a late line, or another message with the same id. Then the
sums of a message are two parts: the settled part, and a row in `tallies-open` with everything since. Nearly always the
verdict on both parts together is the sum of both verdicts (`adds_up`), because the settled part is finished. Otherwise
the message is *reopened*: its history is read, the settled part is subtracted from the sums of its hours, and added to
its row. The column `from_start` says that a row has the whole history of its message.

Two rules make it possible to tell the parts apart. No entry of a settled part is as late as `until`, the greatest limit
that messages were settled with. A row that is not reopened has no acceptance before `until`. Limits are whole hours. So
the settled acceptances of a message are those before the first acceptance of its row, and different parts have
different hours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from operator import and_, or_
from typing import Final

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import Intent
from twinbus.pipeline import reconcile
from twinbus.pipeline.ingest import day, destination
from twinbus.pipeline.message_steps import prefix_of
from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.table_log import DataFile
from twinbus.pipeline.tables import (
    ENTRIES,
    OPERATIONS,
    PENDING,
    SCHEMAS,
    STEPS,
    TALLIES,
    Tables,
    TablesChange,
    columns,
)
from twinbus.pipeline.time_window import HOUR, TimeWindow, hour_of

HORIZON: Final = timedelta(days=30)
"""A finished message is settled when its newest entry is older than this."""
OPEN: Final = f"{TALLIES}open"
SETTLED: Final = f"{TALLIES}settled"
SCHEMA: Final = "destination string, hour long, messages long, accepted long, until long"
"""Schema of `tallies-settled`. A reopened message is a row with negative numbers."""
_KEY: Final = ("destination", "id")
_MILLISECOND: Final = timedelta(milliseconds=1)
# Messages are settled when the limit has moved by this part of the horizon: each time, all open rows are rewritten.
_PARTS: Final = 30
# A batch with more messages than this to reopen adds up the whole history again.
_MOST_REOPENED: Final = 100_000
# Spark reads only the matching pages of a file for so many prefixes.
_MOST_FILTERED: Final = 64
_LATEST: Final = 2**62
# The sums that are 0 if nothing about a message is in doubt.
_NONE: Final = (
    "maybe_delivered",
    "maybe_stored",
    "maybe_removed",
    "dead_lettered",
    "doubted",
    "redirected",
    "found",
    "away",
)


@dataclass(frozen=True, slots=True)
class Horizon:
    """How long finished messages keep a row."""

    span: timedelta = HORIZON
    now: Callable[[], float] = time.time
    """Returns seconds since the epoch. An entry of the future must not settle everything."""

    def limit(self, newest: int) -> int:
        """Returns the time, a whole hour, before which the newest entry of a settled message must be.

        `newest` is the time of the newest entry of all.
        """
        limit = min(newest, int(self.now() * 1000)) - self.span // _MILLISECOND
        return limit - limit % HOUR

    @property
    def step(self) -> int:
        """The milliseconds by which the limit has to move before messages are settled again."""
        return max(HOUR, self.span // _MILLISECOND // _PARTS)


@dataclass(frozen=True, slots=True)
class SettledState:
    """What the log of `tallies-settled` says about a version of the tables."""

    until: int | None = None
    """All entries of settled messages are before this time. None if no message was ever to be settled."""
    is_any: bool = False
    """Whether there may be settled messages."""

    @classmethod
    def of(cls, tables: Tables, version: TablesVersion) -> SettledState:
        limits = [file.limits for file in tables.files(SETTLED, version)]
        if not limits:
            return cls()
        return cls(
            max(one.get("until", (0, _LATEST))[1] for one in limits),
            any(one.get("messages", (0, 1))[1] > 0 for one in limits),
        )

    def splits(self, window: TimeWindow) -> bool:
        """Returns whether the sums by hour cannot tell which settled messages are in a window."""
        if not self.is_any or self.until is None:
            return False
        ends = zip((window.since, window.until), window.milliseconds(), strict=True)
        return any(given is not None and end % HOUR and end < self.until for given, end in ends)


# --- with each batch -------------------------------------------------------------------------------------------------


def advance_open(change: TablesChange, horizon: Horizon) -> None:
    """Adds the tallies of a batch, reopens messages, and settles messages if it is time to.

    If the last batch has no tallies, adds up the whole history.
    """
    tables, before = change.tables, change.before
    if OPEN not in before.tables:
        _add_up_history(change, horizon)
        return
    state = SettledState.of(tables, before)
    change.keep(OPEN, reconcile.TALLIES)
    change.keep(SETTLED, SCHEMA)
    if change.added.get(OPERATIONS) or change.added.get(ENTRIES):
        tallies = reconcile.merge(reconcile.tally(*(change.added_rows(name) for name in (OPERATIONS, ENTRIES))))
        _add(change, OPEN, tallies.withColumn("from_start", F.lit(not state.is_any)))
    elif not change.added.get(PENDING):
        return
    if state.is_any and not _reopen(change, state):
        _add_up_history(change, horizon)
        return
    limit = horizon.limit(change.newest)
    if _may_settle(change, limit) and (state.until is None or limit >= state.until + horizon.step):
        files = (*tables.files(OPEN, before), *change.added[OPEN])
        _settle(change, reconcile.merge(tables.read_files(OPEN, files, reconcile.TALLIES)), limit)
    else:
        change.merge(OPEN, reconcile.merge)
    change.merge(SETTLED, _merged)


def _add_up_history(change: TablesChange, horizon: Horizon) -> None:
    """Makes both tables from all operations and entries, those of the change included."""
    sources = [
        change.tables.read(name, version=change.before).unionAll(change.added_rows(name))
        for name in (OPERATIONS, ENTRIES)
    ]
    rows = reconcile.merge(reconcile.tally(*sources)).withColumn("from_start", F.lit(True))
    limit = horizon.limit(change.newest)
    change.added.pop(SETTLED, None)
    change.removed[SETTLED] = change.tables.latest_files(SETTLED)
    change.keep(SETTLED, SCHEMA)
    if _may_settle(change, limit):
        _settle(change, rows, limit)
    else:
        _replace_open(change, rows)


def _may_settle(change: TablesChange, limit: int) -> bool:
    """Returns whether there are operations before the limit, and whether it is time to settle messages at all.

    While a ledger is read for the first time, entries come in any order: nearly all would be about settled messages.
    """
    if change.ingested is not None and not change.ingested.looked_at:
        return False
    files = (*change.tables.files(OPERATIONS, change.before), *change.added.get(OPERATIONS, ()))
    return any(file.limits.get("at", (-_LATEST, 0))[0] < limit for file in files)


def _settle(change: TablesChange, rows: DataFrame, limit: int) -> None:
    """Replaces the open rows by these, without the messages that are settled now; adds those to the sums."""
    waiting = _waiting(change).withColumn("waits", F.lit(True))
    ends = is_finished() & (F.col("last") < limit) & F.col("waits").isNull()
    marked = rows.join(F.broadcast(waiting), [*_KEY], "left").withColumn("ends", F.coalesce(ends, F.lit(False)))
    marked.persist()
    try:
        settled = marked.where("ends").groupBy("destination", hour_of("first_accepted").alias("hour"))
        sums = settled.agg(F.count("*").alias("messages"), F.sum("accepted").alias("accepted"))
        # A row without a destination keeps the limit also if no message is settled.
        mark = change.tables.spark.range(1).select(
            *(F.lit(None).cast(kind).alias(name) for name, kind in (("destination", "string"), ("hour", "long"))),
            *(F.lit(0).cast("long").alias(name) for name in ("messages", "accepted")),
        )
        both = sums.unionByName(mark).withColumn("until", F.lit(limit).cast("long"))
        _add(change, SETTLED, both.coalesce(1))
        _replace_open(change, marked.where("not ends"))
    finally:
        marked.unpersist()


def is_finished() -> Column:
    """Returns the condition that a message is finished."""
    nothing = [F.col(name) == 0 for name in _NONE]
    return reduce(and_, nothing) & (
        (F.col("accepted") > 0)
        & (F.col("delivered") == F.col("accepted"))
        & (F.col("stored") == F.col("removed"))
        & F.col("doubted_at").isNull()
        & (hour_of("first_accepted") == hour_of("last_accepted"))
    )


def _add(change: TablesChange, table: str, rows: DataFrame) -> None:
    schema = SCHEMA if table == SETTLED else reconcile.TALLIES
    change.add(table, rows.select(*columns(schema)), schema)


def _replace_open(change: TablesChange, rows: DataFrame) -> None:
    change.added.pop(OPEN, None)
    change.replace(OPEN, rows.select(*columns(reconcile.TALLIES)), reconcile.TALLIES)


def _merged(settled: DataFrame) -> DataFrame:
    """Merges the rows of `tallies-settled` by key."""
    return settled.groupBy("destination", "hour").agg(
        *(F.sum(name).alias(name) for name in ("messages", "accepted")), F.max("until").alias("until")
    )


# --- reopened --------------------------------------------------------------------------------------------------------


def _reopen(change: TablesChange, state: SettledState) -> bool:
    """Reopens the messages of a batch whose verdict could depend on a settled part.

    Returns whether it could; if not, these messages are too many.
    """
    assert state.until is not None, "messages are settled"
    tables, before = change.tables, change.before
    found = _doubtful(change, state.until).limit(_MOST_REOPENED + 1).collect()
    if len(found) > _MOST_REOPENED:
        return False
    days = _days_of(tables, before, {row["prefix"] for row in found}, found) if found else set()
    if not days:
        return True
    keys = F.broadcast(tables.spark.createDataFrame([row[:2] for row in found], "destination string, id string"))
    operations, entries = (
        tables.read_files(
            name,
            [file for file in tables.files(name, before) if file.partition["day"] in days],
            SCHEMAS[name],
        )
        for name in (OPERATIONS, ENTRIES)
    )
    ids = F.broadcast(keys.select("id").distinct())
    history = reconcile.tally(operations, entries, ids).join(keys, [*_KEY], "left_semi")
    history.persist()
    try:
        row = reconcile.merge(tables.read(OPEN, reconcile.TALLIES, before).join(keys, [*_KEY], "left_semi"))
        _add(
            change, SETTLED, _subtracted(history, row).withColumn("until", F.lit(state.until).cast("long")).coalesce(1)
        )
        _add(change, OPEN, _settled_part(history, row).coalesce(1))
    finally:
        history.unpersist()
    return True


def _doubtful(change: TablesChange, until: int) -> DataFrame:
    """Returns the messages of a batch, with their prefixes, of which the settled part must be known."""
    tables = change.tables
    new, waiting = change.added_rows(OPEN), _waiting(change)
    begun = _waiting(change, only_new=True)
    keys = new.select(*_KEY).unionAll(begun).distinct()
    known = tables.read(OPEN, reconcile.TALLIES, change.before).join(keys, [*_KEY], "left_semi")
    sums = reconcile.with_verdict(reconcile.merge(known.unionByName(new)))
    rows = keys.join(sums, [*_KEY], "left").join(waiting.withColumn("waits", F.lit(True)), [*_KEY], "left")
    clear = F.col("from_start") | (F.col("waits").isNull() & adds_up(until))
    return rows.where(~F.coalesce(clear, F.lit(False))).select(*_KEY, prefix_of("id"))


def adds_up(until: int) -> Column:
    """Returns the condition that the verdict of a row and of a settled part add up to the verdict on both together.

    The rows need the columns of `reconcile.with_verdict`. The settled part has nothing but deliveries of what was
    accepted, so it changes no difference of two sums. The verdict uses such differences only, apart from the cases that
    are left out here: no acceptance, redirects, times that have to be compared with those of the settled part, and more
    copies than accepted messages, which matter if one was delivered. A message that is listed by id is left out, too:
    its line has the numbers of all its entries.
    """
    col = F.col
    return (
        (col("accepted") > 0)
        & ~reconcile.is_listed()
        & (col("redirected") == 0)
        & (col("away") == 0)
        & (col("first_accepted") >= until)
        & (col("doubted_at").isNull() | (col("doubted_at") >= until))
        & ((col("delivered") > 0) | (col("held") - F.greatest(F.lit(0), col("dead_lettered")) <= col("accepted")))
    )


def _waiting(change: TablesChange, *, only_new: bool = False) -> DataFrame:
    """Returns the messages of operations without an outcome; with `only_new`, of those that the change adds."""
    begun = change.tables.read(PENDING, version=change.after())
    if only_new:
        begun = begun.join(
            change.tables.read(PENDING, version=change.before).select("kind", "id"), ["kind", "id"], "left_anti"
        )
    begun = begun.where(F.col("kind") == Intent.kind)
    return begun.select(destination().alias("destination"), F.explode("ids").alias("id")).distinct()


def _days_of(tables: Tables, version: TablesVersion, prefixes: Collection[str], keys: Sequence[Row]) -> set[str]:
    """Returns the days that have entries about messages with the ids of these keys."""
    files = [file for file in tables.files(STEPS, version) if _may_have(file, prefixes)]
    steps = tables.read_files(STEPS, files, SCHEMAS[STEPS])
    if len(prefixes) <= _MOST_FILTERED:
        steps = steps.where(reduce(or_, (F.col("prefix") == one for one in sorted(prefixes))))
    ids = tables.spark.createDataFrame([(row["id"],) for row in keys], "id string")
    days = steps.join(F.broadcast(ids), "id", "left_semi").select(day().alias("day")).distinct().collect()
    return {row["day"].isoformat() for row in days}


def _may_have(file: DataFile, prefixes: Collection[str]) -> bool:
    least, greatest = file.limits.get("prefix", ("", "g"))
    return any(least <= one <= greatest for one in prefixes)


def _subtracted(history: DataFrame, rows: DataFrame) -> DataFrame:
    """Returns rows of `tallies-settled` that take away the settled parts of messages.

    `history` has the tallies of all entries about these messages, and `rows` their merged open rows.
    """
    opened = rows.select(*_KEY, F.col("first_accepted").alias("opened"))
    accepted = history.where("accepted > 0").join(opened, [*_KEY], "left")
    accepted = accepted.where("opened is null or first_accepted < opened")
    parts = accepted.groupBy(*_KEY, hour_of("first_accepted").alias("hour")).agg(F.sum("accepted").alias("accepted"))
    return parts.groupBy("destination", "hour").agg(
        (-F.count("*")).alias("messages"), (-F.sum("accepted")).alias("accepted")
    )


def _settled_part(history: DataFrame, rows: DataFrame) -> DataFrame:
    """Returns tallies that make the open rows of messages complete: the sums of the history without those of the rows.

    Their times are those of the whole history.
    """
    known = rows.select(*_KEY, *(F.col(name).alias(f"known_{name}") for name in reconcile.SUMS))
    whole = reconcile.merge(history).join(known, [*_KEY], "left").withColumn("from_start", F.lit(True))
    rest = {name: F.col(name) - F.coalesce(f"known_{name}", F.lit(0)) for name in reconcile.SUMS}
    return whole.withColumns({name: value.cast("int") for name, value in rest.items()})


# --- results ---------------------------------------------------------------------------------------------------------


def with_settled(sums: DataFrame, tables: Tables, version: TablesVersion) -> DataFrame:
    """Returns merged tallies with the column `messages`, and a row for the settled messages of each hour.

    Such a row has no id. The verdict on it is the sum of the verdicts on its messages.
    """
    sums = sums.withColumn("messages", F.lit(1).cast("long"))
    if not tables.files(SETTLED, version):
        return sums
    settled = _merged(tables.read(SETTLED, SCHEMA, version)).where("accepted != 0")
    values: dict[str, Column] = {name: F.lit(0) for name in reconcile.SUMS}
    values |= dict.fromkeys(("accepted", "delivered"), F.col("accepted").cast("int"))
    values |= {"id": F.lit(None).cast("string"), "from_start": F.lit(True)}
    values |= dict.fromkeys(("first_accepted", "last_accepted"), F.col("hour"))
    values |= dict.fromkeys(("last", "doubted_at", "seen_at"), F.lit(None).cast("long"))
    return sums.unionByName(settled.withColumns(values).select(*sums.columns))
