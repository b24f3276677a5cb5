"""Programs that some tests need beside Python: a browser, a database server."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def component_missing(name: str, packages: str) -> NoReturn:
    """Skip the test on a person's machine; fail it in CI, which installs every component (`.ci/run`)."""
    text = f"this test needs {name}; on Debian: apt-get install --no-install-recommends {packages}"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"CI must not leave it out: {text}")
    pytest.skip(text)
