"""A Spark driver that stops between two commits of an ingest, until a test kills it.

It ingests the same ledger into several folders of tables, one after the other. In each folder it stops at another step.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.pipeline.driven import QUICK
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.jobs import follow_jobs
from twinbus.pipeline.session import session
from twinbus.pipeline.snapshots import Snapshots, TablesVersion
from twinbus.pipeline.table_log import AppTransaction, TableLog

FOLLOWED = ("cost",)
STOPPED = "stopped"
STEPS = 7
"""Before the commits of operations, pending, entries, steps and tallies; before and after the commit of snapshots."""


def stop_at_commits(steps: dict[str, int]) -> None:
    """In the tables of each folder, stop at this step, counted over all batches. Leaves a file in the folder."""
    reached = dict.fromkeys(steps, 0)
    commit, add = TableLog.commit, Snapshots.add

    def step(root: Path) -> None:
        if reached[str(root)] == steps[str(root)]:
            (root / STOPPED).touch()
            threading.Event().wait()
        reached[str(root)] += 1

    def stopping_commit(log: TableLog, *rest: Any, **named: Any) -> int:
        step(log.storage.root)
        return commit(log, *rest, **named)

    def stopping_add(snapshots: Snapshots, version: TablesVersion, transaction: AppTransaction | None = None) -> None:
        step(snapshots.storage.root)
        add(snapshots, version, transaction)
        step(snapshots.storage.root)

    # Only in this process, which the test kills.
    setattr(TableLog, "commit", stopping_commit)  # noqa: B010  # mypy would not allow the assignment
    setattr(Snapshots, "add", stopping_add)  # noqa: B010


def main(ledger: str, steps: dict[str, int]) -> None:
    spark = session("committing", settings={"spark.driver.defaultJavaOptions": QUICK})
    stop_at_commits(steps)
    for root in map(Path, steps):
        ingest_ledger(spark, Path(ledger), root, most_bytes=1, extend=follow_jobs(FOLLOWED))
        while not (root / STOPPED).exists():
            time.sleep(0.05)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
