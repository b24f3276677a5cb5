"""D1, D2, N6: no key and no token is in a plan, log, checkpoint, event log or page of Spark. A real session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.entra import RECEIVER, SENDER, IssuedTokens, Issuer, TokenEndpoint
from tests.pipeline.secrets_shown import AUTHORITY, HOST, NAMED, WRONG
from twinbus.backlog import backlog_queue_path
from twinbus.testing import LocalNamespace

KEY, SIGNATURE = "SAS_KEY_VALUE", "c2lnbmVkLWJ5LW5vYm9keQ"


@pytest.mark.thorough
@pytest.mark.timeout(500)
def test_d1_d2_n6_no_key_and_no_token_is_in_plans_logs_checkpoints_event_logs_or_pages_of_spark(tmp_path: Path) -> None:
    """The source and the syphon use a key first, and then sign in: on the driver, and on each worker by itself."""
    issuer = Issuer()
    queues = [{"name": "espresso"}, {"name": backlog_queue_path("one", 0)}]
    folder, root = tmp_path / "shown", Path(__file__).resolve().parents[2]
    folder.mkdir()
    config = {"namespaces": [{"name": "shown", "queues": queues}]}
    with (
        LocalNamespace("shown", config=config, jwks=issuer.key_set) as namespace,
        TokenEndpoint(IssuedTokens(issuer, SENDER, RECEIVER)) as endpoint,
    ):
        text = namespace.connection_string
        assert KEY in text
        host = text.partition(";")[0]
        wrong = f"{host};SharedAccessSignature=SharedAccessSignature sr=x&sig={SIGNATURE}&se=1&skn=a"
        places = {NAMED: text, WRONG: wrong, HOST: f"localhost:{namespace.port}", AUTHORITY: str(namespace.ca)}
        environment = {**os.environ, **places, **endpoint.environment, "PYTHONPATH": f"{root / 'src'}:{root}"}
        with (folder / "output").open("wb") as output:
            command = (sys.executable, "-m", "tests.pipeline.secrets_shown", str(folder), "espresso")
            done = subprocess.run(command, env=environment, cwd=tmp_path, stdout=output, stderr=output, check=False)
    assert done.returncode == 0, (folder / "output").read_text()[-3000:]
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    names = {str(path.relative_to(folder)).partition("/")[0].partition("-")[0] for path in files}
    assert names == {"output", "page", "events", "checkpoint", "commands", "ledger"}
    for kind in ("page", "events"):
        assert any(b"espresso" in text and b"redacted" in text for path, text in files.items() if kind in str(path))
    tokens = {token.rpartition(".")[2] for token in endpoint.tokens.texts}
    assert len(tokens) > 2, "the driver and the workers are processes of their own"
    secret = [text.encode() for text in (KEY, SIGNATURE, endpoint.environment["IDENTITY_HEADER"], *tokens)]
    shown = [str(path) for path, text in files.items() if any(one in text for one in secret)]
    assert shown == []
