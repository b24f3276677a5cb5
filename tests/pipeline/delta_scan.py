"""DuckDB's own reader of Delta Lake tables, `delta_scan`, in a process with an environment of its own.

`delta_scan` is an extension. PyPI has it for one version of DuckDB, which is not the version of this project. The
environment is a venv outside of the project, and is kept for the next run. To make it needs PyPI.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import venv
from pathlib import Path
from types import TracebackType

VERSION = "1.5.5"
FOLDER = Path(tempfile.gettempdir(), f"twinbus-delta-scan-{VERSION}")
MADE = FOLDER / "made"
PACKAGES = (f"duckdb=={VERSION}", f"duckdb-extension-delta=={VERSION}")
# Runs in the other environment. For each line with a folder and a version (-1: the latest) it prints the rows.
READER = """
import sys
from pathlib import Path
import duckdb, duckdb_extension_delta
(extension,) = Path(duckdb_extension_delta.__file__).parent.rglob("delta.duckdb_extension")
database = duckdb.connect()
database.execute(f"load '{extension}'")
for line in sys.stdin:
    folder, version = line.rstrip("\\n").split("\\t")
    at = "" if version == "-1" else f", version = {version}"
    rows = database.execute(f"select id from delta_scan('{folder}'{at})").fetchall()
    print(len(rows), flush=True)
"""


class DeltaScan:
    """Counts the rows of tables with `delta_scan`. A context manager."""

    def __enter__(self) -> DeltaScan:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [environment(), "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def count(self, root: Path, table: str, version: int | None) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            print(root / table, -1 if version is None else version, sep="\t", file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())


def is_made() -> bool:
    """Return whether the environment is there."""
    return MADE.exists()


def environment() -> Path:
    """Make the environment, unless it is there, and return its Python."""
    python = FOLDER / "bin" / "python"
    if not is_made():
        venv.create(FOLDER, with_pip=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        subprocess.run([*pip, "--disable-pip-version-check", *PACKAGES], check=True)
        MADE.touch()
    return python
