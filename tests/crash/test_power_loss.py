"""N2: commits survive a power loss at any instant, and no commit is applied in part. Replayed by seed."""

import shutil
from collections import Counter
from pathlib import Path
from random import Random

import apsw
import pytest

from tests.crash.power_loss import SECTOR, Disk, Loss
from tests.namespace.store.store_model import Engine, Model, assert_shows
from tests.tiers import budget
from twinbus.namespace.engine.storage_protocol import OpenedStore
from twinbus.namespace.store import SqliteStore, StoreError
from twinbus.namespace.store.commit_counter import counter_path

SEEDS = budget(4, 20, 200)
LIVES = 5
CONTROLS = 4


class Machine:
    """A store on a disk that loses power many times, and what must be stored."""

    def __init__(self, seed: int, folder: Path, *, syncs: bool = True) -> None:
        self._rng = Random(seed)
        self._engine = Engine(self._rng)
        self._folder = folder
        self._syncs = syncs
        self.certain = Model()
        """The state after the last acknowledged commit."""
        self.possible = Model()
        """The state with the commit that was running at the power loss."""
        self._counters: list[bytes] = []
        """The content of the commit counter when it was created, and after each commit."""
        self.seen: Counter[str] = Counter()
        self._doing = ""

    def live(self, life: int, loss: Loss) -> None:
        """Run until the power is lost, then check the files and continue from them."""
        disk = Disk(syncs=self._syncs)
        home = self._folder / str(life)
        home.mkdir(exist_ok=True)
        with disk.plugged_in():
            # A small log, so that it is checkpointed and started again many times within a life.
            store = SqliteStore(home / "namespace.db", vfs=disk.vfs, log_pages=self._rng.choice((8, 30)))
            try:
                self._work(store, disk)
            except StoreError:
                assert disk.is_dead
            store.close()
        self.seen["cuts"] += 1
        self.seen["cuts while " + self._doing] += 1
        next_home = self._folder / str(life + 1)
        next_home.mkdir()
        for name, content in disk.survivors(self._rng, loss).items():
            (next_home / name).write_bytes(content)
        self._leave_counter(counter_path(next_home / "namespace.db"), home, loss)
        self._look(next_home / "namespace.db")

    def _work(self, store: SqliteStore, disk: Disk) -> None:
        disk.operations_left = self._rng.choice((self._rng.randrange(60), self._rng.randrange(1_500)))
        self._doing = "opening"
        store.open()
        self._counters.append(counter_path(store.path).read_bytes())
        while True:
            self._doing = "committing"
            writes, self.possible = self._engine.commit(self.certain, self._rng.choice((1, 1, 4, 12)))
            store.commit(writes)
            self._counters.append(counter_path(store.path).read_bytes())
            self.certain = self.possible
            self.seen["commits"] += 1
            # A commit that is synced is acknowledged, even if the power is lost during the checkpoint after it.
            self._doing = "folding the log"
            if not disk.is_dead:
                store.tidy()
            if disk.is_dead:
                return

    def _leave_counter(self, path: Path, home: Path, loss: Loss) -> None:
        """Leave the commit counter as it was at any time, also in part: its numbers are not synced."""
        now = counter_path(home / "namespace.db")
        if loss is Loss.NONE:
            if now.exists():
                shutil.copy(now, path)
            return
        if not self._counters:
            return  # the store was never open
        older, newer = self._rng.choice(self._counters), self._rng.choice(self._counters)
        torn = older[:SECTOR] + newer[SECTOR:] if loss is Loss.TORN else older
        path.write_bytes(torn[: self._rng.choice((0, SECTOR, len(torn), len(torn)))])

    def _look(self, path: Path) -> None:
        disk = Disk()  # only because its syncs are quick
        with disk.plugged_in():
            store = SqliteStore(path, vfs=disk.vfs)
            opened = store.open()
            try:
                kept = self._which(store, opened)
            finally:
                store.close()
        if self.possible is not self.certain:
            self.seen["commits under way " + ("kept" if kept is self.possible else "not kept")] += 1
        self.certain = self.possible = kept
        connection = apsw.Connection(str(path))
        assert connection.pragma("integrity_check") == "ok"
        connection.close()

    def _which(self, store: SqliteStore, opened: OpenedStore) -> Model:
        """The commit that was running must be applied completely or not at all."""
        try:
            assert_shows(store, opened, self.possible)
        except AssertionError:
            assert_shows(store, opened, self.certain)
            return self.certain
        return self.possible


def survived(seed: int, folder: Path, loss: Loss, *, syncs: bool = True) -> Counter[str]:
    """Run all lives of one machine. Raises AssertionError if a commit was lost."""
    folder = folder / str(seed)
    folder.mkdir()
    machine = Machine(seed, folder, syncs=syncs)
    for life in range(LIVES):
        machine.live(life, loss)
    return machine.seen


@pytest.mark.parametrize("loss", Loss)
def test_everything_committed_survives_power_loss_and_no_commit_is_applied_in_part(tmp_path: Path, loss: Loss) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen += survived(seed, tmp_path, loss)
    # The power was lost at all kinds of instants; running commits were found both applied and not applied.
    assert seen["cuts"] == SEEDS * LIVES
    assert seen["cuts while opening"] > 0
    assert seen["cuts while committing"] > SEEDS
    assert seen["cuts while folding the log"] > 0
    assert seen["commits"] > 5 * SEEDS
    assert seen["commits under way not kept"] > 0


@pytest.mark.parametrize("loss", [Loss.ALL, Loss.SOME, Loss.TORN])
def test_a_disk_that_does_not_sync_is_detected(tmp_path: Path, loss: Loss) -> None:
    failed = 0
    for seed in range(CONTROLS):
        try:
            survived(seed, tmp_path, loss, syncs=False)
        except (AssertionError, StoreError):
            failed += 1
    assert failed == CONTROLS


def test_a_disk_that_does_not_sync_loses_nothing_when_only_the_process_dies(tmp_path: Path) -> None:
    for seed in range(CONTROLS):
        survived(seed, tmp_path, Loss.NONE, syncs=False)
