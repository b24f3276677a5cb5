"""Counts in the tables of a ledger what `twinbus.money` needs for a bill and for the explanation of a difference (L4).

Each function runs one query and returns few rows. `actual_cost` makes the bill, the facts and the scenario of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.backlog import TRANSFER_SEGMENT, FailureKind
from twinbus.ledger import OK, PAIRED, SYPHON_STARTED, UNKNOWN, Metered, Move, Movement, SegmentHeader, Stage, State
from twinbus.money import EMPTY_PRIMARY, SESSIONS_PRIMARY, SHORT_POLL, CopyFacts
from twinbus.syphon import NOT_TRIED

SEND_STAGES: Final = (Stage.SEND_PRIMARY, Stage.SEND_BACKLOG)
SUBSCRIPTIONS: Final = "/subscriptions/"
METERED_STAGES: Final[Mapping[str, str]] = {
    "send": Stage.SEND_PRIMARY,
    "schedule": Stage.SCHEDULE_PRIMARY,
    "cancel_scheduled": Stage.CANCEL_PRIMARY,
    "ping": Stage.PING,
    "receive": Stage.RECEIVE_PRIMARY,
    "receive_deferred": Stage.RECEIVE_PRIMARY,
    "receive_empty": EMPTY_PRIMARY,
    "complete": Stage.COMPLETE_PRIMARY,
    "abandon": Stage.SETTLE_PRIMARY,
    "defer": Stage.SETTLE_PRIMARY,
    "dead_letter": Stage.SETTLE_PRIMARY,
    "release": Stage.SETTLE_PRIMARY,
    "renew_lock": Stage.RENEW_PRIMARY,
    "peek": Stage.PEEK_PRIMARY,
}
"""The stage of an operation on an entity of the primary, by its name in a meter. Others are SESSIONS_PRIMARY."""
METERED_BACKLOG_STAGES: Final[Mapping[str, str]] = {
    "send": Stage.SEND_BACKLOG,
    "receive": Stage.RECEIVE_BACKLOG,
    "receive_deferred": Stage.RECEIVE_DEFERRED,
    "receive_empty": Stage.EMPTY_RECEIVE,
    "complete": Stage.COMPLETE_BACKLOG,
    "abandon": Stage.SETTLE_BACKLOG,
    "defer": Stage.SETTLE_BACKLOG,
    "dead_letter": Stage.SETTLE_BACKLOG,
    "release": Stage.SETTLE_BACKLOG,
    "renew_lock": Stage.RENEW_BACKLOG,
    "peek": Stage.PEEK_BACKLOG,
}
# Results of operations for which no request was sent, so that they certainly did not happen.
_UNSENT_RESULTS: Final = (
    NOT_TRIED,
    FailureKind.CONNECTION_LOST,
    FailureKind.DETACHED,
    FailureKind.TIMEOUT,
    FailureKind.DNS,
    FailureKind.CERTIFICATE,
    FailureKind.TOKEN_UNAVAILABLE,
)
_SYPHON_STAGES: Final = (Stage.RECEIVE_BACKLOG, Stage.EMPTY_RECEIVE)
_PEEK_STAGES: Final = (Stage.PEEK_BACKLOG, Stage.PEEK_PRIMARY)
_STORES: Final = (Stage.SEND_BACKLOG, Stage.RESUBMIT_BACKLOG)
_PASSED: Final = (Stage.RETURN_PRIMARY, Stage.COMPLETE_BACKLOG)


def by_stage(operations: DataFrame, entries: DataFrame) -> list[Row]:
    """Returns, by month, stage, role of the writer and failure: units, bytes, messages and calls.

    `failure` is null for the rows of calls, or parts of calls, that succeeded. Rows add up: `units` is what was billed,
    `large` the units of successful calls beyond one per message or call, `failed` those of failures, and `unsent` those
    of calls without a request, which are not in `units`.
    """
    result, ids = F.col("result"), F.size("ids")
    partly = _failed_ids()
    is_ok, is_unsent = result == OK, result.isin(*map(str, _UNSENT_RESULTS))
    bad = F.when(is_ok, 0).when(partly > 0, partly).otherwise(F.col("units"))
    whole_fails = ~is_ok & (partly <= 0)
    unknown = F.concat_ws(" ", F.lit(UNKNOWN), "cause")
    counted = (
        F.when(ids > 0, ids)
        .when(F.col("stage").isin(*map(str, _PEEK_STAGES)), 1)
        .otherwise(F.coalesce("count", F.when(F.size("ids") == 0, F.col("units"))))
    )
    rows = operations.select(
        "at",
        "ended",
        month().alias("month"),
        stage().alias("stage"),
        F.substring("id", 1, 16).alias("writer"),
        F.when(is_ok | is_unsent, None).when(result == UNKNOWN, unknown).otherwise(result).alias("failure"),
        F.when(is_unsent, bad).otherwise(0).alias("unsent"),
        F.when(is_unsent, 0).otherwise(bad).alias("failed"),
        F.when(whole_fails, 0).otherwise(F.col("units") - counted).alias("large"),
        F.when(whole_fails, 0).otherwise(counted - partly).alias("messages"),
        (F.col("units") - F.when(is_unsent, bad).otherwise(0)).alias("units"),
        F.when(is_unsent & whole_fails, 0).otherwise(F.col("bytes")).alias("bytes"),
    )
    roles = entries.where(F.col("kind") == SegmentHeader.kind).select(F.substring("id", 1, 16).alias("writer"), "role")
    joined = rows.join(F.broadcast(roles.distinct()), "writer", "left")
    sums = ("units", "bytes", "messages", "large", "failed", "unsent")
    return (
        joined.groupBy("month", "stage", "role", "failure")
        .agg(*(F.sum(name).cast("long").alias(name) for name in sums), F.count("*").alias("calls"))
        .collect()
    )


def overview(operations: DataFrame, long_poll: float) -> Row:
    """Returns one row: begin and end, entities, clients, backlog queues, short polls, and runs of syphons."""
    writer, of_sends = F.substring("id", 1, 16), F.col("stage").isin(*map(str, SEND_STAGES))
    polled = (F.col("stage") == str(Stage.EMPTY_RECEIVE)) & in_backlog() & (F.col("result") == OK)
    asked = F.col("stage").isin(str(Stage.SEND_PRIMARY), str(Stage.PING))
    # Whether no answer of the service is known: the result, or the cause of an unknown one, is about the connection.
    unheard = F.coalesce("cause", "result").isin(*map(str, _UNSENT_RESULTS), UNKNOWN)
    found = operations.agg(
        F.min("at").alias("began"),
        F.max(F.coalesce("ended", "at")).alias("ended"),
        F.count_distinct(F.when(of_sends, F.col("destination"))).alias("entities"),
        F.count_distinct(F.when(of_sends, writer)).alias("clients"),
        F.count(F.when(of_sends & (F.col("result") == OK), 1)).alias("send_calls"),
        F.count_distinct(F.when(in_backlog(), F.lower("entity"))).alias("queues"),
        F.count(F.when(polled & (F.col("seconds") < SHORT_POLL * long_poll), 1)).alias("short_polls"),
        F.max(F.when(asked & (F.col("result") != OK) & ~unheard, 1)).alias("answered"),
    ).first()
    assert found is not None, "an aggregate without keys has a row"
    return found


def syphon_runs(operations: DataFrame) -> list[Row]:
    """Returns writer, begin and end of each program that received from the backlog."""
    mine = operations.where(F.col("stage").isin(*map(str, _SYPHON_STAGES)) & in_backlog())
    ended = F.max(F.coalesce("ended", "at")).alias("ended")
    return mine.groupBy(F.substring("id", 1, 16).alias("writer")).agg(F.min("at").alias("began"), ended).collect()


def copies(operations: DataFrame, entries: DataFrame) -> tuple[dict[str, CopyFacts], int]:
    """Returns what the entries with message ids show of diverted messages by stage, and the number of dead letters."""
    wanted = operations.where(F.col("stage").isin(*map(str, (*_STORES, *_PASSED))))
    each = wanted.select(F.explode("ids").alias("message"), "stage", "result", "failed")
    fails = (F.col("result") != OK) & ((_failed_ids() == 0) | F.array_contains("failed", F.col("message")))
    stored, good = F.col("stage").isin(*map(str, _STORES)), ~F.coalesce(fails, F.lit(False))
    doubtful = stored & ~good & (F.col("result") == UNKNOWN)
    rows = each.select(
        "message",
        (stored & good).cast("long").alias("stored"),
        doubtful.cast("long").alias("doubtful"),
        *(((F.col("stage") == str(one)) & good).cast("long").alias(str(one)) for one in _PASSED),
        F.lit(0).cast("long").alias("dead"),
    )
    is_dead = (F.col("kind") == Movement.kind) & (F.col("move") == str(Move.DEAD_LETTERED))
    dead = entries.where(is_dead).select(F.explode("ids").alias("message"))
    nothing = [F.lit(0).cast("long").alias(name) for name in ("stored", "doubtful", *map(str, _PASSED))]
    rows = rows.unionAll(dead.select("message", *nothing, F.lit(1).cast("long").alias("dead")))
    names = ("stored", "doubtful", *map(str, _PASSED), "dead")
    by_id = rows.groupBy("message").agg(*(F.sum(name).alias(name) for name in names))
    sums = [
        F.coalesce(F.sum(column), F.lit(0)).alias(f"{one}_{name}")
        for one in _PASSED
        for name, column in _copy_columns(str(one)).items()
    ]
    found = by_id.agg(*sums, F.coalesce(F.sum("dead"), F.lit(0)).alias("dead")).first()
    assert found is not None, "an aggregate without keys has a row"
    facts = {
        str(one): CopyFacts(**{name: int(found[f"{one}_{name}"]) for name in _copy_columns(str(one))})
        for one in _PASSED
    }
    return facts, int(found["dead"])


def _copy_columns(passed: str) -> dict[str, Column]:
    """Returns the fields of CopyFacts for one message id."""
    missing = F.greatest(F.col("stored") - F.col(passed), F.lit(0))
    more = F.greatest(F.col(passed) - F.col("stored"), F.lit(0))
    unsure = F.least(more, F.col("doubtful"))
    left = more - unsure
    foreign = F.when((F.col("stored") == 0) & (F.col("doubtful") == 0), F.least(left, F.lit(1))).otherwise(0)
    return {
        "missing": missing,
        "dead_lettered": F.least(missing, F.col("dead")),
        "unsure": unsure,
        "foreign": foreign,
        "again": left - foreign,
    }


def by_destination(operations: DataFrame) -> list[Row]:
    """Returns, by entity of the primary: messages, units and bytes that were sent, scheduled, returned and diverted.

    The columns are `sent`, `sent_units`, `sent_bytes` and so on.
    """
    result, partly = F.col("result"), _failed_ids()
    good = F.when(result == OK, F.size("ids")).when(partly > 0, F.size("ids") - partly).otherwise(0)
    units = F.when(result == OK, F.col("units")).when(partly > 0, F.col("units") - partly).otherwise(0)
    size = F.when((result == OK) | (partly > 0), F.col("bytes")).otherwise(0)
    stages = {
        "sent": Stage.SEND_PRIMARY,
        "scheduled": Stage.SCHEDULE_PRIMARY,
        "returned": Stage.RETURN_PRIMARY,
        "diverted": Stage.SEND_BACKLOG,
    }
    sums = [
        F.sum(F.when(F.col("stage") == str(wanted), column).otherwise(0)).alias(name + suffix)
        for name, wanted in stages.items()
        for suffix, column in (("", good), ("_units", units), ("_bytes", size))
    ]
    return operations.where(F.col("stage").isin(*map(str, stages.values()))).groupBy("destination").agg(*sums).collect()


def receivers(operations: DataFrame) -> dict[str, int]:
    """Returns how many messages a pair's receivers received, by entity in lower case."""
    mine = operations.where((F.col("stage") == str(Stage.RECEIVE_PRIMARY)) & (F.col("result") == OK))
    counted = F.when(F.size("ids") > 0, F.size("ids")).otherwise(F.coalesce("count", "units"))
    rows = mine.groupBy(F.lower("entity").alias("entity")).agg(F.sum(counted).alias("messages")).collect()
    return {row.entity: row.messages for row in rows}


