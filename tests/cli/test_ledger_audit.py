"""`twinbus ledger audit`, and the audit after a drain, run as a user runs them (L3)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import invoke
from tests.cli.syphoned import Backlog
from twinbus.backlog import Endpoint, primary_name
from twinbus.cli.job_answers import JobAnswer, print_balance
from twinbus.connect import ConnectionString
from twinbus.ledger import AUDIT_WORDS, BALANCE_SUMS, LISTED_SUMS, Ledger, Move, Role, Stage
from twinbus.pairing import Administration, provisioning_steps
from twinbus.syphon import LISTED_WORDS, AuditSummary
from twinbus.testing import LocalNamespaces

LOCK = "PT5S"  # the shortest one that there is


class BookedBacklog(Backlog):
    """A backlog whose diverted messages are in a ledger. Its queues have a short lock, so that an audit is short."""

    def __init__(self, namespaces: LocalNamespaces, folder: Path) -> None:
        super().__init__(namespaces)
        self.ledger = folder
        parsed = ConnectionString.parse(self._secondary)
        self.space = primary_name(Endpoint.of(parsed.host, parsed.port))
        self._shorten_locks()

    def _shorten_locks(self) -> None:
        with Administration.from_connection_string(self._secondary) as administration:
            for queue in self.queues:
                properties = administration.request(administration.client.get_queue, queue)
                properties.lock_duration = LOCK
                administration.request(administration.client.update_queue, properties)

    def accept(self, *ids: str) -> None:
        """Divert messages, and book that."""
        self.divert(*ids)
        with Ledger(self.ledger, Role.CLIENT) as ledger:
            destination = f"{self.name}/{self.destination}"
            ledger.begin(Stage.SEND_BACKLOG, self.space, self.queues[0], ids, [4] * len(ids), destination).end()

    def delete_queue(self) -> None:
        with Administration.from_connection_string(self._secondary) as administration:
            administration.request(administration.client.delete_queue, self.queues[0])

    def provision(self) -> None:
        with Administration.from_connection_string(self._secondary) as administration:
            administration.run(provisioning_steps(self.queues))
        self._shorten_locks()


@pytest.fixture
def backlog(namespaces: LocalNamespaces, tmp_path: Path) -> BookedBacklog:
    return BookedBacklog(namespaces, tmp_path / "ledger")


def audit(backlog: BookedBacklog, *options: str, **environment: str) -> tuple[int, dict[str, Any]]:
    given = environment or backlog.environment
    done = invoke("ledger", "audit", str(backlog.ledger), "--json", *options, **given)
    return done.exit_code, json.loads(done.stdout)


def test_l3_an_audit_that_agrees_ends_with_0_after_one_look(backlog: BookedBacklog) -> None:
    backlog.accept("a", "b")
    code, found = audit(backlog)
    assert (code, found["verdict"], found["in_backlog"]) == (0, "proven", 2)
    assert (found["audit"]["there"], found["audit"]["looks"]) == (2, 1)
    assert found["audit"]["queues"] == sorted(backlog.queues)


def test_l3_a_deleted_queue_ends_with_1_and_names_every_message(backlog: BookedBacklog) -> None:
    backlog.accept("a", "b")
    backlog.delete_queue()
    done = invoke("ledger", "audit", str(backlog.ledger), **backlog.environment)
    assert done.exit_code == 1, done.output
    assert "lost: 2 of 2 accepted messages are in neither namespace." in done.output
    for name in ("a", "b"):
        assert f"  {backlog.name}/{backlog.destination}  {name}\n" in done.output
    assert "second look in 5 s" in done.output
    assert invoke("ledger", "check", str(backlog.ledger)).exit_code == 1, "the ledger knows from now on"


def test_l3_an_audit_of_a_ledger_with_missing_entries_ends_with_3(backlog: BookedBacklog) -> None:
    backlog.accept("a")
    # The mark of a writer that could not write.
    (backlog.ledger / "client-elsewhere-1-0123456789abcdef.failing").touch()
    done = invoke("ledger", "audit", str(backlog.ledger), **backlog.environment)
    assert done.exit_code == 3, done.output
    assert "not proven" in done.output


def test_l3_an_audit_needs_neither_the_primary_nor_the_right_to_list(backlog: BookedBacklog) -> None:
    backlog.accept("a")
    environment = {
        name: value for name, value in backlog.weaker.items() if name == "TWINBUS_SECONDARY_CONNECTION_STRING"
    }
    code, found = audit(backlog, **environment)
    assert (code, found["audit"]["there"]) == (0, 1)


def test_l3_a_secondary_that_does_not_answer_is_an_error(backlog: BookedBacklog) -> None:
    backlog.accept("a")
    wrong = {**backlog.environment}
    wrong["TWINBUS_SECONDARY_CONNECTION_STRING"] += "wrong"
    done = invoke("ledger", "audit", str(backlog.ledger), **wrong)
    assert done.exit_code == 2
    assert "lost" not in done.output
    assert "secondary" in done.output
    assert audit(backlog)[1]["lost"] == 0


def test_l3_a_folder_that_is_no_ledger_is_refused(backlog: BookedBacklog, tmp_path: Path) -> None:
    done = invoke("ledger", "audit", str(tmp_path), **backlog.environment)
    assert done.exit_code == 1
    assert "is not a ledger" in done.output


def drain(backlog: BookedBacklog, *options: str) -> tuple[int, list[dict[str, Any]]]:
    done = invoke("syphon", "--drain", "--ledger", str(backlog.ledger), "--json", *options, **backlog.environment)
    return done.exit_code, [json.loads(line) for line in done.stdout.splitlines()]


def test_l3_a_drain_audits_the_ledger_and_says_so(backlog: BookedBacklog) -> None:
    backlog.accept("a", "b", "c")
    code, lines = drain(backlog)
    assert code == 0
    assert (lines[-1]["ended"], lines[-1]["total"]["returned"]) == (True, 3)
    assert lines[-1]["audit"]["text"] == "proven: All 3 accepted messages are accounted for: 3 delivered."
    assert (lines[-1]["audit"]["absent"], lines[-1]["audit"]["lost"], lines[-1]["audit"]["looks"]) == (0, [], 1)
    assert audit(backlog)[1]["verdict"] == "proven"


@pytest.mark.thorough
def test_l3_a_drain_that_misses_messages_names_them_and_ends_with_1(backlog: BookedBacklog) -> None:
    backlog.accept("gone")
    backlog.delete_queue()
    backlog.provision()
    backlog.accept("a")
    done = invoke("syphon", "--drain", "--ledger", str(backlog.ledger), **backlog.environment)
    assert done.exit_code == 1, done.output
    assert "audit: lost: 1 of 2 accepted messages is in neither namespace. 1 not seen" in done.output
    assert f"{backlog.name}/{backlog.destination}  gone" in done.output


def test_l3_a_drain_with_a_ledger_of_its_own_does_not_complain(backlog: BookedBacklog) -> None:
    backlog.divert("a", "b")
    backlog.divert("c", path=None)
    done = invoke("syphon", "--drain", "--ledger", str(backlog.ledger), **backlog.environment)
    assert done.exit_code == 3, done.output
    assert "audit: proven: No message was accepted. The ledger has 2 unconfirmed messages:" in done.output
    assert "lost" not in done.output


def test_l3_l6_a_drain_without_its_audit_ends_with_3_and_names_the_command(
    backlog: BookedBacklog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinbus.cli.syphon._MOST_AUDITED_BYTES", 2**20)
    backlog.accept("a", "b")
    large = backlog.ledger / "client-elsewhere-1-0123456789abcdef-0.jsonl"
    large.write_bytes(b"\n" * (2**20 + 1))
    command = f"twinbus ledger audit {backlog.ledger} --engine spark"
    done = invoke("syphon", "--drain", "--ledger", str(backlog.ledger), **backlog.environment)
    assert done.exit_code == 3, done.output
    assert ": 2 returned, " in done.output
    *_, last, why = done.output.splitlines()
    assert ", audit: not made; " in last
    assert why == f"no verdict: the audit was not made: the ledger is larger than 1 MiB. Run `{command}`."
    code, lines = drain(backlog)
    assert (code, lines[-1]["audit"]["verdict"], lines[-1]["total"]["returned"]) == (3, None, 0)
    assert lines[-1]["audit"]["text"].endswith(f"Run `{command}`.")


def test_l3_l6_a_drain_whose_audit_fails_ends_with_3_and_says_why(backlog: BookedBacklog) -> None:
    backlog.accept("a", "b")
    # A folder with the name of a segment: the syphon never reads it, and the audit cannot.
    (backlog.ledger / "client-elsewhere-1-0123456789abcdef-0.jsonl").mkdir()
    done = invoke("syphon", "--drain", "--ledger", str(backlog.ledger), **backlog.environment)
    assert done.exit_code == 3, done.output
    assert ": 2 returned, " in done.output
    why = done.output.splitlines()[-1]
    assert why.startswith("no verdict: the audit was not made: ")
    assert "Is a directory" in why
    assert why.endswith(f". When this is mended, run `twinbus ledger audit {backlog.ledger}`.")


def book(backlog: BookedBacklog, stage: Stage, name: str, result: str = "ok") -> None:
    """Record an operation of a syphon on a message."""
    destination = f"{backlog.name}/{backlog.destination}"
    with Ledger(backlog.ledger, Role.SYPHON) as ledger:
        if stage is Stage.RETURN_PRIMARY:
            ledger.begin(stage, backlog.name, backlog.destination, [name], [4]).end(result)
        else:
            ledger.begin(stage, backlog.space, backlog.queues[0], [name], [4], destination).end(result)


def unknown(backlog: BookedBacklog) -> None:
    book(backlog, Stage.SEND_BACKLOG, "x")
    book(backlog, Stage.RETURN_PRIMARY, "x", "unknown")
    book(backlog, Stage.COMPLETE_BACKLOG, "x", "unknown")


def gap(backlog: BookedBacklog) -> None:
    (backlog.ledger / "client-elsewhere-1-0123456789abcdef.failing").touch()


def earlier_loss(backlog: BookedBacklog) -> None:
    book(backlog, Stage.SEND_BACKLOG, "x")
    with Ledger(backlog.ledger, Role.AUDIT) as ledger:
        place = f"{backlog.space}/{backlog.queues[0]}"
        ledger.moved(Move.LOST, ["x"], place, f"{backlog.name}/{backlog.destination}")


def come_again(backlog: BookedBacklog) -> None:
    backlog.accept("x")
    backlog.dead_letter("x")
    book(backlog, Stage.RETURN_PRIMARY, "x")
    book(backlog, Stage.COMPLETE_BACKLOG, "x")


def unconfirmed(backlog: BookedBacklog) -> None:
    backlog.divert("x")
    backlog.dead_letter("x")


@pytest.mark.parametrize(
    ("prepare", "said", "code"),
    [
        (unknown, "not proven: 1 of 2 accepted messages is unknown: ", 3),
        (gap, "not proven: The accepted message is accounted for: 1 delivered. Entries are missing ", 3),
        (earlier_loss, "lost: 1 of 2 accepted messages is in neither namespace.", 1),
        (come_again, "proven with possible duplicates: All 2 accepted messages are accounted for: 2 delivered. ", 0),
        (unconfirmed, "proven: The accepted message is accounted for: 1 delivered. 1 seen, but never reported", 0),
    ],
)
def test_l6_the_audit_after_a_drain_has_the_verdict_of_the_ledger_and_its_exit_code(
    backlog: BookedBacklog, prepare: Callable[[BookedBacklog], None], said: str, code: int
) -> None:
    backlog.accept("a")
    prepare(backlog)
    found, lines = drain(backlog)
    assert (found, lines[-1]["audit"]["text"][: len(said)]) == (code, said)
    checked = invoke("ledger", "check", str(backlog.ledger), "--json")
    ledger = json.loads(checked.stdout)
    assert checked.exit_code == code
    assert {name: lines[-1]["audit"][name] for name in ("verdict", "sentence")} == {
        name: ledger[name] for name in ("verdict", "sentence")
    }
    assert [one["id"] for one in lines[-1]["audit"]["lost"]] == (["x"] if code == 1 else [])


def test_l3_a_dead_letter_that_no_syphon_made_is_named_and_recorded(backlog: BookedBacklog) -> None:
    backlog.accept("a", "b")
    backlog.dead_letter("a")
    done = invoke("ledger", "audit", str(backlog.ledger), **backlog.environment)
    assert "accounted for: 1 in the backlog, 1 dead-lettered." in done.output
    assert "audit: 1 message and 1 dead letter in 2 backlog queues, one look, " in done.output
    assert (done.exit_code, audit(backlog)[1]["dead_lettered"]) == (0, 1)
    resubmitted = invoke(
        "deadletter", "resubmit", "--all", "--yes", "--ledger", str(backlog.ledger), **backlog.environment
    )
    assert resubmitted.exit_code == 0, resubmitted.output
    checked = json.loads(invoke("ledger", "check", str(backlog.ledger), "--json").stdout)
    assert (checked["in_backlog"], checked["dead_lettered"]) == (2, 0)


def test_l3_l6_a_reconciliation_after_an_audit_has_the_reasons_of_the_audit(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = ["a segment is not there", "a writer has no open segment here"]
    sums = dict.fromkeys((*BALANCE_SUMS, "in_flight"), 0) | {"accepted": 1, "in_backlog": 1}
    counts = dict.fromkeys(AUDIT_WORDS, 0) | {"absent": 1}
    listed = dict.fromkeys(LISTED_WORDS, ())
    found = AuditSummary(sums, {}, tuple(reasons), counts, listed, (), 0, 0, 2, 2, 1.0)
    answer = JobAnswer((), sums, dict.fromkeys(LISTED_SUMS, ()), reasons[:1])
    assert print_balance(answer, json=True, audited=found) == 3
    printed = json.loads(capsys.readouterr().out)
    assert (printed["verdict"], printed["incomplete"]) == ("not proven", reasons)
    assert print_balance(JobAnswer((), sums, answer.listed), json=True) == 0
