"""D1, D2: no key is in a plan, a log, a checkpoint, an event log or a page of Spark. A real session with its pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.secrets_shown import NAMED, WRONG
from twinbus.backlog import backlog_queue_path
from twinbus.testing import LocalNamespace

KEY, SIGNATURE = "SAS_KEY_VALUE", "c2lnbmVkLWJ5LW5vYm9keQ"


@pytest.mark.thorough
@pytest.mark.timeout(500)
def test_d1_d2_no_key_is_in_plans_logs_checkpoints_event_logs_or_pages_of_spark(tmp_path: Path) -> None:
    queues = [{"name": "espresso"}, {"name": backlog_queue_path("one", 0)}]
    folder, root = tmp_path / "shown", Path(__file__).resolve().parents[2]
    folder.mkdir()
    with LocalNamespace("shown", config={"namespaces": [{"name": "shown", "queues": queues}]}) as namespace:
        text = namespace.connection_string
        assert KEY in text
        host = text.partition(";")[0]
        wrong = f"{host};SharedAccessSignature=SharedAccessSignature sr=x&sig={SIGNATURE}&se=1&skn=a"
        environment = {**os.environ, NAMED: text, WRONG: wrong, "PYTHONPATH": f"{root / 'src'}:{root}"}
        with (folder / "output").open("wb") as output:
            command = (sys.executable, "-m", "tests.pipeline.secrets_shown", str(folder), "espresso")
            done = subprocess.run(command, env=environment, cwd=tmp_path, stdout=output, stderr=output, check=False)
    assert done.returncode == 0, (folder / "output").read_text()[-3000:]
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    names = {str(path.relative_to(folder)).partition("/")[0].partition("-")[0] for path in files}
    assert names == {"output", "page", "events", "checkpoint", "commands", "ledger"}
    for kind in ("page", "events"):
        assert any(b"espresso" in text and b"redacted" in text for path, text in files.items() if kind in str(path))
    shown = [str(path) for path, text in files.items() if KEY.encode() in text or SIGNATURE.encode() in text]
    assert shown == []
