"""Tables that earlier versions wrote, as other tools read them. With Spark: `tests/pipeline/test_older_tables.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars
import pytest
from deltalake import DeltaTable

from tests.formats.sets import expected, sets_with, unpacked
from twinbus.pipeline.snapshots import Snapshots
from twinbus.pipeline.table_storage import TableStorage

DELTA = [one for one in sets_with("tables.tar.xz") if one.id != "set1"]
"""Before, the tables were behind `current.json`: current versions refuse them."""


@pytest.fixture(params=DELTA)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return unpacked(request.param / "tables.tar.xz", tmp_path), expected(request.param / "tables.json")


def test_d4_d5_other_tools_read_the_last_snapshot_of_older_tables(old: tuple[Path, dict[str, Any]]) -> None:
    tables, said = old
    versions = Snapshots(TableStorage(tables)).last().tables
    assert len(DeltaTable(tables / "operations", version=versions["operations"]).file_uris()) > 1

    def rows(table: str, *columns: str) -> list[tuple[Any, ...]]:
        return sorted(polars.read_delta(str(tables / table), version=versions[table]).select(*columns).rows())

    assert [name for (name,) in rows("operations", "id")] == said["operations"]
    assert [list(row) for row in rows("entries", "kind", "id")] == said["entries"]
    assert [name for (name,) in rows("pending", "id")] == said["pending"]
    assert [[Path(file).name, line] for file, line in rows("problems", "file", "line")] == said["problems"]


def test_d4_other_tools_read_the_results_beside_older_tables(old: tuple[Path, dict[str, Any]]) -> None:
    tables, said = old
    cost = polars.read_delta(str(tables / "results" / "cost"))
    found = cost.group_by("stage").agg(polars.col("operations", "units", "bytes").sum()).to_dicts()
    assert {row.pop("stage"): row for row in found} == said["cost"]
