"""Persist, then speak: groups of writes, and what may run once they are on disk."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from twinbus.namespace.engine.storage_protocol import DropRow, Need, Opened, PutRow, Row, SessionState, Write
from twinbus.namespace.group_commit import CONGESTED_BYTES, Committer


class SlowDisk:
    """A store whose disk finishes a commit only when told to."""

    inline = False

    def __init__(self) -> None:
        self.commits: list[Sequence[Write]] = []
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None
        self.freed: dict[int, int] = {}

    def open(self) -> Opened:
        return Opened([], 1, 1)

    def load(self, need: Need) -> Any:
        if self.error is not None:
            raise self.error
        return len(self.commits)

    def commit(self, writes: Sequence[Write]) -> None:
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


def committer_on(disk: SlowDisk, failures: list[Exception] | None = None) -> Committer:
    return Committer(
        disk, failed=(failures if failures is not None else []).append, committed=lambda _: None, freed=lambda _: None
    )


def drop(seq: int) -> Write:
    return DropRow(1, 0, seq)


async def on_disk(committer: Committer, group: int) -> None:
    done = asyncio.get_running_loop().create_future()
    committer.when(group, lambda: done.set_result(None))
    await asyncio.wait_for(done, 10)


async def test_a_call_waits_until_its_group_is_on_disk() -> None:
    disk = SlowDisk()
    committer = committer_on(disk)
    said: list[str] = []
    group = committer.add([drop(1)])
    committer.when(group, lambda: said.append("accepted"))
    await asyncio.sleep(0)
    assert said == []
    disk.go.release()
    await on_disk(committer, group)
    assert said == ["accepted"]
    assert [list(writes) for writes in disk.commits] == [[drop(1)]]
    await committer.close()


async def test_writes_gather_in_one_group_while_the_disk_is_busy() -> None:
    disk = SlowDisk()
    committer = committer_on(disk)
    first = committer.add([drop(1)])
    await asyncio.sleep(0)  # the first group has left
    groups = {committer.add([drop(seq)]) for seq in range(2, 50)}
    assert len(groups) == 1
    assert groups != {first}
    disk.go.release(2)
    await on_disk(committer, groups.pop())
    assert [len(writes) for writes in disk.commits] == [1, 48]
    await committer.close()


async def test_a_call_for_what_is_on_disk_runs_at_once() -> None:
    disk = SlowDisk()
    disk.go.release()
    committer = committer_on(disk)
    group = committer.add([drop(1)])
    await on_disk(committer, group)
    said: list[int] = []
    committer.when(group, lambda: said.append(1))
    assert said == [1]
    await committer.close()


async def test_what_a_call_brings_about_comes_after_the_other_calls_of_its_group() -> None:
    disk = SlowDisk()
    committer = committer_on(disk)
    said: list[str] = []
    group = committer.add([drop(1)])
    committer.when(group, lambda: committer.when(group, lambda: said.append("brought about")))
    committer.when(group, lambda: said.append("waiting"))
    disk.go.release()
    await on_disk(committer, group)
    await committer.close()
    assert said == ["waiting", "brought about"]


async def test_a_call_that_fails_does_not_keep_the_others_from_being_run() -> None:
    disk = SlowDisk()
    committer = committer_on(disk)
    given_up = asyncio.get_running_loop().create_future()
    given_up.cancel()
    group = committer.add([drop(1)])
    committer.when(group, lambda: given_up.set_result(None))
    disk.go.release(2)
    await on_disk(committer, group)
    await on_disk(committer, committer.add([drop(2)]))
    await committer.close()


async def test_after_a_failed_commit_writes_that_come_late_do_not_hold_up_closing() -> None:
    disk = SlowDisk()
    failures: list[Exception] = []
    committer = committer_on(disk, failures)
    disk.error = OSError("disk full")
    committer.add([drop(1)])
    disk.go.release(5)
    await asyncio.wait_for(committer.flushed(), 10)
    said: list[int] = []
    committer.when(committer.add([drop(2)]), lambda: said.append(2))
    await asyncio.wait_for(committer.close(), 10)
    assert (failures, said) == ([disk.error], [])


async def test_after_a_failed_commit_nothing_more_is_said() -> None:
    disk = SlowDisk()
    failures: list[Exception] = []
    committer = committer_on(disk, failures)
    disk.error = OSError("disk full")
    said: list[int] = []
    group = committer.add([drop(1)])
    committer.when(group, lambda: said.append(1))
    disk.go.release(5)
    await asyncio.wait_for(committer.close(), 10)
    assert failures == [disk.error]
    assert said == []


async def test_a_failed_read_is_handed_to_the_one_who_asked() -> None:
    disk = SlowDisk()
    disk.error = OSError("unreadable")
    committer = committer_on(disk)
    answer = asyncio.get_running_loop().create_future()
    committer.load(SessionState(1, "s"), answer.set_result)
    assert await asyncio.wait_for(answer, 10) is disk.error
    await committer.close()


async def test_much_that_waits_for_the_disk_is_congestion_until_it_is_written() -> None:
    disk = SlowDisk()
    committer = committer_on(disk)
    big = Row(1, 0, 1, 1, 0, None, None, None, 0, CONGESTED_BYTES, None, None, bytes(CONGESTED_BYTES + 1))
    group = committer.add([PutRow(big)])
    congested_before = committer.is_congested
    relieved = asyncio.Event()
    committer.when_relieved(relieved.set)
    disk.go.release()
    await on_disk(committer, group)
    await asyncio.wait_for(relieved.wait(), 10)
    assert (congested_before, committer.is_congested) == (True, False)
    await committer.close()


@pytest.mark.parametrize("busy", [False, True])
async def test_close_brings_everything_to_disk(busy: bool) -> None:
    disk = SlowDisk()
    committer = committer_on(disk)
    committer.add([drop(1)])
    if busy:
        await asyncio.sleep(0)
    committer.add([drop(2)])
    disk.go.release(2)
    await asyncio.wait_for(committer.close(), 10)
    assert [write for writes in disk.commits for write in writes] == [drop(1), drop(2)]


async def test_the_store_is_kept_tidy_while_there_is_nothing_to_commit() -> None:
    disk = UntidyDisk(pieces=3)
    committer = committer_on(disk)
    assert await asyncio.to_thread(disk.tidied.wait, 10)
    disk.go.release()
    await on_disk(committer, committer.add([drop(1)]))
    await committer.close()


async def test_what_a_commit_freed_is_told_before_what_waits_for_it() -> None:
    disk, told = SlowDisk(), list[object]()
    committer = Committer(disk, failed=told.append, committed=lambda _: None, freed=told.append)
    group = committer.add([drop(1)])
    committer.when(group, lambda: told.append("on disk"))
    disk.freed = {7: 11}
    disk.go.release()
    await on_disk(committer, group)
    await committer.close()
    assert told == [{7: 11}, "on disk"]


async def test_a_store_that_cannot_be_kept_tidy_has_failed() -> None:
    disk = UntidyDisk(pieces=3)
    disk.error = OSError("unwritable")
    failed = asyncio.get_running_loop().create_future()
    committer = Committer(disk, failed=failed.set_result, committed=lambda _: None, freed=lambda _: None)
    assert await asyncio.wait_for(failed, 10) is disk.error
    await committer.close()
