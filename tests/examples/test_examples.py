"""Every example runs, and prints what it should show."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SHOWN = {
    "send_receive": ["received order-1: two coffees"],
    "sessions": [
        "ann had tea then cake",
        "bob had coffee then water",
        "the session of ann remembers: tea, cake",
    ],
    "faults": [
        "busy twice: the client tried again by itself, and the message arrived",
        "acknowledgement lost: the client sees OperationTimeoutError, though the message was stored",
        "sent again under the same id: 1 in the queue",
        "crash after storing, before answering: the client sees ServiceBusConnectionError",
        "after the restart the queue holds: patience, last words",
    ],
    "outage": [
        "failover_engaged orders",
        "they wait on the secondary: 3 in the backlog",
        "orders is failed_over, 3 diverted",
        "the primary holds 2 orders",
    ],
    "tour": [
        "completed    two coffees",
        "dead-lettered a tea with no cup",
        "received three waters",
        "received breakfast, now that it is due",
        "found a tea with no cup among the dead letters: tea needs a cup",
        "audit heard that the shop is open",
        "billing heard that the shop is open",
    ],
}


def run(name: str) -> str:
    """Run an example. Returns what is wrong with its output, or None."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    missing = [line for line in SHOWN[name] if line not in done.stdout]
    if done.returncode == 0 and not missing and not done.stderr:
        return ""
    return f"{name} ended with {done.returncode}, did not show {missing} and said:\n{done.stderr}"


@pytest.mark.thorough
def test_every_example_shows_what_it_is_for() -> None:
    # All at the same time, because the SDK waits most of the time.
    with ThreadPoolExecutor(len(SHOWN)) as pool:
        wrong = [told for told in pool.map(run, SHOWN) if told]
    assert not wrong, "\n".join(wrong)


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(SHOWN)
