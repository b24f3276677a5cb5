"""X2: killed at any step of --accept-damage, a store is damaged as before, or it is rebuilt. The kill loses no message.

The store has damage in its file, and commits that are only in its log. Each process kills itself at a later call of the
operating system.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.crash.damaged_files import NAME
from tests.ledger.killed_writer import BEFORE, Countdown
from tests.namespace.store.sample_writes import counters, entity, everything, put
from tests.tiers import budget
from twinbus.namespace.store import SqliteStore, StoreDamagedError

STEP = budget(4, 1)
"""Every call, or one in so many."""
ALL = range(1, 41)
DAMAGED = 7


def damaged_store(folder: Path) -> Path:
    """Return the path of a store with messages in file and log, of which one in the file is damaged."""
    live = folder / "live" / NAME
    store = SqliteStore(live)
    store.open()
    # Large messages: the later commits do not write the page of the damaged one again.
    rows = [write for seq in ALL[:20] for write in put(seq, raw=b"%02d" % seq * 1_500)]
    store.commit([entity(1), counters(1, 21, active=20), *rows])
    store.close()
    again = SqliteStore(live)
    again.open()
    for seq in ALL[20:]:
        again.commit([*put(seq), counters(1, seq + 1, active=seq)])
    made = folder / "made" / NAME
    shutil.copytree(live.parent, made.parent, ignore=shutil.ignore_patterns("*-shm", "*.lock"))
    again.close()
    content = bytearray(made.read_bytes())
    content[content.index(b"%02d" % DAMAGED * 1_500)] ^= 1
    made.write_bytes(content)
    return made


def killed_at(number: int, path: Path) -> bool:
    """Accept damage in a child that kills itself before a call of the operating system. Returns whether it did."""
    process = os.fork()
    if not process:
        try:
            logging.disable(logging.CRITICAL)
            Countdown(number, BEFORE)
            SqliteStore(path, accept_damage=True).open()
        finally:
            os._exit(0)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_x2_a_kill_at_any_call_of_accepting_damage_loses_nothing_that_is_intact(tmp_path: Path) -> None:
    made = damaged_store(tmp_path)
    with pytest.raises(StoreDamagedError, match="is damaged"):
        SqliteStore(made).open()
    number = 1
    finished = 0
    while True:
        folder = tmp_path / f"killed-{number}"
        path = shutil.copytree(made.parent, folder) / NAME
        if not killed_at(number, path):
            break
        try:
            store = SqliteStore(path)
            store.open()
            finished += 1  # the decision to accept the damage was made before the kill
        except StoreDamagedError:
            store = SqliteStore(path, accept_damage=True)
            store.open()
        kept = [found.seq for found in everything(store)]
        store.close()
        lost = set(ALL) - set(kept)
        assert lost == {DAMAGED}, f"killed before call {number}"
        assert len(list(folder.glob("*.damaged-1*"))) == 4, "file, log, commit counter and list are kept"
        assert not [left.name for left in folder.iterdir() if "accepted" in left.name or "rebuilt" in left.name]
        shutil.rmtree(folder)
        number += STEP
    assert number > 20
    assert 0 < finished < number // STEP
