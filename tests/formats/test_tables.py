"""Tables that earlier versions wrote, as other tools read them. With Spark: `tests/pipeline/test_older_tables.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.dataset as datasets
import pytest

from tests.formats.sets import expected, sets_with, unpacked


@pytest.fixture(params=sets_with("tables.tar.xz"))
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return unpacked(request.param / "tables.tar.xz", tmp_path), expected(request.param / "tables.json")


def test_d4_other_tools_read_the_living_parts_of_older_tables(old: tuple[Path, dict[str, Any]]) -> None:
    tables, said = old
    parts = json.loads((tables / "current.json").read_text())["parts"]
    read = {name: [str(tables / part["path"]) for part in parts[name]] for name in parts}
    assert len(read["operations"]) > 1, "several parts are one table"

    def rows(table: str, *columns: str) -> list[tuple[Any, ...]]:
        files = [f"{folder}/**/*.parquet" for folder in read[table]]
        return sorted(duckdb.read_parquet(files).select(*columns).fetchall())

    assert [name for (name,) in rows("operations", "id")] == said["operations"]
    assert [list(row) for row in rows("entries", "kind", "id")] == said["entries"]
    assert [name for (name,) in rows("pending", "id")] == said["pending"]
    assert [[Path(file).name, line] for file, line in rows("problems", "file", "line")] == said["problems"]


def test_d4_other_tools_read_the_results_beside_older_tables(old: tuple[Path, dict[str, Any]]) -> None:
    tables, said = old
    cost = datasets.dataset(tables / "results" / "cost").to_table().to_pylist()
    sums: dict[str, dict[str, int]] = {}
    for row in cost:
        stage = sums.setdefault(row["stage"], {"operations": 0, "units": 0, "bytes": 0})
        for name in stage:
            stage[name] += row[name]
    assert sums == said["cost"]
