"""Who may import whom: the contracts of pyproject.toml, shown in full when one is broken."""

import subprocess
import sys
from pathlib import Path

from .source import ROOT


def test_every_import_keeps_to_the_order_of_the_rooms() -> None:
    # In a process of its own: it sets up logging anew, which would silence the loggers of tests that follow.
    program = Path(sys.executable).with_name("lint-imports")
    command = [str(program), "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
