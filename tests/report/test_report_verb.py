"""D4: `twinbus report`, run as a user runs it: what it writes, and what it refuses."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.report.conftest import Books, write_ledger
from tests.report.documents import MOMENT, Document, made
from twinbus.cli.main import app
from twinbus.extras import install_line
from twinbus.report import judge_report

pytestmark = pytest.mark.timeout(600)  # Spark is slow on a busy machine


def run(*arguments: str | Path) -> tuple[int, str]:
    """Run the verb in this process, with the Spark session of the tests. Returns its exit code and its output."""
    done = CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "250"})
    return done.exit_code, done.stdout or done.stderr


@pytest.mark.thorough
def test_d4_a_ledger_and_its_tables_give_the_same_page(books: Books, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("what was there before")
    code, said = run(books.tables.root, "-o", page, "--title", "A title")
    assert code == 0, said
    assert said == f"{judge_report(books.found)}\nreport: {page}\n"
    assert said.startswith(
        "lost: 2 of 71 accepted messages are in neither namespace. 1 of 71 accepted messages is unknown"
    )
    expected = made(books.found).replace("ledger books", f"ledger {books.tables.root.name}")
    assert MOMENT.sub("", page.read_text()) == MOMENT.sub("", expected)
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"], "and nothing is left beside it"


@pytest.mark.thorough
@pytest.mark.usefixtures("spark")
def test_d4_an_empty_ledger_has_a_page_that_says_so(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, said = run(write_ledger(tmp_path / "ledger", []), "-o", page, "--title", "Last <night>", "--json")
    assert code == 0, said
    told = json.loads(said)
    assert (told["page"], told["accepted"], told["lost"]) == (str(page), 0, 0)
    assert (told["verdict"], told["sentence"]) == ("proven", "No message was accepted.")
    document = Document(page.read_text())
    assert {"proven", "No message was accepted.", "Last <night>"} <= set(document.said)
    assert "svg" not in document.tags
    assert document.unbalanced == []


def test_impossible_arguments_are_refused_before_spark_starts(tmp_path: Path) -> None:
    ledger = write_ledger(tmp_path / "ledger", [])
    (tmp_path / "tables" / "snapshots" / "_delta_log").mkdir(parents=True)
    for arguments, told in (
        ([tmp_path / "nowhere"], "contains neither a ledger nor tables"),
        ([tmp_path], "contains neither a ledger nor tables"),
        ([ledger, "-o", tmp_path], "is a folder"),
        ([ledger, "-o", tmp_path / "nowhere" / "report.html"], "is not a folder"),
        ([ledger, "--prices", tmp_path / "none.toml"], "cannot be read"),
        ([ledger, "--tier", "golden"], "has no tier 'golden'"),
        ([tmp_path / "tables", "--tables", tmp_path / "tables"], "contains tables already"),
    ):
        code, said = run(*arguments)
        assert (code, told in said) == (2 if "--tier" in arguments else 1, True), said


def test_without_pyspark_the_verb_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "pyspark" else find(name, *rest))
    code, said = run(write_ledger(tmp_path / "ledger", []), "-o", tmp_path / "report.html")
    assert code == 1
    assert install_line("spark") in said
    assert not (tmp_path / "report.html").exists()
