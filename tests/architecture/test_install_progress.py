"""Set-up shows how far it is: `.ci/pip-progress` prints few lines of pip's many, and all of them if pip fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRINTED = """
import sys, time
print("Collecting azure-core==1.0")
print("  Downloading azure_core-1.0.whl (200 kB)")
print("Collecting pyspark==4.0 (from -r lock (line 3))")
print("  Downloading pyspark-4.0.tar.gz (400 MB)")
print("Installing collected packages: azure-core, pyspark")
print("WARNING: a warning of pip")
sys.exit(int(sys.argv[-1] == "--fail"))
"""


def installed(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a module that prints what pip prints, and has its name."""
    (folder / "pip").mkdir()
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(PRINTED, encoding="utf-8")
    (folder / "lock").write_text("# a lock\nazure-core==1.0 \\\n    --hash=x\npyspark==4.0 \\\n    --hash=y\n")
    return subprocess.run(
        [sys.executable, ROOT / ".ci" / "pip-progress", "-r", folder / "lock", *more],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_installation_tells_how_many_packages_it_installs(tmp_path: Path) -> None:
    done = installed(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(" s  ")[1] for line in done.stdout.splitlines()] == ["installing 2 packages"]


def test_an_installation_that_fails_shows_everything(tmp_path: Path) -> None:
    done = installed(tmp_path, "--fail")
    assert done.returncode == 1
    assert "Downloading pyspark-4.0.tar.gz (400 MB)" in done.stderr


def test_an_installation_without_packages_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = progress_class()(0)
    for line in ("Obtaining file:///here", "Installing collected packages: twinbus"):
        progress.read(line)
    assert capsys.readouterr().out == ""


def test_every_installation_of_make_shows_how_far_it_is() -> None:
    recipes = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    assert [line for line in recipes if "pip install" in line] == []
    assert len([line for line in recipes if ".ci/pip-progress" in line]) == 4


def test_the_state_is_told_with_the_package_and_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    progress = progress_class()(60)
    for line in PRINTED.splitlines()[2:6]:
        progress.read(line.removeprefix('print("').removesuffix('")'))
    progress.tell(now=True)
    assert "2 of at most 60 packages fetched, now pyspark (400 MB)" in capsys.readouterr().out


def progress_class() -> Any:
    names: dict[str, object] = {"__name__": "pip_progress"}
    exec((ROOT / ".ci" / "pip-progress").read_text(encoding="utf-8"), names)  # noqa: S102 - a script without .py
    return names["Progress"]
