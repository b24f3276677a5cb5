"""X3: text of other programs controls no terminal, in the output of any verb: on a pseudo-terminal and in a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import PATIENCE, environment, in_terminal, run, serving
from tests.cli.syphoned import Backlog, ids_of
from tests.namespace.front.amqp_peer import Peer
from twinbus.amqp import Connection, ConnectionClosed, Error
from twinbus.ledger import Ledger, Stage
from twinbus.printable import printable
from twinbus.testing import LocalNamespaces

TITLE, CLEAR, HUE, C1_HUE = "\x1b]0;pwned\x07", "\x1b[2J", "\x1b[38;5;201m", "\x9b38;5;201m"
# Wide enough that no line is broken into two.
WIDE = 2000
HOSTILE = f"a{TITLE}{CLEAR}{HUE}{C1_HUE}\u202eb\u2066\x7f\r\x08[red]c[/] :bug: \u2028d"
# Escape sequences that Rich itself writes: styles, and moves of the cursor for a table that is redrawn.
_OWN = re.compile(r"\x1b\[(?:0|1|2|3|4|[34][0-7]|9[0-7]|;)*m|\x1b\[(?:\?25[lh]|1A|2K|\d+A)")
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def controls(shown: str) -> list[str]:
    """Return the control characters and invisible characters in the output, without those that Rich writes."""
    return _CONTROLS.findall(_OWN.sub("", shown.replace("\r\n", "\n").replace("\r\x1b[2K", "")))


@pytest.fixture
def backlog(namespaces: LocalNamespaces) -> Backlog:
    made = Backlog(namespaces)
    made.divert(HOSTILE, path=HOSTILE)
    made.divert("[/]")
    made.dead_letter(HOSTILE, "[/]", reason=f"reason {HOSTILE}", description=f"description {HOSTILE}\nforged line")
    return made


def unwrapped(shown: str) -> str:
    """The text of a table's cells, without styles, borders and line breaks."""
    return re.sub(r"\s|[│┃]", "", _OWN.sub("", shown))


def test_x3_dead_letters_on_a_terminal_show_their_control_characters(backlog: Backlog) -> None:
    code, shown = in_terminal("deadletter", "list", columns=WIDE, variables=backlog.environment)
    assert code == 0, shown
    assert controls(shown) == []
    assert "\\u001b]0;pwned\\u0007" in unwrapped(shown)
    assert "[red]c[/]" in unwrapped(shown)
    assert ":bug:" in unwrapped(shown)
    assert "\\nforged" in unwrapped(shown)
    assert "\x1b[1m" in shown, "Rich's own styles are there"


@pytest.mark.thorough
def test_x3_dead_letters_that_need_more_than_80_columns_stay_in_their_fields(backlog: Backlog) -> None:
    code, shown = in_terminal("deadletter", "list", variables=backlog.environment)
    assert code == 0, shown
    assert controls(shown) == []
    lines = [_OWN.sub("", line) for line in shown.replace("\r\n", "\n").splitlines()]
    assert max(map(len, lines)) <= 80
    fields = ("id", "destination", "reason", "description", "arrived, UTC")
    others = [line for line in lines if line.strip() and not line.startswith((*fields, " " * 14))]
    assert others == ["--json, or a wider terminal, also shows queue and sequence number", "2 dead-lettered messages"]


@pytest.mark.thorough
def test_x3_dead_letters_in_a_pipe_have_no_control_characters(backlog: Backlog) -> None:
    done = run("deadletter", "list", **backlog.environment)
    assert (done.returncode, controls(done.stdout + done.stderr)) == (0, [])


@pytest.mark.thorough
def test_x3_json_of_dead_letters_keeps_every_character_and_shows_none_raw(backlog: Backlog) -> None:
    code, shown = in_terminal("deadletter", "list", "--json", columns=WIDE, variables=backlog.environment)
    piped = run("deadletter", "list", "--json", **backlog.environment)
    assert (code, piped.returncode) == (0, 0)
    for output in (shown.replace("\r\n", "\n"), piped.stdout):
        assert controls(output) == []
        first = json.loads(output.splitlines()[0])
        assert (first["message_id"], first["destination"]) == (HOSTILE, HOSTILE)
        assert first["reason"] == f"reason {HOSTILE}"
        assert first["description"] == f"description {HOSTILE}\nforged line"


def test_x3_resubmitting_a_hostile_id_asks_and_tells_without_control_characters(backlog: Backlog) -> None:
    asked = ("deadletter", "resubmit", "--id", HOSTILE)
    code, shown = in_terminal(*asked, typed="n\n", variables=backlog.environment)
    assert (code, controls(shown)) == (1, [])
    assert "Put 1 message back into the backlog" in shown
    code, shown = in_terminal(*asked, "--yes", columns=WIDE, variables=backlog.environment)
    assert (code, controls(shown)) == (0, []), shown
    assert printable(f"resubmitted  {HOSTILE} to {HOSTILE}") in shown
    assert ids_of(backlog.left()) == [HOSTILE]
    assert ids_of(backlog.dead()) == ["[/]"]


