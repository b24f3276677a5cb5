"""The expected results of the jobs, computed with DuckDB's SQL from the same Parquet files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import duckdb
from deltalake import DeltaTable

from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.tables import ENTRIES, OPERATIONS, PENDING, SCHEMAS, struct

_TYPES: Final = {
    "string": "varchar",
    "bigint": "bigint",
    "array<string>": "varchar[]",
    "array<bigint>": "bigint[]",
    "map<string,string>": "map(varchar, varchar)",
}

_RECONCILE: Final = """
with each as (
    select destination, stage, coalesce(if(stage = 'return_primary', broker_at, null), "at") as "at",
        if(stage = 'return_primary', null,
            coalesce(broker_at + cast(round(coalesce(seconds, 0) * 1000) as bigint), ended)) as ended,
        unnest(ids) as id,
        unnest(range(1, len(ids) + 1)) as place, ids, failed, result, orphaned and stage = 'return_primary' as orphaned
    from operations
    where stage in ('send_primary', 'schedule_primary', 'send_backlog', 'resubmit_backlog', 'return_primary',
                    'complete_backlog')
), judged as (
    select destination, id, stage, "at", coalesce(ended, "at") as ended, orphaned,
        case when coalesce(len(failed), 0) = 0 then result
             when len(list_filter(ids[1:place], lambda x: x = id)) <= len(list_filter(failed, lambda x: x = id))
             then result else 'ok' end as result
    from each
), effects as (
    select destination, id,
        count(*) filter (result = 'ok' and stage in ('send_primary', 'schedule_primary', 'send_backlog')) as accepted,
        count(*) filter (result = 'ok' and stage in ('send_primary', 'schedule_primary', 'return_primary'))
            as delivered,
        count(*) filter (result = 'unknown' and stage in ('send_primary', 'schedule_primary', 'return_primary'))
            as maybe_delivered,
        count(*) filter (result = 'ok' and stage in ('send_backlog', 'resubmit_backlog')) as stored,
        count(*) filter (result = 'unknown' and stage in ('send_backlog', 'resubmit_backlog')) as maybe_stored,
        count(*) filter (result = 'ok' and stage = 'complete_backlog') as removed,
        count(*) filter (orphaned or (result = 'unknown' and stage = 'complete_backlog')) as maybe_removed,
        0 as dead, 0 as doubted, 0 as redirected, 0 as found,
        max(ended) filter (orphaned or (result = 'unknown' and stage = 'complete_backlog')) as doubted_at,
        max("at") filter (stage = 'return_primary') as seen_at
    from judged where result in ('ok', 'unknown') or stage = 'return_primary' group by all
), moved as (
    select lower(destination) as destination, unnest(ids) as id, lower(source) as source, move,
        coalesce(broker_at, "at") as "at"
    from entries where kind = 'movement'
), moves as (
    select destination, id, count(*) filter (move = 'redirected') as accepted, 0 as delivered, 0 as maybe_delivered,
        count(*) filter (move = 'redirected') as stored, 0 as maybe_stored,
        count(*) filter (move = 'lost') - count(*) filter (move = 'reappeared') as removed, 0 as maybe_removed,
        count(*) filter (move = 'dead_lettered') - count(*) filter (move = 'resubmitted') as dead,
        count(*) filter (move = 'possible_duplicate') as doubted, count(*) filter (move = 'redirected') as redirected,
        count(*) filter (move = 'found') as found, null as doubted_at,
        max("at") filter (move in ('dead_lettered', 'kept', 'found', 'reappeared')) as seen_at
    from moved group by all
    union all
    select source, id, -count(*), 0, 0, -count(*), 0, 0, 0, -count(*), 0, 0, 0, null, null
    from moved where move = 'redirected' group by all
), sums as (
    select destination, id, sum(accepted) as a, sum(redirected) as redirected, sum(delivered) as d,
        sum(maybe_delivered) as md, sum(stored) as s, sum(maybe_stored) as ms, sum(removed) as r,
        sum(maybe_removed) as mr, sum(dead) as dead, sum(doubted) as doubted, sum(found) as f,
        coalesce(max(seen_at) > coalesce(max(doubted_at), -(2::hugeint ** 63)), false) as seen
    from (select * from effects union all select * from moves) group by all
), resolved as (
    {resolved}
), bounds as (
    select *, if(seen, greatest(0, s - r, least(f, s + ms - r)), greatest(0, s - r - mr)) as held,
        greatest(0, s + ms - r) as hoped,
        greatest(0, n - d - md - greatest(0, s + ms - r)) as lost, greatest(0, d - greatest(n, 1)) as duplicated
    from resolved
), verdicts as (
    select destination, id, n as accepted, least(n, d) as delivered, greatest(0, n - d - held) - lost as unknown, lost,
        duplicated, n - least(n, d) - greatest(0, n - d - held) as there, greatest(0, dead) as dead,
        greatest(greatest(0, d + md - greatest(n, 1)) - duplicated, if(duplicated > 0, 0,
            if(doubted > 0 or (d > 0 and held - greatest(0, dead) > n - least(n, d)), 1, 0)))
            as possibly_duplicated,
        if(n = 0 and d + md + hoped + f > 0, 1, 0) as unconfirmed
    from bounds
)
select count(*) as messages, sum(accepted) as accepted, sum(delivered) as delivered,
    sum(there - least(there, dead)) as in_backlog, sum(least(there, dead)) as dead_lettered, sum(unknown) as unknown,
    sum(lost) as lost, sum(duplicated) as duplicated, sum(possibly_duplicated) as possibly_duplicated,
    sum(unconfirmed) as unconfirmed
