"""README and guides are true: their commands work, and their options and events are those of the code."""

import re
from contextlib import ExitStack
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import pytest

from tests import private_machine
from tests.guides.reader import Reader, hidden_commands, steps
from twinbus.pairing import CHOICES, EVENTS, RANGES, SendAvailabilityOptions

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
PAGES = [ROOT / "README.md", ROOT / "docs" / "tables.md", *sorted(GUIDES.glob("*.md"))]
# Pages that `make test` follows; `make test-all` follows every page.
QUICK = ("README",)
# Pages whose commands take the ports 443 and 5671, or change /etc/hosts and certificates.
IN_PRIVATE_MACHINE = ("azure-names", "celery")
# By page: the first characters of commands that no test can run, or that another test runs.
NOT_FOLLOWED = {
    ("README", "make demo"): "tests/cli/test_demo.py plays it",
    ("README", "make test"): "this test is a part of it",
    ("README", "pip install"): "as in the guide `install`",
    ("celery", "pip install"): "as in the guide `install`",
    ("cluster", ""): "needs a cluster, a database, or what pip brings from the network; tests/pipeline runs the jobs",
    ("entra-id", "from azure.identity"): "needs Azure; tests/pairing/drivers/test_entra.py runs such a pair",
    ("entra-id", "pip install"): "as in the guide `install`",
    ("entra-id", "twinbus entity"): "needs Azure; tests/cli/test_entra.py runs the verbs",
    ("entra-id", "twinbus syphon"): "needs Azure; tests/cli/test_entra.py runs the verbs",
    ("costs", "twinbus cost actual"): "starts Spark on tables of its own; tests/pipeline/test_actual_cost.py runs it",
    ("install", "pip install"): "brings packages from the network; tests/test_extras.py checks what each needs",
    ("pipeline", ""): "starts Spark on a ledger of its own; tests/pipeline/test_pipeline_run.py runs it",
    ("report", "twinbus report"): "starts Spark on a ledger of its own; tests/report/test_report_verb.py runs it",
    ("serve", "twinbus serve --jwks"): "needs the key set of an issuer; the guide `entra-id` makes one and serves it",
    ("serve", "twinbus serve --host"): "for other machines and tunnels; tests/namespace/front/test_origins.py uses it",
    ("syphon", "twinbus syphon --engine spark"): "goes on for ever; tests/pipeline/test_spark_syphon.py runs it",
    ("syphon", "twinbus deadletter resubmit"): "a dead letter takes ten minutes; tests/cli/test_deadletter.py runs it",
}


def not_followed(page: Path, text: str) -> list[tuple[str, str]]:
    return [(name, begin) for name, begin in NOT_FOLLOWED if name == page.stem and text.startswith(begin)]


@pytest.mark.timeout(300)  # Spark starts slowly on a busy machine
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[] if page.stem in QUICK else [pytest.mark.thorough])
        for page in PAGES
        if list(steps(page.read_text(encoding="utf-8")))
    ],
)
def test_what_a_page_tells_its_reader_to_type_works_from_an_empty_folder(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    with ExitStack() as stack:
        reader = Reader(folder)
        if page.stem in IN_PRIVATE_MACHINE:
            reader = Reader(folder, stack.enter_context(private_machine.running(tmp_path)).inside)
        stack.callback(reader.stop)
        for step in steps(page.read_text(encoding="utf-8")):
            if not not_followed(page, step.text):
                reader.follow(step)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "The page shows:\n2"),
        ("```python\nprint(1)\n```\n\nSome words.\n\n```text\n1\n```\n", "prints:\n1"),
        ("```python\nraise SystemExit('no')\n```\n", "ended with 1"),
        ("```console\n$ echo one\ntwo\n```\n", "The page shows:\ntwo"),
        ("```console\n$ false\n```\n", "ended with 1"),
        ("```console\n$ twinbus serve --queue 'or ders'\n```\n", "serve is not ready"),
    ],
)
def test_a_page_that_is_wrong_is_found_out(page: str, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    reader = Reader(folder)
    (step,) = steps(page)
    with pytest.raises(AssertionError, match=re.escape(said)):
        reader.follow(step)
    reader.stop()


def test_what_is_exported_lasts_until_the_end_of_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    page = "```console\n$ export PLACE='here; there'\n$ echo \\\n  $PLACE\nhere; …\n```\n"
    page += "```python\nimport os\nprint(os.environ['PLACE'])\n```\n```text\nhere; there\n```\n"
    reader = Reader(folder)
    for step in steps(page):
        reader.follow(step)


def test_every_exception_is_still_on_its_page() -> None:
    found = {
        exception
        for page in PAGES
        for step in steps(page.read_text(encoding="utf-8"))
        for exception in not_followed(page, step.text)
    }
    assert found == set(NOT_FOLLOWED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_stand_where_they_are_typed(page: Path) -> None:
    assert hidden_commands(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: path.stem
)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def rows() -> dict[str, tuple[str, str]]:
    """Return default and range of each option, from the guide."""
    text = (GUIDES / "options.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| `" in line[:4]]
    return {row[0].strip("`"): (row[1], row[2]) for row in cells if len(row) == 4}


def spoken(value: object) -> str:
    match value:
        case timedelta():
            seconds = value.total_seconds()
            return f"{seconds / 60:g} min" if seconds > 60 else f"{seconds:g} s"
        case bool():
            return str(value).lower()
        case None | ():
            return "none"
        case _:
            return str(value)


def test_p2_the_guide_has_every_option_with_its_default_and_its_range() -> None:
    told, defaults = rows(), SendAvailabilityOptions()
    assert list(told) == [field.name for field in fields(SendAvailabilityOptions)]
    assert {name: default for name, (default, _) in told.items()} == {
        **{name: spoken(getattr(defaults, name)) for name in told},
        "primary_name": "from the host",
    }
    for name, span in RANGES.items():
        assert told[name][1] == f"{spoken(span.least)} to {spoken(span.most)}"
    for name, choices in CHOICES.items():
        assert told[name][1] == ", ".join(choices)


def test_s11_the_guide_names_every_event() -> None:
    text = (GUIDES / "five-minutes.md").read_text(encoding="utf-8")
    assert [event for event in EVENTS if f"`{event}`" not in text] == []


def _typed(page: Path) -> list[str]:
    """Return the lines of a page that a reader types into a shell, and the commands inside its sentences."""
    text = page.read_text(encoding="utf-8")
    return [*re.findall(r"^\s*\$ (.*)$", text, re.MULTILINE), *re.findall(r"`([^`\n]*)`", text)]


def test_x4_no_page_and_no_help_has_a_key_on_a_command_line() -> None:
    secret = re.compile(r"SharedAccessKey=|password=|\$\{?\w*(CONNECTION|KEY|JDBC)", re.IGNORECASE)
    option = re.compile(r"--(primary|secondary|connection-string|jdbc)[ =]|(?:export|fault|entity) .*-c ")
    pages = [*PAGES, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    typed = {f"{page.name}: {line}" for page in pages for line in _typed(page) if not line.startswith("export ")}
    for code in sorted((ROOT / "src" / "twinbus" / "cli").rglob("*.py")):
        lines = code.read_text(encoding="utf-8").splitlines()
        typed |= {f"{code.name}: {line.strip()}" for line in lines if re.match(r"\s+twinbus ", line)}
    assert len(typed) > 100
    commands = [line for line in typed if "twinbus " in line]
    # With a credential, these options name hosts.
    assert [
        line for line in commands if secret.search(line) or ("--credential" not in line and option.search(line))
    ] == []
