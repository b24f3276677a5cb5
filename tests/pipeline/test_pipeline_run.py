"""`twinbus pipeline run`: tables and results of a ledger, committed together (D5)."""

from __future__ import annotations

import fcntl
import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from tests.cli.running import in_terminal
from tests.pipeline.books import MIDNIGHT, halves, history, operation, segment_name, write_segments, writer
from twinbus.cli.main import app
from twinbus.cli.pipeline import follow_ledger
from twinbus.errors import OperatorError
from twinbus.ledger import Entry, Role, SegmentHeader, Stage, encode_entry
from twinbus.pipeline import table_storage
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.ingested_segments import SEGMENTS
from twinbus.pipeline.jobs import JOBS, stored_rows
from twinbus.pipeline.result_tables import AS_OF, CLOCKS, INCOMPLETE, PARTS, RESULTS, read_as_of
from twinbus.pipeline.run import CommittedBatch, PipelineRun
from twinbus.pipeline.table_storage import TablesBusyError, TableStorage
from twinbus.pipeline.tables import SCHEMAS, Tables, TablesChange
from twinbus.pipeline.writer_states import WriterStates

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]  # Spark is slow on a busy machine


def read(root: Path, job: str, version: int) -> list[dict[str, Any]]:
    return polars.read_delta(str(root / "results" / job), version=version).to_dicts()


def versions_in(root: Path, snapshot: int) -> dict[str, int]:
    rows = polars.read_delta(str(root / "snapshots")).filter(polars.col("snapshot") == snapshot)
    return dict(rows.select("table_name", "version").iter_rows())


def in_order(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(row, default=str, sort_keys=True) for row in rows)


def test_d5_the_results_of_every_snapshot_are_those_of_its_tables(spark: SparkSession, tmp_path: Path) -> None:
    ledger, root, seen = tmp_path / "ledger", tmp_path / "tables", list[CommittedBatch]()
    write_segments(ledger, history(3, worlds=2, steps=60), seed=3, count=4)
    run = PipelineRun(spark, ledger, root, report=seen.append)
    run.start(most_bytes=25_000).awaitTermination()
    tables = Tables(spark, root)
    numbers = [batch.snapshot for batch in seen]
    assert numbers == list(range(1, tables.version().number + 1))
    assert len(numbers) > 2
    for number in numbers:
        versions = versions_in(root, number)
        ended = polars.read_delta(str(root / "operations"), version=versions["operations"]).height
        begun = polars.read_delta(str(root / "pending"), version=versions["pending"])
        in_flight = begun.filter(polars.col("kind") == "intent").height
        cost = read(root, "cost", versions["results/cost"])
        assert sum(row["operations"] for row in cost) == ended + in_flight
        stated = read(root, AS_OF, versions[RESULTS + AS_OF])
        assert {(row["snapshot"], row["segments"]) for row in stated} == {(number, versions[SEGMENTS])}
    versions = versions_in(root, numbers[-1])
    results = {RESULTS + name for name in (*JOBS, INCOMPLETE, CLOCKS, AS_OF)}
    assert {*versions} == {*SCHEMAS, SEGMENTS, *(name for job in JOBS.values() for name in job.tables), *results}
    history_only = replace(tables.version(), tables={name: versions[name] for name in SCHEMAS})
    for name, job in JOBS.items():
        rows = stored_rows(tables, history_only, job, WriterStates.in_ledger(ledger)).collect()
        assert in_order(read(root, name, versions[RESULTS + name])) == in_order([row.asDict() for row in rows])
        assert rows
    run.update()
    last = tables.version()
    known = read_as_of(tables.storage, last)
    assert {*known} == {part for parts in PARTS.values() for part in parts}, "those of bill and report, too"
    assert {one.segments for one in known.values()} == {last.tables[SEGMENTS]}
    run.update()
    assert tables.version() == last, "there was nothing to do"


