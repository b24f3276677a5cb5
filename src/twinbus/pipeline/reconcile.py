"""The job `reconcile`: the same balance as `twinbus.ledger.balance`, but on Spark, with one shuffle.

A tally is the effect of one operation or movement on one message. The tallies of a message are merged into sums and
latest times, which give the verdict on the message. If messages were redirected, a second shuffle corrects their sums
before the verdict. The effects of the stages come from `twinbus.ledger`, and a test compares both balances.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import LISTED_SUMS, OK, SIGHTINGS, STAGE_EFFECTS, UNKNOWN, Move, Movement
from twinbus.pipeline.result_tables import JUDGED
from twinbus.pipeline.time_window import TimeWindow, hour_of

SUMS: Final = (
    "accepted",
    "delivered",
    "maybe_delivered",
    "stored",
    "maybe_stored",
    "removed",
    "maybe_removed",
    "dead_lettered",
    "doubted",
    "redirected",
    "away",
    "found",
)
TALLIES: Final = (
    "destination string, id string, "
    + ", ".join(f"{name} int" for name in SUMS)
    + ", first_accepted long, last_accepted long, last long, doubted_at long, seen_at long, from_start boolean"
)
RESULT: Final = "destination string, id string, messages long, " + ", ".join(f"{name} long" for name in JUDGED)
TIMES: Final = ("first_accepted", "last_accepted", "last")
STORED: Final = (
    "destination string, id string, "
    + ", ".join(f"{name} long" for name in TIMES)
    + ", messages long, "
    + ", ".join(f"{name} long" for name in JUDGED)
)
_NEVER: Final = -(2**63)
# The outcome of an operation of the last hour may be in a segment that is not ingested yet.
EDGE: Final = timedelta(hours=1)


# --- tallies ---------------------------------------------------------------------------------------------------------


_AWAY: Final = "away"
_MOVED: Final[Mapping[str, Mapping[str, int]]] = {
    Move.DEAD_LETTERED: {"dead_lettered": 1},
    Move.RESUBMITTED: {"dead_lettered": -1},
    # A redirected message belongs to another entity: its acceptance and its stored copy now count for that entity.
    Move.REDIRECTED: {"accepted": 1, "stored": 1, "redirected": 1},
    _AWAY: {"accepted": -1, "stored": -1, "dead_lettered": -1, "away": 1},
    Move.POSSIBLE_DUPLICATE: {"doubted": 1},
    Move.FOUND: {"found": 1},
    Move.LOST: {"removed": 1},
    Move.REAPPEARED: {"removed": -1},
    Move.KEPT: {},
}
_DONE: Final = {
    str(stage): {name: 1 for name in ("accepted", "delivered", "stored", "removed") if getattr(effect, name)}
    for stage, effect in STAGE_EFFECTS.items()
}
_MAYBE: Final = {stage: {f"maybe_{name}": 1 for name in added if name != "accepted"} for stage, added in _DONE.items()}
_SEEING: Final = [str(stage) for stage, effect in STAGE_EFFECTS.items() if effect.sees]
_REMOVING: Final = [stage for stage, added in _DONE.items() if "removed" in added]
# A dead writer that was about to deliver a message has perhaps completed the copy in the backlog, too.
_ORPHANED: Final = {stage: {**_MAYBE[stage], "maybe_removed": 1} for stage in _SEEING}
# A delivery that was refused adds nothing. It shows that a copy was in the backlog.
_REFUSED: Final[Mapping[str, Mapping[str, int]]] = {stage: {} for stage in _SEEING}
_EFFECTS: Final = (_DONE, _MAYBE, _ORPHANED, _REFUSED, _MOVED)
# All possible effects on a message. An effect is identified by its index here; the value is what is added to the sums.
_ADDED: Final = tuple(added for effects in _EFFECTS for added in effects.values())
_SIGHTING: Final = tuple(
    word in (_SEEING if effects is not _MOVED else SIGHTINGS) for effects in _EFFECTS for word in effects
)
WRITER_DIED: Final = "writer_died"
"""Cause of an operation without an outcome whose writer is dead."""


def tally(operations: DataFrame, entries: DataFrame, only: DataFrame | None = None) -> DataFrame:
    """Returns one row per message of each operation and movement that has an effect.

    `only` is a table of message ids: then other messages have no rows. The rows are shuffled by message here, while
    they have only four columns. Most messages have only one or two rows, so a partial sum before the shuffle would not
    make the shuffle smaller.
    """
    rows = _of_operations(operations).unionAll(_of_movements(entries))
    rows = (rows if only is None else rows.join(only, "id", "left_semi")).repartition("destination", "id")
    accepted = F.when(_adds("accepted") > 0, F.col("at"))
    return rows.select(
        "destination",
        "id",
        *(_adds(name).alias(name) for name in SUMS),
        accepted.alias("first_accepted"),
        accepted.alias("last_accepted"),
        F.col("at").alias("last"),
        F.when(_adds("maybe_removed") > 0, F.col("at")).alias("doubted_at"),
        F.when(F.col("effect").isin([n for n, sees in enumerate(_SIGHTING) if sees]), F.col("at")).alias("seen_at"),
        F.lit(False).alias("from_start"),
    )


def _of_operations(operations: DataFrame) -> DataFrame:
    rows = operations.where(F.col("stage").isin([*_DONE]))
    # A completion of unknown outcome has perhaps removed a copy until its end. Times are by the broker's clock, if the
    # entry has it: the clocks of two syphons may differ (L5).
    ends = (F.col("result") == UNKNOWN) & F.col("stage").isin(_REMOVING)
    seconds = F.coalesce(F.round(F.col("seconds") * 1000).cast("long"), F.lit(0))
    ended = F.coalesce(F.col("broker_at") + seconds, "ended", "at")
    at = F.when(ends, ended).when(F.col("stage").isin(_SEEING), F.coalesce("broker_at", "at"))
    at = at.otherwise(F.col("at")).alias("at")
    names = ("destination", "stage", "result", "cause", "ids", "failed")
    ids = rows.select(*names, at, F.posexplode("ids").alias("place", "id"))
    surely, perhaps = (F.col("result") == OK) | ~concerned(), F.col("result") == UNKNOWN
    orphaned = perhaps & (F.col("cause") == WRITER_DIED) & F.col("stage").isin(_SEEING)
    number = (
        F.when(surely, _number("stage", _DONE))
        .when(orphaned, _number("stage", _ORPHANED))
        .when(perhaps, _number("stage", _MAYBE))
        .otherwise(_number("stage", _REFUSED))
    )
    return _numbered(ids, number)


def concerned(message: str = "id") -> Column:
    """Returns the condition that selects the rows to which the operation's result applies. A row has one message id.

    If `failed` is empty, the result applies to all ids. Otherwise it applies only to the ids in `failed`. An id may be
    in `ids` several times: if it is n times in `failed`, the result applies to the first n of them. The rows need the
    columns `ids`, `failed`, the id, and `place`, the index of the id in `ids`. The expression has no lambda: with a
    lambda, Spark would not compile the stage, and would copy all ids for each id.
    """

    def times(ids: str) -> str:
        return f"(size({ids}) - size(array_remove({ids}, {message})))"

    named = F.expr(times("failed"))
    return F.coalesce(F.size("failed") <= 0, F.lit(True)) | (
        (named > 0) & (F.expr(times("slice(ids, 1, place)")) < named)
    )


def _of_movements(entries: DataFrame) -> DataFrame:
    moves = entries.where(F.col("kind") == Movement.kind)
    at = F.coalesce("broker_at", "at").alias("at")
    ids = moves.select("source", "destination", "move", at, F.explode("ids").alias("id"))
    away = ids.where(F.col("move") == str(Move.REDIRECTED))
    ids = ids.unionAll(away.withColumns({"destination": F.col("source"), "move": F.lit(_AWAY)}))
    number = _number("move", _MOVED)
    return _numbered(ids.withColumn("destination", F.lower("destination")), number)


def _number(column: str, effects: Mapping[str, Mapping[str, int]]) -> Column:
    """Returns the index in `_ADDED` of the effect of the word in a column; null if `effects` has no such word."""
    first = sum(map(len, _EFFECTS[: next(n for n, one in enumerate(_EFFECTS) if one is effects)]))
    whens = (f"when '{word}' then {number}" for number, word in enumerate(effects, first))
    return F.expr(f"case {column} {' '.join(whens)} end")


def _numbered(rows: DataFrame, number: Column) -> DataFrame:
    """Adds the column `effect`, an index of `_ADDED`, and returns only the rows that have an effect."""
    return rows.select("destination", "id", "at", number.alias("effect")).where("effect is not null")


def _adds(name: str) -> Column:
    more, less = ([number for number, added in enumerate(_ADDED) if added.get(name) == by] for by in (1, -1))
    return F.when(F.col("effect").isin(more), 1).when(F.col("effect").isin(less), -1).otherwise(0)


def merge(tallies: DataFrame) -> DataFrame:
    """Returns one row per message. Tallies may be merged in several steps: the result is the same as with one merge."""
    return tallies.groupBy("destination", "id").agg(
        # Tallies of an older version lack the newer sums: these are null.
        *(F.coalesce(F.sum(name), F.lit(0)).cast("int").alias(name) for name in SUMS),
        F.min("first_accepted").alias("first_accepted"),
        F.max("last_accepted").alias("last_accepted"),
        F.max("last").alias("last"),
        F.max("doubted_at").alias("doubted_at"),
        F.max("seen_at").alias("seen_at"),
        F.max("from_start").alias("from_start"),
    )


def resolve(sums: DataFrame, source: DataFrame) -> DataFrame:
    """Takes back acceptances that a redirect moved although the ledger has no acceptance of the message.

    `source` has the entries or the stored tallies. If `source` has no redirect, which is the usual case, the sums are
    returned unchanged.
    """
    redirected = F.col("redirected") > 0 if "redirected" in source.columns else F.col("move") == str(Move.REDIRECTED)
    if source.where(redirected).isEmpty():
        return sums
    same = Over.partitionBy("id")
    before = same.orderBy("destination").rowsBetween(Over.unboundedPreceding, -1)
    debt = F.sum(F.greatest(F.lit(0), -F.col("accepted"))).over(same)
    brought = F.greatest(F.lit(0), F.least("accepted", "redirected"))
    paid = F.coalesce(F.sum(brought).over(before), F.lit(0))
    lacking = F.least(brought, F.greatest(F.lit(0), debt - paid))
    rows = sums.withColumn("accepted", (F.col("accepted") - lacking).cast("int"))
    known = (F.col("redirected") == 0) | (F.col("accepted") > 0)
    return rows.withColumns({name: F.when(known, F.col(name)) for name in ("first_accepted", "last_accepted")})


# --- judgement -------------------------------------------------------------------------------------------------------


def judge(sums: DataFrame, window: TimeWindow, newest: int, edge: timedelta = EDGE) -> DataFrame:
    """Returns the verdict on each message that was accepted in the window, or whose acceptance is unknown.

    `newest` is the time of the newest entry. An unknown or unconfirmed message is also counted as `in_flight` if
    entries that were not read may change the verdict: the last entry about the message is at most one hour older than
    `newest`, or the message may have been accepted before the window.
    """
    rows = with_verdict(sums if window.is_unlimited else sums.where(_inside(window)))
    recent = F.col("last") >= newest - int(edge.total_seconds() * 1000)
    before = F.lit(window.since is not None) & (F.col("accepted") <= 0)
    doubtful = F.when(recent | before, F.col("unknown") + F.col("unconfirmed")).otherwise(0)
    rows = rows.withColumn("in_flight", doubtful)
    renamed = [F.col(f"is_{name}").alias(name) for name in ("delivered", "dead_lettered")]
    kept = [name for name in JUDGED if name not in ("delivered", "dead_lettered")]
    messages = F.col("messages") if "messages" in sums.columns else F.lit(1).alias("messages")
    names = ("destination", "id", "messages", *TIMES)
    return rows.withColumn("messages", messages).select(*names, *kept, *renamed).select(*names, *JUDGED)


def with_verdict(sums: DataFrame) -> DataFrame:
    """Returns the sums with the columns of the verdict on each message.

    `delivered` and `dead_lettered` keep the sums; the verdict has these words as `is_delivered` and `is_dead_lettered`.
    `there` is `in_backlog` plus `is_dead_lettered`, and `hoped` is `Balance.copies`.
    """
    for name, value in _verdict().items():
        sums = sums.withColumn(name, value)
    return sums


def _inside(window: TimeWindow) -> Column:
    since, until = window.milliseconds()
    accepted = (F.col("first_accepted") < until) & (F.col("last_accepted") >= since)
    never = F.col("first_accepted").isNull() & F.col("last").between(since, until - 1)
    return accepted | never


def _verdict() -> dict[str, Column]:
    """Returns the columns of the verdict, computed as in `twinbus.ledger.balance`.

    A column may use columns before it.
    """
    col, zero = F.col, F.lit(0)

    def at_least_0(value: Column) -> Column:
        return F.greatest(zero, value)

    expected = F.greatest(col("accepted"), F.lit(1))
    possibly = at_least_0(col("delivered") + col("maybe_delivered") - expected) - col("duplicated")
    dead = at_least_0(col("dead_lettered"))
    comes_again = (col("delivered") > 0) & (col("held") - dead > col("accepted") - col("is_delivered"))
    doubt = ((col("duplicated") == 0) & ((col("doubted") > 0) | comes_again)).cast("int")
    was_seen = F.coalesce(col("seen_at") > F.coalesce(col("doubted_at"), F.lit(_NEVER)), F.lit(False))
    there_is = col("delivered") + col("maybe_delivered") + col("hoped") + col("found") > 0
    return {
        "accepted": at_least_0(col("accepted")),
        "hoped": at_least_0(col("stored") + col("maybe_stored") - col("removed")),
        "held": F.when(
            was_seen, F.greatest(zero, col("stored") - col("removed"), F.least(col("hoped"), col("found")))
        ).otherwise(at_least_0(col("stored") - col("removed") - col("maybe_removed"))),
        "lost": at_least_0(col("accepted") - col("delivered") - col("maybe_delivered") - col("hoped")),
        "unknown": at_least_0(col("accepted") - col("delivered") - col("held")) - col("lost"),
        "is_delivered": F.least(col("accepted"), col("delivered")),
        "there": col("accepted") - col("is_delivered") - col("unknown") - col("lost"),
        "is_dead_lettered": F.least(col("there"), dead),
        "in_backlog": col("there") - col("is_dead_lettered"),
        "duplicated": at_least_0(col("delivered") - expected),
        "possibly_duplicated": F.greatest(possibly, doubt),
        "unconfirmed": ((col("accepted") == 0) & there_is).cast("int"),
    }


def summed(judged: DataFrame, *times: str) -> DataFrame:
    """Returns one row per listed message, and one row without an id for all other messages of a destination.

    With `times`, the other messages have a row for each combination of these columns.
    """
    rows = judged.withColumn("id", F.when(is_listed(), F.col("id")))
    return rows.groupBy("destination", "id", *times).agg(
        *(F.sum(name).cast("long").alias(name) for name in ("messages", *JUDGED))
    )


def stored(sums: DataFrame, newest: int) -> DataFrame:
    """Returns one row per listed message with its times, and one row for all others with times in the same hours.

    The times of the others are the begins of the hours. `last` is null if a message was accepted: then no window asks
    for it.
    """
    judged = judge(sums, TimeWindow(), newest)
    last = F.when(F.col("first_accepted").isNull(), hour_of("last"))
    hours = {"first_accepted": hour_of("first_accepted"), "last_accepted": hour_of("last_accepted"), "last": last}
    times = {name: F.when(is_listed(), F.col(name)).otherwise(hour) for name, hour in hours.items()}
    return summed(judged.withColumns(times), *TIMES)


def is_listed() -> Column:
    """Returns the condition that a message with its verdict is listed by id."""
    return reduce(or_, (F.col(name) != 0 for name in LISTED_SUMS))


def summarize(sums: DataFrame, window: TimeWindow, newest: int) -> DataFrame:
    return summed(judge(sums, window, newest))
