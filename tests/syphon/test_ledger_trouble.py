"""L1 and L7: the ledger cannot be written just when a delivery is to be recorded, before its completion."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.crash.ledger_oracle import contradictions
from tests.syphon.two_namespaces import TwoNamespaces, config, grounds, ids, numbered, until
from twinbus.ledger import (
    Balance,
    Ledger,
    LedgerOptions,
    LedgerUnavailableError,
    Role,
    Stage,
    balance,
    dead_writers,
    read_ledger,
)
from twinbus.syphon import HeldMessage, MoveStep, context
from twinbus.testing import LocalNamespaces

COUNT = 20
WINDOW = 5
END_SECONDS = 60.0
PAGE_BYTES = 4096


class Trouble(Protocol):
    """What happens to the ledger in `folder` until it is mended."""

    folder: Path

    def begin(self) -> None: ...

    def mend(self) -> None: ...


class GoneFolder:
    """The folder is moved away, and back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "ledger"

    def begin(self) -> None:
        self.folder.rename(self.folder.with_name("away"))

    def mend(self) -> None:
        self.folder.with_name("away").rename(self.folder)


class FullDisk:
    """The disk of the folder is full."""

    def __init__(self, folder: Path) -> None:
        self._disk = folder / "disk"
        self.folder = self._disk / "ledger"
        self._disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(self._disk)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("this user may not mount a file system")

    def begin(self) -> None:
        with (self._disk / "ballast").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 512)

    def mend(self) -> None:
        (self._disk / "ballast").unlink()

    def unmount(self) -> None:
        subprocess.run(["umount", self._disk], check=True)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    with LocalNamespaces("primary", "secondary", memory=True, config=config()) as found:
        yield found


@pytest.fixture
def ground(namespaces: LocalNamespaces) -> Iterator[TwoNamespaces]:
    yield from grounds(namespaces)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[FullDisk]:
    made = FullDisk(tmp_path)
    yield made
    made.unmount()


@pytest.fixture
def gone_folder(tmp_path: Path) -> GoneFolder:
    return GoneFolder(tmp_path)


async def fill(ground: TwoNamespaces, folder: Path) -> None:
    await ground.fill(COUNT)
    names = list(numbered(COUNT))
    with Ledger(folder, Role.CLIENT) as ledger:
        place = f"primary/{ground.orders}"
        ledger.done(Stage.SEND_BACKLOG, "secondary", ground.queue, names, (1,) * COUNT, place, seconds=0.1)


class AtStep:
    """Begins the trouble at a step: when the first messages were delivered, before their outcome is recorded."""

    def __init__(self, trouble: Trouble, ledger: Ledger, step: MoveStep = MoveStep.CONFIRMED) -> None:
        self._trouble = trouble
        self._ledger = ledger
        self._step = step
        self.reached = asyncio.Event()

    def __call__(self, step: MoveStep, held: Sequence[HeldMessage]) -> None:
        if step is self._step and not self.reached.is_set():
            self.reached.set()
            self._trouble.begin()
            # An entry that does not fit into the last page of the segment, which a full disk still has room in.
            self._ledger.state("restored", {"padding": "x" * PAGE_BYTES})


def agreed(found: Balance, arrived: dict[str, int]) -> list[str]:
    return contradictions(found, arrived=arrived, left=(), safe=numbered(COUNT), is_over=True)


async def stopped(ground: TwoNamespaces, trouble: Trouble, **options: Any) -> Counter[str]:
    """Runs a syphon with `on_error="stop"` into the trouble, stops it, and returns what is left in the backlog."""
    await fill(ground, trouble.folder)
    with Ledger(trouble.folder, Role.SYPHON, LedgerOptions(on_error="stop")) as ledger:
        confirmed = AtStep(trouble, ledger)
        async with ground.syphon(on_step=confirmed, ledger=ledger, **options) as syphon:
            running = asyncio.create_task(syphon.run())
            await confirmed.reached.wait()
            await until(lambda: ledger.failure)
            syphon.stop()
            await asyncio.wait_for(running, END_SECONDS)
        left = ids(await ground.left())
        trouble.mend()
        with contextlib.suppress(LedgerUnavailableError):  # the first flush reports what was lost before it
            ledger.flush()
    return left


async def test_l1_with_stop_what_cannot_be_recorded_as_delivered_is_not_completed(
    ground: TwoNamespaces, full_disk: FullDisk
) -> None:
    assert await stopped(ground, full_disk) == numbered(COUNT)
    with Ledger(full_disk.folder, Role.SYPHON) as ledger:
        await ground.drain(ledger=ledger)
    arrived = ids(await ground.arrived())
    assert arrived == numbered(COUNT) + numbered(COUNT)
    found = balance(read_ledger(full_disk.folder), dead_writers(full_disk.folder))
    assert agreed(found, arrived) == []
    assert found.incomplete == []


