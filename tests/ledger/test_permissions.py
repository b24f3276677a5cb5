"""X4: a ledger is for its owner alone, unless its folder is shared with a group."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinbus.ledger import Ledger, LedgerOptions, Role, Stage, read_ledger
from twinbus.ledger.failing_marks import FailingMark


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """The loosest umask: only the modes that the code asks for protect a file."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def record(folder: Path) -> None:
    """Write enough for several segments, some of them sealed."""
    ledger = Ledger(folder, Role.CLIENT, LedgerOptions(segment_bytes=4096, budget_bytes=50 * 4096))
    for number in range(100):
        ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", [number]).end()
    ledger.close()


def file_modes(folder: Path) -> set[int]:
    files = list(folder.iterdir())
    assert len(files) > 1
    return {mode(path) for path in files}


def test_x4_a_new_ledger_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "ledger"
    record(folder)
    FailingMark(folder, "client-here-1-0123456789abcdef").make()
    assert mode(folder) == 0o700
    assert file_modes(folder) == {0o600}


@pytest.mark.parametrize(("folder_mode", "expected"), [(0o755, 0o600), (0o770, 0o640), (0o2770, 0o640)])
def test_x4_an_existing_folder_keeps_its_mode_and_its_group_may_read_if_it_may_write(
    tmp_path: Path, folder_mode: int, expected: int
) -> None:
    folder = tmp_path / "ledger"
    folder.mkdir()
    folder.chmod(folder_mode)
    record(folder)
    FailingMark(folder, "client-here-1-0123456789abcdef").make()
    assert mode(folder) == folder_mode
    assert file_modes(folder) == {expected}
    assert len(list(read_ledger(folder))) > 100