@pytest.mark.thorough
def test_x3_the_question_before_resubmitting_shows_the_new_destination_on_one_line(backlog: Backlog) -> None:
    asked = ("deadletter", "resubmit", "--all", "--to", f"{HOSTILE}\nforged line")
    code, shown = in_terminal(*asked, typed="n\n", columns=WIDE, variables=backlog.environment)
    assert (code, controls(shown)) == (1, [])
    assert printable(f"all for {HOSTILE}\nforged line? ") in shown


@pytest.mark.thorough
def test_x3_a_dry_run_and_a_drain_show_a_hostile_destination_safely(backlog: Backlog) -> None:
    backlog.divert("1", path=HOSTILE, queue=1)
    code, shown = in_terminal("syphon", "--dry-run", variables=backlog.environment)
    assert (code, controls(shown)) == (0, [])
    assert "\\u001b]0;pwned" in shown
    code, shown = in_terminal("syphon", "--drain", columns=WIDE, variables=backlog.environment)
    assert controls(shown) == [], shown
    assert "\\u001b]0;pwned" in shown
    piped = run("syphon", "--drain", **backlog.environment)
    assert controls(piped.stdout + piped.stderr) == []


@pytest.mark.thorough
@pytest.mark.parametrize("entity", [f"no-such-{HOSTILE}", b"\xff[/]".decode("utf-8", "surrogateescape")])
def test_x3_a_drill_of_a_hostile_entity_fails_readably(backlog: Backlog, entity: str) -> None:
    arguments = ("drill", "--entity", os.fsencode(entity), "--yes", "--count", "2")
    code, shown = in_terminal(*arguments, "--debug", columns=WIDE, variables=backlog.environment)
    assert code == 1
    assert controls(shown) == [], shown
    code, shown = in_terminal("drill", "--entity", os.fsencode(entity), typed="n\n", variables=backlog.environment)
    assert (code, controls(shown)) == (1, [])


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-verb" + HOSTILE,),
        ("serve", "--no-such-option" + HOSTILE),
        ("demo", "--rate", HOSTILE),
        ("serve", "--log-level", HOSTILE),
        ("serve", "--config", f"no-such-file-{HOSTILE}"),
        ("--settings", f"no-such-file-{HOSTILE}", "serve"),
        ("ledger", "check", f"no-such-folder-{HOSTILE}"),
        ("cost", "forecast", "--tier", HOSTILE),
        ("serve", "--namespace", b"\xff\x9b=1"),
    ],
)
def test_x3_arguments_are_repeated_without_their_control_characters(arguments: tuple[str | bytes, ...]) -> None:
    code, shown = in_terminal(*arguments, columns=WIDE)
    assert code in (1, 2), shown
    assert controls(shown) == [], shown
    assert "pwned" in shown or "udcff" in shown
    assert "MarkupError" not in shown


def test_x3_a_hostile_settings_file_is_refused_readably(tmp_path: Path) -> None:
    settings = tmp_path / "twinbus.toml"
    settings.write_text(f"[serve]\n{json.dumps(HOSTILE)} = 1\n", encoding="utf-8")
    code, shown = in_terminal("--settings", str(settings), "serve", columns=WIDE)
    assert (code, controls(shown)) == (2, [])
    assert "pwned" in shown


@pytest.mark.thorough
def test_x3_a_hostile_price_table_is_shown_as_text(tmp_path: Path) -> None:
    prices = tmp_path / f"prices{TITLE}.toml"
    made = run("cost", "prices", "--write", str(prices))
    assert made.returncode == 0, made.stderr
    text = prices.read_text(encoding="utf-8")
    quoted = json.dumps(HOSTILE)[1:-1]
    text = re.sub(r'^(currency|region|origin) = "', lambda found: f"{found[0]}{quoted}", text, flags=re.MULTILINE)
    prices.write_text(text, encoding="utf-8")
    for verb in ("prices", "forecast"):
        code, shown = in_terminal("cost", verb, "--prices", str(prices), columns=WIDE)
        assert (code, controls(shown)) == (0, []), shown
        assert "[red]c[/]" in shown


@pytest.mark.thorough
def test_x3_a_ledger_names_hostile_messages_readably(tmp_path: Path) -> None:
    folder = tmp_path / f"books{TITLE}[/]"
    queue = "contoso/x-servicebus-transfer/0"
    with Ledger(folder) as ledger:
        ledger.begin(Stage.SEND_BACKLOG, "paris", queue, (HOSTILE, "b\nforged"), 10, f"contoso/{HOSTILE}").end()
        ledger.begin(Stage.COMPLETE_BACKLOG, "paris", queue, (HOSTILE, "b\nforged"), 0, f"contoso/{HOSTILE}").end()
    (folder / f"damaged{TITLE}.jsonl").write_bytes(b"\x1b[2J\x9b\xff\n")
    code, shown = in_terminal("ledger", "check", str(folder), columns=WIDE)
    assert (code, controls(shown)) == (1, []), shown
    assert printable(f"  contoso/{HOSTILE.lower()}  {HOSTILE}") in shown
    assert "b\\nforged" in shown
    told = run("ledger", "check", "--json", str(folder))
    assert controls(told.stdout) == []
    assert {one["id"] for one in json.loads(told.stdout)["messages"]["lost"]} == {HOSTILE, "b\nforged"}


