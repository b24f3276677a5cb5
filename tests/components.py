"""Programs that some tests need beside Python: a browser, a database server."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def component_missing(name: str, packages: str = "", install: str = "") -> NoReturn:
    """Skip the test on a person's machine; fail it in CI, which installs every component (`.ci/run`).

    `packages` are packages of Debian; `install` is the command for a component that is none.
    """
    text = f"this test needs {name}; "
    text += install or f"on Debian: apt-get install --no-install-recommends {packages}"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"CI must not leave it out: {text}")
    pytest.skip(text)
