"""Several `twinbus` commands in one process, one after the other, so that Spark starts once for all of them.

A line of stdin is the arguments of one, as JSON; when it has ended, a line tells its exit code. With stdin it ends at
once: the demo is gone, and what is under way is for nobody.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from queue import SimpleQueue
from typing import Final

from twinbus.cli.terminal import lowest

READY: Final = "\x1eready"
ENDED: Final = "\x1eended "


def main() -> None:
    from twinbus.cli.main import app  # noqa: PLC0415 - it imports the demo, and this with it
    from twinbus.pipeline.session import session  # noqa: PLC0415 - slow

    # The commands find this one.
    session("twinbus demo").range(1).count()
    asked = listen()
    _tell(READY)
    while True:
        code: object = 0
        try:
            app(json.loads(asked.get()), prog_name="twinbus")
        except SystemExit as end:
            code = end.code or 0
        _tell(f"{ENDED}{code}")


def listen() -> SimpleQueue[str]:
    """The lines of stdin, as they come."""
    lines: SimpleQueue[str] = SimpleQueue()

    def hear() -> None:
        for line in sys.stdin:
            lines.put(line)
        os.killpg(0, signal.SIGKILL)  # the JVM too

    threading.Thread(target=hear, daemon=True).start()
    return lines


def _tell(text: str) -> None:
    # For the demo, not for a terminal: past the stream that would escape the marks.
    stdout = lowest(sys.stdout)
    stdout.write(f"{text}\n")
    stdout.flush()


if __name__ == "__main__":
    main()
