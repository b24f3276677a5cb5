"""Persist, then acknowledge: groups of writes, and the calls that run after they are on disk."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from twinbus.namespace.engine.storage_protocol import (
    DropRow,
    OpenedStore,
    PutRow,
    Row,
    StoredSessionState,
    StoreRead,
    StoreWrite,
)
from twinbus.namespace.group_commit import CONGESTED_BYTES, GroupCommit
from twinbus.namespace.store import StoreDamagedError


class SlowDisk:
    """A store that finishes a commit only when the test allows it."""

    inline = False

    def __init__(self) -> None:
        self.commits: list[Sequence[StoreWrite]] = []
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None
        self.freed: dict[int, int] = {}

    def open(self) -> OpenedStore:
        return OpenedStore([], 1, 1)

    def load(self, need: StoreRead) -> Any:
        if self.error is not None:
            raise self.error
        return len(self.commits)

    def commit(self, writes: Sequence[StoreWrite]) -> None:
        assert self.go.acquire(timeout=10)
        if self.error is not None:
            raise self.error
        self.commits.append(writes)

    def tidy(self) -> bool:
        return False

    def take_freed(self) -> Mapping[int, int]:
        freed, self.freed = self.freed, {}
        return freed

    def close(self) -> None:
        pass


class UntidyDisk(SlowDisk):
    """A store with pieces of housekeeping to do."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.pieces = pieces
        self.tidied = threading.Event()

    def tidy(self) -> bool:
        if self.error is not None:
            raise self.error
        self.pieces -= 1
        if self.pieces <= 0:
            self.tidied.set()
        return self.pieces > 0


def group_commit_on(disk: SlowDisk, failures: list[Exception] | None = None) -> GroupCommit:
    return GroupCommit(
        disk, failed=(failures if failures is not None else []).append, committed=lambda _: None, freed=lambda _: None
    )


def drop(seq: int) -> StoreWrite:
    return DropRow(1, 0, seq)


async def on_disk(group_commit: GroupCommit, group: int) -> None:
    done = asyncio.get_running_loop().create_future()
    group_commit.when(group, lambda: done.set_result(None))
    await asyncio.wait_for(done, 10)


async def test_a_call_waits_until_its_group_is_on_disk() -> None:
    disk = SlowDisk()
    group_commit = group_commit_on(disk)
    said: list[str] = []
    group = group_commit.add([drop(1)])
    group_commit.when(group, lambda: said.append("accepted"))
    await asyncio.sleep(0)
    assert said == []
    disk.go.release()
    await on_disk(group_commit, group)
    assert said == ["accepted"]
    assert [list(writes) for writes in disk.commits] == [[drop(1)]]
    await group_commit.close()


async def test_writes_gather_in_one_group_while_the_disk_is_busy() -> None:
    disk = SlowDisk()
    group_commit = group_commit_on(disk)
    first = group_commit.add([drop(1)])
    await asyncio.sleep(0)  # the first group has left
    groups = {group_commit.add([drop(seq)]) for seq in range(2, 50)}
    assert len(groups) == 1
    assert groups != {first}
    disk.go.release(2)
    await on_disk(group_commit, groups.pop())
    assert [len(writes) for writes in disk.commits] == [1, 48]
    await group_commit.close()


async def test_a_call_for_what_is_on_disk_runs_at_once() -> None:
    disk = SlowDisk()
    disk.go.release()
    group_commit = group_commit_on(disk)
    group = group_commit.add([drop(1)])
    await on_disk(group_commit, group)
    said: list[int] = []
    group_commit.when(group, lambda: said.append(1))
    assert said == [1]
    await group_commit.close()


async def test_what_a_call_brings_about_comes_after_the_other_calls_of_its_group() -> None:
    disk = SlowDisk()
    group_commit = group_commit_on(disk)
    said: list[str] = []
    group = group_commit.add([drop(1)])
    group_commit.when(group, lambda: group_commit.when(group, lambda: said.append("brought about")))
    group_commit.when(group, lambda: said.append("waiting"))
    disk.go.release()
    await on_disk(group_commit, group)
    await group_commit.close()
    assert said == ["waiting", "brought about"]


async def test_a_call_that_fails_does_not_keep_the_others_from_being_run() -> None:
    disk = SlowDisk()
    group_commit = group_commit_on(disk)
    given_up = asyncio.get_running_loop().create_future()
    given_up.cancel()
    group = group_commit.add([drop(1)])
    group_commit.when(group, lambda: given_up.set_result(None))
    ran: list[int] = []
    group_commit.when(group, lambda: ran.append(1))
    disk.go.release(2)
    await on_disk(group_commit, group)
    next_group = group_commit.add([drop(2)])
    group_commit.when(next_group, lambda: ran.append(2))
    await on_disk(group_commit, next_group)
    assert ran == [1, 2]
    await group_commit.close()


