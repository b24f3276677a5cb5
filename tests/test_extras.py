"""The base install pairs and nothing more; every other part names the command that installs what it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import twinbus
from twinbus.extras import EXTRAS, install_command
from twinbus.testing import LocalNamespaces

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SITE = Path(sysconfig.get_path("purelib"))
SOURCES = Path(twinbus.__file__).parents[1]


def closure(*names: str) -> set[str]:
    """Return these distributions and all that they require, without extras."""
    found: set[str] = set()
    waiting = [Requirement(name).name for name in names]
    while waiting:
        name = waiting.pop().lower()
        if name not in found:
            found.add(name)
            needed = map(Requirement, metadata.requires(name) or ())
            waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def make_site(folder: Path, *names: str) -> Path:
    """Make a folder that holds these distributions, what they require, and nothing else."""
    for name in closure(*names):
        for file in metadata.files(name) or ():
            # Several distributions have modules in the package `azure`.
            top = Path(*file.parts[: 2 if file.parts[0] == "azure" else 1])
            if top.parts[0] not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).parent.mkdir(exist_ok=True)
                (folder / top).symlink_to(SITE / top)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_site(tmp_path_factory.mktemp("base"), *PROJECT["dependencies"])


def run(site: Path, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these packages only. The sources of Twinbus stand for its installation."""
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{site}:{SOURCES}", "PYTHONUTF8": "1", "COLUMNS": "200"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


# --- the base install ------------------------------------------------------------------------------------------------


def test_the_base_install_is_the_sdk_and_what_the_sdk_requires(base: Path) -> None:
    assert [Requirement(one).name for one in PROJECT["dependencies"]] == ["azure-servicebus"]
    others = {module for modules in EXTRAS.values() for module in modules} | {"aiohttp", "pytest"}
    assert [module for module in sorted(others) if (base / module.replace(".", "/")).exists()] == []


IMPORTS = """
import twinbus, twinbus.aio, twinbus.connect, twinbus.ledger, twinbus.syphon, twinbus.testing
for module in (twinbus, twinbus.aio, twinbus.syphon):
    for name in module.__all__:
        getattr(module, name)
"""


def test_everything_that_a_pair_needs_is_loaded_with_the_base_install(base: Path) -> None:
    done = run(base, "-c", IMPORTS)
    assert done.returncode == 0, done.stderr


