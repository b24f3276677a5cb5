"""Writes a new set of data in today's formats: `python -m tests.formats.making set2`. See README.md first.

Takes about a minute, and needs Spark. Refuses a set that exists: an old set is never written again.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from tests.formats.making import backlog, data_folders, ledgers, spark
from tests.formats.sets import HERE


def main() -> None:
    (name,) = sys.argv[1:] or ("",)
    if not re.fullmatch(r"set[0-9]+", name):
        sys.exit("Name the new set: set2, set3, …")
    folder = HERE / name
    try:
        folder.mkdir()
    except FileExistsError:
        sys.exit(f"{folder} exists. A set is never written again: name a new one.")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        data_folders.make(folder, work)
        backlog.make(folder, work)
        sealed = ledgers.make(folder, work)
        spark.make(folder, work, sealed)
    size = sum(file.stat().st_size for file in folder.iterdir())
    sys.stdout.write(f"{folder}: {size:,} bytes. Add it to README.md.\n")


if __name__ == "__main__":
    main()
