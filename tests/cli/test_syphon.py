"""`twinbus syphon`, run as an operator runs it: once as a process, otherwise in the test's own process."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import COMMAND, PATIENCE, environment, invoke
from tests.cli.syphoned import Backlog, ids_of
from twinbus.backlog import SESSION_ID_PROPERTY, TIME_TO_LIVE_PROPERTY, FailureKind
from twinbus.cli.progress import LineDisplay, TableDisplay, duration
from twinbus.ledger import Intent, Operation, Stage, read_ledger
from twinbus.syphon import DestinationStatus, MessageCounts, Progress, Readiness
from twinbus.testing import LocalNamespaces
from twinbus.values import Char


@pytest.fixture
def backlog(namespaces: LocalNamespaces) -> Backlog:
    return Backlog(namespaces)


@pytest.mark.parametrize("transport", ["native", "sdk"])
def test_y3_a_drain_brings_everything_home_and_ends(backlog: Backlog, transport: str, tmp_path: Path) -> None:
    backlog.divert("1", "2")
    backlog.divert("3", queue=1, properties={SESSION_ID_PROPERTY: "s"})
    done = invoke(
        "syphon", "--drain", "--transport", transport, "--ledger", str(tmp_path), "--json", **backlog.environment
    )
    assert done.exit_code == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["ended"] is True
    assert last["total"]["returned"] == 3
    assert (last["remaining"], last["seconds_left"]) == (None, None)
    assert last["by_destination"][backlog.destination]["returned"] == 3
    assert ids_of(backlog.arrived()) == ["1", "2", "3"]
    assert backlog.left() == []
    begun = [one for one in read_ledger(tmp_path) if isinstance(one, Intent | Operation)]
    returned = [message_id for one in begun if one.stage is Stage.RETURN_PRIMARY for message_id in one.ids]
    assert sorted(returned) == ["1", "2", "3"]


def test_y6_y9_a_drain_that_leaves_dead_letters_behind_says_so(backlog: Backlog) -> None:
    backlog.divert("1")
    backlog.divert("2", path=None)
    done = invoke("syphon", "--drain", **backlog.environment)
    assert done.exit_code == 3, done.stdout + done.stderr
    assert "1 returned" in done.stdout
    assert "1 dead-lettered" in done.stdout
    (dead,) = backlog.dead()
    assert (dead.message_id, dead.dead_letter_reason) == ("2", "NoDestination")


def test_y7_absolute_dead_letters_what_expired(backlog: Backlog) -> None:
    backlog.divert("1", properties={TIME_TO_LIVE_PROPERTY: 10_000})
    done = invoke("syphon", "--drain", "--ttl", "absolute", **backlog.environment)
    assert done.exit_code == 3, done.stdout + done.stderr
    assert [one.dead_letter_reason for one in backlog.dead()] == ["TTLExpiredException"]


def test_y10_what_the_sdk_would_change_stays_until_the_native_transport_carries_it(backlog: Backlog) -> None:
    backlog.divert("1", data=b"x" * 250_000, message_annotations={"x-mine": Char("ü")})
    kept = invoke("syphon", "--drain", "--transport", "sdk", **backlog.environment)
    assert kept.exit_code == 3, kept.stdout + kept.stderr
    assert "1 kept" in kept.stdout
    assert backlog.arrived() == []
    carried = invoke("syphon", "--drain", **backlog.environment)
    assert carried.exit_code == 0, carried.stdout + carried.stderr
    (found,) = backlog.arrived()
    assert type(found.annotations["x-mine"]) is Char


def test_y9_a_dry_run_tells_what_is_there_and_moves_nothing(backlog: Backlog) -> None:
    backlog.divert("1", "2")
    backlog.divert("3", path="elsewhere", queue=1)
    backlog.divert("4", path=None)
    found = invoke("syphon", "--dry-run", "--json", **backlog.environment)
    assert found.exit_code == 0, found.stderr
    told = json.loads(found.stdout)
    assert told["messages"] == 4
    counts = {one["destination"]: one["messages"] for one in told["destinations"]}
    assert counts == {backlog.destination: 2, "elsewhere": 1, None: 1}
    plain = invoke("syphon", "--dry-run", **backlog.environment)
    assert "2  " + backlog.destination in plain.stdout
    assert "no destination, would be dead-lettered" in plain.stdout
    assert "4 messages in 2 backlog queues; nothing was moved" in plain.stdout
    assert len(backlog.left()) == 4


def test_y2_a_key_that_may_not_list_finds_the_queues_one_by_one(backlog: Backlog) -> None:
    backlog.divert("1", queue=1)
    done = invoke("syphon", "--drain", **backlog.weaker)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert ids_of(backlog.arrived()) == ["1"]


@pytest.mark.parametrize(
    ("change", "says", "hint"),
    [
        ({"TWINBUS_PRIMARY_NAME": "nobody"}, "no backlog queue of 'nobody'", "--primary-name"),
        ({"TWINBUS_SECONDARY_CONNECTION_STRING": "not one;a=b"}, "--secondary: part 1", "connection strings"),
        ({"TWINBUS_SECONDARY_CONNECTION_STRING": "not one"}, "--secondary: it is neither", "connection strings"),
        ({"key-of-all": "key-of-none"}, "the key was refused by the secondary", "key"),
    ],
)
def test_what_is_wrong_is_told_in_a_line_with_a_hint(
    backlog: Backlog, change: dict[str, str], says: str, hint: str
) -> None:
    given = backlog.environment
    for name, value in change.items():
        given = (
            {**given, name: value} if name in given else {key: one.replace(name, value) for key, one in given.items()}
        )
    done = invoke("syphon", "--drain", **given)
    assert done.exit_code == (2 if says.startswith("--") else 1)
    assert says in done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert "key-of-none" not in done.stderr


@pytest.mark.parametrize("rate", ["0.0", "inf", "nan"])
def test_a_rate_that_is_none_is_refused_by_name(backlog: Backlog, rate: str) -> None:
    done = invoke("syphon", "--rate", rate, **backlog.environment)
    assert done.exit_code == 2
    assert f"rate is {rate}; it must be" in done.stderr
    assert "unexpected error" not in done.stderr


@pytest.mark.parametrize("option", [("--master", "local"), ("--ledger", "somewhere"), ("--lanes", "2")])
def test_a_dry_run_refuses_what_it_would_not_use(backlog: Backlog, option: tuple[str, str]) -> None:
    done = invoke("syphon", "--dry-run", "--engine", "spark", *option, **backlog.environment)
    assert done.exit_code == 2
    assert "--dry-run cannot be combined" in done.stderr


@pytest.mark.parametrize("verb", [("syphon", "--drain"), ("deadletter", "resubmit", "--all", "--yes")])
@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_ledger_that_cannot_be_written_is_refused_before_anything_moves(
    backlog: Backlog, tmp_path: Path, verb: tuple[str, ...], name: str
) -> None:
    (tmp_path / "file").touch()
    backlog.divert("1")
    done = invoke(*verb, "--ledger", str(tmp_path / name), **backlog.environment)
    assert done.exit_code == 1
    assert f"error: --ledger {tmp_path / name} cannot be written: " in done.stderr
    assert len(done.stderr.splitlines()) == 2  # the error and a hint
    assert len(backlog.left()) == 1


def test_the_paragraphs_of_the_help_are_not_broken_but_by_the_terminal() -> None:
    shown = invoke("syphon", "--help").stdout
    assert "0 if stopped, 1 if it could not work, 128 + signal after a second signal." in shown


# --- signals ---------------------------------------------------------------------------------------------------------


class Running:
    """A running `twinbus syphon --json` in its own process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first JSON object that the process prints for which the condition holds."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told: dict[str, Any] = json.loads(line)
            if holds(told):
                return told
        raise AssertionError(f"it ended before that: {self.process.stderr and self.process.stderr.read()}")


