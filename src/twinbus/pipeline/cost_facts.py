"""Counts in the tables of a ledger what `twinbus.money` needs for a bill and for the explanation of a difference (L4).

Each function counts one kind of facts, by day, so that the facts of all time also give those of a window of days.
`bill_facts` adds up the days, and `actual_cost` makes the bill, the facts and the scenario of them.

A day is that of the writer's clock. Times that are compared with those of other writers are by the broker's clock (L5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.backlog import TRANSFER_SEGMENT, FailureKind
from twinbus.ledger import (
    NOT_BY_A_SYPHON,
    OK,
    PAIRED,
    SYPHON_STARTED,
    UNKNOWN,
    Metered,
    Move,
    Movement,
    SegmentHeader,
    Stage,
    State,
)
from twinbus.money import EMPTY_PRIMARY
from twinbus.pipeline import clocks
from twinbus.pipeline.actual_cost import ActualCost
from twinbus.pipeline.bill_facts import (
    COPIES,
    DESTINATIONS,
    FACTS,
    METERS,
    OPTIONS,
    OVERVIEW,
    PASSED_STAGES,
    POLLS,
    RECEIVERS,
    RUNS,
    STAGES,
    BillFacts,
    FactRow,
)
from twinbus.pipeline.jobs import (
    JOBS,
    UNKNOWN_STATES,
    current_result,
    current_sums,
    off_clocks,
    read_history,
    why_incomplete,
)
from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.tables import Tables
from twinbus.pipeline.time_window import TimeWindow
from twinbus.pipeline.writer_states import WriterStates
from twinbus.syphon import NOT_TRIED

SEND_STAGES: Final = (Stage.SEND_PRIMARY, Stage.SEND_BACKLOG)
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


def fact_rows(name: str, tables: Tables, version: TablesVersion, window: TimeWindow) -> pa.Table:
    """Returns the facts of one kind, by day, for the days of a window. Runs one query."""
    operations, entries = read_history(tables, version, window.days())
    # Programs that started before the window recorded their roles and options then.
    _, earlier = read_history(tables, version, TimeWindow(until=window.until).days())
    if name in _COMPARE_WRITERS:
        # A clock may be known only from messages outside of the window.
        off = clocks.off_clocks(current_sums(tables, version, JOBS["latency"], TimeWindow()))
        operations = clocks.corrected(operations, off, "at", "ended", writer=clocks.writer_of())
        earlier = clocks.corrected(earlier, off, "at", writer=clocks.writer_of())
    return _QUERIES[name](operations, entries, earlier).toArrow()


def compute_actual_cost(
    tables: Tables,
    window: TimeWindow | None = None,
    writers: WriterStates = UNKNOWN_STATES,
    *,
    long_poll: timedelta | None = None,
) -> ActualCost:
    """Returns the actual cost of a ledger: of all its days, or of each whole day (UTC) that overlaps a time window.

    Runs all queries. `writers` are the writers of the ledger that are known to be dead or alive. `long_poll` replaces
    the length that the syphons recorded.
    """
    window = window or TimeWindow()
    version = tables.version()
    with tables.parallel_queries() as pool:
        found = {name: pool.submit(fact_rows, name, tables, version, window) for name in FACTS}
        incidents = pool.submit(_incidents, tables, window)
        incomplete = pool.submit(why_incomplete, tables, writers)
        off = pool.submit(off_clocks, tables, version=version)
        facts = BillFacts({name: future.result() for name, future in found.items()})
        return ActualCost(facts, incidents.result(), incomplete.result(), off.result(), long_poll=long_poll)


def _incidents(tables: Tables, window: TimeWindow) -> list[FactRow]:
    rows = current_result(tables, JOBS["incidents"], window.whole_days()).orderBy("began", "destination")
    names = ("began", "restored", "drained", "processes", "diverted")
    return [FactRow(row.asDict()) for row in rows.select(*names).collect()]


def by_stage(operations: DataFrame, entries: DataFrame) -> DataFrame:
    """Returns, by day, stage, role of the writer and failure: units, bytes, messages and calls.

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
        "day",
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
    return joined.groupBy("day", "stage", "role", "failure").agg(
        *(F.sum(name).cast("long").alias(name) for name in sums), F.count("*").alias("calls")
    )


