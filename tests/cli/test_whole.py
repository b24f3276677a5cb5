"""The command line as a whole: its list of verbs, its examples, its settings file, and its spinner."""

import re
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from tests.cli.running import run
from twinbus.cli import spinner as waiting_module
from twinbus.cli.main import app
from twinbus.cli.spinner import spinner

PRIMARY = "Endpoint=sb://one.example.net/;SharedAccessKeyName=Root;SharedAccessKey=c2VjcmV0LW9uZQ=="
SECONDARY = "Endpoint=sb://two.example.net/;SharedAccessKeyName=Root;SharedAccessKey=c2VjcmV0LXR3bw=="
_EXAMPLE = re.compile(r"^  (twinbus .*?)(?:\s+#.*)?$", re.MULTILINE)


def verbs(group: TyperGroup, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, verb in group.commands.items():
        if isinstance(verb, TyperGroup):
            yield from verbs(verb, (*above, name))
        else:
            yield (*above, name), verb


def root() -> TyperGroup:
    made = get_command(app)
    assert isinstance(made, TyperGroup)
    return made


VERBS = dict(verbs(root()))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("TWINBUS_SETTINGS", "TWINBUS_PRIMARY_CONNECTION_STRING", "TWINBUS_SECONDARY_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def settled(text: str, *arguments: str) -> Any:
    path = Path("twinbus.toml")
    path.write_text(text)
    path.chmod(0o600)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.mark.parametrize("name", VERBS, ids=" ".join)
def test_every_verb_has_examples_that_its_parser_takes(name: tuple[str, ...]) -> None:
    examples = _EXAMPLE.findall(VERBS[name].help)
    assert examples, "its docstring has no Examples"
    for example in examples:
        words = shlex.split(example.partition(" | ")[0])
        assert tuple(words[1 : 1 + len(name)]) == name
        # As from the settings file: the user does not type a connection string.
        VERBS[name].make_context(
            "twinbus",
            words[1 + len(name) :],
            default_map={"primary": PRIMARY, "secondary": SECONDARY, "connection_string": PRIMARY},
        )


@pytest.mark.parametrize("name", VERBS, ids=" ".join)
def test_the_examples_of_every_verb_are_indented_in_its_help(name: tuple[str, ...]) -> None:
    # Typer removes the indent of examples after a help of one paragraph, unless two empty lines are between them.
    shown = CliRunner().invoke(app, [*name, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"}).stdout
    assert re.search(r"^ Examples: *\n   twinbus ", shown, re.MULTILINE), shown


def test_every_verb_prints_json_for_programs() -> None:
    options = {" ".join(name): {text for one in verb.params for text in one.opts} for name, verb in VERBS.items()}
    # What `export` prints is JSON.
    assert [name for name, texts in options.items() if "--json" not in texts] == ["export"]


@pytest.mark.parametrize("name", VERBS, ids=" ".join)
def test_every_verb_can_show_the_trace_of_an_error(name: tuple[str, ...]) -> None:
    assert "--debug" in {option for one in VERBS[name].params for option in one.opts}


def test_the_table_of_contents_fits_a_terminal_and_says_each_verb_in_a_line() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "NO_COLOR": "1"}).stdout
    for name in root().commands:
        assert re.search(rf"^│ {name} +\S", shown, re.MULTILINE), name
    # The second line of a description starts with spaces in the column of the verb.
    contents = shown[shown.index("Namespaces and their entities") :]
    assert not re.search(r"^│ {4,}\S", contents, re.MULTILINE), contents


def test_the_help_of_cost_actual_names_the_defaults_that_a_ledger_does_not_have() -> None:
    shown = {option.name: option.show_default for option in VERBS["cost", "actual"].params}
    assert [shown[name] for name in ("rate", "outage", "syphons")] == ["from the ledger"] * 3
    assert (shown["tier"], shown["messaging_units"], shown["drain_rate"]) == ("standard", "1", "1000")
    assert (shown["other_operations"], shown["bandwidth"]) == ("0", "inter_region")


# --- twinbus.toml ----------------------------------------------------------------------------------------------------


def test_connection_strings_come_from_the_file_and_keys_are_not_shown(here: Path) -> None:
    done = settled(f'[connections]\nprimary = "{PRIMARY}"\nsecondary = "{PRIMARY}"\n', "doctor")
    assert done.exit_code == 2
    assert "--primary and --secondary are the same namespace" in done.stderr
    assert "c2VjcmV0" not in done.output


def test_the_environment_and_the_command_line_go_before_the_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f'[connections]\nprimary = "{PRIMARY}"\nsecondary = "{SECONDARY}"\n'
    monkeypatch.setenv("TWINBUS_SECONDARY_CONNECTION_STRING", PRIMARY)
    assert "are the same namespace" in settled(text, "doctor").stderr
    typed = settled(text, "doctor", "--primary", SECONDARY, "--secondary", SECONDARY)
    assert "are the same namespace" in typed.stderr


def test_a_verb_has_a_table_of_its_own(here: Path) -> None:
    done = settled('[serve]\nlog-level = "loud"\n', "serve")
    assert "--log-level 'loud' is unknown" in done.stderr
    done = settled("[ledger.check]\njson = true\n", "ledger", "check", "nowhere")
    assert "nowhere is not a ledger" in done.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[connections\n", "twinbus.toml is not TOML"),
        ("[conections]\n", "the file has no 'conections'. hint: Is it connections?"),
        ("[connections]\nprimry = 'x'\n", "[connections] has no 'primry'. hint: Is it primary?"),
        ("[syphon]\nrat = 5\n", "[syphon] has no 'rat'. hint: Is it rate?"),
        ("[ledger.reconcil]\n", "[ledger] has no 'reconcil'. hint: Is it reconcile?"),
        ("[syphon]\nrate = 'quick'\n", "[syphon] rate: 'quick' is not a valid float"),
        ("serve = 5\n", "serve is not a table"),
    ],
)
def test_a_mistake_in_the_file_is_told_with_its_place(here: Path, text: str, told: str) -> None:
    done = settled(text, "fault", "list")
    assert done.exit_code == 2
    assert told in done.stderr.replace("\nhint:", ". hint:")
    assert "Traceback" not in done.output


def test_a_file_that_was_named_must_be_there(here: Path) -> None:
    done = CliRunner().invoke(app, ["--settings", "missing.toml", "ledger", "check", "x"])
    assert done.exit_code == 2
    assert "missing.toml cannot be read: No such file" in done.stderr


def test_the_users_own_file_is_found_where_there_is_none_here(here: Path) -> None:
    own = here / "config" / "twinbus" / "twinbus.toml"
    own.parent.mkdir(parents=True)
    own.write_text("[wrong]\n")
    assert "the file has no 'wrong'" in CliRunner().invoke(app, ["ledger", "check", "x"]).stderr


def test_keys_that_others_may_read_are_warned_of(here: Path) -> None:
    text = f'[connections]\nprimary = "{PRIMARY}"\n'
    assert "warning" not in settled(text, "ledger", "check", "x").stderr
    Path("twinbus.toml").chmod(0o644)
    warned = CliRunner().invoke(app, ["ledger", "check", "x"]).stderr
    assert "warning: twinbus.toml holds keys and others may read it: chmod 600 twinbus.toml" in warned
    assert "c2VjcmV0" not in warned


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_what_takes_longer_than_a_moment_is_told_once_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting_module, "MOMENT", 0.0)
    before = threading.active_count()
    with spinner("counting"):
        while not (told := capsys.readouterr()).err:
            pass
    assert (told.out, told.err) == ("", "counting …\n")
    assert threading.active_count() == before


def test_what_is_quick_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with spinner("counting"):
        pass
    assert capsys.readouterr() == ("", "")


# --- as a process ----------------------------------------------------------------------------------------------------


def test_completion_knows_the_verbs() -> None:
    asked = {"_TWINBUS_COMPLETE": "complete_bash", "COMP_WORDS": "twinbus sy", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, [], prog_name="twinbus", env=asked)
    assert done.stdout.split() == ["syphon"], done.stderr


def test_an_error_is_two_lines_and_a_trace_only_with_debug() -> None:
    plain = run("ledger", "check", "nowhere")
    assert plain.returncode == 1
    assert [line.partition(":")[0] for line in plain.stderr.splitlines()] == ["error", "hint"]
    assert "Traceback" in run("ledger", "check", "nowhere", "--debug").stderr