def test_d5_after_an_ingest_without_results_the_next_run_makes_them(spark: SparkSession, tmp_path: Path) -> None:
    ledger, tables = tmp_path / "ledger", Tables(spark, tmp_path / "tables")
    ledger.mkdir()
    (ledger / segment_name(1)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "a")))
    ran(spark, ledger, tables)
    (ledger / segment_name(2)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "b")))
    ingest_ledger(spark, ledger, tables.root).awaitTermination()
    version = tables.version()
    assert read_as_of(tables.storage, version)["cost"].segments != version.tables[SEGMENTS], "they lack a batch"
    ran(spark, ledger, tables)
    version = tables.version()
    (cost,) = read(tables.root, "cost", version.tables["results/cost"])
    assert (cost["operations"], cost["messages"]) == (2, 2)
    (before,) = tables.segments.ledgers(version.tables[SEGMENTS])
    ran(spark, ledger, tables)
    assert tables.version() == version, "there was nothing to do"
    (after,) = tables.segments.ledgers(version.tables[SEGMENTS])
    assert before.looked_at < after.looked_at, "but to look"
    assert before.segments == after.segments
    (ledger / segment_name(3)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "c")))
    PipelineRun(spark, ledger, tables.root).update()
    assert tables.segments.ledgers(version.tables[SEGMENTS]) == [after], "there are new lines"


def ran(spark: SparkSession, ledger: Path, tables: Tables) -> None:
    run = PipelineRun(spark, ledger, tables.root)
    run.start().awaitTermination()
    run.update()


def test_l1_d5_the_death_of_a_writer_changes_the_results_without_a_new_entry(
    spark: SparkSession, tmp_path: Path
) -> None:
    ledger, tables = tmp_path / "ledger", Tables(spark, tmp_path / "tables")
    ledger.mkdir()
    name = f"syphon-{socket.gethostname()}-7-{writer(2)}"
    header = SegmentHeader(
        at=MIDNIGHT, id=f"{writer(2)}-h", writer=name, role=Role.SYPHON, host=socket.gethostname(), pid=7, version="1",
        segment=0, durability="process",
    )  # fmt: skip
    begun, _ = halves(operation(Stage.RETURN_PRIMARY, "a", by=2))
    path = ledger / f"{name}-0.jsonl.open"
    entries: list[Entry] = [header, operation(Stage.SEND_BACKLOG, "a", by=2), begun]
    path.write_text("".join(map(encode_entry, entries)))
    with path.open("rb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        run = PipelineRun(spark, ledger, tables.root)
        run.start().awaitTermination()
        run.update()
        version = tables.version()
        (found,) = read(tables.root, "reconcile", version.tables["results/reconcile"])
        assert (found["in_backlog"], found["unknown"]) == (1, 0)
    run.update()
    (found,) = read(tables.root, "reconcile", tables.version().tables["results/reconcile"])
    assert (found["in_backlog"], found["unknown"]) == (0, 1)
    number, later = tables.version().number, tables.version().tables
    run.update()
    assert tables.version().number == number, "once"
    for name in ("operations", "results/incidents", "results/latency"):
        assert later[name] == version.tables[name], "nothing was diverted"
    stated = read_as_of(tables.storage, tables.version())
    assert {one.snapshot for one in stated.values()} == {number}
    PipelineRun(spark, ledger, tables.root).update()
    assert tables.version().number == number, "nor by a run that starts again"


class Signal(threading.Event):
    """A signal to end, which shows when somebody has noticed it."""

    def __init__(self) -> None:
        super().__init__()
        self.noticed = threading.Event()

    def is_set(self) -> bool:
        if not super().is_set():
            return False
        self.noticed.set()
        return True


def test_d5_ctrl_c_ends_a_run_after_its_batch(spark: SparkSession, tmp_path: Path) -> None:
    ledger, tables, signal, seen = tmp_path / "ledger", Tables(spark, tmp_path / "tables"), Signal(), list[int]()
    ledger.mkdir()
    (ledger / segment_name(1)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "a")))

    class Interrupted(PipelineRun):
        @contextmanager
        def _batch_turn(self) -> Iterator[None]:
            """Begin a batch, and press Ctrl-C."""
            with super()._batch_turn():
                signal.set()
                assert signal.noticed.wait(60)
                yield

    run = Interrupted(spark, ledger, tables.root, report=lambda batch: seen.append(batch.snapshot))
    follow_ledger(run, 10, signal)
    assert seen == [1]
    (cost,) = read(tables.root, "cost", tables.version().tables["results/cost"])
    assert cost["operations"] == 1
    assert not spark.streams.active


def test_d5_the_error_of_the_last_batch_is_raised_after_ctrl_c(spark: SparkSession, tmp_path: Path) -> None:
    ledger, tables, signal = tmp_path / "ledger", Tables(spark, tmp_path / "tables"), Signal()
    ledger.mkdir()
    (ledger / segment_name(1)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "a")))

    class Failing(PipelineRun):
        def _extend(self, change: TablesChange) -> None:
            """Press Ctrl-C inside a batch, and fail."""
            signal.set()
            assert signal.noticed.wait(60)
            raise OperatorError("the disk is full")

    with pytest.raises(OperatorError, match="could not be read into the tables: the disk is full"):
        follow_ledger(Failing(spark, ledger, tables.root), 10, signal)
    assert tables.version().number == 0
    assert not spark.streams.active


