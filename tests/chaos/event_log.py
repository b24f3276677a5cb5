"""The log of one process of the chaos suite: one JSON line for each event, written before the process goes on.

The log is not buffered, so it is complete after a kill.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class EventLog:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(self, event: str, ids: Iterable[str], *more: str) -> None:
        os.write(self._file, json.dumps([event, list(ids), *more]).encode() + b"\n")


def read(path: Path) -> list[list[Any]]:
    if not path.exists():
        return []
    # The last line of a process that was killed may be incomplete.
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
