"""D4: the page in a real browser: no error, no network request, and its script works."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import chromium
from tests.report.documents import Document, made
from twinbus.pipeline import ReportData

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(600),  # Spark is slow on a busy machine
]


def opened(page: Path, part: str) -> tuple[str, str]:
    """Return the document after its script ran in the browser, and the messages of the browser's console."""
    options = ("--enable-logging=stderr", "--v=0", "--dump-dom")
    done = subprocess.run(
        [*chromium.command(page.parent / "profile", *options), f"file://{page}#{part}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_d4_a_browser_runs_the_page_without_an_error_and_no_name_becomes_a_script(
    troubled: ReportData, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    page.write_text(made(troubled), encoding="utf-8")
    text, console = opened(page, "dark")
    assert console == ""
    assert '<html lang="en" data-theme="dark">' in text
    document = Document(text)
    assert "A title" in document.said, "nobody has changed it"
    assert document.tags.count("script") == 1
    assert "Light" in document.said, "the switch offers the other one"
