"""Node, with the SDK and the other packages of `package.json`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.compat.javascript.node_tests import HERE, alone, node_and_npm
from twinbus.testing import LocalNamespace


@pytest.fixture(scope="module")
def node() -> list[str]:
    """The command that runs node; brings the SDK if `make node` did not."""
    node, npm = node_and_npm()
    with alone(HERE / ".install.lock"):
        wanted = json.loads((HERE / "package.json").read_text(encoding="utf-8"))["dependencies"]
        if not all((HERE / "node_modules" / name / "package.json").exists() for name in wanted):
            subprocess.run([*npm, "ci", "--no-audit", "--no-fund"], cwd=HERE, check=True)
    return node


@pytest.fixture(scope="module")
def namespace() -> Iterator[LocalNamespace]:
    with LocalNamespace() as namespace:
        yield namespace
