"""The log of one table and the table `snapshots`, read again with other tools (D5). No Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from twinbus.errors import OperatorError
from twinbus.pipeline import snapshots as snapshots_module
from twinbus.pipeline.snapshots import Snapshots, TablesVersion
from twinbus.pipeline.table_log import AppTransaction, DataFile, TableLog, described_file, merged_size
from twinbus.pipeline.table_storage import SNAPSHOTS, TableStorage

SCHEMA = json.dumps(
    {
        "type": "struct",
        "fields": [
            {"name": name, "type": kind, "nullable": True, "metadata": {}}
            for name, kind in (("id", "string"), ("at", "long"), ("day", "date"))
        ],
    }
)
DAYS = ("2026-09-22", "2026-09-23")


class Sample:
    """A table by day, to which each call of `written` adds files."""

    def __init__(self, root: Path) -> None:
        self.storage = TableStorage(root)
        self.log = TableLog(self.storage, "operations")
        self.log.create(SCHEMA, ["day"])

    def written(self, *ids: str | None, day: str = DAYS[0]) -> DataFile:
        """Return a new file with a row for each id, which no commit has yet."""
        with self.storage.staging(self.log.name) as folder:
            target = Path(folder) / f"day={day}" / "any.parquet"
            target.parent.mkdir(parents=True)
            rows = {"id": pa.array(ids, pa.string()), "at": pa.array(range(len(ids)), pa.int64())}
            parquet.write_table(pa.table(rows), target)
            ((path, partition),) = self.storage.adopt(folder, self.log.name)
        return described_file(self.storage, self.log.name, path, partition)

    def ids(self, version: int | None = None) -> list[str]:
        return sorted(polars.read_delta(self.storage.uri("operations"), version=version)["id"].to_list())


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return Sample(tmp_path)


def test_d5_a_commit_adds_and_removes_files_at_once_and_earlier_versions_stay_readable(sample: Sample) -> None:
    one, other = sample.written("a", "b"), sample.written("c", day=DAYS[1])
    assert sample.ids() == [], "a file that no commit has is invisible"
    first = sample.log.commit([one, other])
    second = sample.log.commit([sample.written("d")], [one])
    assert sample.ids() == ["c", "d"]
    assert sample.ids(first) == ["a", "b", "c"]
    assert {file.path for file in sample.log.files(first)} == {one.path, other.path}
    assert [file.partition for file in sample.log.files(second)].count({"day": DAYS[1]}) == 1
    table = DeltaTable(sample.storage.uri("operations"), version=first).to_pyarrow_dataset()
    found = duckdb.from_arrow(table).filter(f"day = '{DAYS[0]}'").order("id").fetchall()
    assert [row[0] for row in found] == ["a", "b"]


def test_d5_statistics_have_the_limits_of_numbers_and_short_texts(sample: Sample) -> None:
    def found(*ids: str | None) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(sample.written(*ids).statistics)
        return values

    assert found("b", "ä", None) == {
        "numRecords": 3,
        "minValues": {"id": "b", "at": 0},
        "maxValues": {"id": "ä", "at": 2},
        "nullCount": {"id": 1, "at": 0},
    }
    assert found(None)["minValues"] == {"at": 0}
    assert found(None)["nullCount"] == {"id": 1, "at": 0}
    assert "id" not in found("a", "x" * 100_000)["maxValues"], "a long text would be in every entry of the log"
    assert sample.log.version() == 0


def test_d5_a_reader_skips_files_by_their_statistics(sample: Sample) -> None:
    files = [sample.written(name) for name in ("a", "b", "c")]
    sample.log.commit(files)
    for file in files[1:]:
        (sample.storage.root / "operations" / file.path).unlink()
    uri = sample.storage.uri("operations")
    assert DeltaTable(uri).to_pyarrow_table(filters=[("id", "=", "a")]).num_rows == 1


def test_d5_a_transaction_that_another_process_committed_fails(sample: Sample) -> None:
    stale, twice = sample.log.open(), AppTransaction("app", 7)
    sample.log.commit([sample.written("a")], transaction=twice)
    sample.log.open = lambda version=None: stale  # type: ignore[method-assign] # as another process that opened it before
    with pytest.raises(CommitFailedError):
        sample.log.commit([sample.written("a")], transaction=twice)
    assert sample.ids() == ["a"]


def test_d5_a_restored_table_has_the_rows_of_the_earlier_version_and_takes_the_batch_again(sample: Sample) -> None:
    one, again = sample.written("a"), AppTransaction("app", 1)
    first = sample.log.commit([one], transaction=AppTransaction("app", 0))
    sample.log.commit([sample.written("b")], [one], again)
    assert sample.log.restore(first) == first + 2
    assert sample.ids() == ["a"]
    sample.log.commit([sample.written("b")], transaction=again)
    assert sample.ids() == ["a", "b"]


def test_d5_many_small_files_of_a_day_become_one_and_readers_of_earlier_versions_go_on(sample: Sample) -> None:
    for number in range(16):
        sample.log.commit([sample.written(f"{number:02}")])
    other = sample.written("other", day=DAYS[1])
    before = sample.log.commit([other], transaction=AppTransaction("app", 3))
    reader = DeltaTable(sample.storage.uri("operations"), version=before).to_pyarrow_dataset()
    after = sample.log.compact("day")
    assert after == before + 1
    assert other.path in {file.path for file in sample.log.files()}
    assert len(sample.log.files()) == 2
    assert sample.log.vacuum() == after, "nothing is old enough to be removed"
    assert sample.ids() == sample.ids(before) == sorted(reader.to_table().column("id").to_pylist())
    assert sample.log.open().transaction_version("app") == 3
    assert sample.log.compact("day") == after, "nothing more to merge"


def test_d5_what_was_replaced_over_a_day_ago_is_removed_and_what_is_alive_or_younger_stays(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, recent, alive, orphan, new_orphan = (sample.written(name) for name in "abcde")
    sample.log.commit([old, recent, alive])
    two_days_ago = time.time() - 2 * 24 * 3600
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: two_days_ago)
        sample.log.commit([], [old])
    before = sample.log.commit([], [recent])
    folder = sample.storage.root / "operations"
    # The time when a file was replaced counts, not the time when it was written.
    for file in (recent, alive, orphan):
        os.utime(folder / file.path, (two_days_ago, two_days_ago))
    sample.log.vacuum()
    left = {file.path: (folder / file.path).exists() for file in (old, recent, alive, orphan, new_orphan)}
    assert [*left.values()] == [False, True, True, False, True]
    assert sample.ids() == ["c"]
    assert sample.ids(before - 1) == ["b", "c"]


def _age_log(sample: Sample, days: float) -> None:
    """Make all that is in the log older."""
    for file in (sample.storage.root / "operations" / "_delta_log").iterdir():
        at = file.stat().st_mtime - days * 24 * 3600
        os.utime(file, (at, at))


def test_d5_a_commit_can_be_undone_also_if_the_version_before_it_is_old(sample: Sample) -> None:
    file = sample.written("a")
    before = sample.log.commit([file])
    while before < 98:
        before = sample.log.commit([])
    _age_log(sample, 3)
    after = sample.log.commit([], [file])
    sample.log.vacuum()
    assert sample.log.open().version() == after == 99, "this commit writes a checkpoint"
    assert sample.ids(before) == ["a"]
    sample.log.restore(before)
    assert sample.ids() == ["a"]


def test_d5_entries_of_the_log_are_removed_that_no_version_of_two_days_needs(sample: Sample) -> None:
    version = sample.log.commit([sample.written("a")])
    while version < 101:
        version = sample.log.commit([])
    _age_log(sample, 1.5)
    sample.log.vacuum()
    log = sample.storage.root / "operations" / "_delta_log"
    assert len([*log.glob("*.json")]) == 102
    _age_log(sample, 1.5)
    sample.log.vacuum()
    assert sorted(file.name[17:] for file in log.glob("0*")) == [
        "099.checkpoint.parquet", "099.json", "100.json", "101.json"
    ]  # fmt: skip
    assert sample.ids() == sample.ids(99) == ["a"]


def test_d5_an_older_table_gets_the_columns_that_it_lacks(sample: Sample) -> None:
    sample.log.commit([sample.written("a")])
    wanted = json.loads(SCHEMA)
    wanted["fields"].append({"name": "count", "type": "long", "nullable": True, "metadata": {}})
    version = sample.log.create(json.dumps(wanted), ["day"])
    assert sample.log.create(json.dumps(wanted), ["day"]) == version == sample.log.version()
    rows = DeltaTable(sample.storage.uri("operations")).to_pyarrow_table().to_pylist()
    assert [(row["id"], row["count"]) for row in rows] == [("a", None)]


@given(st.lists(st.integers(1, 1 << 30), max_size=200))
def test_d5_merging_ends_with_few_small_files_and_rewrites_a_row_seldom(added: list[int]) -> None:
    files: list[int] = []
    rewritten = 0
    for size in added:
        files.append(size)
        for _ in range(20):
            target = merged_size(files)
            if target is None:
                break
            small = sorted(one for one in files if one < target)
            files = [one for one in files if one >= target]
            bins: list[int] = []
            for one in small:
                if bins and bins[-1] + one <= target:
                    bins[-1] += one
                else:
                    bins.append(one)
            assert len(bins) < len(small), "a merge makes fewer files"
            rewritten += sum(small)
            files += bins
        else:
            pytest.fail("merging does not end")
    assert sum(files) == sum(added)
    assert rewritten <= 16 * max(sum(added), 1)


# --- snapshots -------------------------------------------------------------------------------------------------------


def test_d5_the_last_snapshot_names_the_versions_that_belong_together(tmp_path: Path) -> None:
    snapshots = Snapshots(TableStorage(tmp_path))
    assert snapshots.last() == TablesVersion()
    transaction = AppTransaction("app", 4)
    assert not snapshots.is_committed(transaction)
    snapshots.add(TablesVersion(1, {"operations": 1, "entries": 3}, newest=9), AppTransaction("app", 3))
    assert not snapshots.is_committed(transaction)
    snapshots.add(TablesVersion(2, {"operations": 2, "entries": 3}, newest=8), transaction)
    assert snapshots.last() == TablesVersion(2, {"operations": 2, "entries": 3}, 8)
    assert snapshots.is_committed(transaction)
    assert not snapshots.is_committed(AppTransaction("other", 0))
    table = polars.read_delta(str(tmp_path / SNAPSHOTS))
    assert table.sort("snapshot", "table_name").select("snapshot", "table_name", "version").rows() == [
        (1, "entries", 3), (1, "operations", 1), (2, "entries", 3), (2, "operations", 2)
    ]  # fmt: skip


@pytest.mark.thorough
def test_d5_a_process_that_ends_right_after_reading_a_snapshot_is_not_aborted(tmp_path: Path) -> None:
    snapshots = Snapshots(TableStorage(tmp_path))
    for number in range(1, 7):
        snapshots.add(TablesVersion(number, {"operations": number}))
    program = f"""