@pytest.mark.thorough
async def test_l1_with_stop_a_message_that_cannot_be_recorded_as_dead_lettered_is_not_dead_lettered(
    ground: TwoNamespaces, full_disk: FullDisk
) -> None:
    await ground.put(ground.diverted("wrong", timetolive="soon"))
    with Ledger(full_disk.folder, Role.SYPHON, LedgerOptions(on_error="stop")) as ledger:
        ledger.state("restored", {})
        assert ledger.flush()
        received = AtStep(full_disk, ledger, MoveStep.RECEIVED)
        async with ground.syphon(on_step=received, ledger=ledger) as syphon:
            running = asyncio.create_task(syphon.run())
            await received.reached.wait()
            await until(lambda: ledger.failure)
            syphon.stop()
            ended = await asyncio.wait_for(running, END_SECONDS)
        assert ids(await ground.left()) == {"wrong": 1}
        assert await ground.dead_lettered() == {}
        assert ended.total.dead_lettered == 0
        full_disk.mend()
        assert ledger.flush()
    with Ledger(full_disk.folder, Role.SYPHON) as ledger:
        assert (await ground.drain(ledger=ledger)).total.dead_lettered == 1
    assert set(await ground.dead_lettered()) == {"wrong"}


@pytest.mark.thorough
@pytest.mark.parametrize("step", [MoveStep.RECEIVED, MoveStep.CONFIRMED])
async def test_y11_with_stop_a_drain_gives_up_if_the_disk_stays_full(
    ground: TwoNamespaces, full_disk: FullDisk, step: MoveStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "LEDGER_PATIENCE", 0.0)
    await fill(ground, full_disk.folder)
    ledger = Ledger(full_disk.folder, Role.SYPHON, LedgerOptions(on_error="stop"))
    with pytest.raises(LedgerUnavailableError):
        await asyncio.wait_for(ground.drain(on_step=AtStep(full_disk, ledger, step), ledger=ledger), END_SECONDS)
    assert ids(await ground.left()) == numbered(COUNT)
    full_disk.mend()
    with contextlib.suppress(LedgerUnavailableError):
        ledger.close()
    with Ledger(full_disk.folder, Role.SYPHON) as ledger:
        await ground.drain(ledger=ledger)
    assert set(ids(await ground.arrived())) == set(numbered(COUNT))


@pytest.mark.thorough
async def test_l1_with_go_on_a_delivery_is_completed_and_recorded_once_there_is_room(
    ground: TwoNamespaces, full_disk: FullDisk
) -> None:
    await fill(ground, full_disk.folder)
    with Ledger(full_disk.folder, Role.SYPHON) as ledger:
        await ground.drain(on_step=AtStep(full_disk, ledger), ledger=ledger)
        assert ids(await ground.left()) == {}
        assert not ledger.flush()
        # Killed now, the syphon would leave this ledger.
        assert balance(read_ledger(full_disk.folder), {ledger.writer}).incomplete != []
        full_disk.mend()
        assert ledger.flush()
    arrived = ids(await ground.arrived())
    assert arrived == numbered(COUNT)
    found = balance(read_ledger(full_disk.folder), dead_writers(full_disk.folder))
    assert agreed(found, arrived) == []
    assert found.incomplete == []


@pytest.mark.thorough
async def test_l7_with_stop_a_folder_that_is_gone_ends_the_moves_at_the_next_flush(
    ground: TwoNamespaces, gone_folder: GoneFolder
) -> None:
    """The batch that was delivered just then is completed: its outcome is in the file, wherever the file is now."""
    left = await stopped(ground, gone_folder, window=WINDOW)
    assert left.total() >= COUNT - WINDOW
    with Ledger(gone_folder.folder, Role.SYPHON) as ledger:
        await ground.drain(ledger=ledger)
    arrived = ids(await ground.arrived())
    assert set(arrived) == set(numbered(COUNT))
    found = balance(read_ledger(gone_folder.folder), dead_writers(gone_folder.folder))
    assert agreed(found, arrived) == []
    # The folder is back with all its entries. The writer could not know that, and has recorded a gap.
    assert any("removed or replaced" in reason for reason in found.incomplete)


@pytest.mark.thorough
async def test_l7_with_go_on_the_entries_of_a_folder_that_is_gone_are_recorded_as_missing(
    ground: TwoNamespaces, gone_folder: GoneFolder
) -> None:
    await fill(ground, gone_folder.folder)
    with Ledger(gone_folder.folder, Role.SYPHON) as ledger:
        await ground.drain(on_step=AtStep(gone_folder, ledger), ledger=ledger)
        assert ids(await ground.left()) == {}
        assert not ledger.flush()
        gone_folder.mend()
        assert ledger.flush()
    assert ids(await ground.arrived()) == numbered(COUNT)
    found = balance(read_ledger(gone_folder.folder), dead_writers(gone_folder.folder))
    assert found.lost.total() == 0
    assert any("removed or replaced" in reason for reason in found.incomplete)