async def test_after_a_failed_commit_writes_that_come_late_do_not_hold_up_closing() -> None:
    disk = SlowDisk()
    failures: list[Exception] = []
    group_commit = group_commit_on(disk, failures)
    disk.error = OSError("disk full")
    group_commit.add([drop(1)])
    disk.go.release(5)
    await asyncio.wait_for(group_commit.flushed(), 10)
    said: list[int] = []
    group_commit.when(group_commit.add([drop(2)]), lambda: said.append(2))
    await asyncio.wait_for(group_commit.close(), 10)
    assert (failures, said) == ([disk.error], [])


async def test_after_a_failed_commit_nothing_more_is_said() -> None:
    disk = SlowDisk()
    failures: list[Exception] = []
    group_commit = group_commit_on(disk, failures)
    disk.error = OSError("disk full")
    said: list[int] = []
    group = group_commit.add([drop(1)])
    group_commit.when(group, lambda: said.append(1))
    disk.go.release(5)
    await asyncio.wait_for(group_commit.close(), 10)
    assert failures == [disk.error]
    assert said == []


async def test_a_failed_read_is_handed_to_the_one_who_asked() -> None:
    disk = SlowDisk()
    disk.error = OSError("unreadable")
    group_commit = group_commit_on(disk)
    answer = asyncio.get_running_loop().create_future()
    group_commit.load(StoredSessionState(1, "s"), answer.set_result)
    assert await asyncio.wait_for(answer, 10) is disk.error
    await group_commit.close()


async def test_much_that_waits_for_the_disk_is_congestion_until_it_is_written() -> None:
    disk = SlowDisk()
    group_commit = group_commit_on(disk)
    big = Row(1, 0, 1, 1, 0, None, None, None, 0, CONGESTED_BYTES, None, None, bytes(CONGESTED_BYTES + 1))
    group = group_commit.add([PutRow(big)])
    congested_before = group_commit.is_congested
    relieved = asyncio.Event()
    group_commit.when_relieved(relieved.set)
    disk.go.release()
    await on_disk(group_commit, group)
    await asyncio.wait_for(relieved.wait(), 10)
    assert (congested_before, group_commit.is_congested) == (True, False)
    await group_commit.close()


@pytest.mark.parametrize("busy", [False, True])
async def test_close_brings_everything_to_disk(busy: bool) -> None:
    disk = SlowDisk()
    group_commit = group_commit_on(disk)
    group_commit.add([drop(1)])
    if busy:
        await asyncio.sleep(0)
    group_commit.add([drop(2)])
    disk.go.release(2)
    await asyncio.wait_for(group_commit.close(), 10)
    assert [write for writes in disk.commits for write in writes] == [drop(1), drop(2)]


async def test_the_store_is_kept_tidy_while_there_is_nothing_to_commit() -> None:
    disk = UntidyDisk(pieces=3)
    group_commit = group_commit_on(disk)
    assert await asyncio.to_thread(disk.tidied.wait, 10)
    disk.go.release()
    await on_disk(group_commit, group_commit.add([drop(1)]))
    await group_commit.close()


async def test_what_a_commit_freed_is_told_before_what_waits_for_it() -> None:
    disk, told = SlowDisk(), list[object]()
    group_commit = GroupCommit(disk, failed=told.append, committed=lambda _: None, freed=told.append)
    group = group_commit.add([drop(1)])
    group_commit.when(group, lambda: told.append("on disk"))
    disk.freed = {7: 11}
    disk.go.release()
    await on_disk(group_commit, group)
    await group_commit.close()
    assert told == [{7: 11}, "on disk"]


async def test_a_store_that_cannot_be_kept_tidy_has_failed() -> None:
    disk = UntidyDisk(pieces=3)
    disk.error = OSError("unwritable")
    failed = asyncio.get_running_loop().create_future()
    group_commit = GroupCommit(disk, failed=failed.set_result, committed=lambda _: None, freed=lambda _: None)
    assert await asyncio.wait_for(failed, 10) is disk.error
    await group_commit.close()


async def test_x2_a_read_that_finds_damage_ends_the_namespace_and_is_not_answered() -> None:
    disk, failures, answers = SlowDisk(), list[Exception](), list[Any]()
    disk.error = StoreDamagedError("message 7 is damaged")
    group_commit = group_commit_on(disk, failures)
    for _ in range(2):
        group_commit.load(StoredSessionState(1, "s"), answers.append)
    await asyncio.wait_for(group_commit.close(), 10)
    await asyncio.sleep(0)  # the failure was reported to the loop before the thread ended
    assert failures == [disk.error]
    assert answers == []
