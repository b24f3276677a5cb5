"""`twinbus ledger ship`: sealed segments are copied exactly once, whatever ends the process (D6)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.object_stores import SECRET, Hook, StoreServer, s3_server
from twinbus.cli.main import app
from twinbus.ledger import Ledger, LedgerOptions, Shipping, Stage, dead_writers, read_ledger
from twinbus.object_store import ObjectFolder, without_credentials
from twinbus.storage_location import StorageLocation


@pytest.fixture(scope="module")
def s3() -> Iterator[StoreServer]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


def make_segments(directory: Path, count: int) -> None:
    """Write a ledger with this many sealed segments."""
    for number in range(count):
        with Ledger(directory, options=LedgerOptions()) as ledger:
            ledger.begin(Stage.SEND_BACKLOG, "paris", "backlog", [f"order-{number}"], 100, "contoso/orders").end()


def content(url: str) -> dict[str, bytes]:
    folder = ObjectFolder(StorageLocation.parse(url))
    return {one.name: folder.read(one.name) for one in folder.list()}


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name.endswith(".jsonl")}


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["ledger", *arguments], env={"COLUMNS": "250"})
    return done.exit_code, done.stdout + done.stderr


def test_d6_sealed_segments_are_shipped_once_and_the_copy_is_read_as_the_ledger(
    s3: StoreServer, tmp_path: Path
) -> None:
    make_segments(tmp_path / "ledger", 2)
    url = s3.url()
    with Ledger(tmp_path / "ledger") as writing:
        writing.begin(Stage.SEND_PRIMARY, "contoso", "orders", ["order-9"], 100).end()
        code, said = run("ship", str(tmp_path / "ledger"), url, "--json")
        sealed = files(tmp_path / "ledger")
        assert (code, json.loads(said)) == (
            0,
            {"copied": 2, "bytes": sum(map(len, sealed.values())), "present": 0, "open": 1, "differing": []},
        )
        assert content(url) == sealed, "and nothing of the open segment"
    code, said = run("ship", str(tmp_path / "ledger"), url)
    assert (code, said.split()[3:8]) == (0, ["copied", "1", "bytes", said.split()[6], "present"])
    assert content(url) == files(tmp_path / "ledger")
    assert list(read_ledger(url)) == list(read_ledger(tmp_path / "ledger"))
    assert dead_writers(url) == dead_writers(tmp_path / "ledger") != frozenset()
    code, said = run("check", url)
    assert (code, said.splitlines()[0].partition(":")[0]) == (0, "proven"), said


def test_d6_a_segment_that_differs_there_is_named_and_not_replaced(s3: StoreServer, tmp_path: Path) -> None:
    make_segments(tmp_path / "ledger", 3)
    url = s3.url()
    folder = ObjectFolder(StorageLocation.parse(url))
    longer, other, same = sorted(files(tmp_path / "ledger").items())
    folder.put_new(longer[0], longer[1] + b"{}\n", {})
    folder.put_new(other[0], bytes(len(other[1])), {})
    folder.put_new(same[0], same[1], {})  # copied by another tool
    before = content(url)
    code, said = run("ship", str(tmp_path / "ledger"), url, "--json")
    assert (code, json.loads(said)["differing"], json.loads(said)["present"]) == (3, [longer[0], other[0]], 1)
    assert content(url) == before
    code, said = run("ship", str(tmp_path / "ledger"), url)
    assert (code, f"{longer[0]} differs there" in said) == (3, True)


def test_d6_a_segment_that_another_process_has_shipped_since_the_listing_is_present_or_differs(
    s3: StoreServer, tmp_path: Path
) -> None:
    make_segments(tmp_path / "ledger", 1)
    url = s3.url()
    shipping = Shipping(tmp_path / "ledger", StorageLocation.parse(url))
    assert shipping.ship().copied == 1
    before = files(tmp_path / "ledger")
    make_segments(tmp_path / "ledger", 2)
    same, other = sorted(files(tmp_path / "ledger").keys() - before.keys())
    theirs = {**files(tmp_path / "ledger"), other: b"{}\n"}
    for name in (same, other):
        assert ObjectFolder(StorageLocation.parse(url)).put_new(name, theirs[name], {})
    found = shipping.ship()
    assert (found.copied, found.present, found.differing) == (0, 1, (other,))
    assert content(url) == theirs


def test_d6_a_store_that_refuses_or_does_not_answer_is_an_error_without_credentials(
    s3: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_segments(tmp_path / "ledger", 1)
    code, said = run("ship", str(tmp_path / "ledger"), f"s3://no-{s3.container}/ledger")
    assert (code, "does not exist" in said, f"s3://no-{s3.container}/ledger" in said) == (1, True, True), said
    assert SECRET not in said
    code, said = run("check", s3.url())
    assert (code, "has no segment of a ledger" in said) == (1, True)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2021&sig=a-secret-signature")
    shown = without_credentials(f"PUT http://host/a?sv=2021&sig=other, {SECRET}; sv=2021&sig=a-secret-signature")
    assert (shown.count("…"), "sig=" in shown, SECRET in shown) == (3, False, False)


def test_d6_segments_are_shipped_to_a_folder_too(tmp_path: Path) -> None:
    make_segments(tmp_path / "ledger", 2)
    for copied in (2, 0):
        found = Shipping(tmp_path / "ledger", StorageLocation(str(tmp_path / "copy"))).ship()
        assert (found.copied, found.present, found.differing) == (copied, 2 - copied, ())
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == sorted(files(tmp_path / "ledger"))
    assert files(tmp_path / "copy") == files(tmp_path / "ledger")
    (tmp_path / "copy" / ".shipping-gone").symlink_to(tmp_path / "gone")
    found = Shipping(tmp_path / "ledger", StorageLocation(str(tmp_path / "copy"))).ship()
    assert found.present == 2, "another process that ships has finished a file since the listing"
    (tmp_path / "link").symlink_to("ledger")
    for name in ("ledger", "link"):
        code, said = run("ship", str(tmp_path / "ledger"), f"file://{tmp_path / name}")
        assert (code, "is the ledger itself" in said) == (1, True)


REQUESTS = 3
"""Requests of a process that ships two segments: one to list, two to store."""


def killing(pid: int, step: int) -> Hook:
    """Return a hook that kills a process at the request of this number, counted from 0."""
    requests = count()

    def kill(_method: str, _path: str) -> None:
        if next(requests) == step:
            os.kill(pid, signal.SIGKILL)
            raise ConnectionAbortedError("the test ends this request here")

    return kill


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["before", "after"])
def test_d6_kill_9_at_any_step_of_shipping_leaves_no_half_segment_and_none_twice(
    s3: StoreServer, tmp_path: Path, moment: str
) -> None:
    """The server kills the process at each of its requests: before it is handled, or before its answer is sent."""
    make_segments(tmp_path / "ledger", REQUESTS - 1)
    expected = files(tmp_path / "ledger")
    for step in range(REQUESTS):
        url = s3.url()
        process = subprocess.Popen([sys.executable, "-m", "twinbus", "ledger", "ship", str(tmp_path / "ledger"), url])

        setattr(s3, moment, killing(process.pid, step))
        assert process.wait() == -signal.SIGKILL
        setattr(s3, moment, None)
        stored = content(url)
        assert stored.items() <= expected.items(), "no half segment"
        assert len(stored) == max(0, step - (moment == "before"))
        found = Shipping(tmp_path / "ledger", StorageLocation.parse(url)).ship()
        assert (found.copied, found.present) == (len(expected) - len(stored), len(stored))
        assert content(url) == expected


def fail(_method: str, _path: str) -> None:
    raise RuntimeError("the test lets this request fail")


@contextmanager
def following(ledger: Path, target: str) -> Iterator[subprocess.Popen[str]]:
    """Ship with --follow until the end of the block."""
    command = [sys.executable, "-m", "twinbus", "ledger", "ship", str(ledger), target, "--json"]
    with subprocess.Popen(
        [*command, "--follow", "--every", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


def copied(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(json.loads(process.stdout.readline())["copied"])


@pytest.mark.thorough
def test_d6_a_follower_ships_what_is_sealed_later_and_survives_a_store_that_fails(
    s3: StoreServer, tmp_path: Path
) -> None:
    make_segments(tmp_path / "ledger", 1)
    url = s3.url()
    with following(tmp_path / "ledger", url) as process:
        assert process.stderr is not None
        assert copied(process) == 1
        s3.before = fail
        make_segments(tmp_path / "ledger", 1)
        assert "error: " in process.stderr.readline()
        s3.before = None
        assert copied(process) == 1
        assert content(url) == files(tmp_path / "ledger")


@pytest.mark.thorough
def test_d6_a_follower_survives_a_folder_that_is_gone_for_a_moment(tmp_path: Path) -> None:
    ledger, target, away = tmp_path / "ledger", tmp_path / "copy", tmp_path / "away"
    make_segments(ledger, 1)
    with following(ledger, str(target)) as process:
        assert process.stderr is not None
        assert copied(process) == 1
        target.rename(away)
        make_segments(ledger, 1)
        assert process.stderr.readline().startswith(f"error: shipping to {target} failed at ")
        assert not target.exists(), "a volume that is not mounted: nothing may be written below its mount point"
        away.rename(target)
        assert copied(process) == 1
    assert files(target) == files(ledger)


@pytest.fixture
def silent(s3: StoreServer) -> Iterator[threading.Event]:
    """The store answers no request. The event is set when there is one."""
    asked, ended = threading.Event(), threading.Event()

    def wait(_method: str, _path: str) -> None:
        asked.set()
        ended.wait()

    s3.before = wait
    yield asked
    s3.before = None
    ended.set()


@pytest.mark.thorough
def test_ctrl_c_ends_a_verb_that_waits_for_an_object_store(
    s3: StoreServer, silent: threading.Event, tmp_path: Path
) -> None:
    make_segments(tmp_path / "ledger", 1)
    command = [sys.executable, "-m", "twinbus", "ledger", "ship", str(tmp_path / "ledger"), s3.url()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert silent.wait(60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert (process.returncode, said.splitlines()[-1]) == (130, "interrupted")


@pytest.mark.thorough
def test_a_second_ctrl_c_ends_a_follower_that_waits_for_an_object_store(
    s3: StoreServer, silent: threading.Event, tmp_path: Path
) -> None:
    make_segments(tmp_path / "ledger", 1)
    wait, s3.before = s3.before, None
    command = [sys.executable, "-m", "twinbus", "ledger", "ship", str(tmp_path / "ledger"), s3.url()]
    with subprocess.Popen(
        [*command, "--follow", "--every", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        s3.before = wait
        make_segments(tmp_path / "ledger", 1)
        assert silent.wait(60)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        _, said = process.communicate()
    assert (process.returncode, said.splitlines()[-1]) == (130, "interrupted")
