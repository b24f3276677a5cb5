"""A real headless Chromium for tests. Without one, a test is skipped on a person's machine and fails in CI."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.components import component_missing

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def command(profile: Path, *options: str) -> list[str]:
    """The command line of the browser with a fresh profile. Skips or fails the test where there is no browser."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        component_missing("Chromium", "chromium")
    return [found, *_OPTIONS, f"--user-data-dir={profile}", *options]


@contextmanager
def opened(url: str, profile: Path, *options: str) -> Iterator[None]:
    """Open this page in the browser. The browser ends with the block."""
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [*command(profile, *options), url],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield
        finally:
            # Its helpers are in its own process group.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
