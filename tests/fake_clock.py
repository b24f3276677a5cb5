"""Processes with a wrong clock, by libfaketime. Without it, a test is skipped on a person's machine and fails in CI."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Final

from tests.components import component_missing

_ROOT: Final = Path(__file__).resolve().parents[1]
_PATH: Final = (_ROOT / "tests" / "fake_clock_site", _ROOT / "src", _ROOT)


def environment(ahead: timedelta) -> dict[str, str]:
    """Return variables for a process whose wall clock is ahead by this time. Its monotonic clock stays as it is."""
    if not ahead:
        return {}
    # The variant for programs with threads.
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        component_missing("libfaketime", "faketime")
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME": f"{ahead.total_seconds():+.0f}",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": os.pathsep.join(map(str, _PATH)),
    }