def meters(entries: DataFrame) -> list[Row]:
    """Returns what the meters of namespaces counted, by month, entity and operation."""
    mine = entries.where(F.col("kind") == Metered.kind)
    sums = [F.sum(name).alias(name) for name in ("count", "units", "bytes")]
    entity = F.lower("entity").alias("entity")
    return mine.groupBy(month().alias("month"), entity, in_backlog().alias("backlog"), "operation").agg(*sums).collect()


class StatedOptions(NamedTuple):
    """The options that programs recorded at their start. Empty if an older Twinbus wrote the ledger."""

    pairs: list[Mapping[str, str]]
    syphons: list[Mapping[str, str]]


def stated_options(entries: DataFrame) -> StatedOptions:
    """Returns the options of pairs and syphons, the latest first."""
    rows = (
        entries.where((F.col("kind") == State.kind) & F.col("event").isin(PAIRED, SYPHON_STARTED))
        .orderBy(F.desc("at"))
        .select("event", "facts")
        .collect()
    )
    return StatedOptions(*([row.facts for row in rows if row.event == event] for event in (PAIRED, SYPHON_STARTED)))


# --- columns ---------------------------------------------------------------------------------------------------------


def month() -> Column:
    return F.date_format("day", "yyyy-MM")


def stage() -> Column:
    """Returns the stage; for empty receives that are not on a backlog queue, EMPTY_PRIMARY."""
    polled = (F.col("stage") != str(Stage.EMPTY_RECEIVE)) | in_backlog()
    return F.when(polled, F.col("stage")).otherwise(F.lit(EMPTY_PRIMARY))


def _failed_ids() -> Column:
    """Returns how many messages of an operation failed, if only some of them did; otherwise 0."""
    return F.greatest(F.coalesce(F.size("failed"), F.lit(0)), F.lit(0))


def in_backlog() -> Column:
    return F.lower("entity").contains(f"/{TRANSFER_SEGMENT}/")


def metered_stage(operation: str, *, backlog: bool) -> str:
    """Returns the stage of an operation that a meter counted."""
    if backlog:
        return str(METERED_BACKLOG_STAGES.get(operation, f"{operation}_backlog"))
    return str(METERED_STAGES.get(operation, SESSIONS_PRIMARY))


def sum_of(rows: Iterable[Any], column: str) -> int:
    return sum(int(row[column] or 0) for row in rows)
