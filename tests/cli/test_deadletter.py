"""`twinbus deadletter`, run as an operator runs it (Y6)."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from tests.cli.running import invoke
from tests.cli.syphoned import Backlog, ids_of
from twinbus.backlog import PATH_PROPERTY, SESSION_ID_PROPERTY
from twinbus.cli import deadletter
from twinbus.ledger import Move, Movement, read_ledger
from twinbus.testing import LocalNamespaces


@pytest.fixture
def backlog(namespaces: LocalNamespaces) -> Backlog:
    """Four dead letters in two queues: two for the destination, one for another, one for none."""
    made = Backlog(namespaces)
    made.divert("1", "2", properties={SESSION_ID_PROPERTY: "s"})
    made.divert("3", path="gone")
    made.divert("4", path=None, queue=1)
    made.dead_letter("1", "2", reason="MessageTooLarge", description="[by far]")
    made.dead_letter("3", reason="DestinationGone")
    made.dead_letter("4", queue=1)
    return made


def test_y6_dead_letters_are_listed_with_reason_destination_id_and_arrival(backlog: Backlog) -> None:
    shown = invoke("deadletter", "list", **backlog.environment)
    assert shown.exit_code == 0, shown.stderr
    for text in (
        "MessageTooLarge",
        "[by far]",
        "DestinationGone",
        backlog.destination,
        "gone",
        "4 dead-lettered messages",
    ):
        assert text in shown.stdout
    told = [
        json.loads(line) for line in invoke("deadletter", "list", "--json", **backlog.environment).stdout.splitlines()
    ]
    for one in told:
        assert datetime.fromisoformat(one["enqueued_time"]).strftime("%Y-%m-%d %H:%M:%S") in shown.stdout
    assert [(one["message_id"], one["destination"]) for one in told] == [
        ("1", backlog.destination),
        ("2", backlog.destination),
        ("3", "gone"),
        ("4", None),
    ]
    assert len(backlog.dead()) == 4


def test_y6_a_long_list_is_shown_page_by_page(backlog: Backlog) -> None:
    page = invoke("deadletter", "list", "--limit", "3", "--json", **backlog.environment)
    assert [json.loads(line)["message_id"] for line in page.stdout.splitlines()] == ["1", "2", "3"]
    cursor = page.stderr.split("--after ")[1].strip()
    rest = invoke("deadletter", "list", "--limit", "3", "--after", cursor, "--json", **backlog.environment)
    assert [json.loads(line)["message_id"] for line in rest.stdout.splitlines()] == ["4"]
    assert "more:" not in rest.stderr
    wrong = invoke("deadletter", "list", "--after", "nothing", **backlog.environment)
    assert wrong.exit_code == 2
    assert "--after 'nothing'" in wrong.stderr
    elsewhere = invoke("deadletter", "list", "--after", "nosuch:3", **backlog.environment)
    assert elsewhere.exit_code == 1
    assert "'nosuch' is none of the backlog queues" in elsewhere.stderr


def test_y6_all_of_a_long_list_are_drawn_a_table_at_a_time(backlog: Backlog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadletter, "_ROWS", 3)
    shown = invoke("deadletter", "list", "--limit", "0", **backlog.environment)
    assert shown.stdout.count("destination") == 2
    assert shown.stdout.splitlines()[-1] == "4 dead-lettered messages"


@pytest.mark.parametrize("verb", [("list",), ("resubmit", "--all", "--yes")])
def test_y6_a_primary_without_a_backlog_is_told_and_not_taken_for_one_without_dead_letters(
    backlog: Backlog, verb: tuple[str, ...]
) -> None:
    done = invoke("deadletter", *verb, **{**backlog.environment, "TWINBUS_PRIMARY_NAME": "nobody"})
    assert done.exit_code == 1
    assert "has no backlog queue of 'nobody'" in done.stderr


def test_y6_to_bring_back_all_of_none_is_done(namespaces: LocalNamespaces) -> None:
    done = invoke("deadletter", "resubmit", "--all", "--yes", **Backlog(namespaces).environment)
    assert done.exit_code == 0
    assert "there are no dead-lettered messages" in done.stderr


def test_y6_resubmitted_by_id_a_message_is_as_it_was_and_the_others_stay(backlog: Backlog, tmp_path: Path) -> None:
    done = invoke("deadletter", "resubmit", "--id", "2", "--yes", "--ledger", str(tmp_path), **backlog.environment)
    assert done.exit_code == 0, done.stderr
    assert "1 message is back in the backlog" in done.stdout
    (back,) = backlog.left()
    assert back.application_properties == {
        PATH_PROPERTY: backlog.destination,
        SESSION_ID_PROPERTY: "s",
        "colour": "red",
    }
    assert ids_of(backlog.dead()) == ["1", "3", "4"]
    assert [one.delivery_count for one in backlog.dead()] == [0, 0, 0]
    (moved,) = [entry for entry in read_ledger(tmp_path) if isinstance(entry, Movement)]
    assert (moved.move, moved.ids) == (Move.RESUBMITTED, ("2",))
    assert moved.destination == f"{backlog.name}/{backlog.destination}"
    home = invoke("syphon", "--drain", **backlog.environment)
    assert home.exit_code == 0, home.stderr
    (found,) = backlog.arrived()
    assert (found.message_id, found.session_id, found.application_properties) == ("2", "s", {"colour": "red"})


def test_y6_resubmitted_by_destination_with_another_one(backlog: Backlog, tmp_path: Path) -> None:
    done = invoke(
        "deadletter", "resubmit", "--destination", "GONE", "--destination", "-", "--to", backlog.destination,
        "--ledger", str(tmp_path), "--yes", "--json", **backlog.environment,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["message_id"]: one["resubmitted_to"] for one in told} == {
        "3": backlog.destination,
        "4": backlog.destination,
    }
    assert {one.application_properties[PATH_PROPERTY] for one in backlog.left()} == {backlog.destination}
    moved = {entry.source: entry for entry in read_ledger(tmp_path) if isinstance(entry, Movement)}
    assert moved.keys() == {f"{backlog.name}/gone", f"{backlog.name}/"}
    assert {(one.move, one.destination) for one in moved.values()} == {
        (Move.REDIRECTED, f"{backlog.name}/{backlog.destination}")
    }
    assert ids_of(backlog.dead()) == ["1", "2"]


def test_y6_nothing_is_moved_without_a_yes(backlog: Backlog) -> None:
    refused = invoke("deadletter", "resubmit", "--id", "1", **backlog.environment)
    assert refused.exit_code == 1
    assert f"Put 1 message back into the backlog, for {backlog.destination}?" in refused.stdout
    assert len(backlog.dead()) == 4


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        ((), "no message is selected", 2),
        (("--id", "nope"), "no dead-lettered message matches", 1),
        (("--all", "--id", "1"), "no message is selected", 2),
        (("--all", "--json"), "Add --yes", 2),
        (("--all", "--yes"), "1 of them have no destination", 1),
    ],
)
def test_y6_what_cannot_be_meant_is_refused_with_a_hint(
    backlog: Backlog, arguments: tuple[str, ...], says: str, code: int
) -> None:
    done = invoke("deadletter", "resubmit", *arguments, **backlog.environment)
    assert done.exit_code == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(backlog.dead()) == 4