@contextmanager
def locked_elsewhere(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold the lock of the tables as another process does. Yields an event that is set when the lock was refused."""
    refused, lock = threading.Event(), TableStorage.lock

    @contextmanager
    def observed(storage: TableStorage) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(lock(storage))
            except TablesBusyError:
                refused.set()
                raise
            yield

    monkeypatch.setattr(table_storage, "_LOCK_SECONDS", 0.0)
    with lock(tables.storage):
        monkeypatch.setattr(TableStorage, "lock", observed)
        yield refused


def test_d5_l7_a_follower_waits_for_another_process_that_writes_the_tables(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, tables = tmp_path / "ledger", Tables(spark, tmp_path / "tables")
    ledger.mkdir()
    (ledger / segment_name(1)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "a")))
    with ExitStack() as stack:
        with locked_elsewhere(tables, monkeypatch) as refused:
            run = PipelineRun(spark, ledger, tables.root)
            query = run.start(every=1)
            stack.callback(run.stop, query)
            assert refused.wait(120)
            assert query.isActive
        query.processAllAvailable()
        assert tables.version().number == 1


@pytest.mark.parametrize("is_ingested", [False, True], ids=["a batch waits", "results wait"])
def test_d5_ctrl_c_ends_a_run_that_waits_for_another_process(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ingested: bool
) -> None:
    ledger, tables, signal = tmp_path / "ledger", Tables(spark, tmp_path / "tables"), threading.Event()
    ledger.mkdir()
    (ledger / segment_name(1)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "a")))
    if is_ingested:  # without results
        ingest_ledger(spark, ledger, tables.root).awaitTermination()
    number = tables.version().number
    with ThreadPoolExecutor() as pool, locked_elsewhere(tables, monkeypatch) as refused:
        ended = pool.submit(follow_ledger, PipelineRun(spark, ledger, tables.root), 0.1, signal)
        assert refused.wait(120)
        signal.set()
        ended.result(60)
    assert tables.version().number == number
    assert not spark.streams.active


def test_d5_ctrl_c_ends_a_run_whose_results_wait_for_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    ledger, tables, signal = tmp_path / "ledger", Tables(spark, tmp_path / "tables"), threading.Event()
    ledger.mkdir()
    (ledger / segment_name(1)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "a")))
    run = PipelineRun(spark, ledger, tables.root)
    run.start().awaitTermination()
    signal.set()
    with ThreadPoolExecutor() as pool, run._turns.lock:
        pool.submit(run.update, stopping=signal).result(120)
    assert tables.version().number == 1


@pytest.mark.usefixtures("spark")
def test_d5_the_verb_prints_a_line_for_each_batch(tmp_path: Path) -> None:
    ledger, tables = tmp_path / "ledger", tmp_path / "tables"
    ledger.mkdir()
    for number in (1, 2):
        (ledger / segment_name(number)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, f"{number}")))
        done = CliRunner().invoke(
            app, ["pipeline", "run", str(ledger), str(tables), "--horizon", "8h", *["--json"] * (number - 1)]
        )
        assert done.exit_code == 0, done.output
        (line,) = done.stdout.splitlines()
        if number == 1:
            assert "snapshot 1: 1 operations, 0 other entries, the newest of 2026-09-22 00:00:00Z; " in line
        else:
            told = json.loads(line)
            # The facts of bill and report are the second snapshot.
            assert (told["snapshot"], told["operations"], told["newest"]) == (3, 1, "2026-09-22T00:00:00.000+00:00")
    done = CliRunner().invoke(app, ["pipeline", "run", str(ledger), str(tables)])
    assert (done.exit_code, done.stdout) == (0, "")
    assert DeltaTable(tables / "results" / "cost").to_pyarrow_table().num_rows == 1


def test_d5_on_a_terminal_the_verb_shows_what_it_does_below_the_lines_of_its_batches(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / segment_name(1)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "a")))
    code, seen = in_terminal("pipeline", "run", str(tmp_path / "ledger"), str(tmp_path / "tables"), patience=800.0)
    assert code == 0, seen
    phases = ("starting Spark", "reading new entries", "computing results", "counting the facts of bill and report")
    for phase in phases:
        assert re.search(rf"{phase} … \d+ s", seen), phase
    assert "snapshot 1: 1 operations" in seen
