"""Ledgers with millions of lines, for benchmarks of the pipeline. DuckDB makes the lines.

Of ten messages one is diverted: it is sent to the backlog, brought back and completed, which are five lines. Each other
message is one line. So 14 lines are 10 messages, and 8 of 28 lines are halves: an intent or an outcome. Returns are
written half a segment after the diversion, so that some halves are in different segments. One line in a hundred is
written twice, the second time to another segment. One message in a thousand is dead-lettered. Every segment has a line
that is no entry, and ends with a part of a line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import duckdb

_LINES_PER_MESSAGE: Final = 1.4
_SEGMENT_LINES: Final = 200_000
_DAYS: Final = 3
_MESSAGES: Final = """
create temp view messages as
select i, md5(i::varchar) as id, {midnight} + i * {days} * 86400000 // {messages} as "at",
    'entity-' || (i % 20) as entity, i % 10 = 0 as diverted, i * {segments} // {messages} as segment,
    least({segments} - 1, (i + {half}) * {segments} // {messages}) as later
from range({first}, {last}) as numbers(i)
"""
_HEAD: Final = """'{{"v":1,"kind":"{kind}","at":' || ("at" + {after}) || ',"id":"' || lpad(to_hex(segment), 16, '0')
    || '-' || i || '{mark}"'"""
_BEGUN: Final = """ || ',"stage":"{stage}","namespace":"{namespace}","entity":"' || {entity}
    || '"{toward},"ids":["' || id || '"],"bytes":1024,"units":1'"""
_ENDED: Final = """ || ',"seconds":0.00' || (1000 + i % 9000) || ',"result":"ok"'"""
_HOME: Final = {"namespace": "contoso", "entity": "entity", "toward": ""}
_BACKLOG: Final = {
    "namespace": "paris",
    "entity": "'contoso/x-servicebus-transfer/' || (i % 10)",
    "toward": ""","destination":"contoso/' || entity || '\"""",
}
_MOVED: Final = """ || ',"move":"dead_lettered","ids":["' || id || '"],"source":"paris/contoso/x-servicebus-transfer/'
    || (i % 10) || '","destination":"contoso/' || entity || '","reason":"expired"'"""
_MIDNIGHT: Final = 1_790_035_200_000


def _line(kind: str, segment: str, mark: str, after: int, rest: str, where: str) -> str:
    head = _HEAD.format(kind=kind, mark=mark, after=after)
    return f"""select {segment} as segment, "at" + {after} as "at", {head}{rest} || '}}' as line
        from messages where {where}"""  # noqa: S608  # of parts that are written here


def _statement(segments: int) -> str:
    """Returns the query for the lines of some messages: the number of the segment, and the line."""
    begun = {
        stage: _BEGUN.format(stage=stage, **side)
        for stage, side in (
            ("send_primary", _HOME),
            ("send_backlog", _BACKLOG),
            ("return_primary", _HOME),
            ("complete_backlog", _BACKLOG),
        )
    }
    parts = (
        _line("operation", "segment", "", 0, begun["send_primary"] + _ENDED, "not diverted"),
        _line("intent", "segment", "s", 0, begun["send_backlog"], "diverted"),
        _line("outcome", "segment", "s", 5, _ENDED, "diverted"),
        _line("intent", "segment", "r", 60_000, begun["return_primary"], "diverted"),
        _line("outcome", "later", "r", 60_005, _ENDED, "diverted"),
        _line("operation", "later", "c", 60_010, begun["complete_backlog"] + _ENDED, "diverted"),
        _line("movement", "later", "m", 60_020, _MOVED, "i % 1000 = 0"),
    )
    union = "\nunion all ".join(parts)
    return f"""with written as ({union})
        from written union all
        select least({segments} - 1, segment + 1), "at", line from written where hash(line) % 100 = 0"""  # noqa: S608


def make_ledger(folder: Path, lines: int) -> int:
    """Makes a ledger of about so many lines. Returns its size in bytes."""
    folder.mkdir(parents=True)
    messages, segments = int(lines / _LINES_PER_MESSAGE), max(1, lines // _SEGMENT_LINES)
    database = duckdb.connect()
    database.execute(f"set threads = {os.cpu_count() or 2}")
    share = -(-messages // segments)
    database.execute('create temp table lines (segment bigint, "at" bigint, line varchar)')
    for number in range(segments):
        database.execute("drop view if exists messages")
        database.execute(
            _MESSAGES.format(
                midnight=_MIDNIGHT,
                days=_DAYS,
                messages=messages,
                segments=segments,
                half=share // 2,
                first=number * share,
                last=min(messages, (number + 1) * share),
            )
        )
        database.execute("insert into lines " + _statement(segments))
        _write_segment(database, folder, number)
    for number in range(segments):
        _end_segment(folder / _name(number), number)
    return sum(file.stat().st_size for file in folder.iterdir())


def _name(number: int) -> str:
    return f"client-host-7-{number:016x}-0.jsonl"


def _write_segment(database: duckdb.DuckDBPyConnection, folder: Path, number: int) -> None:
    """Writes the lines that belong to a segment or an earlier one; those of the next segment stay in the table."""
    found = database.execute('select line from lines where segment <= ? order by "at"', [number])
    at, writer = _MIDNIGHT, f"client-host-7-{number:016x}"
    header = (
        f'{{"v":1,"kind":"header","at":{at},"id":"{number:016x}-h","writer":"{writer}","role":"client","host":"host",'
        '"pid":7,"version":"1","segment":0}\n'
    )
    with (folder / _name(number)).open("w") as file:
        file.write(header + "no entry\n")
        while rows := found.fetchmany(50_000):
            file.write("".join(f"{line}\n" for (line,) in rows))
    database.execute("delete from lines where segment <= ?", [number])


def _end_segment(path: Path, number: int) -> None:
    with path.open("a") as file:
        file.write(f'{{"v":1,"kind":"closed","at":{_MIDNIGHT},"id":"{number:016x}-c","writer":"{path.stem[:-2]}"}}\n')
        file.write('{"v":1,"kind":"oper')