def overview(operations: DataFrame) -> DataFrame:
    """Returns, by day: begin and end, entities, clients and backlog queues, and how many calls sent messages."""
    writer, of_sends = F.substring("id", 1, 16), F.col("stage").isin(*map(str, SEND_STAGES))
    asked = F.col("stage").isin(str(Stage.SEND_PRIMARY), str(Stage.PING))
    # Whether no answer of the service is known: the result, or the cause of an unknown one, is about the connection.
    unheard = F.coalesce("cause", "result").isin(*map(str, _UNSENT_RESULTS), UNKNOWN)
    return operations.groupBy("day").agg(
        F.min("at").alias("began"),
        F.max(F.coalesce("ended", "at")).alias("ended"),
        F.collect_set(F.when(of_sends, F.col("destination"))).alias("entities"),
        F.collect_set(F.when(of_sends, writer)).alias("clients"),
        F.count(F.when(of_sends & (F.col("result") == OK), 1)).alias("send_calls"),
        F.collect_set(F.when(in_backlog(), F.lower("entity"))).alias("queues"),
        F.max(F.when(asked & (F.col("result") != OK) & ~unheard, 1)).cast("long").alias("answered"),
    )


def polls(operations: DataFrame) -> DataFrame:
    """Returns, by day, how long the receives took that found no message in a backlog queue, and how often that was."""
    mine = operations.where((F.col("stage") == str(Stage.EMPTY_RECEIVE)) & in_backlog() & (F.col("result") == OK))
    length = F.floor(F.col("seconds") * 1000).cast("long").alias("milliseconds")
    return mine.groupBy("day", length).agg(F.count("*").alias("polls"))


def syphon_runs(operations: DataFrame) -> DataFrame:
    """Returns, by day, writer, begin and end of each program that received from the backlog."""
    mine = operations.where(F.col("stage").isin(*map(str, _SYPHON_STAGES)) & in_backlog())
    ended = F.max(F.coalesce("ended", "at")).alias("ended")
    return mine.groupBy("day", F.substring("id", 1, 16).alias("writer")).agg(F.min("at").alias("began"), ended)


def copies(operations: DataFrame, entries: DataFrame) -> DataFrame:
    """Returns what happened to the copies of diverted messages.

    A row has what happened to a message on each day (`days`), and the number of messages to which the same happened on
    the same days (`messages`). There are few such rows, whatever the number of messages is.
    """
    wanted = operations.where(F.col("stage").isin(*map(str, (*_STORES, *PASSED_STAGES))))
    each = wanted.select("day", F.explode("ids").alias("message"), "stage", "result", "failed")
    fails = (F.col("result") != OK) & ((_failed_ids() == 0) | F.array_contains("failed", F.col("message")))
    stored, good = F.col("stage").isin(*map(str, _STORES)), ~F.coalesce(fails, F.lit(False))
    doubtful = stored & ~good & (F.col("result") == UNKNOWN)
    rows = each.select(
        "day",
        "message",
        (stored & good).cast("long").alias("stored"),
        doubtful.cast("long").alias("doubtful"),
        *(((F.col("stage") == str(one)) & good).cast("long").alias(str(one)) for one in PASSED_STAGES),
        F.lit(0).cast("long").alias("dead"),
    )
    is_dead = (F.col("kind") == Movement.kind) & (F.col("move") == str(Move.DEAD_LETTERED))
    # What an audit recorded was neither received nor settled by a syphon.
    is_dead &= F.coalesce("reason", F.lit("")) != NOT_BY_A_SYPHON
    dead = entries.where(is_dead).select("day", F.explode("ids").alias("message"))
    nothing = [F.lit(0).cast("long").alias(name) for name in ("stored", "doubtful", *map(str, PASSED_STAGES))]
    rows = rows.unionAll(dead.select("day", "message", *nothing, F.lit(1).cast("long").alias("dead")))
    names = ("stored", "doubtful", *map(str, PASSED_STAGES), "dead")
    by_day = rows.groupBy("message", "day").agg(*(F.sum(name).alias(name) for name in names))
    by_id = by_day.groupBy("message").agg(F.sort_array(F.collect_list(F.struct("day", *names))).alias("days"))
    return by_id.groupBy("days").agg(F.count("*").alias("messages"))


