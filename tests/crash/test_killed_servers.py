"""Servers are killed with -9 under three `twinbus syphon`: no syphon ends by itself, and nothing is lost (Y1, Y3).

Each round, the primary, the secondary or both are killed while messages come home, and started again. At the end both
servers are away when the syphons are stopped. Then a drain brings the rest home. What arrived is counted in the files
of the servers (`stored_ids`).
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from tests.cli.running import COMMAND, PATIENCE, environment
from tests.crash.stored_ids import StoredIds, marked_body
from tests.tiers import budget
from twinbus.connect import connect
from twinbus.message import Message
from twinbus.testing import LocalNamespace

pytestmark = pytest.mark.timeout(900)

ROUNDS = budget(2, 20, 200)
ROUNDS_PER_RUN = 20
# The transport of the SDK is not the default, and costs as much time for each round.
SDK_ROUNDS = budget(1, 4, 20)
RUNS = [("native", seed, min(ROUNDS, ROUNDS_PER_RUN)) for seed in range(-(-ROUNDS // ROUNDS_PER_RUN))]
SYPHONS = 3
NAME = "contoso"
QUEUES = tuple(f"{NAME}/x-servicebus-transfer/{index}" for index in range(2))
DESTINATION = "orders"
FILL = 300
LONGEST_DELAY = 0.4
"""Most seconds from the arrival of the messages to the kill, and from the kill to the next start."""
_CONFIG: Final[dict[str, dict[str, Any]]] = {
    "primary": {"queues": [{"name": DESTINATION}]},
    # The shortest lock that Service Bus allows: what was held at a kill comes back after this time.
    "secondary": {
        "queues": [{"name": name, "lock_duration": "PT5S", "max_delivery_count": 2**31 - 1} for name in QUEUES]
    },
}


class Servers:
    """A primary and a secondary in processes of their own, with their data on disk."""

    def __init__(self, folder: Path) -> None:
        self.made = {
            name: LocalNamespace(
                name,
                data=folder / name,
                config={"namespaces": [{"name": name, **_CONFIG[name]}]},
                log_level="warning",
            )
            for name in ("primary", "secondary")
        }
        self._folder = folder

    def __enter__(self) -> Servers:
        for one in self.made.values():
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.made.values():
            one.close()

    @property
    def environment(self) -> dict[str, str]:
        texts = {f"TWINBUS_{name.upper()}_CONNECTION_STRING": one.connection_string for name, one in self.made.items()}
        return {**texts, "TWINBUS_PRIMARY_NAME": NAME}

    def stored(self, name: str, queue: str) -> StoredIds:
        return StoredIds(self._folder / name / f"{name}.sqlite", queue)

    async def fill(self, queue: str, names: Sequence[str]) -> None:
        properties = {"x-ms-path": DESTINATION}
        messages = [Message(marked_body(name), message_id=name, application_properties=properties) for name in names]
        async with connect(self.made["secondary"].connection_string) as bus:
            await (await bus.sender(queue)).send(messages)


class Syphons:
    """Running `twinbus syphon` processes. `texts` returns what one has printed to stderr."""

    def __init__(self, servers: Servers, folder: Path, transport: str) -> None:
        self._files = [(folder / f"syphon-{number}.out", folder / f"syphon-{number}.err") for number in range(SYPHONS)]
        arguments = ["syphon", "--transport", transport, "--timeout", "2", "--every", "0.1", "--json"]
        ledger = ["--ledger", str(folder / "ledger")]
        self.processes = [
            subprocess.Popen(
                [*COMMAND, *arguments, *ledger],
                env=environment(**servers.environment),
                stdout=out.open("wb"),
                stderr=err.open("wb"),
            )
            for out, err in self._files
        ]

    def check(self, when: str) -> None:
        """Fail if a syphon has ended."""
        for process, (_, err) in zip(self.processes, self._files, strict=True):
            code = process.poll()
            assert code is None, f"{when}: a syphon ended with {code}: {err.read_text()[-3000:]}"

    def are_running(self) -> bool:
        """Return whether every syphon has printed its first line."""
        self.check("at the start")
        return all(out.stat().st_size for out, _ in self._files)

    def stop(self) -> None:
        """Stop the syphons with SIGTERM. Each has to end with 0."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process, (_, err) in zip(self.processes, self._files, strict=True):
            assert process.wait(PATIENCE) == 0, err.read_text()[-3000:]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def syphons(servers: Servers, folder: Path, transport: str) -> Iterator[Syphons]:
    made = Syphons(servers, folder, transport)
    try:
        yield made
    finally:
        made.kill()


def until(holds: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def kill_servers(servers: Servers, running: Syphons, seed: int, rounds: int) -> set[str]:
    """Kill servers so often. Returns the ids of all messages that the secondary has accepted."""
    chance, sent = Random(seed), set[str]()
    for number in range(rounds):
        victims = chance.choice((["primary"], ["secondary"], ["primary", "secondary"]))
        for index, queue in enumerate(QUEUES):
            names = [f"{seed}-{number}-{index}-{part}" for part in range(FILL)]
            asyncio.run(servers.fill(queue, names))
            sent.update(names)
        time.sleep(chance.uniform(0, LONGEST_DELAY))
        for name in victims:
            servers.made[name].kill()
        running.check(f"seed {seed}, round {number}: {victims} were killed")
        time.sleep(chance.uniform(0, LONGEST_DELAY))
        for name in victims:
            servers.made[name].start()
        running.check(f"seed {seed}, round {number}: {victims} are back")
    return sent


def drain(servers: Servers, folder: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "syphon", "--drain", "--wait-for-destinations", "30s", "--ledger", str(folder / "ledger")],
        env=environment(**servers.environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(("transport", "seed", "rounds"), [*RUNS, ("sdk", 0, SDK_ROUNDS)])
def test_y1_y3_no_syphon_ends_because_servers_are_killed_and_every_message_comes_home(
    tmp_path: Path, transport: str, seed: int, rounds: int
) -> None:
    with ExitStack() as stack:
        servers = stack.enter_context(Servers(tmp_path))
        running = stack.enter_context(syphons(servers, tmp_path, transport))
        until(running.are_running)
        sent = kill_servers(servers, running, seed, rounds)
        for one in servers.made.values():
            one.kill()
        running.stop()
        for one in servers.made.values():
            one.start()
        drain(servers, tmp_path)
        arrived = servers.stored("primary", DESTINATION).all()
        left = [name for queue in QUEUES for name in servers.stored("secondary", queue).all()]
    print(f"{len(sent)} messages, {arrived.total() - len(arrived)} further copies")
    assert set(arrived) == sent
    assert left == []
