"""The check of a store file after a kill: what it reports as damage, and what it accepts."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from tests.crash.inspection import check_file
from twinbus.namespace.engine.storage_protocol import PutBody, PutRow, QueueLane, Row, StoreWrite
from twinbus.namespace.store import SqliteStore


def _row(seq: int, body: int | None) -> PutRow:
    return PutRow(Row(1, QueueLane.ACTIVE, seq, seq, 0, None, None, None, 0, 1, None, body, b"x"))


def _written(data: Path, *writes: StoreWrite) -> Path:
    store = SqliteStore(data / "primary.sqlite")
    store.open()
    store.commit(writes)
    store.close()
    return data


def test_a_store_of_queues_is_accepted(tmp_path: Path) -> None:
    data = _written(tmp_path / "data", _row(1, None), _row(2, None))
    assert check_file(data, tmp_path / "copy") == (2, 0, 0)


def test_a_store_of_queues_and_a_topic_is_accepted(tmp_path: Path) -> None:
    data = _written(tmp_path / "data", PutBody(1, b"x", 1), _row(1, 1), _row(2, 1), _row(3, None))
    assert check_file(data, tmp_path / "copy") == (3, 2, 1)


@pytest.mark.parametrize("others", [(), (PutBody(9, b"x", 1), _row(9, 9))])
def test_a_message_without_its_shared_body_is_reported(tmp_path: Path, others: tuple[StoreWrite, ...]) -> None:
    data = _written(tmp_path / "data", *others, _row(1, None), PutBody(1, b"x", 1), _row(2, 1))
    connection = apsw.Connection(str(data / "primary.sqlite"))
    connection.execute("DELETE FROM body WHERE id = 1")
    connection.close()
    with pytest.raises(AssertionError, match=r"1: SELECT .* NOT IN"):
        check_file(data, tmp_path / "copy")


def test_a_topic_that_is_charged_for_a_missing_body_is_reported(tmp_path: Path) -> None:
    data = _written(tmp_path / "data", PutBody(1, b"x", 1), _row(2, 1))
    connection = apsw.Connection(str(data / "primary.sqlite"))
    connection.execute("UPDATE shared SET bytes = 2")
    connection.close()
    with pytest.raises(AssertionError, match=r"1: SELECT count.* FROM shared"):
        check_file(data, tmp_path / "copy")


def test_a_body_without_a_message_is_reported(tmp_path: Path) -> None:
    data = _written(tmp_path / "data", PutBody(1, b"x", 1))
    with pytest.raises(AssertionError, match="FROM body WHERE id NOT IN"):
        check_file(data, tmp_path / "copy")
