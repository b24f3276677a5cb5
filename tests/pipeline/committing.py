"""A Spark driver that stops between two commits of a run of the pipeline, until a test kills it.

It brings the same ledger into several folders of tables, one after the other. In each folder it stops at another step.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pipeline.driven import QUICK
from twinbus.pipeline import results
from twinbus.pipeline.ingested_segments import IngestedSegments
from twinbus.pipeline.run import PipelineRun
from twinbus.pipeline.session import session
from twinbus.pipeline.snapshots import Snapshots
from twinbus.pipeline.table_log import TableLog

STOPPED = "stopped"
STEPS = 4 + 3 + 4 + 1 + 3 + 2
"""Before the commits of operations, pending, entries and steps; of three tables of tallies; of four results; of
segments; of three results that Spark does not write; before and after the commit of snapshots."""


def stop_at_commits(steps: dict[str, int]) -> None:
    """In the tables of each folder, stop at this step, counted over all batches. Leaves a file in the folder."""
    reached = dict.fromkeys(steps, 0)

    def step(root: Path) -> None:
        if reached[str(root)] == steps[str(root)]:
            (root / STOPPED).touch()
            threading.Event().wait()
        reached[str(root)] += 1

    def stopping(commit: Callable[..., Any], *, twice: bool = False) -> Callable[..., Any]:
        """Return a function that stops before a commit, or before and after it. Its first argument has a storage."""

        def stopped(made: Any, *rest: Any, **named: Any) -> Any:
            step(made.storage.root)
            done = commit(made, *rest, **named)
            if twice:
                step(made.storage.root)
            return done

        return stopped

    # Only in this process, which the test kills.
    for owner, name in ((TableLog, "commit"), (IngestedSegments, "add"), (results, "_overwrite")):
        setattr(owner, name, stopping(getattr(owner, name)))
    setattr(Snapshots, "add", stopping(Snapshots.add, twice=True))  # noqa: B010  # mypy would not allow the assignment


def main(ledger: str, steps: dict[str, int]) -> None:
    spark = session("committing", settings={"spark.driver.defaultJavaOptions": QUICK})
    stop_at_commits(steps)
    for root in map(Path, steps):
        PipelineRun(spark, Path(ledger), root).start(most_bytes=1)
        while not (root / STOPPED).exists():
            time.sleep(0.05)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