from verdicts
"""

RECONCILE: Final = _RECONCILE.format(
    resolved="""
    -- What was redirected more often than accepted brought no acceptance along.
    select *, greatest(0, a) - least(brought, greatest(0, debt - coalesce(paid, 0))) as n
    from (select *, sum(greatest(0, -a)) over (partition by id) as debt,
              sum(brought) over (partition by id order by destination rows between unbounded preceding
                                 and 1 preceding) as paid
          from (select *, greatest(0, least(a, redirected)) as brought from sums))
    """
)
# For a ledger without redirects.
RECONCILE_UNREDIRECTED: Final = _RECONCILE.format(resolved="select *, a as n from sums")

COST: Final = """
select day, stage, lower(namespace), lower(entity), count(*), sum(len(ids)), sum(units), sum(bytes),
    count(*) filter (result = 'unknown'),
    count(*) filter (result not in ('ok', 'unknown') and coalesce(len(failed), 0) = 0)
from operations group by all order by all
"""

_INSTANTS: Final = """
instants as (
    select destination, id, stage, "at" from (
        select destination, stage, ended as "at", unnest(ids) as id, unnest(range(1, len(ids) + 1)) as place, ids,
            failed, result
        from operations where stage in ('send_backlog', 'return_primary'))
    where result = 'ok' or (len(failed) > 0
        and len(list_filter(ids[1:place], lambda x: x = id)) > len(list_filter(failed, lambda x: x = id)))
    union all
    select lower(source), unnest(ids), 'return_primary', "at" from entries where move = 'redirected'
    union all
    select lower(destination), unnest(ids), 'send_backlog', "at" from entries where move = 'redirected'
), ranked as (
    select *, row_number() over (partition by destination, id, stage order by "at") as rank from instants
), waits as (
    select one.destination, one.id, one."at" as diverted, other."at" as home
    from (from ranked where stage = 'send_backlog') one
    left join (from ranked where stage = 'return_primary') other using (destination, id, rank)
)
"""

LATENCY: Final = f"""
with {_INSTANTS}, timed as (
    select *, cast(make_timestamp(diverted * 1000) as date) as day,
        if(home >= diverted, (home - diverted) / 1000, null) as seconds
    from waits)
select destination, day, count(*), count(home), avg(seconds), min(seconds), quantile_cont(seconds, 0.5),
    quantile_cont(seconds, 0.75), quantile_cont(seconds, 0.9), quantile_cont(seconds, 0.99), max(seconds),
    count(*) filter (home is not null and seconds is null)
