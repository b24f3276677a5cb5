"""The guides are true: their programs run, and what they say of options and events is what the code says."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import pytest
from azure.servicebus import ServiceBusClient

from twinbus.pairing.events import EVENTS
from twinbus.pairing.options import CHOICES, RANGES, SendAvailabilityOptions
from twinbus.testing import LocalNamespaces

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
QUEUES = {"namespaces": [{"name": "primary", "queues": [{"name": "orders"}, {"name": "cafe"}]}, {"name": "secondary"}]}
SHOWN = {
    "five-minutes": [
        "received two coffees",
        "sent with asyncio",
        "orders failed_over forced 0",
        "heard failover_engaged orders",
        "heard restored orders",
    ],
    "outage": ["failed_over 1", "['before', 'after']", "['failover_engaged', 'restored', 'closed', 'closed']"],
    "options": [],
    "syphon": ["moved 1", "syphon stopped"],
    "spark-source": ["1 two coffees", "2 one tea"],
    "costs": ["40 an hour, 960 a day, 28800 in 30 days", "idle 388262932", "outage 543992", "drain 912342"],
}


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    with LocalNamespaces("primary", "secondary", config=QUEUES) as made:
        yield made


def program(guide: str) -> str:
    """All Python of a guide, as one program."""
    text = (GUIDES / f"{guide}.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def test_the_ten_lines_of_the_read_me_send_and_receive(namespaces: LocalNamespaces) -> None:
    lines = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    assert len(lines.splitlines()) <= 10
    strings = {side.upper(): namespaces[side].connection_string for side in ("primary", "secondary")}
    with ServiceBusClient.from_connection_string(strings["PRIMARY"]) as client:
        with client.get_queue_receiver("cafe", max_wait_time=0.1) as receiver:
            assert receiver.peek_messages() == []
        # No five seconds for a second message, which never comes.
        lines = lines.replace('"orders"', '"cafe"').replace("max_wait_time=5", "max_wait_time=0.5")
        exec(compile(lines, "README.md", "exec"), dict(strings))  # noqa: S102 - our own
        with client.get_queue_receiver("cafe", max_wait_time=0.1) as receiver:
            assert receiver.peek_messages() == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: path.stem
)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.timeout(300)  # Spark alone takes a while to start where others are at work
@pytest.mark.parametrize("guide", SHOWN)
def test_the_program_of_a_guide_shows_what_the_guide_says(namespaces: LocalNamespaces, guide: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "PRIMARY": namespaces["primary"].connection_string,
        "SECONDARY": namespaces["secondary"].connection_string,
        # For the guide that starts a JVM: half its processor time, where it runs for a moment only.
        "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    done = subprocess.run(
        [sys.executable, "-c", program(guide)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == SHOWN[guide]


def test_the_outage_guide_prints_what_its_program_prints() -> None:
    text = (GUIDES / "outage.md").read_text(encoding="utf-8")
    assert "```text\n" + "\n".join(SHOWN["outage"]) + "\n```" in text


def rows() -> dict[str, tuple[str, str]]:
    """Option → default and range, as the guide has them."""
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
