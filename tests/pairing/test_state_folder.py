"""The shared state in a folder: crashes, several writers, damage and rights (S16)."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiers import budget
from twinbus.backlog import FailureKind
from twinbus.pairing.decide.known_state import (
    EVERY_ENTITY,
    FailoverRecord,
    HoldRecord,
    KnownState,
    ReleaseRecord,
    RestoreRecord,
)
from twinbus.pairing.state_folder import FolderState

OVER = FailoverRecord("Orders/EU", FailureKind.TIMEOUT, 1_000_000.0, 1_000_060.0, 60.0, 0, 1_000_000.0, "me")
KILLS = budget(2, 12)
WRITERS, HOLDS = 4, budget(3, 25)


@pytest.fixture
def folder(tmp_path: Path) -> FolderState:
    return FolderState(tmp_path / "state", "Contoso")


def hold(entity: str = EVERY_ENTITY) -> HoldRecord:
    return HoldRecord(entity, 1_000_000.0, "operator")


def test_s16_what_one_process_writes_another_reads(folder: FolderState, tmp_path: Path) -> None:
    folder.write([OVER, hold("bills")])
    other = FolderState(tmp_path / "state", "contoso")
    expected = KnownState({"orders/eu": OVER}, {"bills": hold("bills")})
    assert other.read() == (expected, (), False)
    other.write([replace(OVER, next_ping_at=2_000_000.0), RestoreRecord("x", 1_000_000.0, "me")])
    assert folder.read().state.failovers["orders/eu"].next_ping_at == 2_000_000.0
    other.write([RestoreRecord("ORDERS/eu", 1_000_000.0, "me"), ReleaseRecord("bills", 1_000_000.0, "me")])
    assert folder.read() == (KnownState(), (), False)


def test_s16_primaries_do_not_see_each_other(folder: FolderState, tmp_path: Path) -> None:
    folder.write([OVER])
    with pytest.raises(FileNotFoundError):
        FolderState(tmp_path / "state", "fabrikam").read()


def test_s16_files_and_folders_are_private(folder: FolderState) -> None:
    before = os.umask(0)
    try:
        folder.write([OVER, hold()])
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.folder.iterdir()}
    assert set(modes.values()) == {0o600}
    assert {"holds.json", "holds.lock"} < set(modes)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 9, "changes": []}', "x" * 2_000_000])
def test_s16_a_damaged_file_counts_as_healthy_and_hides_no_other(folder: FolderState, damage: str) -> None:
    folder.write([OVER, replace(OVER, entity="bills"), hold("letters")])
    damaged = folder.folder / folder._failover_file("bills")
    damaged.write_text(damage)
    state, unreadable, hides_holds = folder.read()
    assert (set(state.failovers), set(state.holds)) == ({"orders/eu"}, {"letters"})
    assert (len(unreadable), hides_holds) == (1, False)
    assert str(damaged) in unreadable[0]
    folder.write([replace(OVER, entity="bills")])
    assert folder.read().unreadable == ()


def test_s15_damaged_holds_are_reported_and_kept_until_all_entities_are_released(
    folder: FolderState, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write([OVER, hold()])
    (folder.folder / "holds.json").write_text("{")
    state, unreadable, hides_holds = folder.read()
    assert (set(state.failovers), dict(state.holds), len(unreadable)) == ({"orders/eu"}, {}, 1)
    assert hides_holds
    folder.write([hold("bills"), ReleaseRecord("letters", 1_000_000.0, "me")])
    kept = folder.folder / "holds.json.damaged-1"
    assert kept.read_text() == "{"
    assert str(kept) in caplog.text
    state, unreadable, hides_holds = folder.read()
    assert (set(state.holds), hides_holds) == ({"bills"}, True), "a hold that is missing has not ended"
    assert str(kept) in unreadable[0]
    (folder.folder / "holds.json").write_text("x" * 2_000_000)
    folder.write([hold("bills")])
    assert len(folder.read().unreadable) == 2
    folder.write([ReleaseRecord(EVERY_ENTITY, 1_000_000.0, "me")])
    assert folder.read() == (replace(KnownState(), failovers=state.failovers), (), False)


def test_s15_damaged_holds_do_not_replace_those_of_earlier_damage(folder: FolderState) -> None:
    folder.write([hold()])
    for damage in ("first", "second", "third"):
        (folder.folder / "holds.json").write_text(damage)
        folder.write([hold()])
        if damage == "second":
            (folder.folder / "holds.json.damaged-1").unlink()
    assert {path.read_text() for path in folder.folder.glob("holds.json.damaged-*")} == {"second", "third"}


def test_s16_a_pipe_or_a_link_in_place_of_a_file_is_unreadable_and_blocks_nobody(
    folder: FolderState, tmp_path: Path
) -> None:
    folder.write([OVER])
    os.mkfifo(folder.folder / "holds.json")
    (tmp_path / "elsewhere").write_text("secret")
    (folder.folder / folder._failover_file("bills")).symlink_to(tmp_path / "elsewhere")
    state, unreadable, hides_holds = folder.read()
    assert set(state.failovers) == {"orders/eu"}
    assert (len(unreadable), hides_holds) == (2, True)
    assert "secret" not in str(unreadable)


def test_s15_holds_are_read_however_many_files_there_are(folder: FolderState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinbus.pairing.state_folder._MOST_FILES", 2)
    folder.write([replace(OVER, entity=f"queue-{number}") for number in range(3)])
    folder.write([hold("letters")])
    state = folder.read().state
    assert (set(state.holds), len(state.failovers)) == ({"letters"}, 2)


def test_s16_files_that_nobody_needs_are_removed(folder: FolderState) -> None:
    folder.write([OVER])
    left = folder.folder / ".holds.json.0123.tmp"
    left.write_text("half")
    old = folder.folder / folder._failover_file("orders/eu")
    for path in (left, old):
        os.utime(path, (time.time() - 100_000,) * 2)
    young = folder.folder / ".holds.json.4567.tmp"
    young.write_text("half")
    folder.write([hold("bills")])
    assert {path.name for path in folder.folder.iterdir()} == {"holds.json", "holds.lock", young.name}


def hold_many(place: str, writer: int) -> None:
    for number in range(HOLDS):
        FolderState(place, "contoso").write([HoldRecord(f"queue-{writer}-{number}", 1_000_000.0, str(writer))])


def test_s15_several_writers_lose_no_hold(tmp_path: Path) -> None:
    place = str(tmp_path / "state")
    with ProcessPoolExecutor(WRITERS) as pool:
        for done in [pool.submit(hold_many, place, writer) for writer in range(WRITERS)]:
            done.result()
    held = set(FolderState(place, "contoso").read().state.holds)
    assert held == {f"queue-{writer}-{number}" for writer in range(WRITERS) for number in range(HOLDS)}


WRITER = """
import sys
from dataclasses import replace
from tests.pairing.test_state_folder import OVER, hold
from twinbus.pairing.decide.known_state import ReleaseRecord, RestoreRecord
from twinbus.pairing.state_folder import FolderState

folder = FolderState(sys.argv[1], "contoso")
number = 0
while True:
    number += 1
    changes = [replace(OVER, next_ping_at=float(number) + 1_000_000.0), hold(f"queue-{number % 5}")]
    folder.write(changes)
    folder.write([ReleaseRecord(f"queue-{number % 5}", 1_000_000.0, "me"), hold("always")])
    print(number, flush=True)
"""


def test_s16_a_writer_that_is_killed_at_any_instant_leaves_a_readable_state(tmp_path: Path) -> None:
    folder = FolderState(tmp_path / "state", "contoso")
    for kill in range(KILLS):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "state")], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for _ in range(1 + kill % 7):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        state, unreadable, _ = folder.read()
        assert unreadable == ()
        assert set(state.failovers) == {"orders/eu"}
        assert "always" in state.holds
    # A killed writer keeps no lock.
    folder.write([ReleaseRecord(EVERY_ENTITY, 1_000_000.0, "me")])
    assert dict(folder.read().state.holds) == {}
