"""The exit codes of all verbs: the documented table, the help of each verb, and what each verb really does."""

import ast
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinbus.cli.main import app

from .test_whole import VERBS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "exit-codes.md"
AWAY = "Endpoint=sb://localhost:1;SharedAccessKeyName=a;SharedAccessKey=b;UseDevelopmentEmulator=true"
OTHER = AWAY.replace("localhost:1", "localhost:2")
PAIR = {"TWINBUS_PRIMARY_CONNECTION_STRING": AWAY, "TWINBUS_SECONDARY_CONNECTION_STRING": OTHER}
ONE = {"TWINBUS_CONNECTION_STRING": AWAY}
NOT_A_STRING = {**PAIR, "TWINBUS_SECONDARY_CONNECTION_STRING": "x", "TWINBUS_CONNECTION_STRING": "x"}

# Arguments of each verb of `entity` with which it asks nothing.
ENTITY: dict[str, tuple[str, ...]] = {
    "list": (),
    "show": ("orders",),
    "create": ("orders",),
    "delete": ("orders", "--yes"),
    "peek": ("orders",),
    "send": ("orders", "body"),
    "purge": ("orders", "--yes"),
}

# What each verb does without any namespace: the arguments, the environment, the exit code.
WITHOUT_NAMESPACES: list[tuple[str, tuple[str, ...], dict[str, str], int]] = [
    ("serve", ("--log-level", "loud"), {}, 2),
    ("serve", ("--data", "x", "--memory"), {}, 2),
    ("serve", ("--data", "file/below", "--namespace", "one=0"), {}, 1),
    ("fault set", ("server-busy",), NOT_A_STRING, 2),
    ("fault set", ("server-busy",), ONE, 1),
    ("fault clear", (), NOT_A_STRING, 2),
    ("fault clear", (), ONE, 1),
    ("fault list", (), NOT_A_STRING, 2),
    ("fault list", (), ONE, 1),
    ("export", (), NOT_A_STRING, 2),
    ("export", (), ONE, 1),
    *((f"entity {verb}", path, NOT_A_STRING, 2) for verb, path in ENTITY.items()),
    *((f"entity {verb}", path, ONE, 1) for verb, path in ENTITY.items()),
    ("provision", (), NOT_A_STRING, 2),
    ("provision", ("--count", "1", "--primary-name", "-"), PAIR, 2),
    ("doctor", (), NOT_A_STRING, 2),
    ("doctor", ("--clean", "--json"), PAIR, 2),
    ("doctor", ("--count", "1"), PAIR, 4),
    ("drill", ("--entity", "orders", "--yes"), NOT_A_STRING, 2),
    ("syphon", ("--lanes", "2"), PAIR, 2),
    ("syphon", ("--drain", "--timeout", "1"), PAIR, 1),
    ("deadletter list", ("--after", "nothing"), PAIR, 2),
    ("deadletter list", ("--timeout", "1"), PAIR, 1),
    ("deadletter list", (), NOT_A_STRING, 2),
    ("deadletter resubmit", (), PAIR, 2),
    ("deadletter resubmit", ("--all", "--yes", "--timeout", "1"), PAIR, 1),
    ("ledger check", (), {}, 2),
    ("ledger check", ("nowhere",), {}, 1),
    ("ledger audit", ("nowhere",), PAIR, 1),
    ("ledger reconcile", ("tables", "--audit"), {}, 2),
    ("ledger reconcile", ("tables", "--ledger", "nowhere"), {}, 1),
    ("ledger ingest", ("nowhere", "tables"), {}, 1),
    ("ledger ingest", ("nowhere", "gs://bucket/tables"), {}, 2),
    ("ledger ship", ("nowhere", "s3://bucket/ledger"), {}, 1),
    ("ledger ship", ("nowhere", "gs://bucket/ledger"), {}, 2),
    ("ledger cost", ("tables", "--follow"), {}, 2),
    ("ledger incidents", ("tables", "--follow"), {}, 2),
    ("ledger latency", ("tables", "--follow"), {}, 2),
    ("pipeline run", ("nowhere", "tables"), {}, 1),
    ("pipeline run", ("nowhere", "tables", "--every", "0"), {}, 2),
    ("cost forecast", (), {}, 0),
    ("cost forecast", ("--tier", "gold"), {}, 2),
    ("cost forecast", ("--prices", "nowhere"), {}, 1),
    ("cost actual", ("tables", "--ledger", "nowhere"), {}, 1),
    ("cost prices", (), {}, 0),
    ("cost prices", ("--prices", "nowhere"), {}, 1),
    ("report", ("nowhere",), {}, 1),
    ("demo", ("--engine", "native", "--keep", "file"), {}, 1),
]
# Tests that show the other codes, by verb and code, with real namespaces and ledgers.
ELSEWHERE = {
    ("serve", 0): "cli/test_serve.py::test_entities_of_the_emulators_file_are_there",
    ("fault set", 0): "cli/test_fault.py::test_a_fault_is_set_listed_and_cleared",
    ("fault list", 0): "cli/test_fault.py::test_a_fault_is_set_listed_and_cleared",
    ("fault clear", 0): "cli/test_fault.py::test_a_fault_is_set_listed_and_cleared",
    ("export", 0): "cli/test_export.py::test_an_export_is_served_again_and_exports_the_same",
    ("entity list", 0): "cli/test_entity.py::test_n1_a_topic_with_subscriptions_takes_and_filters_messages",
    ("entity show", 0): "cli/test_entity.py::test_n1_a_queue_is_created_with_its_properties_and_shown",
    ("entity create", 0): "cli/test_entity.py::test_n1_a_queue_is_created_with_its_properties_and_shown",
    ("entity delete", 0): "cli/test_entity.py::test_n1_nothing_is_deleted_or_purged_without_a_yes",
    ("entity peek", 0): "cli/test_entity.py::test_n1_peek_shows_messages_page_by_page_and_changes_nothing",
    ("entity send", 0): "cli/test_entity.py::test_n1_a_message_is_sent_with_its_properties",
    ("entity purge", 0): "cli/test_entity.py::test_n1_a_purge_removes_waiting_deferred_and_scheduled_messages",
    ("entity purge", 3): "cli/test_entity.py::test_n1_a_purge_leaves_what_a_receiver_has_locked_and_ends_with_3",
    ("provision", 0): "cli/test_pairing.py::test_p8_provision_creates_what_is_missing_and_says_what_was_there",
    ("provision", 1): "cli/test_pairing.py::test_p7_provision_with_a_key_that_may_not_says_what_right_is_missing",
    ("provision", 3): "cli/test_doctor.py::test_p6_doctor_reports_what_is_wrong_with_the_queues",
    ("doctor", 0): "cli/test_doctor.py::test_doctor_a_pair_without_fault_is_well_and_what_was_not_tested_is_a_note",
    ("doctor", 3): "cli/test_doctor.py::test_doctor_a_primary_that_is_away_needs_attention",
    ("drill", 0): "cli/test_pairing.py::test_s11_a_drill_fails_over_diverts_restores_and_takes_back_what_it_sent",
    ("drill", 1): "cli/test_pairing.py::test_s11_a_drill_of_an_entity_that_is_not_there_says_so",
    ("drill", 3): "cli/test_pairing.py::test_s11_a_drill_whose_sends_fail_ends_with_3",
    ("syphon", 0): "cli/test_ledger_audit.py::test_l3_a_drain_audits_the_ledger_and_says_so",
    ("syphon", 3): "cli/test_syphon.py::test_y6_y9_a_drain_that_leaves_dead_letters_behind_says_so",
    ("deadletter list", 0): "cli/test_deadletter.py::test_y6_a_long_list_is_shown_page_by_page",
    ("deadletter resubmit", 0): "cli/test_deadletter.py::test_y6_to_bring_back_all_of_none_is_done",
    ("ledger check", 0): "cli/test_ledger.py::test_l6_a_ledger_that_adds_up_is_proven_and_ends_with_0",
    ("ledger check", 3): "cli/test_ledger.py::test_l6_a_ledger_with_missing_entries_is_not_proven_and_ends_with_3",
    ("ledger audit", 0): "cli/test_ledger_audit.py::test_l3_an_audit_that_agrees_ends_with_0_after_one_look",
    ("ledger audit", 3): "cli/test_ledger_audit.py::test_l3_an_audit_of_a_ledger_with_missing_entries_ends_with_3",
    ("ledger reconcile", 0): "pipeline/test_ledger_verbs.py::test_d3_a_ledger_without_entries_gives_empty_results",
    (
        "ledger reconcile",
        3,
    ): "pipeline/test_ledger_verbs.py::test_d3_the_verbs_ingest_and_report_and_a_loss_exits_with_1",
    (
        "ledger ship",
        0,
    ): "ledger/test_shipping.py::test_d6_sealed_segments_are_shipped_once_and_the_copy_is_read_as_the_ledger",
    ("ledger ship", 3): "ledger/test_shipping.py::test_d6_a_segment_that_differs_there_is_named_and_not_replaced",
    ("ledger ingest", 0): "pipeline/test_ledger_verbs.py::test_d3_a_ledger_without_entries_gives_empty_results",
    ("pipeline run", 0): "pipeline/test_pipeline_run.py::test_d5_the_verb_prints_a_line_for_each_batch",
    ("ledger cost", 0): "pipeline/test_ledger_verbs.py::test_d3_a_ledger_without_entries_gives_empty_results",
    ("ledger incidents", 0): "pipeline/test_ledger_verbs.py::test_d3_a_ledger_without_entries_gives_empty_results",
    ("ledger latency", 0): "pipeline/test_ledger_verbs.py::test_d3_a_ledger_without_entries_gives_empty_results",
    ("cost actual", 0): "pipeline/test_actual_cost.py::test_l4_m4_d3_what_happened_in_a_ledger_is_billed_forecast_and"
    "_compared_stage_by_stage",
    ("report", 0): "report/test_report_verb.py::test_d4_an_empty_ledger_has_a_page_that_says_so",
    ("demo", 0): "cli/test_demo.py::test_a_short_demo_on_spark_proves_that_nothing_is_lost",
    ("demo", 3): "cli/test_demo.py::test_a_message_that_vanishes_from_the_backlog_fails_the_demo_by_its_id",
}


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """Return the cells of a table's rows by each name in the first cell."""
    table = page[page.index(heading) :].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name.strip(" `"): row[1:] for row in cells for name in row[0].split(", ")}


