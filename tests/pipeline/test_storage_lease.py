"""The lock of tables in an object store: a lease (D6)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.object_stores import s3_server
from twinbus.errors import OperatorError
from twinbus.object_store import ObjectFolder
from twinbus.pipeline.checkpoints import checkpoints_of
from twinbus.pipeline.storage_lease import NAME, StorageLease
from twinbus.pipeline.table_storage import TablesBusyError, TableStorage
from twinbus.storage_location import LocationError, StorageLocation


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server.url()


def lease(folder: ObjectFolder, lasts: float = 3600.0) -> StorageLease:
    return StorageLease(folder, renew=0.1, lasts=lasts)


def owner(**values: object) -> bytes:
    return json.dumps({"id": "x", **values}).encode()


def test_d6_a_lease_that_its_owner_renews_is_refused_and_one_of_a_dead_process_is_taken_over(url: str) -> None:
    folder = ObjectFolder(StorageLocation.parse(f"{url}/renewed"))
    taken = r"another process \(process \d+ on .+\) is writing"
    with lease(folder).held():
        with pytest.raises(TablesBusyError, match=taken), lease(folder).held():
            pass
        assert folder.exists(NAME)
    assert not folder.exists(NAME), "it is released"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with lease(folder).held():
        mine = json.loads(folder.read(NAME))
    folder.put_if(NAME, owner(machine=mine["machine"], pid=ended.pid, started="1"), None)
    after_dead = lease(folder)
    with after_dead.held():
        after_dead.check()
    folder.put_if(NAME, owner(machine="elsewhere", pid=1, started="1"), None)
    with lease(folder, lasts=0.5).held():
        assert json.loads(folder.read(NAME))["machine"] == mine["machine"], "nobody renewed it"


def test_d6_a_process_that_lost_its_lease_does_not_commit(url: str) -> None:
    folder = ObjectFolder(StorageLocation.parse(f"{url}/lost"))
    lost = StorageLease(folder, renew=3600.0, lasts=7200.0)
    with lost.held():
        lost.check()
        found = folder.read_version(NAME)
        assert found is not None
        assert folder.put_if(NAME, owner(machine="elsewhere", pid=1), found[1]) is not None
    assert folder.exists(NAME), "the lease of the other process stays"
    with pytest.raises(OperatorError, match="lost the lock"):
        lost.check()
    late = StorageLease(ObjectFolder(StorageLocation.parse(f"{url}/late")), renew=0.5, lasts=0.5)
    with late.held(), pytest.raises(OperatorError, match="lost the lock"):
        late.check()


def test_d5_a_folder_whose_lock_another_process_has_is_busy(tmp_path: Path) -> None:
    one, other = TableStorage(tmp_path), TableStorage(tmp_path)
    with one.lock(), pytest.raises(TablesBusyError, match="is writing the tables"), other.lock():
        pass
    with other.lock():
        assert (tmp_path / ".lock").exists()


def test_d6_checkpoints_of_tables_at_a_url_are_in_a_local_folder(tmp_path: Path) -> None:
    root, here = StorageLocation.parse("s3://bucket/tables"), StorageLocation(str(tmp_path))
    state = {"XDG_STATE_HOME": str(tmp_path)}
    assert checkpoints_of(here, state).text == str(tmp_path / "checkpoints")
    found = Path(checkpoints_of(root, state))
    assert found.parent == tmp_path / "twinbus" / "checkpoints"
    assert checkpoints_of(StorageLocation.parse("s3://bucket/other"), state).text != str(found)
    named = {**state, "TWINBUS_CHECKPOINTS": "s3a://bucket/checkpoints"}
    assert checkpoints_of(root, named) == StorageLocation.parse(f"s3a://bucket/checkpoints/{found.name}")


def test_d6_a_user_without_a_home_folder_reads_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(LocationError, match="set TWINBUS_CHECKPOINTS or XDG_STATE_HOME"):
        checkpoints_of(StorageLocation.parse("s3://bucket/tables"), {})
