"""Runs the pipeline and other `twinbus` commands in one process, so that Spark starts only once.

From its start, the process follows the ledger in the background, as `twinbus pipeline run --follow` does, and prints a
line for each batch. Each line of stdin holds the arguments of one command, as JSON; FINISH instead of arguments ends
the pipeline. After each command, the process prints a line with the exit code of the command. When stdin closes, the
demo has ended and needs no more results, so the process kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from twinbus.cli.demo.processes import BATCH, ENDED, FINISH, FOLLOW_SECONDS, LEDGER, READY, TABLES
from twinbus.cli.terminal import lowest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from twinbus.pipeline import CommittedBatch


def main() -> None:
    from twinbus.pipeline.session import session  # noqa: PLC0415 - slow

    # This call starts Spark. The commands use the same Spark session.
    spark = session("twinbus demo")
    commands = read_commands()
    pipeline = _Following(spark)
    _write(READY)
    while True:
        arguments = json.loads(commands.get())
        _write(f"{ENDED}{pipeline.finish() if arguments == FINISH else run(arguments)}")


def run(arguments: Sequence[str]) -> int:
    """Run a command, and return its exit code."""
    from twinbus.cli.main import app  # noqa: PLC0415 - slow

    try:
        app(arguments, prog_name="twinbus")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


class _Following:
    """The pipeline, in a thread of its own. `finish` ingests all entries that are there, and ends it."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._stopping = threading.Event()
        self._code = 1
        self._thread = threading.Thread(target=self._run, name="twinbus-pipeline", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from twinbus.cli.errors import print_error  # noqa: PLC0415 - slow
        from twinbus.cli.pipeline import follow_ledger  # noqa: PLC0415
        from twinbus.pipeline import PipelineRun  # noqa: PLC0415

        try:
            made = PipelineRun(self._spark, Path(LEDGER), Path(TABLES), report=_write_batch)
            follow_ledger(made, FOLLOW_SECONDS, self._stopping, to_the_end=True)
        except Exception as error:  # the demo shows it, whatever it is
            print_error(error)
        else:
            self._code = 0

    def finish(self) -> int:
        """Return the exit code: 0 if all entries are ingested."""
        self._stopping.set()
        self._thread.join()
        return self._code


def _write_batch(batch: CommittedBatch) -> None:
    from twinbus.cli.pipeline import batch_text  # noqa: PLC0415 - slow

    _write(f"{BATCH}{batch_text(batch)}")


def read_commands() -> SimpleQueue[str]:
    """Return a queue that gets each line of stdin."""
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os.killpg(0, signal.SIGKILL)  # the whole process group, so that the JVM ends, too

    threading.Thread(target=read, daemon=True).start()
    return lines


def _write(text: str) -> None:
    # The demo reads this text, not a terminal. So it is written to the original stream: `PrintableStream` would escape
    # its control characters.
    stdout = lowest(sys.stdout)
    stdout.write(f"{text}\n")
    stdout.flush()


if __name__ == "__main__":
    main()