def by_destination(operations: DataFrame) -> DataFrame:
    """Returns messages, units and bytes that were sent, scheduled, returned and diverted, by day and primary entity.

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
    return operations.where(F.col("stage").isin(*map(str, stages.values()))).groupBy("day", "destination").agg(*sums)


def receivers(operations: DataFrame) -> DataFrame:
    """Returns how many messages a pair's receivers received, by day and entity in lower case."""
    mine = operations.where((F.col("stage") == str(Stage.RECEIVE_PRIMARY)) & (F.col("result") == OK))
    counted = F.when(F.size("ids") > 0, F.size("ids")).otherwise(F.coalesce("count", "units"))
    return mine.groupBy("day", F.lower("entity").alias("entity")).agg(F.sum(counted).alias("messages"))


def meters(entries: DataFrame) -> DataFrame:
    """Returns what the meters of namespaces counted, by day, entity and operation."""
    mine = entries.where(F.col("kind") == Metered.kind)
    sums = [F.sum(name).alias(name) for name in ("count", "units", "bytes")]
    entity = F.lower("entity").alias("entity")
    return mine.groupBy("day", entity, in_backlog().alias("backlog"), "operation").agg(*sums)


def stated_options(entries: DataFrame) -> DataFrame:
    """Returns the options that pairs and syphons recorded at their start, as JSON."""
    mine = entries.where((F.col("kind") == State.kind) & F.col("event").isin(PAIRED, SYPHON_STARTED))
    return mine.select("day", "at", "event", F.to_json("facts").alias("options"))


_QUERIES: Final[Mapping[str, Callable[[DataFrame, DataFrame, DataFrame], DataFrame]]] = {
    STAGES: lambda operations, _, earlier: by_stage(operations, earlier),
    OVERVIEW: lambda operations, *_: overview(operations),
    POLLS: lambda operations, *_: polls(operations),
    RUNS: lambda operations, *_: syphon_runs(operations),
    COPIES: lambda operations, entries, _: copies(operations, entries),
    DESTINATIONS: lambda operations, *_: by_destination(operations),
    RECEIVERS: lambda operations, *_: receivers(operations),
    METERS: lambda _, entries, __: meters(entries),
    OPTIONS: lambda _, __, earlier: stated_options(earlier),
}
"""The query of each kind of facts, on operations and entries of a window, and on entries up to its end."""
_COMPARE_WRITERS: Final = (OVERVIEW, RUNS, OPTIONS)
"""The kinds of facts with times that are compared with those of other writers."""


# --- columns ---------------------------------------------------------------------------------------------------------


def stage() -> Column:
    """Returns the stage; for empty receives that are not on a backlog queue, EMPTY_PRIMARY."""
    polled = (F.col("stage") != str(Stage.EMPTY_RECEIVE)) | in_backlog()
    return F.when(polled, F.col("stage")).otherwise(F.lit(EMPTY_PRIMARY))


def _failed_ids() -> Column:
    """Returns how many messages of an operation failed, if only some of them did; otherwise 0."""
    return F.greatest(F.coalesce(F.size("failed"), F.lit(0)), F.lit(0))


def in_backlog() -> Column:
    return F.lower("entity").contains(f"/{TRANSFER_SEGMENT}/")