@contextmanager
def running(backlog: Backlog, *arguments: str) -> Iterator[Running]:
    process = subprocess.Popen(
        [*COMMAND, "syphon", "--json", "--every", "0.2", *arguments],
        env=environment(**backlog.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Running(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_y9_it_pauses_resumes_and_stops_by_signals(backlog: Backlog) -> None:
    with running(backlog) as syphon:
        syphon.until(lambda told: told["state"] == "running")
        syphon.process.send_signal(signal.SIGUSR1)
        syphon.until(lambda told: told["state"] == "paused")
        syphon.until(lambda told: told["held"] == 0)
        backlog.divert("1")
        assert syphon.until(lambda _: True)["total"]["returned"] == 0
        assert ids_of(backlog.left()) == ["1"]
        syphon.process.send_signal(signal.SIGUSR2)
        syphon.until(lambda told: told["total"]["returned"] == 1)
        syphon.process.send_signal(signal.SIGTERM)
        assert syphon.until(lambda told: told["ended"])["state"] == "ended"
        assert syphon.process.wait(PATIENCE) == 0
    assert ids_of(backlog.arrived()) == ["1"]


def test_y11_a_drain_that_is_stopped_does_not_end_like_one_that_is_done(backlog: Backlog, tmp_path: Path) -> None:
    backlog.divert(*map(str, range(5)))
    with running(backlog, "--drain", "--rate", "0.5", "--ledger", str(tmp_path / "ledger")) as syphon:
        syphon.until(lambda told: told["state"] == "running")
        syphon.process.send_signal(signal.SIGTERM)
        audit = syphon.until(lambda told: told["ended"])["audit"]
        assert (audit["verdict"], audit["text"].partition(". ")[0]) == (
            None,
            "not made: the drain was stopped before its end",
        )
        assert syphon.process.wait(PATIENCE) == 3
    assert backlog.left()


def test_y3_a_second_signal_ends_it_at_once_and_nothing_is_lost(backlog: Backlog, namespaces: LocalNamespaces) -> None:
    fault = namespaces["primary"].faults.set("black-hole", entity=backlog.destination, points=["send"])
    try:
        with running(backlog, "--timeout", "30") as syphon:
            backlog.divert("1")
            syphon.until(lambda told: told["held"] == 1)
            syphon.process.send_signal(signal.SIGTERM)
            syphon.until(lambda told: told["state"] == "stopping")
            syphon.process.send_signal(signal.SIGTERM)
            assert syphon.process.wait(PATIENCE) == 128 + signal.SIGTERM
    finally:
        namespaces["primary"].faults.clear(fault["id"])
    assert ids_of(backlog.left()) == ["1"]


def test_it_ends_without_a_word_when_nobody_reads_it_any_more(backlog: Backlog) -> None:
    with running(backlog) as syphon:
        syphon.until(lambda told: told["state"] == "running")
        assert syphon.process.stdout is not None
        syphon.process.stdout.close()
        assert syphon.process.wait(PATIENCE) == 128 + signal.SIGPIPE
        assert syphon.process.stderr is not None
        assert "error" not in syphon.process.stderr.read()


# --- words -----------------------------------------------------------------------------------------------------------


def moment(**given: Any) -> Progress:
    usual: dict[str, Any] = {
        "seconds": 60.0,
        "total": MessageCounts(returned=600, kept=2),
        "by_destination": {"orders": MessageCounts(returned=600), "events": MessageCounts(deferred=5)},
        "states": (DestinationStatus("events", Readiness.ASIDE, FailureKind.ENTITY_DISABLED, 0.0),),
        "operations": {},
        "rate": 100.0,
        "held": 5,
        "aside_by_destination": {"events": 5},
        "remaining": 7300,
        "seconds_left": 73.0,
        "state": "running",
    }
    return Progress(**{**usual, **given})


def test_y9_a_line_tells_rate_remaining_estimated_end_and_each_destination(capsys: pytest.CaptureFixture[str]) -> None:
    shown = LineDisplay()
    shown.show(moment())
    shown.show(moment(seconds_left=None, remaining=None))
    first, second = capsys.readouterr().out.splitlines()
    assert "running: 600 returned, 100/s, 7300 remaining, about 1 min 13 s left (until " in first
    assert "2 kept: this transport would change them" in first
    assert "orders: 600" in first
    assert "events: 0 (aside: entity_disabled, tried again in 0 s)" in first
    assert "left" not in second


def test_y9_a_terminal_is_shown_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with TableDisplay() as shown:
        shown.end(moment())
    told = capsys.readouterr().out
    assert "destination" in told
    assert "7300 remaining" in told


def test_l6_the_table_shows_the_messages_that_are_put_aside_and_their_sum_is_in_the_summary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # 102 deferrals: three messages were brought back, and put aside again. One destination is known of an earlier run.
    counted = {"orders": MessageCounts(returned=600), "events": MessageCounts(deferred=102)}
    total, aside = MessageCounts(returned=600, deferred=102), {"events": 97, "earlier": 2}
    with TableDisplay() as shown:
        shown.end(moment(total=total, by_destination=counted, aside_by_destination=aside))
    told = capsys.readouterr().out
    rows = {cells[1].strip(): cells[3].strip() for line in told.splitlines() if len(cells := line.split("│")) > 4}
    assert {path: count for path, count in rows.items() if path} == {"orders": "0", "events": "97", "earlier": "2"}
    assert "99 put aside" in " ".join(told.split())
    assert "102" not in told


def test_l6_a_summary_says_whether_the_numbers_of_lanes_that_died_are_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    LineDisplay().show(moment(lanes_lost=3, lanes_uncounted=3))
    LineDisplay().show(moment(lanes_lost=3))
    LineDisplay().show(moment())
    first, second, third = capsys.readouterr().out.splitlines()
    assert "3 lanes died: what they moved is not in these numbers" in first
    assert "3 lanes died: counted from the ledger" in second
    assert "died" not in third


def test_l6_a_summary_says_that_its_possible_duplicates_are_those_of_this_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The verdict beside it counts those of the whole ledger.
    audit = {
        "verdict": "proven with possible duplicates",
        "text": "proven with possible duplicates: … 7 possibly",
        "lost": [],
    }
    LineDisplay().show(moment(total=MessageCounts(returned=600, possible_duplicates=2), audit=audit))
    assert "2 possibly delivered twice in this run, audit: proven with possible" in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (3700, "1 h 1 min")])
def test_spans_are_told_as_people_do(seconds: float, text: str) -> None:
    assert duration(seconds) == text
