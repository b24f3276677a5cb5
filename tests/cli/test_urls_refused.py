"""No verb takes a URL for a local path (D6): `s3://bucket/tables` was a local folder named `s3:`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command
from typer.models import TyperPath
from typer.testing import CliRunner

from twinbus.cli.local_paths import refuse_urls
from twinbus.cli.main import app


def path_parameters(command: Any, name: str = "twinbus") -> Iterator[tuple[str, Any]]:
    for one in command.params:
        if isinstance(one.type, TyperPath):
            yield f"{name} {one.name}", one
    if isinstance(command, TyperGroup):
        for below, verb in command.commands.items():
            yield from path_parameters(verb, f"{name} {below}")


def test_d6_every_path_of_every_verb_refuses_a_url() -> None:
    command = get_command(app)
    refuse_urls(command)
    found = dict(path_parameters(command))
    assert {"twinbus syphon ledger", "twinbus report output", "twinbus serve data", "twinbus ledger audit tables"} <= {
        *found
    }
    for parameter in found.values():
        for url in ("s3://bucket/a", "gs://bucket/a", "abfss://c@account.dfs.core.windows.net/a"):
            with pytest.raises(typer.BadParameter, match="is a URL, but a local path is needed here"):
                parameter.type.convert(url, parameter, None)
        assert parameter.type.convert("file:///var/a", parameter, None) == Path("/var/a")


@pytest.mark.parametrize("url", ["gs://bucket/tables", "s3:/bucket/tables"])
@pytest.mark.parametrize("verb", [["ingest", "."], ["reconcile"], ["check"]])
def test_d6_an_unknown_scheme_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str], url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["ledger", *verb, url], env={"COLUMNS": "250"})
    assert (done.exit_code, url in done.stderr) == (2, True), done.stderr
    assert not list(tmp_path.iterdir())
