"""A Spark driver that stops between two commits of a run of the pipeline, until a test kills it.

It brings the same ledger into several tables, one after the other: in folders, or at URLs. In each of them it stops at
another step, and leaves a file in the folder of marks.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pipeline.driven import QUICK
from twinbus.pipeline import results
from twinbus.pipeline.bill_facts import FACTS
from twinbus.pipeline.ingested_segments import IngestedSegments
from twinbus.pipeline.run import PipelineRun
from twinbus.pipeline.session import session
from twinbus.pipeline.snapshots import Snapshots
from twinbus.pipeline.table_log import TableLog
from twinbus.pipeline.table_storage import TableStorage

STEPS = 4 + 3 + 4 + 1 + 3 + 2
"""Before the commits of operations, pending, entries and steps; of three tables of tallies; of four results; of
segments; of three results that Spark does not write; before and after the commit of snapshots."""
FACT_STEPS = 1 + 1 + len(FACTS) + 1 + 2
"""When all batches are in, before the commits of the timeline, of segments, of each kind of facts of the bill and of
`as_of`; before and after the commit of snapshots."""


def mark(marks: Path, root: str) -> Path:
    """Return the file that says that the ingest into these tables has stopped."""
    return marks / hashlib.sha256(root.encode()).hexdigest()


def stop_at_commits(marks: Path, steps: dict[str, int]) -> None:
    """In each of the tables, stop at this step, counted over all batches."""
    reached = dict.fromkeys(steps, 0)

    def step(storage: TableStorage) -> None:
        root = str(storage.location)
        if reached[root] == steps[root]:
            mark(marks, root).touch()
            threading.Event().wait()
        reached[root] += 1

    def stopping(commit: Callable[..., Any], *, twice: bool = False) -> Callable[..., Any]:
        """Return a function that stops before a commit, or before and after it. Its first argument has a storage."""

        def stopped(made: Any, *rest: Any, **named: Any) -> Any:
            step(made.storage)
            done = commit(made, *rest, **named)
            if twice:
                step(made.storage)
            return done

        return stopped

    # Only in this process, which the test kills.
    for owner, name in ((TableLog, "commit"), (IngestedSegments, "add"), (results, "_overwrite")):
        setattr(owner, name, stopping(getattr(owner, name)))
    setattr(Snapshots, "add", stopping(Snapshots.add, twice=True))  # noqa: B010  # mypy would not allow the assignment


def main(ledger: str, marks: Path, steps: dict[str, int]) -> None:
    spark = session("committing", settings={"spark.driver.defaultJavaOptions": QUICK})
    stop_at_commits(marks, steps)
    for root in steps:
        threading.Thread(target=run, args=(PipelineRun(spark, ledger, root),), daemon=True).start()
        while not mark(marks, root).exists():
            time.sleep(0.05)
    threading.Event().wait()


def run(made: PipelineRun) -> None:
    """Ingest the ledger in batches of one segment, then make the results that need the whole history."""
    made.start(most_bytes=1).awaitTermination()
    made.update()


def go_on(ledger: str, roots: list[str]) -> None:
    """Ingest the ledger into these tables, and end."""
    spark = session("committing", settings={"spark.driver.defaultJavaOptions": QUICK})
    for root in roots:
        PipelineRun(spark, ledger, root).start(most_bytes=1).awaitTermination()


if __name__ == "__main__":
    if sys.argv[4:]:
        go_on(sys.argv[1], sys.argv[4:])
    else:
        main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