def test_x3_faults_of_hostile_entities_are_listed_readably(namespaces: LocalNamespaces) -> None:
    connection = namespaces["primary"].connection_string
    try:
        made = in_terminal("fault", "set", "server-busy", "-c", connection, "--entity", HOSTILE, "--link", HOSTILE)
        assert (made[0], controls(made[1])) == (0, []), made
        code, shown = in_terminal("fault", "list", "-c", connection, columns=WIDE)
        assert (code, controls(shown)) == (0, []), shown
        assert "[red]c[/]" in unwrapped(shown)
        wrong = in_terminal("fault", "set", HOSTILE, "-c", connection, columns=WIDE)
        assert (wrong[0], controls(wrong[1])) == (2, []), wrong
        assert "pwned" in wrong[1]
    finally:
        namespaces["primary"].faults.clear()


@pytest.mark.parametrize("form", ["human", "json"])
def test_x3_the_log_of_a_server_shows_what_hostile_peers_say(form: str) -> None:
    with serving("--json", "--memory", "--namespace", "one=0", "--log-level", "debug", "--log-format", form) as server:
        port = server.namespaces["one"]["port"]

        async def speak() -> None:
            loop = asyncio.get_running_loop()
            for name in ("localhost", f"x{HOSTILE}"):
                core = Connection.client(HOSTILE, name)
                _, peer = await loop.create_connection(lambda core=core: Peer(core, port), "127.0.0.1", port)  # type: ignore[misc]  # mypy cannot infer a default
                peer.attach_sender(f"nowhere-{HOSTILE}", name=f"link-{HOSTILE}")
                await peer.ask("$cbs", "put-token", "SharedAccessSignature sr=x&sig=y&se=1&skn=z", {"name": HOSTILE})
                peer.core.close(Error("amqp:internal-error", f"said {HOSTILE}\nforged line"))
                peer.flush()
                await peer.event(ConnectionClosed)
                peer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            request = f"GET /{HOSTILE} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: {HOSTILE}\r\nX-A: b\r\n\r\n"
            writer.write(request.encode())
            await reader.read()
            writer.close()

        asyncio.run(speak())
        server.signal(signal.SIGTERM)
        code, log = server.end()
    assert code == 0
    assert controls(log) == [], log
    assert "pwned" in log
    for line in log.splitlines():
        assert not line.startswith("forged")
        if form == "json":
            json.loads(line)


@pytest.mark.thorough
def test_x3_a_server_in_a_folder_with_a_hostile_name_shows_it_as_text(tmp_path: Path) -> None:
    with serving("--data", str(tmp_path / f"data{TITLE}[red]"), "--namespace", "one=0") as server:
        assert controls(server.printed) == []
        assert "[red]" in server.printed
        assert "\\u001b]0;pwned" in server.printed


def test_x3_a_terminal_that_lacks_a_character_is_shown_its_escape(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.begin(Stage.SEND_BACKLOG, "paris", "c/x-servicebus-transfer/0", ("日本",), 10, "contoso/orders").end()
        ledger.begin(Stage.COMPLETE_BACKLOG, "paris", "c/x-servicebus-transfer/0", ("日本",), 0, "contoso/orders").end()
    done = run("ledger", "check", str(tmp_path), PYTHONIOENCODING="ascii")
    assert done.returncode == 1, done.stderr
    assert "\\u65e5\\u672c" in done.stdout


def program(text: str, **more: str) -> str:
    """Run a Python program in its own process and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.thorough
def test_x3_completion_in_fish_has_a_tab_between_an_option_and_its_help() -> None:
    # The script `twinbus`: the variable that starts completion contains the program's name.
    script = "import sys; sys.argv[0] = 'twinbus'; from twinbus.cli.main import app; app()"
    shown = program(
        script,
        _TWINBUS_COMPLETE="complete_fish",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
        _TYPER_COMPLETE_ARGS="twinbus serve --mem",
    )
    assert shown == "--memory\tKeep everything in memory; nothing is stored.\n"


def test_x3_a_tab_in_a_cell_of_a_table_is_shown_as_an_escape() -> None:
    shown = program(
        "from twinbus.cli.terminal import console, protect; protect()\n"
        "from rich.table import Table; table = Table('title'); table.add_row('a\\tb'); console().print(table)"
    )
    assert "a\\tb" in shown