PAIRS = """
import asyncio, sys
from azure.servicebus import ServiceBusMessage
import twinbus, twinbus.aio, twinbus.testing
from twinbus import SendAvailabilityOptions, pair_connection_strings

primary, secondary, ledger = sys.argv[1:]
options = SendAvailabilityOptions(backlog_queue_count=2, enable_syphon=True, ledger=ledger)
for name in twinbus.__all__:
    getattr(twinbus, name)

with pair_connection_strings(primary, secondary, options=options) as pair:
    with pair.get_queue_sender("orders") as sender:
        sender.send_messages(ServiceBusMessage("sync"))
        pair.force_failover("orders")
        sender.send_messages(ServiceBusMessage("sync, diverted"))
        pair.force_restore("orders")
    with pair.get_queue_receiver("orders") as receiver:
        for message in receiver:
            receiver.complete_message(message)
            print(message)
            if "diverted" in str(message):
                break

async def main():
    async with twinbus.aio.pair_connection_strings(primary, secondary, options=options) as pair:
        async with pair.get_queue_sender("orders") as sender:
            await sender.send_messages(ServiceBusMessage("aio"))
            pair.force_failover("orders")
            await sender.send_messages(ServiceBusMessage("aio, diverted"))
            pair.force_restore("orders")
        async with pair.get_queue_receiver("orders") as receiver:
            async for message in receiver:
                await receiver.complete_message(message)
                print(message)
                if "diverted" in str(message):
                    break

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    queues = {"namespaces": [{"name": "primary", "queues": [{"name": "orders"}]}, {"name": "secondary"}]}
    with LocalNamespaces("primary", "secondary", memory=True, config=queues) as started:
        yield started


@pytest.mark.thorough
def test_pairs_of_both_kinds_divert_and_syphon_with_the_base_install(
    base: Path, namespaces: LocalNamespaces, tmp_path: Path
) -> None:
    strings = [namespaces[side].connection_string for side in ("primary", "secondary")]
    done = run(base, "-c", PAIRS, *strings, str(tmp_path / "ledger"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["aio", "aio, diverted", "sync", "sync, diverted"]


# --- what is missing is named ----------------------------------------------------------------------------------------


def test_the_extras_are_those_of_the_project_with_the_same_packages() -> None:
    modules = {name: set(found) for name, found in _modules_by_distribution().items()}
    extras = {extra: list(map(Requirement, names)) for extra, names in PROJECT["optional-dependencies"].items()}

    def declared(extra: str) -> set[str]:
        return {
            module
            for one in extras[extra]
            for module in (modules[one.name.lower()] if not one.extras else set().union(*map(declared, one.extras)))
        }

    assert {extra: declared(extra) for extra in extras if extra != "all"} == {
        extra: set(names) for extra, names in EXTRAS.items()
    }
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert Requirement(everything).extras == set(EXTRAS)


def _modules_by_distribution() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for module, distributions in metadata.packages_distributions().items():
        for name in distributions:
            if not module.startswith("_") and module.isidentifier():
                found.setdefault(name.lower().replace("_", "-"), []).append(module)
    return found | {"azure-identity": ["azure.identity"]}  # one of several distributions with the package `azure`


SIGN_IN = "from twinbus.connect import named_credential\nnamed_credential('default')"
LOCAL_NAMESPACE = "from twinbus.testing import LocalNamespace\nLocalNamespace(memory=True).start()"


@pytest.mark.parametrize(
    ("program", "extra"),
    [
        (("-m", "twinbus", "serve"), "cli"),
        (("-m", "twinbus"), "cli"),
        (("-c", LOCAL_NAMESPACE), "serve"),
        (("-c", "import twinbus.kombu"), "celery"),
        (("-c", SIGN_IN), "azure"),
        (("-c", "import twinbus.pipeline.servicebus"), "spark"),
        (("-c", "from twinbus.pipeline import read_history"), "spark"),
        (("-c", "from twinbus.pipeline.session import session; session()"), "spark"),
    ],
)
def test_what_the_base_install_lacks_is_named_with_its_command(
    base: Path, program: tuple[str, ...], extra: str
) -> None:
    done = run(base, *program)
    assert done.returncode == 1
    assert f"pip install 'twinbus[{extra}]'" in done.stderr
    assert all(module in done.stderr for module in EXTRAS[extra])


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    extra = PROJECT["optional-dependencies"]["cli"]
    return make_site(tmp_path_factory.mktemp("cli"), *PROJECT["dependencies"], *extra)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("verb", "extra"),
    [
        (("serve", "--memory"), "serve"),
        (("demo",), "serve"),
        (("ledger", "ingest", "ledger", "tables"), "spark"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_verb_whose_extra_is_missing_names_it_without_a_traceback(
    command_line: Path, tmp_path: Path, verb: tuple[str, ...], extra: str
) -> None:
    (tmp_path / "ledger").mkdir()
    done = run(command_line, "-m", "twinbus", *verb, folder=tmp_path)
    assert done.returncode == 1
    assert f"pip install 'twinbus[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_the_command_line_alone_has_help_for_every_verb(command_line: Path) -> None:
    done = run(command_line, "-m", "twinbus", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(verb in done.stdout for verb in ("serve", "syphon", "doctor", "ledger"))


TESTS = """
def test_of_the_user():
    pass

def test_with_a_namespace(twinbus_namespace):
    pass
"""


@pytest.mark.thorough
def test_without_the_server_only_the_tests_that_ask_for_a_namespace_fail(tmp_path: Path) -> None:
    site = make_site(tmp_path, *PROJECT["dependencies"], "pytest")
    (tmp_path / "test_user.py").write_text(TESTS, encoding="utf-8")
    done = run(
        site,
        "-m",
        "pytest",
        "-p",
        "twinbus.testing.fixtures",
        "-p",
        "no:cacheprovider",
        "test_user.py",
        folder=tmp_path,
    )
    assert "1 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "pip install 'twinbus[serve]'" in done.stdout


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'twinbus[cli,serve]'"),
        ({"url": "file:///home/me/twinbus", "dir_info": {}}, "pip install '/home/me/twinbus[cli,serve]'"),
        (
            {"url": "file:///home/my%20own/twinbus", "dir_info": {"editable": True}},
            "pip install -e '/home/my own/twinbus[cli,serve]'",
        ),
        (
            {"url": "file:///srv/twinbus-1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'twinbus[cli,serve] @ file:///srv/twinbus-1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://example.org/twinbus", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'twinbus[cli,serve] @ git+https://example.org/twinbus@abc'",
        ),
    ],
)
def test_the_command_installs_from_where_twinbus_came(origin: dict[str, object] | None, command: str) -> None:
    assert install_command(("cli", "serve"), origin) == command


def test_guides_name_only_extras_that_exist() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("guides/*.md"))]
    lists = [found for text in texts for found in re.findall(r"(?:twinbus|\.)\[([a-z,]+)\]", text)]
    named = {extra for found in lists for extra in found.split(",")}
    assert named
    assert named <= {*EXTRAS, "all"}