from timed group by all order by all
"""  # noqa: S608  # of parts that are written here

SECONDS: Final = f"with {_INSTANTS} select (home - diverted) / 1000 from waits"  # noqa: S608  # as above

SERIES: Final = f"""
with {_INSTANTS}, told as (
    select destination, coalesce(ended, "at") as "at", result, stage, ids, failed,
        unnest(ids) as id, unnest(range(1, len(ids) + 1)) as place
    from operations where stage in ('send_primary', 'schedule_primary', 'send_backlog', 'return_primary')
), judged as (
    select destination, "at", case
        when result <> 'ok' and (coalesce(len(failed), 0) = 0
            or len(list_filter(ids[1:place], lambda x: x = id)) <= len(list_filter(failed, lambda x: x = id)))
        then 'failed'
        when stage = 'send_backlog' then 'diverted' when stage = 'return_primary' then 'returned' else 'direct'
        end as name
    from told
    union all select destination, diverted, 'came' from waits
    union all select destination, greatest(home, diverted), 'left' from waits where home is not null
), placed as (
    select destination, name, greatest(("at" // $width) * $width, ($first // $width - 1) * $width) as bucket
    from judged where "at" // $width <= $last // $width
)
select destination, bucket, count(*) filter (name = 'direct'), count(*) filter (name = 'diverted'),
    count(*) filter (name = 'returned'), count(*) filter (name = 'failed'), count(*) filter (name = 'came'),
    count(*) filter (name = 'left')
from placed where bucket >= ($first // $width) * $width or name in ('came', 'left') group by all order by all
"""  # noqa: S608  # of parts that are written here

INCIDENTS: Final = f"""
with {_INSTANTS}, told as (
    select lower(pair || '/' || (facts['entity'])) as destination, id[1:16] as writer, "at", event,
        facts['cause'] as cause, facts['episode'] as episode
    from entries where event in ('failover_engaged', 'restored')
), own as (
    select destination, id[1:16] as writer, ended as "at" from operations where stage = 'send_backlog' and result = 'ok'
    union all select lower(destination), id[1:16], "at" from entries where move = 'redirected'
), failovers as (
    select *, coalesce(lead("at") over (partition by destination, writer order by "at"), 1e18) as following
    from told where event = 'failover_engaged'
), known as (
    select *, (select max(r."at") from told r where r.event = 'restored' and r.destination = f.destination
        and r.writer = f.writer and r.episode = f.episode) as restored
    from failovers f
), windows as (
    select destination, writer, "at" as began, cause, restored,
        coalesce(restored, (select max(o."at") from own o where o.destination = f.destination and o.writer = f.writer
            and o."at" >= f."at" and o."at" < f.following), f."at") as ended
    from known f
), heads as (
    -- An incident begins where no other window of the entity is open.
    select distinct destination, began from windows w where not exists (
        from windows v where v.destination = w.destination and v.began < w.began and v.ended >= w.began)
), spans as (
    select *, coalesce(lead(began) over (partition by destination order by began), 1e18) as following from heads
), incidents as (
    select s.destination, s.began, any_value(s.following) as following, count(distinct w.writer) as processes,
        arg_min(w.cause, (w.began, w.writer)) as cause,
        max(w.ended) as ended, max(w.ended) filter (w.restored is null) as unrestored
    from spans s join windows w on w.destination = s.destination and w.began >= s.began and w.began < s.following
    group by all
), diverted as (
    select w.destination, i.began, count(*) as diverted, count(home) as returned, max(home) as home
    from waits w left join incidents i
        on i.destination = w.destination and w.diverted >= i.began and w.diverted < i.following
    group by all
)
select coalesce(i.destination, d.destination) as destination, i.began as began,
    if(ended = unrestored, null, ended) as restored, if(d.diverted = d.returned, home, null) as drained, cause,
    coalesce(processes, 0), coalesce(d.diverted, 0), coalesce(d.returned, 0), (restored - i.began) / 1000,
    if(drained is null or restored is null, null, greatest(drained - restored, 0) / 1000)
from incidents i full outer join diverted d on d.destination = i.destination and d.began = i.began
order by all
"""  # noqa: S608  # as above


def connect(root: Path, version: TablesVersion, dead: Collection[str] = ()) -> duckdb.DuckDBPyConnection:
    """Return a connection with the tables as views. An operation without an outcome has the result unknown.

    `dead` are the names of dead writers: their operations without an outcome are `orphaned`.
    """
    database = duckdb.connect()
    for table in (OPERATIONS, ENTRIES, PENDING):
        files = DeltaTable(root / table, version=version.tables[table]).file_uris()
        source = f"read_parquet({files}, hive_partitioning=true, union_by_name=true)" if files else _nothing(table)
        name = "settled" if table == OPERATIONS else table
        database.execute(f"create view {name} as select * from {source}")  # noqa: S608  # the test's own folders
    digits = [name.rpartition("-")[2] for name in dead]
    database.execute(f"""
        create view operations as
        select destination, id, stage, namespace, entity, ids, bytes, units, failed, result, "at", ended, day,
            broker_at, seconds, false as orphaned
        from settled
        union all
        select lower(coalesce(nullif(destination, ''), namespace || '/' || entity)), id, stage, namespace, entity, ids,
            bytes, units, null, 'unknown', "at", null, cast(make_timestamp("at" * 1000) as date),
            broker_at, null, list_contains({digits}::varchar[], id[1:16])
        from pending where kind = 'intent'
    """)  # noqa: S608  # the test's own writers
    return database


def rows(database: duckdb.DuckDBPyConnection, query: str, **values: int) -> list[tuple[Any, ...]]:
    return database.execute(query, values).fetchall()


def named(database: duckdb.DuckDBPyConnection, query: str) -> Mapping[str, Any]:
    """Return the only row, by column name."""
    found = database.execute(query)
    names = [column[0] for column in found.description or ()]
    (row,) = found.fetchall()
    return dict(zip(names, row, strict=True))


def _nothing(table: str) -> str:
    columns = [(field.name, field.dataType.simpleString()) for field in struct(SCHEMAS[table]).fields]
    said = ", ".join(f'null::{_TYPES.get(kind, kind)} as "{name}"' for name, kind in columns)
    return f"(select {said} where false)"