from pathlib import Path
from twinbus.pipeline.snapshots import Snapshots
from twinbus.pipeline.table_storage import TableStorage
print(Snapshots(TableStorage(Path({str(tmp_path)!r}))).last().number)
"""
    # About one process in ten was aborted.
    for _ in range(30):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "6\n", "")


@pytest.mark.thorough
def test_d5_the_files_of_many_snapshots_are_replaced_by_one(tmp_path: Path) -> None:
    snapshots = Snapshots(TableStorage(tmp_path))
    for number in range(1, 66):
        snapshots.add(TablesVersion(number, {"operations": number}), AppTransaction("app", number))
    assert len(TableLog(TableStorage(tmp_path), SNAPSHOTS).files()) == 1
    assert snapshots.last() == TablesVersion(65, {"operations": 65})
    assert snapshots.is_committed(AppTransaction("app", 65))
    assert sorted(polars.read_delta(str(tmp_path / SNAPSHOTS))["snapshot"]) == [*range(1, 66)]


def test_d5_a_snapshot_stays_for_a_day_after_the_next_one_however_old_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_module, "_MOST_FILES", 3)
    snapshots, now = Snapshots(TableStorage(tmp_path)), time.time()
    for number, days in enumerate((4, 3, 0.5, 0), 1):
        monkeypatch.setattr(time, "time", lambda at=now - days * 24 * 3600: at)
        snapshots.add(TablesVersion(number, {"operations": number}))
    assert sorted(polars.read_delta(str(tmp_path / SNAPSHOTS))["snapshot"]) == [2, 3, 4]
    assert snapshots.last() == TablesVersion(4, {"operations": 4})


def test_d5_tables_of_the_old_format_are_refused_with_the_command_that_makes_them_again(tmp_path: Path) -> None:
    (tmp_path / "current.json").write_text("{}")
    with pytest.raises(OperatorError) as raised:
        Snapshots(TableStorage(tmp_path)).last()
    assert raised.value.hint == f"Make them again from the ledger: twinbus ledger ingest LEDGER {tmp_path} --rebuild"
