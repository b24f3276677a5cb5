"""Runs several `twinbus` commands in one process, one after the other, so that Spark starts only once.

Each line of stdin holds the arguments of one command, as JSON. After each command, the process prints a line with the
exit code of the command. When stdin closes, the demo has ended and needs no more results, so the process kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from queue import SimpleQueue

from twinbus.cli.demo.processes import ENDED, READY
from twinbus.cli.terminal import lowest


def main() -> None:
    from twinbus.cli.main import app  # noqa: PLC0415 - slow
    from twinbus.pipeline.session import session  # noqa: PLC0415 - slow

    # This call starts Spark. The commands use the same Spark session.
    session("twinbus demo").range(1).count()
    commands = read_commands()
    _write(READY)
    while True:
        code: object = 0
        try:
            app(json.loads(commands.get()), prog_name="twinbus")
        except SystemExit as end:
            code = end.code or 0
        _write(f"{ENDED}{code}")


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