def test_the_page_has_every_verb_and_agrees_with_its_help() -> None:
    told = rows(PAGE.read_text(encoding="utf-8"), "| verb |")
    assert set(told) == {" ".join(name) for name in VERBS}
    for name, verb in VERBS.items():
        codes = re.findall(r"\b([34]) if\b", verb.help or "")
        page = [code for code, cell in zip("34", told[" ".join(name)][1:3], strict=True) if cell != "–"]
        assert codes == page, name


def test_the_first_help_leads_to_the_exit_codes() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "NO_COLOR": "1"}).stdout
    words = " ".join(re.sub("[│╭╰─]", " ", shown).split())
    assert "Exit codes: 0 well, 1 failed, 2 wrong usage, 3 needs attention, 4 broken" in words
    assert f"({PAGE.relative_to(ROOT)})" in words


@pytest.mark.parametrize(
    ("verb", "arguments", "environment", "code"),
    # Wrong usage is found before anything slow is loaded; `make test-all` runs the others.
    [pytest.param(*case, marks=[] if case[-1] == 2 else [pytest.mark.thorough]) for case in WITHOUT_NAMESPACES],
    ids=[f"{verb} {' '.join(arguments)} {code}" for verb, arguments, _, code in WITHOUT_NAMESPACES],
)
def test_a_verb_without_a_namespace_ends_with_its_code(
    verb: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    variables: dict[str, str | None] = dict.fromkeys({**PAIR, **ONE})
    done = CliRunner().invoke(app, [*verb.split(), *arguments], env={**variables, **environment})
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    if code in (1, 2):
        assert done.stdout == ""
        assert done.stderr


def test_every_code_of_the_page_is_shown_by_a_test() -> None:
    told = rows(PAGE.read_text(encoding="utf-8"), "| verb |")
    shown = {(verb, code) for verb, _, _, code in WITHOUT_NAMESPACES} | set(ELSEWHERE)
    for verb, cells in told.items():
        codes = [code for code, cell in zip((0, 3, 4), cells, strict=False) if cell != "–"]
        assert [code for code in codes if (verb, code) not in shown] == [], verb


def test_the_tests_named_here_exist() -> None:
    for place in ELSEWHERE.values():
        path, _, name = place.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
        assert name in {one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}, place
